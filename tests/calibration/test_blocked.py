"""Values in blocks of channels give the statistics that they have in order, and are not put in order for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.calibration import CalibrationConfig
from kenosis_ort.calibration import part_session as session
from kenosis_ort.calibration.accumulators import Accumulator, Blocked, extremes_and_some, in_order, pick
from kenosis_ort.calibration.histogram import extremes
from kenosis_ort.calibration.part_session import ObservedModel, Segment, SessionSettings
from tests.calibration.support import swept
from tests.planning import parse

CHANNELS = ("wide", "odd", "end")  # 32, 27 and 32, of 8 or 16 a block: full ones, and one that is not


NET = """net (float[n,4,40,41] x) => (float[n,32,40,41] end)
    <float[32,4,3,3] w_wide, float[27,32,3,3] w_odd, float[32,27,3,3] w_end> {
    c_wide = Conv <pads = [1, 1, 1, 1]> (x, w_wide)  wide = Relu (c_wide)
    c_odd = Conv <pads = [1, 1, 1, 1]> (wide, w_odd)  odd = Relu (c_odd)
    c_end = Conv <pads = [1, 1, 1, 1]> (odd, w_end)  end = Sigmoid (c_end) }"""


def net() -> onnx.ModelProto:
    """Three Convs, the second of channels that fill no whole number of blocks."""
    return parse(NET, ir_version=8)


def samples() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(0, 1, (2, 4, 40, 41)).astype(np.float32)} for _ in range(3)]


@pytest.mark.parametrize("channels", [{}, {"wide": 1, "end": -3}])
@pytest.mark.parametrize("budget", [2**29, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"sketch": True}, {"method": "percentile"}], ids=str)
def test_statistics_are_those_of_values_in_order(
    options: dict[str, Any], budget: int, channels: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*CHANNELS, *(f"c_{name}" for name in CHANNELS)]
    found = swept(net(), samples(), names, channels=channels, fetch_budget=budget, **options)
    monkeypatch.setattr(session, "without_reorders", lambda *_: {})
    plain = swept(net(), samples(), names, channels=channels, fetch_budget=budget, **options)
    assert found.tensors == plain.tensors


def test_full_blocks_come_as_they_are_and_only_where_any_order_does() -> None:
    model = net()
    part = Segment(0, len(model.graph.node), ("x",), CHANNELS, ())
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
    wanted = swept(net(), samples(), ["wide"])
    calls = []

    def lost(_: onnx.ModelProto, names: Collection[str]) -> dict[str, str]:
        calls.append(names)
        return {"wide": "no such value"}

    monkeypatch.setattr(session, "without_reorders", lost)
    monkeypatch.setattr(session.onnx, "load", lambda *_, **__: onnx.ModelProto())  # and cannot be opened
    assert swept(net(), samples(), ["wide"]).tensors == wanted.tensors
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
        assert tensor.take(*tensor.look(values))
        return tensor.statistics()

    assert ranges(array) == ranges(in_order(array))
