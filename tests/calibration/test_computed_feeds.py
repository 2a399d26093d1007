"""States fed back from step to step, and what bodies are fed with against what the runtime computes in them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort.calibration.computed_feeds import ClosedLoopReader, body_feeds, value_types
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.bodies import Body, places, take_out
from kenosis_ort.graph.walk import outer_names, owners
from tests.flow import control
from tests.graph.build import ready, run
from tests.models import normal
from tests.planning import parse

RNG = np.random.default_rng(0)
INTEGRATOR = """net (float[1,3] x, float[1,3] h_in) => (float[1,3] z, float[1,3] h_out) {
    h_out = Add (x, h_in)\n z = Neg (h_out) }"""
CACHE = """net (float[1,T,2] x, float[B,P,2] past_key_values_0_key) => (float[1,T,2] y, float[B,Q,2] present_0_key) {
    present_0_key = Concat <axis = 1> (past_key_values_0_key, x)\n y = Neg (x) }"""


def ones(count: int) -> list[dict[str, Any]]:
    return [{"x": np.ones((1, 3), np.float32)} for _ in range(count)]


def looped(feeds: Any, **options: Any) -> list[float]:
    """First elements of the states that a reader adds."""
    reader = ClosedLoopReader(parse(INTEGRATOR), feeds, threads=1, **options)
    assert len(reader) == len(feeds)
    found = [float(feed["h_in"][0, 0]) for feed in iter(reader.get_next, None)]
    assert reader.get_next() is None
    return found


def test_states_come_from_the_step_before() -> None:
    assert looped(ones(4)) == [0, 1, 2, 3]
    assert looped(ones(5), steps=2) == [0, 1, 0, 1, 0]
    first = {"h_in": np.full((1, 3), 7, np.float32)}
    assert looped(ones(3), initial=first) == [7, 8, 9]
    feeds = ones(4)
    feeds[2].update(first)
    assert looped(feeds, states={"h_out": "h_in"}) == [0, 1, 7, 8]


def test_an_empty_cache_grows(tmp_path: Path) -> None:
    onnx.save(parse(CACHE), tmp_path / "net.onnx")
    reader = ClosedLoopReader(tmp_path / "net.onnx", [{"x": np.zeros((1, 3, 2), np.float32)}] * 3, threads=1)
    sizes = [feed["past_key_values_0_key"].shape for feed in iter(reader.get_next, None)]
    assert sizes == [(1, 0, 2), (1, 3, 2), (1, 6, 2)]


def test_bad_states_and_samples_are_named() -> None:
    for states, feeds, says in (
        ({"h_out": "h_inn"}, ones(2), "Did you mean"),
        ({}, ones(2), "No state"),
        (None, [{"x": np.ones((2, 2), np.float32)}], "sample 0"),
    ):
        with pytest.raises(CalibrationError, match=says):
            looped(feeds, states=states)


# ---- bodies ---------------------------------------------------------------------------------------------------------


X = normal((2, 32))


def fed(model: onnx.ModelProto, *feeds: dict[str, Any]) -> list[tuple[Body, list[Any]]]:
    """Each body with what it is fed with, the same each time."""
    found = []
    for owner in owners(model):
        for place, graph in places(owner):
            body = take_out(model, place, graph, value_types(model, outer_names(graph)))
            assert body is not None
            again = body_feeds(model, owner, body, lambda: iter(feeds))
            found.append((body, [*again()]))
            np.testing.assert_equal([*again()], found[-1][1])
    return found


@pytest.mark.parametrize("outside", [False, True])
def test_a_branch_is_fed_where_its_condition_holds(outside: bool) -> None:
    model = ready(control.two_rates(outside=outside)).proto
    rates = [16000, 8000, 8000]
    feeds = [{"x": RNG.normal(size=(2, 3, 16, 16)).astype(np.float32), "rate": np.array(r)} for r in rates]
    taken = {"then_branch": [0], "else_branch": [1, 2]}
    for body, inside in fed(model, *feeds):
        for feed, at in zip(inside, taken[body.place.attribute], strict=True):
            np.testing.assert_allclose(run(body.model, feed)[0], run(model, feeds[at])[0], rtol=1e-5)
        if outside:  # constants of the graph around are constants of the body
            assert (len(body.captured), len(body.constants)) == (1, 1)
            assert body.constants.keys() <= {t.name for t in body.model.graph.initializer}


ENDS = """(float[2,32] x, int64 n) => (float[2,32] y, float[m,2,32] all) <int64 one = {1}> {
    y, all = Loop (n, , x) <body = b (int64 i, bool k, float[2,32] s) => (bool g, float[2,32] t, float[2,32] u)
    { t = Add (s, s)  u = Neg (t)  g = Less (i, one) }> }"""


@pytest.mark.parametrize(("model", "feed", "steps", "at"), [
    (parse(ENDS), {"x": X, "n": np.array(9)}, 2, 1),
    (control.loop(None), {"x": X, "n": np.array(3)}, 3, 1), (control.loop(3), {"x": X}, 3, 1),
    (control.scan(), {"x": normal((1, 6, 24))}, 6, 0),
], ids=["loop that ends by itself", "loop", "loop of known length", "scan"])  # fmt: skip
def test_loops_are_fed_once_an_iteration(model: onnx.ModelProto, feed: dict[str, Any], steps: int, at: int) -> None:
    model = ready(model).proto
    ((body, inside),) = fed(model, feed)
    assert [int(f.get("i", step)) for step, f in enumerate(inside)] == [*range(steps)]
    ran, (final, each) = [run(body.model, f) for f in inside], run(model, feed)
    np.testing.assert_allclose(ran[-1][at], final, rtol=1e-5)
    np.testing.assert_allclose(np.stack([r[at + 1] for r in ran]), each, rtol=1e-5)
    assert fed(model, *([feed | {"n": np.array(0)}] if "n" in feed else []))[0][1] == []
