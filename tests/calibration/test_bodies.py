"""What bodies are fed with, against what the runtime computes in them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from kenosis_ort.calibration.computed_feeds import body_feeds, value_types
from kenosis_ort.graph.bodies import Body, owners, places, take_out
from kenosis_ort.graph.walk import outer_names
from tests.flow import control
from tests.graph.build import ready, run

RNG = np.random.default_rng(0)


def bodies(model: onnx.ModelProto) -> list[tuple[onnx.NodeProto, Body]]:
    found = []
    for owner in owners(model):
        for place, graph in places(owner):
            body = take_out(model, place, graph, value_types(model, outer_names(graph)))
            assert body is not None
            found.append((owner, body))
    return found


def fed(model, owner, body, feeds):
    again = body_feeds(model, owner, body, lambda: iter(feeds))
    assert len(list(again())) == len(list(again()))
    return list(again())


@pytest.mark.parametrize("outside", [False, True])
def test_a_branch_is_fed_where_its_condition_holds(outside: bool) -> None:
    model = ready(control.two_rates(outside=outside)).proto
    rates = [16000, 8000, 8000]
    feeds = [{"x": RNG.normal(size=(2, 3, 16, 16)).astype(np.float32), "rate": np.array(r)} for r in rates]
    taken = {"then_branch": [0], "else_branch": [1, 2]}
    for owner, body in bodies(model):
        inside = fed(model, owner, body, feeds)
        assert len(inside) == len(taken[body.place.attribute])
        for feed, at in zip(inside, taken[body.place.attribute], strict=True):
            np.testing.assert_allclose(run(body.model, feed)[0], run(model, feeds[at])[0], rtol=1e-5)


@pytest.mark.parametrize("steps", [None, 3])
def test_a_loop_is_fed_once_an_iteration(steps: int | None) -> None:
    model = ready(control.loop(steps)).proto
    x = RNG.normal(size=(2, 32)).astype(np.float32)
    feed = {"x": x} if steps else {"x": x, "n": np.array(3)}
    ((owner, body),) = bodies(model)
    inside = fed(model, owner, body, [feed])
    assert [int(f["i"]) for f in inside] == [0, 1, 2]
    ran = [run(body.model, f) for f in inside]
    final, each = run(model, feed)
    np.testing.assert_allclose(ran[-1][1], final, rtol=1e-5)
    np.testing.assert_allclose(np.stack([r[2] for r in ran]), each, rtol=1e-5)
    assert fed(model, owner, body, [] if steps else [{"x": x, "n": np.array(0)}]) == []


def test_a_scan_is_fed_slice_by_slice() -> None:
    model = ready(control.scan()).proto
    feed = {"x": RNG.normal(size=(1, 6, 24)).astype(np.float32)}
    ((owner, body),) = bodies(model)
    ran = [run(body.model, f) for f in fed(model, owner, body, [feed])]
    final, each = run(model, feed)
    np.testing.assert_allclose(ran[-1][0], final, rtol=1e-5)
    np.testing.assert_allclose(np.stack([r[1] for r in ran]), each, rtol=1e-5)


def test_constants_of_the_graph_around_are_constants_of_the_body() -> None:
    model = ready(control.two_rates(outside=True)).proto
    for _, body in bodies(model):
        assert len(body.captured) == 1
        assert len(body.constants) == 1
        assert body.constants.keys() <= {t.name for t in body.model.graph.initializer}
