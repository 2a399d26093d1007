"""Ranges by channel are those of numpy, however many elements a channel has side by side."""

from __future__ import annotations

import numpy as np
import pytest

from kenosis_ort.calibration import CalibrationConfig
from kenosis_ort.calibration.accumulators import Accumulator


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 8, 3, 3), 1), ((5, 8, 40, 40), 1), ((1, 8, 2, 2), 1), ((4, 6, 7), -1), ((9,), 0)]
)
def test_channels_and_the_whole(shape: tuple[int, ...], axis: int) -> None:
    data = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    tensor = Accumulator("float32", CalibrationConfig(), axis)
    for sample in data:
        assert tensor.add(sample)
    found = tensor.statistics()
    assert found.channels is not None
    over = (0, *(a + 1 for a in range(len(shape)) if a != axis % len(shape)))
    np.testing.assert_array_equal(found.channels.low, data.min(axis=over))
    np.testing.assert_array_equal(found.channels.high, data.max(axis=over))
    assert (found.low, found.high, found.count) == (data.min(), data.max(), data.size)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(5, 8, 3, 3), (1, 8, 40, 40)])
def test_not_finite_is_seen(bad: float, shape: tuple[int, ...]) -> None:
    data = np.zeros(shape, np.float32)
    data[-1, 5, 1, 2] = bad
    assert not Accumulator("float32", CalibrationConfig(), 1).add(data)
