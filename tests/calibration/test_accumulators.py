"""What is kept of a tensor: exact histograms, ranges by channel; what follows from another."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from kenosis_ort.calibration import CalibrationConfig, collector
from kenosis_ort.calibration.accumulators import (
    BLOCK,
    WHOLE_BELOW,
    Accumulator,
    Collector,
    exponent_of,
    extremes,
    extremes_and_some,
)
from kenosis_ort.calibration.derived import Function, unions_of
from kenosis_ort.calibration.statistics import HALF, Extremes, Histogram
from kenosis_ort.errors import CalibrationError
from kenosis_ort.runtime.counting import counted
from tests.calibration.support import histogram_of, histogram_of as build, one_node_model, random_feeds, swept
from tests.planning import parse

PLAIN, SKETCH = CalibrationConfig(), CalibrationConfig(sketch=True)


def taken(config, *arrays, axis=None):
    """Statistics of a tensor whose values are these, one after the other."""
    tensor = Accumulator("float32", config, axis)
    assert all(tensor.take(*tensor.look(array)) for array in arrays)
    return tensor.statistics()


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 8, 3, 3), 1), ((5, 8, 40, 40), 1), ((1, 8, 2, 2), 1), ((4, 6, 7), -1), ((9,), 0)]
)
@pytest.mark.parametrize("config", [PLAIN, SKETCH])
def test_channels_and_the_whole(shape, axis, config):
    data = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    found = taken(config, *data, axis=axis)
    over = (0, *(a + 1 for a in range(len(shape)) if a != axis % len(shape)))
    np.testing.assert_array_equal(found.channels.low, data.min(axis=over))
    np.testing.assert_array_equal(found.channels.high, data.max(axis=over))
    assert (found.low, found.high, found.count) == (data.min(), data.max(), data.size)
    if found.histogram is not None and data[0].size < WHOLE_BELOW:
        assert found.histogram == build(data)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(1, 8, 100, 125), (5, 8, 3, 3), (1, 8, 40, 40)])
@pytest.mark.parametrize("config", [PLAIN, SKETCH, CalibrationConfig("percentile")])
@pytest.mark.parametrize("axis", [None, 1])
def test_not_finite_is_seen_wherever_it_is(bad, shape, config, axis):
    data = np.zeros(shape, np.float32)
    data[-1, 5, 1, 2] = bad
    tensor = Accumulator("float32", config, axis)
    assert not tensor.take(*tensor.look(data))


@pytest.mark.parametrize("shape", [(1, 64, 35, 35), (1, 300, 256), (5, 7, 11, 13, 17), (1, 4, 200, 200)])
def test_all_channels_and_places_are_picked_alike(shape):
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    data[..., 0] += 100.0  # one channel, last axis, far away
    statistics = taken(SKETCH, data)
    histogram = statistics.histogram
    assert (statistics.low, statistics.high, statistics.count) == (data.min(), data.max(), data.size)
    assert data.size / 20 < histogram.total <= data.size / 5 + 1
    assert data.size >= WHOLE_BELOW
    share = 1 - histogram.cumulative_at(np.array([50.0]))[0] / histogram.total
    assert share == pytest.approx(1 / shape[-1], rel=0.1)


@pytest.mark.parametrize("options", [{}, {"sketch": True}, {"method": "percentile"}], ids=str)
def test_what_consumers_take_alike_may_be_infinite(options):
    """A mask of minus infinity is an error by itself, and counts as what a function says it stands for."""
    samples = random_feeds(3)
    for sample in samples:
        sample["x"][0] = -np.inf
    with pytest.raises(CalibrationError, match="infinity"):
        swept(one_node_model(), samples, ["y"], **options)
    seen = {"y": lambda array: np.maximum(array, np.float32(-20.0))}
    statistics = swept(one_node_model(), samples, ["y"], seen_as=seen, **options).tensors["y"]
    assert statistics.low == -20.0
    assert 0.0 < statistics.high < 20.0


# ---- histograms ------------------------------------------------------------------------------------------------------


values = hnp.arrays(
    np.float32,
    st.integers(0, 300),
    elements=st.sampled_from([-1.0, 0.0, 1.0]).flatmap(
        lambda s: st.integers(-40, 60).map(lambda e: s * 1.375 * 2.0**e)
    ),
) | hnp.arrays(
    np.float32, st.integers(0, 300), elements=st.floats(-8, 8, width=32).map(lambda v: v if abs(v) > 1e-6 else 0.0)
)


@given(values)
def test_every_value_is_in_its_bin_and_bins_are_narrow(data):
    histogram = build(data)
    assert histogram.total == data.size
    if not data.size:
        return
    if (top := float(np.abs(data).max())) > 1e-28:
        assert histogram.width <= top / 2048
        assert top < 2.0**histogram.exponent
    exact = np.floor(np.ldexp(data.astype(np.float64), -histogram.exponent) * HALF).astype(int) + HALF
    np.testing.assert_array_equal(histogram.counts, np.bincount(exact, minlength=2 * HALF))


@given(values, values, values)
def test_order_and_split_do_not_matter(a, b, c):
    whole = build(np.concatenate([a, b, c]))
    assert build(c, a, b) == whole
    parts = [build(p) for p in (a, b, c)]
    assert parts[0].merge(parts[1]).merge(parts[2]) == whole
    assert parts[2].merge(parts[0].merge(parts[1])) == whole


def test_larger_than_a_block_and_of_any_shape_and_type():
    data = np.random.default_rng(0).standard_normal((3, 50, 1000)).astype(np.float32)
    assert build(data) == build(*data)
    assert build(data[:, ::2]).total == data.size // 2
    half = data.astype(np.float16)
    assert build(half) == build(half.astype(np.float32))
    assert [exponent_of(magnitude) for magnitude in (1.0, 0.999, 0.0)] == [1, 0, -100]


def test_counts_are_checked_and_frozen():
    with pytest.raises(ValueError, match="8192 bins"):
        Histogram(0, np.zeros(3, np.int64))
    histogram = build(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="read-only"):
        histogram.counts[0] = 1


# ---- every some element ----------------------------------------------------------------------------------------------


def arrays():
    flat = st.integers(1, 3 * BLOCK).map(lambda size: np.random.default_rng(size).standard_normal(size))
    return st.builds(np.asarray, flat, st.sampled_from([np.float16, np.float32]))


@given(array=arrays(), stride=st.sampled_from([2, 5, 7, 11, 13, 19]))
def test_elements_are_picked_by_their_stride(array, stride):
    seen, picked = extremes_and_some(array, stride)
    assert seen == extremes(array)
    np.testing.assert_array_equal(picked, array[::stride])


# ---- gates and unions, which follow from what is observed of their input ---------------------------------------------


SIDE = 6000
NAMES = ["s", "silu", "h", "hard", "swish"]


GATES = """gates (float[N,6000] x) => (float[N,6000] y) <float three = {3.0}> {
    v = Mul (x, three)  s = Sigmoid (v)  silu = Mul (s, v)  h = HardSigmoid <alpha = 0.3, beta = 0.4> (v)
    hard = Mul (v, h)  swish = HardSwish (v)  again = Sigmoid (s)  y = Sum (s, silu, h, hard, swish, again) }"""


def gate_samples(count):
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((4, SIDE)).astype(np.float32) * (1 + at)} for at in range(count)]


def collected(feeds, *tensors, sketch=True, **more):
    return swept(parse(GATES), feeds, tensors, sketch=sketch, **more)


@pytest.mark.parametrize("sketch", [False, True])
def test_what_follows_is_what_is_seen(sketch):
    feeds = gate_samples(3)
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


def test_what_follows_is_counted_within_its_extremes():
    """Float32 rounds a gate apart from its extremes: counted beyond them it would be in the next bin."""
    x = np.array([0.14576514065265656], np.float32)
    kinds = dict.fromkeys(("x", "s"), "float32")
    found = Collector(kinds, CalibrationConfig(sketch=True), functions={"x": {"s": Function()}})
    found.add("x", x)
    derived = found.statistics()["s"]
    assert derived.low == derived.high
    assert derived.histogram == histogram_of(np.array([derived.high], np.float32))


def test_what_follows_is_not_fetched():
    feeds = gate_samples(2)
    size = sum(feed["x"].nbytes for feed in feeds)
    with counted() as counts:
        collected(feeds, "v", *NAMES)
    assert counts.total.copied // size == 1
    with counted() as counts:
        swept(parse(GATES), feeds, ["v", *NAMES], method="percentile")
    assert counts.total.copied // size == 1 + len(NAMES)


def test_tables_merge_to_the_same_bytes():
    feeds = gate_samples(5)
    parts = [collected(feeds[:2], "v", *NAMES), collected(feeds[2:], "v", *NAMES)]
    assert parts[1].merge(parts[0]).to_json() == collected(feeds, "v", *NAMES).to_json()
    assert collected(feeds, "v", *NAMES, part={0: (), 1: ()}).part.tensors == parts[0].tensors


def test_what_stands_for_the_input_changes_no_function_of_it():
    feeds = gate_samples(2)
    plain = collected(feeds, "v", *NAMES)
    cut = collected(feeds, "v", *NAMES, seen_as={"v": lambda array: np.maximum(array, np.float32(-2.0))})
    assert (cut.tensors["v"].low, cut.tensors["v"].high) == (-2.0, plain.tensors["v"].high)
    assert all(cut.tensors[name] == plain.tensors[name] for name in NAMES)


@pytest.mark.parametrize("function", [Function(0.0, 0.0, True), Function(1 / 6, 0.5, True), Function(0.5, 1.0, True)])
@pytest.mark.parametrize(("low", "high"), [(-9.0, 4.0), (-9.0, -5.0), (-1.0, 3.0), (0.5, 2.0), (-3.0, -0.1)])
def test_a_range_holds_all_that_lies_between(function, low, high):
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

    def both():
        with counted() as counts:
            table = swept(parse(MOVING), gate_samples(3), names, method=method, channels=channels, part={1: ()})
        return table, counts.total.copied

    found, copied = both()
    monkeypatch.setattr(collector, "unions_of", lambda *_: {})
    seen, most = both()
    assert (found.tensors, found.part.tensors) == (seen.tensors, seen.part.tensors)
    assert copied < most


def test_unions_of_gates_are_seen():
    """A gate's range is the function's, and may be wider than what is seen: it widens nothing behind it."""
    graph = parse(MOVING).graph
    kinds = dict.fromkeys(("a", "b", "turned", "back", "all"), "float32")
    assert unions_of(graph, kinds, ()) == {"turned": ("b",), "back": ("turned",), "all": ("a", "back", "a")}
    assert unions_of(graph, kinds, ("b", "a")) == {"back": ("turned",)}
    assert unions_of(graph, {**kinds, "back": "float16"}, ()) == {"turned": ("b",)}
