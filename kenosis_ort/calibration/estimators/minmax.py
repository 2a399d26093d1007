"""The range that holds every value."""

from __future__ import annotations

from kenosis_ort.calibration.statistics import TensorStatistics


def minmax_range(
    statistics: TensorStatistics, *, low_limit: float | None = None, high_limit: float | None = None
) -> tuple[float, float]:
    """Returns the smallest and the largest value, cut to the limits; no histogram is needed."""
    low, high = statistics.low, statistics.high
    if low_limit is not None:
        low, high = max(low, low_limit), max(high, low_limit)
    if high_limit is not None:
        low, high = min(low, high_limit), min(high, high_limit)
    return low, high
