"""The predicted quantization error is that of the data, whatever their distribution and the range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.calibration.estimators import sketch
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.errors import CalibrationError
from tests.calibration.estimators.distributions import Floats, activations, quantization_error, statistics_of


@given(activations(), st.floats(0.2, 1.0), st.floats(0.2, 1.0), st.sampled_from([1.0, 2.0, 2.4, 3.0]))
@settings(deadline=None)
def test_error_is_that_of_the_data(data: Floats, a: float, b: float, power: float) -> None:
    values = sketch(statistics_of(data))
    low, high = a * min(values.low, 0.0), b * max(values.high, 0.0)
    (predicted,) = values.errors([(low, high)], power=power)
    actual = quantization_error(data, low, high, power)
    step = (high - low) / 255
    assert predicted == pytest.approx(actual, rel=0.15, abs=(0.4 * step) ** power)


@given(activations())
@settings(deadline=None)
def test_mass_and_quantiles(data: Floats) -> None:
    values = sketch(statistics_of(data))
    assert values.total == data.size
    assert (values.low, values.high) == (data.min(), data.max())
    bin_width = 4.0 * np.abs(data).max() / 2048
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        exact = np.quantile(data, share, method="inverted_cdf" if share < 0.5 else "higher")
        near = np.sort(np.abs(data - exact))[:20].max()  # where data are sparse, a neighbour is as good
        assert abs(values.quantile(share) - exact) <= bin_width + near


def test_limits_gather_what_lies_beyond() -> None:
    data = np.linspace(-100, 10, 1000, dtype=np.float32)
    values = sketch(statistics_of(data), low_limit=-8.0)
    assert (values.low, values.high) == (-8.0, 10.0)
    assert values.total == 1000
    actual = quantization_error(np.maximum(data, -8.0), -8.0, 10.0, 2.0)
    assert values.errors([(-8.0, 10.0)], power=2)[0] == pytest.approx(actual, rel=0.1)


@pytest.mark.parametrize(("low", "high", "expected"), [(5.0, None, 5.0), (None, -5.0, -5.0)])
def test_everything_beyond_a_limit(low: float | None, high: float | None, expected: float) -> None:
    values = sketch(statistics_of(np.linspace(-1, 1, 99, dtype=np.float32)), low_limit=low, high_limit=high)
    assert (values.low, values.high) == (expected, expected)


def test_extremes_that_a_partial_histogram_missed() -> None:
    part = statistics_of(np.linspace(-1, 1, 1000, dtype=np.float32))
    values = sketch(TensorStatistics(-50.0, 90.0, 5000, histogram=part.histogram))
    assert (values.low, values.high) == (-50.0, 90.0)
    assert values.total == pytest.approx(1000.4)


def test_no_histogram_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="histogram"):
        sketch(TensorStatistics(0.0, 1.0, 5))
