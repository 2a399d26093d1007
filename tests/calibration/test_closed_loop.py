"""States fed back from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from kenosis_ort.calibration import collect
from kenosis_ort.calibration.computed_feeds import ClosedLoopReader
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.bodies import state_pairs
from tests.planning import parse


def integrator() -> onnx.ModelProto:
    """``y = x + h``, and ``y`` is the next ``h``."""
    return parse(
        """net (float[1,3] x, float[1,3] h_in) => (float[1,3] z, float[1,3] h_out) {
        h_out = Add (x, h_in)\n z = Neg (h_out) }"""
    )


def ones(count: int) -> list[dict[str, Any]]:
    return [{"x": np.ones((1, 3), np.float32)} for _ in range(count)]


def drain(reader: ClosedLoopReader) -> list[float]:
    found = []
    while (feed := reader.get_next()) is not None:
        found.append(float(feed["h_in"][0, 0]))
    return found


def test_states_come_from_the_step_before() -> None:
    reader = ClosedLoopReader(integrator(), ones(4), threads=1)
    assert len(reader) == 4
    assert drain(reader) == [0.0, 1.0, 2.0, 3.0]
    assert reader.get_next() is None


def test_sequences() -> None:
    assert drain(ClosedLoopReader(integrator(), ones(5), steps=2, threads=1)) == [0, 1, 0, 1, 0]
    first = {"h_in": np.full((1, 3), 7, np.float32)}
    assert drain(ClosedLoopReader(integrator(), ones(3), initial=first, threads=1)) == [7, 8, 9]
    feeds = ones(4)
    feeds[2].update(first)
    assert drain(ClosedLoopReader(integrator(), feeds, states={"h_out": "h_in"}, threads=1)) == [0, 1, 7, 8]


def test_ranges_of_closed_loop_runs(tmp_path: Any) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(integrator(), path)
    table = collect(integrator(), ClosedLoopReader(path, ones(6), threads=1), tensors=["h_in", "z"], threads=1)
    assert table.range_of("h_in") == (0.0, 5.0)
    assert table.range_of("z") == (-6.0, -1.0)


def test_an_empty_cache_grows() -> None:
    text = """net (float[1,T,2] x, float[B,P,2] past_key_values.0.key) => (float[1,T,2] y, float[B,Q,2] present.0.key) {
        present.0.key = Concat <axis = 1> (past_key_values.0.key, x)\n y = Neg (x) }"""
    model = parse(
        text.replace("past_key_values.0.key", "past_key_values_0_key").replace("present.0.key", "present_0_key")
    )
    samples = [{"x": np.zeros((1, 3, 2), np.float32)} for _ in range(3)]
    reader = ClosedLoopReader(model, samples, threads=1)
    sizes = []
    while (feed := reader.get_next()) is not None:
        sizes.append(feed["past_key_values_0_key"].shape)
    assert sizes == [(1, 0, 2), (1, 3, 2), (1, 6, 2)]


@pytest.mark.parametrize(
    ("inputs", "outputs", "pairs"),
    [
        (["input", "state", "sr"], ["output", "stateN"], {"stateN": "state"}),
        (["x", "h0", "c0"], ["y", "hn", "cn"], {}),  # nothing in the names tells
        (["past.0.key", "past.0.value"], ["present.0.key", "present.0.value"],
         {"present.0.key": "past.0.key", "present.0.value": "past.0.value"}),
        (["past_key_values.1.key"], ["present.1.key"], {"present.1.key": "past_key_values.1.key"}),
        (["hidden_in", "cell_in"], ["hidden_out", "cell_out"], {"hidden_out": "hidden_in", "cell_out": "cell_in"}),
        (["image"], ["boxes", "scores"], {}),
    ],
)  # fmt: skip
def test_pairs_by_name(inputs: list[str], outputs: list[str], pairs: dict[str, str]) -> None:
    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4])

    graph = helper.make_graph([], "g", [value(n) for n in inputs], [value(n) for n in outputs])
    assert state_pairs(helper.make_model(graph)) == pairs


def test_bad_input() -> None:
    with pytest.raises(CalibrationError, match="Did you mean"):
        ClosedLoopReader(integrator(), ones(2), states={"h_out": "h_inn"})
    with pytest.raises(CalibrationError, match="No state"):
        ClosedLoopReader(integrator(), ones(2), states={})
    with pytest.raises(CalibrationError, match="clearly"):
        ClosedLoopReader(parse("net (float[1,3] x) => (float[1,3] y) { y = Neg (x) }"), ones(2))
    with pytest.raises(CalibrationError, match="sequence"):
        ClosedLoopReader(integrator(), ones(2), steps=0)
    with pytest.raises(CalibrationError, match="sample 0"):
        ClosedLoopReader(integrator(), [{"x": np.ones((2, 2), np.float32)}]).get_next()
