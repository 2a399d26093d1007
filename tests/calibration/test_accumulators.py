"""What is kept of a tensor: exact histograms and ranges by channel, also of values in blocks of channels."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kenosis_ort.calibration import CalibrationConfig
from kenosis_ort.calibration import part_session as session
from kenosis_ort.calibration.accumulators import (
    BLOCK,
    WHOLE_BELOW,
    Accumulator,
    exponent_of,
    extremes,
    extremes_and_some,
    pick,
)
from kenosis_ort.calibration.histogram import HALF, Histogram
from kenosis_ort.calibration.part_session import Blocked, ObservedModel, Segment, SessionSettings, in_order
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.errors import CalibrationError
from tests.calibration.support import histogram_of as build
from tests.calibration.support import one_node_model, random_feeds, swept
from tests.planning import parse

PLAIN, SKETCH = CalibrationConfig(), CalibrationConfig(sketch=True)


def taken(config: CalibrationConfig, *arrays: np.ndarray, axis: int | None = None) -> TensorStatistics:
    """Statistics of a tensor whose values are these, one after the other."""
    tensor = Accumulator("float32", config, axis)
    assert all(tensor.take(*tensor.look(array)) for array in arrays)
    return tensor.statistics()


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 8, 3, 3), 1), ((5, 8, 40, 40), 1), ((1, 8, 2, 2), 1), ((4, 6, 7), -1), ((9,), 0)]
)
@pytest.mark.parametrize("config", [PLAIN, SKETCH])
def test_channels_and_the_whole(shape: tuple[int, ...], axis: int, config: CalibrationConfig) -> None:
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
def test_all_channels_and_places_are_picked_alike(shape: tuple[int, ...]) -> None:
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
def test_what_consumers_take_alike_may_be_infinite(options: dict[str, Any]) -> None:
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
def test_every_value_is_in_its_bin_and_bins_are_narrow(data: np.ndarray) -> None:
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
def test_order_and_split_do_not_matter(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    whole = build(np.concatenate([a, b, c]))
    assert build(c, a, b) == whole
    parts = [build(p) for p in (a, b, c)]
    assert parts[0].merge(parts[1]).merge(parts[2]) == whole
    assert parts[2].merge(parts[0].merge(parts[1])) == whole


def test_larger_than_a_block_and_of_any_shape_and_type() -> None:
    data = np.random.default_rng(0).standard_normal((3, 50, 1000)).astype(np.float32)
    assert build(data) == build(*data)
    assert build(data[:, ::2]).total == data.size // 2
    half = data.astype(np.float16)
    assert build(half) == build(half.astype(np.float32))
    assert [exponent_of(magnitude) for magnitude in (1.0, 0.999, 0.0)] == [1, 0, -100]


def test_counts_are_checked_and_frozen() -> None:
    with pytest.raises(ValueError, match="8192 bins"):
        Histogram(0, np.zeros(3, np.int64))
    histogram = build(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="read-only"):
        histogram.counts[0] = 1


# ---- values in blocks of channels ------------------------------------------------------------------------------------


CHANNELS = ("wide", "odd", "end")  # 32, 27 and 32, of 8 or 16 a block: full ones, and one that is not


NET = parse(  # three Convs, the second of channels that fill no whole number of blocks
    """(float[n,4,40,41] x) => (float[n,32,40,41] end)
    <float[32,4,3,3] w_wide, float[27,32,3,3] w_odd, float[32,27,3,3] w_end> {
    c_wide = Conv <pads = [1, 1, 1, 1]> (x, w_wide)  wide = Relu (c_wide)
    c_odd = Conv <pads = [1, 1, 1, 1]> (wide, w_odd)  odd = Relu (c_odd)
    c_end = Conv <pads = [1, 1, 1, 1]> (odd, w_end)  end = Sigmoid (c_end) }""",
    ir_version=8,
)


def samples() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(0, 1, (2, 4, 40, 41)).astype(np.float32)} for _ in range(3)]


@pytest.mark.parametrize("channels", [{}, {"wide": 1, "end": -3}])
@pytest.mark.parametrize("budget", [2**29, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"sketch": True}, {"method": "percentile"}], ids=str)
def test_statistics_are_those_of_values_in_order(options, budget, channels, monkeypatch):
    names = [*CHANNELS, *(f"c_{name}" for name in CHANNELS)]
    found = swept(NET, samples(), names, channels=channels, fetch_budget=budget, **options)
    monkeypatch.setattr(session, "without_reorders", lambda *_: {})
    plain = swept(NET, samples(), names, channels=channels, fetch_budget=budget, **options)
    assert found.tensors == plain.tensors


def test_full_blocks_come_as_they_are_and_only_where_any_order_does() -> None:
    part = Segment(0, len(NET.graph.node), ("x",), CHANNELS, ())
    feed = samples()[0]
    with ObservedModel(NET, SessionSettings(threads=1)) as observed:
        blocked, held = observed.segment(part, part.observed, feed, ("wide", "odd"))
        if not held:
            pytest.skip("this processor has no blocks")
        plain, _ = observed.segment(part, part.observed, feed)
        assert set(held) == {"wide"}
        wanted = dict(zip(CHANNELS, plain.run(list(CHANNELS), feed), strict=True))
        for name, array in wanted.items():
            (got,) = blocked.run([held.get(name, name)], feed)
            assert got.shape == array.shape
            assert np.array_equal(got, array) == (name not in held)
            np.testing.assert_array_equal(np.sort(got, axis=None), np.sort(array, axis=None))
        assert blocked.inputs == plain.inputs


def test_a_file_that_the_runtime_does_not_read_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, lost = swept(NET, samples(), ["wide"]), Mock(return_value={"wide": "no such value"})
    monkeypatch.setattr(session, "without_reorders", lost)
    monkeypatch.setattr(session.onnx, "load", Mock(return_value=onnx.ModelProto()))  # and cannot be opened
    assert swept(NET, samples(), ["wide"]).tensors == wanted.tensors
    assert [call.args[1] for call in lost.call_args_list] == [{"wide"}]


@st.composite
def arrays(draw: st.DrawFn) -> Blocked:
    shape = [draw(st.integers(1, most)) for most in (3, 4, 40, 40)]
    block = draw(st.sampled_from([8, 16]))
    return np.random.default_rng(sum(shape)).standard_normal((*shape, block)).astype(np.float32).view(Blocked)


def plain_arrays() -> st.SearchStrategy[np.ndarray]:
    flat = st.integers(1, 3 * BLOCK).map(lambda size: np.random.default_rng(size).standard_normal(size))
    return st.builds(np.asarray, flat, st.sampled_from([np.float16, np.float32]))


@given(array=arrays() | plain_arrays(), stride=st.sampled_from([2, 5, 7, 11, 13, 19]))
def test_the_elements_picked_are_those_picked_in_order(array: Any, stride: int) -> None:
    plain = in_order(array) if isinstance(array, Blocked) else array
    seen, picked = extremes_and_some(array, stride)
    assert seen == extremes(plain)
    wanted = np.sort(plain.reshape(-1)[::stride])
    np.testing.assert_array_equal(np.sort(picked), wanted)
    np.testing.assert_array_equal(np.sort(pick(array, stride)), wanted)


@given(array=arrays(), axis=st.sampled_from([1, -3]))
def test_channels_are_told_apart(array: Blocked, axis: int) -> None:
    assert taken(SKETCH, array, axis=axis) == taken(SKETCH, in_order(array), axis=axis)
