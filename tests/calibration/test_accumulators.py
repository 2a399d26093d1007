"""What an accumulator keeps of a tensor: ranges by channel, and histograms of some elements beside exact ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.calibration import CalibrationConfig, CalibrationTable
from kenosis_ort.calibration.accumulators import WHOLE_BELOW, Accumulator, extremes_and_some
from kenosis_ort.calibration.histogram import BLOCK, extremes
from kenosis_ort.errors import CalibrationError
from tests import models
from tests.calibration.support import one_node_model, random_feeds, swept

PLAIN, SKETCH = CalibrationConfig(), CalibrationConfig(sketch=True)


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 8, 3, 3), 1), ((5, 8, 40, 40), 1), ((1, 8, 2, 2), 1), ((4, 6, 7), -1), ((9,), 0)]
)
def test_channels_and_the_whole(shape: tuple[int, ...], axis: int) -> None:
    data = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    tensor = Accumulator("float32", PLAIN, axis)
    assert all(tensor.take(*tensor.look(sample)) for sample in data)
    found = tensor.statistics()
    assert found.channels is not None
    over = (0, *(a + 1 for a in range(len(shape)) if a != axis % len(shape)))
    np.testing.assert_array_equal(found.channels.low, data.min(axis=over))
    np.testing.assert_array_equal(found.channels.high, data.max(axis=over))
    assert (found.low, found.high, found.count) == (data.min(), data.max(), data.size)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("shape", "config", "axis"),
    [
        ((5, 8, 3, 3), CalibrationConfig(), 1),
        ((1, 8, 40, 40), CalibrationConfig(), 1),
        ((1, 8, 100, 125), SKETCH, None),
        ((1, 8, 100, 125), CalibrationConfig("percentile"), None),
        ((1, 8, 100, 125), CalibrationConfig("percentile"), 1),
    ],
)
def test_not_finite_is_seen_wherever_it_is(
    bad: float, shape: tuple[int, ...], config: CalibrationConfig, axis: int | None
) -> None:
    data = np.zeros(shape, np.float32)
    data[-1, 5, 1, 2] = bad
    tensor = Accumulator("float32", config, axis)
    assert not tensor.take(*tensor.look(data))


def test_ranges_beside_histograms_are_those_of_minmax() -> None:
    model = models.ALL["residual_block"]()
    plain, sketched = (swept(model, models.feeds(model, 4), sketch=sketch) for sketch in (False, True))
    for name, statistics in plain.tensors.items():
        assert sketched.range_of(name) == plain.range_of(name)
        histogram = sketched.tensors[name].histogram
        assert histogram is not None
        assert histogram.total == statistics.count  # small tensors are counted whole


@pytest.mark.parametrize("shape", [(1, 64, 35, 35), (1, 300, 256), (5, 7, 11, 13, 17), (1, 4, 200, 200)])
def test_all_channels_and_places_are_picked_alike(shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    data[..., 0] += 100.0  # one channel, last axis, far away
    tensor = Accumulator("float32", SKETCH)
    assert tensor.take(*tensor.look(data))
    statistics = tensor.statistics()
    histogram = statistics.histogram
    assert histogram is not None
    assert (statistics.low, statistics.high, statistics.count) == (data.min(), data.max(), data.size)
    assert data.size / 20 < histogram.total <= data.size / 5 + 1
    assert data.size >= WHOLE_BELOW
    share = 1 - histogram.cumulative_at(np.array([50.0]))[0] / histogram.total
    assert share == pytest.approx(1 / shape[-1], rel=0.1)


@settings(deadline=None)
@given(size=st.integers(1, 3 * BLOCK), stride=st.sampled_from([2, 5, 7, 11, 19]), half=st.booleans())
def test_one_pass_picks_what_a_slice_does(size: int, stride: int, half: bool) -> None:
    array = np.random.default_rng(size).standard_normal(size).astype(np.float16 if half else np.float32)
    seen, picked = extremes_and_some(array, stride)
    assert seen == extremes(array)
    np.testing.assert_array_equal(picked, array[::stride])


def test_a_cache_without_histograms_does_not_serve() -> None:
    plain, sketched = (swept(one_node_model(), random_feeds(2), ["y"], sketch=sketch) for sketch in (False, True))
    with pytest.raises(CalibrationError, match="histograms"):
        plain.check_matches(plain.model_fingerprint, SKETCH)
    again = CalibrationTable.from_json(sketched.to_json())
    assert again.tensors == sketched.tensors
    again.check_matches(sketched.model_fingerprint, PLAIN)
    assert sketched.merge(again).tensors["y"].histogram is not None


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
