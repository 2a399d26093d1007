"""What is known about one tensor, and what one range follows from it.

From a histogram to a range: the percentile, entropy and distribution methods.

Each follows the definition of ``onnxruntime.quantization`` on bins of the same number and place, so that the only
difference to it is that of the histograms. With ``T`` the largest magnitude of the tensor, ``w`` the width of one of
its bins and ``v <= T / 2048`` the width of one of ours:

* percentile: each end differs by at most ``w + v`` (``w`` is ``T / num_bins`` when symmetric, else twice that), save
  where the percentile falls between two values exactly and rounding decides for one or the other;
* entropy with ``num_bins == num_quantized_bins`` (the default): equal, since the search has a single candidate;
  with more bins, the candidate chosen has a divergence near the smallest, the values next to an edge aside;
* distribution: range equal, mean and standard deviation differ by at most ``w / 2 + v``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.histogram import Histogram
from kenosis_ort.errors import CalibrationError

_SMOOTHING = 1e-4

Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation as the distribution method defines them, with the bins they come from."""

    mean: float
    std: float
    counts: Counts
    edges: Doubles


def _signed_bins(low: float, high: float, bins: int) -> Doubles:
    top = max(abs(low), abs(high))
    if top == 0.0:
        return np.linspace(-0.5, 0.5, bins + 1)
    return np.linspace(-top, top, bins + 1)


def _magnitude_bins(low: float, high: float, bins: int) -> Doubles:
    top = max(abs(low), abs(high))
    bottom = 0.0 if low <= 0.0 <= high else min(abs(low), abs(high))
    if top == bottom:
        return np.linspace(top - 0.5, top + 0.5, bins + 1)
    return np.linspace(bottom, top, bins + 1)


def _clip(range_: tuple[float, float], low: float, high: float) -> tuple[float, float]:
    return max(range_[0], low), min(range_[1], high)


def percentile_range(
    histogram: Histogram, low: float, high: float, *, percentile: float, bins: int, symmetric: bool
) -> tuple[float, float]:
    """The range that holds a percentage of the values.

    Args:
        histogram: Counts of the values.
        low: Their minimum.
        high: Their maximum.
        percentile: Percentage inside the range, 0 to 100; when not symmetric half of the rest is cut on each side.
        bins: Number of bins whose edges the ends are taken from.
        symmetric: Takes the percentile of the magnitudes.

    Returns:
        The ends, each the left edge of the bin that holds the percentile, never outside ``[low, high]``.
    """
    if symmetric:
        edges = _magnitude_bins(low, high, bins)
        cdf = _cdf(histogram.rebin(edges, magnitudes=True))
        top = float(edges[np.searchsorted(cdf, percentile / 100.0)])
        return _clip((-top, top), low, high)
    edges = _signed_bins(low, high, bins)
    cdf = _cdf(histogram.rebin(edges))
    cut = (100.0 - percentile) / 200.0
    left, right = np.searchsorted(cdf, cut), np.searchsorted(cdf, 1.0 - cut)
    return _clip((float(edges[left]), float(edges[right])), low, high)


def _cdf(counts: Counts) -> Doubles:
    cumulative: Doubles = np.cumsum(counts / max(int(counts.sum()), 1))  # rounded as stock's, which decides ties
    return cumulative


def distribution_moments(
    histogram: Histogram, low: float, high: float, *, bins: int, scenario: Literal["same", "p3"]
) -> Moments:
    """Mean and standard deviation over symmetric bins.

    Args:
        histogram: Counts of the values.
        low: Their minimum.
        high: Their maximum.
        bins: Number of bins.
        scenario: ``"p3"`` takes the moments of the signed cube root of the values.
    """
    edges = _signed_bins(low, high, bins)
    counts = histogram.rebin(edges)
    values = (edges[:-1] + edges[1:]) * 0.5
    if scenario == "p3":
        values = np.cbrt(values)
    total = max(int(counts.sum()), 1)
    mean = float((counts * values).sum() / total)
    variance = float((counts * values**2).sum() / total) - mean**2
    return Moments(mean, math.sqrt(max(variance, 0.0)), counts, edges)


