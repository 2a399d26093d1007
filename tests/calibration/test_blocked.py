"""Values in blocks of channels give the statistics that they have in order, and are not put in order for it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.calibration import CalibrationConfig, collect
from kenosis_ort.calibration import part_session as session
from kenosis_ort.calibration.accumulators import Accumulator, extremes_and_some
from kenosis_ort.calibration.blocked import Blocked, in_order, pick
from kenosis_ort.calibration.histogram import extremes
from kenosis_ort.calibration.part_session import ObservedModel, Segment, SessionSettings

CHANNELS = {"wide": 32, "odd": 24 + 3, "end": 32}  # of 8 or 16 a block: full ones, and one that is not


def net() -> onnx.ModelProto:
    """Returns three Convs, the second of channels that fill no whole number of blocks."""
    rng = np.random.default_rng(0)
    nodes, weights, before, inside = [], [], "x", 4
    for name, channels in CHANNELS.items():
        weights.append(
            numpy_helper.from_array(rng.normal(0, 0.1, (channels, inside, 3, 3)).astype(np.float32), f"w_{name}")
        )
        nodes.append(helper.make_node("Conv", [before, f"w_{name}"], [f"c_{name}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Sigmoid" if name == "end" else "Relu", [f"c_{name}"], [name]))
        before, inside = name, channels
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 40, 41])
    y = helper.make_tensor_value_info("end", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def samples() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(0, 1, (2, 4, 40, 41)).astype(np.float32)} for _ in range(3)]


@pytest.mark.parametrize("channels", [{}, {"wide": 1, "end": -3}])
@pytest.mark.parametrize("budget", [2**29, 1 << 20])
@pytest.mark.parametrize(
    "config", [CalibrationConfig(), CalibrationConfig(sketch=True), CalibrationConfig("percentile")]
)
def test_statistics_are_those_of_values_in_order(
    config: CalibrationConfig, budget: int, channels: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CalibrationConfig(**{**config.to_dict(), "fetch_budget": budget})
    names = [*CHANNELS, *(f"c_{name}" for name in CHANNELS)]
    found = collect(net(), samples(), tensors=names, config=config, channels=channels, threads=1)
    monkeypatch.setattr(session, "without_reorders", lambda *_: {})
    plain = collect(net(), samples(), tensors=names, config=config, channels=channels, threads=1)
    assert found.tensors == plain.tensors


def test_full_blocks_come_as_they_are_and_only_where_any_order_does() -> None:
    model = net()
    part = Segment(0, len(model.graph.node), ("x",), tuple(CHANNELS), ())
    feed = samples()[0]
    with ObservedModel(model, SessionSettings(threads=1)) as observed:
        blocked, held = observed.segment_in_blocks(part, part.observed, feed, ("wide", "odd"))
        if not held:
            pytest.skip("this processor has no blocks")
        plain = observed.segment(part, part.observed, feed)
        assert set(held) == {"wide"}
        wanted = dict(zip(CHANNELS, plain.run(list(CHANNELS), feed), strict=True))
        for name, array in wanted.items():
            (got,) = blocked.run([held.get(name, name)], feed)
            assert got.shape == array.shape
            assert np.array_equal(got, array) == (name not in held)
            np.testing.assert_array_equal(np.sort(got, axis=None), np.sort(array, axis=None))
        assert blocked.inputs == plain.inputs


def test_a_file_that_the_runtime_does_not_read_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = collect(net(), samples(), tensors=["wide"], threads=1)
    calls = []

    def lost(_: onnx.ModelProto, names: Collection[str]) -> dict[str, str]:
        calls.append(names)
        return {"wide": "no such value"}

    monkeypatch.setattr(session, "without_reorders", lost)
    monkeypatch.setattr(session.onnx, "load", lambda *_, **__: onnx.ModelProto())  # and cannot be opened
    assert collect(net(), samples(), tensors=["wide"], threads=1).tensors == wanted.tensors
    assert calls == [frozenset({"wide"})]


@st.composite
def arrays(draw: st.DrawFn) -> Blocked:
    shape = [draw(st.integers(1, most)) for most in (3, 4, 40, 40)]
    block = draw(st.sampled_from([8, 16]))
    return np.random.default_rng(sum(shape)).standard_normal((*shape, block)).astype(np.float32).view(Blocked)


@settings(deadline=None)
@given(array=arrays(), stride=st.sampled_from([2, 5, 7, 11, 13]))
def test_the_elements_picked_are_those_picked_in_order(array: Blocked, stride: int) -> None:
    wanted = np.sort(in_order(array).reshape(-1)[::stride])
    seen, picked = extremes_and_some(array, stride)
    assert seen == extremes(in_order(array))
    np.testing.assert_array_equal(np.sort(picked), wanted)
    np.testing.assert_array_equal(np.sort(pick(array, stride)), wanted)


@settings(deadline=None)
@given(array=arrays(), axis=st.sampled_from([1, -3]))
def test_channels_are_told_apart(array: Blocked, axis: int) -> None:
    def ranges(values: np.ndarray) -> object:
        tensor = Accumulator("float32", CalibrationConfig(sketch=True), axis)
        assert tensor.add(values)
        return tensor.statistics()

    assert ranges(array) == ranges(in_order(array))
