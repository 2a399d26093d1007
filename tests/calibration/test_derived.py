"""Gates and gated products that follow from what is observed of their input, beside the same values observed."""

import numpy as np
import pytest

from kenosis_ort.calibration import CalibrationConfig, CalibrationTable, derived
from kenosis_ort.calibration.accumulators import Collector
from kenosis_ort.calibration.derived import Function, unions_of
from kenosis_ort.calibration.histogram import Extremes
from kenosis_ort.runtime.counting import counted
from tests.calibration.support import histogram_of, swept
from tests.planning import parse

SIDE = 6000
NAMES = ["s", "silu", "h", "hard", "swish"]


NET = """gates (float[N,6000] x) => (float[N,6000] y) <float three = {3.0}> {
    v = Mul (x, three)  s = Sigmoid (v)  silu = Mul (s, v)  h = HardSigmoid <alpha = 0.3, beta = 0.4> (v)
    hard = Mul (v, h)  swish = HardSwish (v)  again = Sigmoid (s)  y = Sum (s, silu, h, hard, swish, again) }"""


def samples(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((4, SIDE)).astype(np.float32) * (1 + at)} for at in range(count)]


def collected(feeds: list[dict[str, np.ndarray]], *tensors: str, sketch: bool = True, **more) -> CalibrationTable:
    return swept(parse(NET), feeds, tensors, sketch=sketch, **more)


@pytest.mark.parametrize("sketch", [False, True])
def test_what_follows_is_what_is_seen(sketch: bool) -> None:
    feeds = samples(3)
    derived = collected(feeds, "v", *NAMES, "again", sketch=sketch)
    for name in (*NAMES, "again"):
        own, seen = derived.tensors[name], collected(feeds, name, sketch=sketch).tensors[name]
        assert (own.count, own.dtype) == (seen.count, seen.dtype)
        assert own.low == pytest.approx(seen.low, abs=2e-4)
        assert own.high == pytest.approx(seen.high, rel=1e-5)
        assert own.low <= seen.low + 1e-6
        if sketch:
            a, b = own.histogram, seen.histogram
            assert (a.exponent, a.total) == (b.exponent, b.total)
            moved = np.abs(np.cumsum(a.counts) - np.cumsum(b.counts)).max()
            assert moved <= a.total / 100  # the runtime takes Sigmoid(-20) for 0


def test_what_follows_is_counted_within_its_extremes() -> None:
    """Float32 rounds a gate apart from its extremes: counted beyond them it would be in the next bin."""
    x = np.array([0.14576514065265656], np.float32)
    kinds = dict.fromkeys(("x", "s"), "float32")
    found = Collector(kinds, CalibrationConfig(sketch=True), functions={"x": {"s": Function()}})
    found.add("x", x)
    derived = found.statistics()["s"]
    assert derived.low == derived.high
    assert derived.histogram == histogram_of(np.array([derived.high], np.float32))


def test_what_follows_is_not_fetched() -> None:
    feeds = samples(2)
    size = sum(feed["x"].nbytes for feed in feeds)
    with counted() as counts:
        collected(feeds, "v", *NAMES)
    assert counts.total.copied // size == 1
    with counted() as counts:
        swept(parse(NET), feeds, ["v", *NAMES], method="percentile")
    assert counts.total.copied // size == 1 + len(NAMES)


def test_tables_merge_to_the_same_bytes() -> None:
    feeds = samples(5)
    parts = [collected(feeds[:2], "v", *NAMES), collected(feeds[2:], "v", *NAMES)]
    whole = collected(feeds, "v", *NAMES)
    assert parts[1].merge(parts[0]).to_json() == whole.to_json()
    assert collected(feeds, "v", *NAMES, part={0: (), 1: ()}).part.tensors == parts[0].tensors


def test_what_stands_for_the_input_changes_no_function_of_it() -> None:
    feeds = samples(2)
    plain = collected(feeds, "v", *NAMES)
    cut = collected(feeds, "v", *NAMES, seen_as={"v": lambda array: np.maximum(array, np.float32(-2.0))})
    assert (cut.tensors["v"].low, cut.tensors["v"].high) == (-2.0, plain.tensors["v"].high)
    assert all(cut.tensors[name] == plain.tensors[name] for name in NAMES)


@pytest.mark.parametrize("function", [Function(0.0, 0.0, True), Function(1 / 6, 0.5, True), Function(0.5, 1.0, True)])
@pytest.mark.parametrize(("low", "high"), [(-9.0, 4.0), (-9.0, -5.0), (-1.0, 3.0), (0.5, 2.0), (-3.0, -0.1)])
def test_a_range_holds_all_that_lies_between(function: Function, low: float, high: float) -> None:
    inputs = np.linspace(low, high, 200_001, dtype=np.float32)
    values = inputs * function.gate(inputs)
    found = function.of(Extremes(low, high, 5))
    assert found.low == pytest.approx(float(values.min()), abs=1e-6)
    assert found.high == pytest.approx(float(values.max()), abs=1e-6)
    assert found.count == 5


# Values that are moved about, strung together, and cut: the last is no union.
MOVING = """moves (float[N,6000] x) => (float[N,M] y) <int64[1] zero = {0}, int64[1] one = {1}> {
    a = Relu (x)  b = Neg (x)  turned = Transpose <perm = [1, 0]> (b)  back = Transpose <perm = [1, 0]> (turned)
    all = Concat <axis = 1> (a, back, a)  fed = Concat <axis = 1> (all, x)  y = Slice (fed, zero, one, one) }"""


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy"])
@pytest.mark.parametrize("channels", [{}, {"all": 1}, {"a": 1, "back": 0}])
def test_unions_have_what_their_parts_have(method, channels, monkeypatch):
    names = ["x", "all", "a", "turned", "back", "b", "fed", "y"]

    def both() -> tuple[CalibrationTable, int]:
        with counted() as counts:
            table = swept(parse(MOVING), samples(3), names, method=method, channels=channels, part={1: ()})
        return table, counts.total.copied

    found, copied = both()
    monkeypatch.setattr(derived, "unions_of", lambda *_: {})
    seen, most = both()
    assert (found.tensors, found.part.tensors) == (seen.tensors, seen.part.tensors)
    assert copied < most


def test_unions_of_gates_are_seen() -> None:
    """A gate's range is the function's, and may be wider than what is seen: it widens nothing behind it."""
    graph = parse(MOVING).graph
    kinds = dict.fromkeys(("a", "b", "turned", "back", "all"), "float32")
    assert unions_of(graph, kinds, ()) == {"turned": ("b",), "back": ("turned",), "all": ("a", "back", "a")}
    assert unions_of(graph, kinds, ("b", "a")) == {"back": ("turned",)}
    assert unions_of(graph, {**kinds, "back": "float16"}, ()) == {"turned": ("b",)}