def entropy_range(
    histogram: Histogram, low: float, high: float, *, bins: int, quantized_bins: int
) -> tuple[float, float]:
    """The symmetric range, cut to ``[low, high]``, with the smallest Kullback-Leibler divergence.

    Args:
        histogram: Counts of the values.
        low: Their minimum.
        high: Their maximum.
        bins: Number of bins over the full range; the candidates end on their edges.
        quantized_bins: Number of levels that the quantized distribution has.
    """
    edges = _signed_bins(low, high, bins)
    counts = histogram.rebin(edges)
    centre = bins // 2
    half = min(quantized_bins // 2, centre)
    best, best_range = math.inf, (0.0, 0.0)
    for reach in range(half, centre + 1):
        start, end = centre - reach, min(centre + reach + 1, bins)
        divergence = _divergence(counts, start, end, quantized_bins)
        if reach == half or divergence < best:
            best, best_range = divergence, (float(edges[start]), float(edges[end]))
    return _clip(best_range, low, high)


def _divergence(counts: Counts, start: int, end: int, levels: int) -> float:
    """Divergence of the counts cut to ``[start, end)`` and quantized to ``levels`` from those with the tails added."""
    inside = counts[start:end]
    reference = inside.copy()
    reference[0] += counts[:start].sum()
    reference[-1] += counts[end:].sum()
    occupied = reference != 0
    merged = inside.size // levels
    body = levels * merged
    sums = inside[:body].reshape(levels, merged).sum(axis=1)
    sums[-1] += inside[body:].sum()
    holders = occupied[:body].reshape(levels, merged).sum(axis=1)
    level = np.zeros(levels, np.int64)
    np.floor_divide(sums, holders, out=level, where=holders != 0)
    quantized = np.zeros(inside.size, np.int64)
    quantized[:body] = np.repeat(level, merged)
    p, q = _smooth(reference), _smooth(quantized)
    if p is None or q is None:
        return math.inf
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum(p * np.log(p / q)))


def _smooth(counts: Counts) -> npt.NDArray[np.float32] | None:
    """Moves a little weight from the occupied to the empty bins, so that the divergence is finite."""
    empty = counts == 0
    occupied = counts.size - int(empty.sum())
    if occupied == 0:
        return None
    taken = _SMOOTHING * (counts.size - occupied) / occupied
    if taken >= 1.0:
        return None
    return np.where(empty, _SMOOTHING, counts - taken).astype(np.float32)


@dataclass(frozen=True, eq=False)
class ChannelRange:
    """Range of each channel of a tensor over all samples, exact.

    Attributes:
        axis: Of the channels, counted from the first.
        rank: Number of axes of the tensor.
        low: Smallest values, float64 (channels,).
        high: Largest values, likewise.
    """

    axis: int
    rank: int
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChannelRange):
            return NotImplemented
        same = np.array_equal(self.low, other.low) and np.array_equal(self.high, other.high)
        return (self.axis, self.rank) == (other.axis, other.rank) and same

    __hash__ = None  # type: ignore[assignment]

    def merge(self, other: ChannelRange) -> ChannelRange | None:
        """The ranges over both data sets; None where the number of channels is not the same."""
        if (self.axis, self.rank, self.low.size) != (other.axis, other.rank, other.low.size):
            return None
        return replace(self, low=np.minimum(self.low, other.low), high=np.maximum(self.high, other.high))


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor over all samples.

    Attributes:
        low: Smallest value seen, exact; of a gate such as ``x * Sigmoid(x)`` the least that it takes over the range of
            ``x`` (`kenosis_ort.calibration.segments`). 0 if no element was seen.
        high: Largest value seen, likewise.
        count: Number of elements seen; 0 for a tensor that was always empty, or where it is not known.
        dtype: ``"float32"`` or ``"float16"``, the tensor's element type.
        histogram: Counts of the values; None for MinMax.
        averaged: Range by moving average, None without.
        fixed: A range that takes the place of the computed one, e.g. from stock's cache file.
        channels: Ranges by channel, of tensors whose channels a pass may scale; None of others.
    """

    low: float
    high: float
    count: int = 0
    dtype: str = "float32"
    histogram: Histogram | None = None
    averaged: tuple[float, float] | None = None
    fixed: tuple[float, float] | None = None
    channels: ChannelRange | None = None

    @property
    def mean(self) -> float | None:
        """Mean of the elements, from the histogram (within half of one of its bins); None without one."""
        return None if self.histogram is None else self.histogram.moment(1)

    @property
    def second_moment(self) -> float | None:
        """Mean of the squares, from the histogram; None without one."""
        return None if self.histogram is None else self.histogram.moment(2)

    def range(self, config: CalibrationConfig, name: str = "") -> tuple[float, float]:
        """The range by the method of ``config``, rounded to the tensor's element type.

        Args:
            config: Method and settings.
            name: Name of the tensor, for messages.

        Raises:
            CalibrationError: The method needs a histogram and there is none.
        """
        if self.fixed is not None:
            return self.fixed
        low, high = np.array(self._range(config, name)).astype(self.dtype).tolist()
        return low, high

    def _range(self, config: CalibrationConfig, name: str) -> tuple[float, float]:
        if config.method == "minmax":
            low, high = self.averaged if config.moving_average and self.averaged else (self.low, self.high)
            if config.is_symmetric and not (config.moving_average and self.averaged):
                top = max(abs(low), abs(high))
                return -top, top
            return low, high
        if self.count == 0:
            return 0.0, 0.0
        histogram = self._histogram_or_raise(config, name)
        if config.method == "percentile":
            return percentile_range(
                histogram,
                self.low,
                self.high,
                percentile=config.percentile,
                bins=config.bins,
                symmetric=config.is_symmetric,
            )
        if config.method == "entropy":
            return entropy_range(
                histogram, self.low, self.high, bins=config.bins, quantized_bins=config.num_quantized_bins
            )
        top = max(abs(self.low), abs(self.high))
        return -top, top

    def moments(self, config: CalibrationConfig, name: str = "") -> Moments:
        """Mean and standard deviation as the distribution method defines them."""
        histogram = self._histogram_or_raise(config, name)
        return distribution_moments(histogram, self.low, self.high, bins=config.bins, scenario=config.scenario)

    def _histogram_or_raise(self, config: CalibrationConfig, name: str) -> Histogram:
        if self.histogram is None:
            raise CalibrationError(
                f"The calibration method '{config.method}' needs a histogram, and this table holds none.",
                where=f"tensor '{name}'",
                fix="Collect again with that method.",
            )
        return self.histogram

    def merge(self, other: TensorStatistics, *, weights: tuple[int, int]) -> TensorStatistics:
        """The statistics of both data sets together.

        Args:
            other: Statistics of the same tensor over other samples.
            weights: Number of samples of this and the other, for the moving average.
        """
        low, high = self.low, self.high
        if other.count or not self.count:
            low, high = (min(low, other.low), max(high, other.high)) if self.count else (other.low, other.high)
        histogram = None
        if self.histogram is not None and other.histogram is not None:
            histogram = self.histogram.merge(other.histogram)
        channels = self.channels if not other.count else other.channels if not self.count else None
        if self.channels is not None and other.channels is not None:
            channels = self.channels.merge(other.channels)
        averaged = None
        if self.averaged is not None and other.averaged is not None:
            a, b = weights[0] / sum(weights), weights[1] / sum(weights)
            averaged = (
                a * self.averaged[0] + b * other.averaged[0],
                a * self.averaged[1] + b * other.averaged[1],
            )
        return replace(
            self,
            low=low,
            high=high,
            count=self.count + other.count,
            histogram=histogram,
            averaged=averaged,
            channels=channels,
        )
