"""Statistics of one tensor: histograms, all samples together, by channel, and after a change of weights.

A pass that moves scales from one layer to the next changes values whose ranges were collected before. Minima and maxima
by channel scale with the channels; they merge as those of the whole tensor do, and cost next to nothing to collect.

Histograms grow by doubling and merge exactly. The bins are fixed by a power of two and by nothing else: bin ``i`` of a
histogram with exponent ``e`` covers ``[(i - HALF) * w, (i - HALF + 1) * w)`` with ``w = 2**e / HALF``. When a value
falls outside, the exponent goes up and neighbouring bins are added together; since scaling by a power of two is exact
in floating point, the counts are what they would have been with the larger exponent from the start. So the result
depends neither on the order of the data nor on how it was split, and two histograms of different exponents merge
without any error. (A negative value that scaling brings below the smallest float32, some 1e-34 of the range, counts as
zero.)

With ``T`` the largest magnitude seen, the exponent is the smallest with ``T < 2**e``, so the bins are at most
``T / 2048`` wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

HALF = 4096
"""Bins on each side of zero."""
MIN_EXPONENT = -100
_LEVELS = HALF.bit_length() - 1


@dataclass(frozen=True, slots=True)
class Extremes:
    """Extremes of one array; ``low`` is greater than ``high`` if it has no element, and both are NaN if one is.

    Attributes:
        low: Smallest value.
        high: Largest value.
        count: Number of elements.
    """

    low: float = math.inf
    high: float = -math.inf
    count: int = 0


def fold(counts: Counts, steps: int) -> Counts:
    """The counts of the histogram whose exponent is larger by ``steps``.

    Args:
        counts: Shape ``(2 * HALF,)``.
        steps: How many times the range doubles, 0 or more.
    """
    if steps <= 0:
        return counts
    factor = 1 << min(steps, _LEVELS)  # beyond, only the two bins next to zero are left, and they stay
    half = HALF // factor
    out = np.zeros(2 * HALF, np.int64)
    out[HALF - half : HALF + half] = counts.reshape(-1, factor).sum(axis=1)
    return out


class _ByContent:
    """Equality of records that hold arrays: all of their fields are equal."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(np.array_equal(value, getattr(other, name)) for name, value in vars(self).items())

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Histogram(_ByContent):
    """A finished histogram.

    Attributes:
        exponent: The range is ``[-2**exponent, 2**exponent)``.
        counts: Number of values in each bin, shape ``(8192,)``, read-only.
    """

    exponent: int
    counts: Counts

    def __post_init__(self) -> None:
        counts = np.array(self.counts, np.int64)
        if counts.shape != (2 * HALF,):
            raise ValueError(f"a histogram has {2 * HALF} bins, got an array of shape {counts.shape}")
        counts.flags.writeable = False
        object.__setattr__(self, "counts", counts)

    @property
    def width(self) -> float:
        """Width of a bin."""
        return math.ldexp(1.0, self.exponent) / HALF

    @property
    def total(self) -> int:
        """Number of values counted."""
        return int(self.counts.sum())

    @property
    def edges(self) -> Float64:
        """Edges of the bins, shape ``(8193,)``."""
        edges: Float64 = np.arange(-HALF, HALF + 1, dtype=np.float64) * np.float64(self.width)
        return edges

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both data sets together, without error."""
        exponent = max(self.exponent, other.exponent)
        return Histogram(
            exponent, fold(self.counts, exponent - self.exponent) + fold(other.counts, exponent - other.exponent)
        )

    def cumulative_at(self, points: Float64) -> Float64:
        """Number of values below each point, linear inside a bin."""
        cumulative = np.concatenate(([0], np.cumsum(self.counts)))
        return np.interp(points, self.edges, cumulative)

    def rebin(self, edges: Float64, *, magnitudes: bool = False) -> Counts:
        """The counts in other bins.

        Args:
            edges: Increasing edges, shape ``(n + 1,)``. Values outside go to the first and last bin.
            magnitudes: Bins the absolute values instead.

        Returns:
            Counts of shape ``(n,)`` that sum to `total`. A value can only end up in the wrong bin if an edge
            lies in the same bin of this histogram.
        """
        below = self.cumulative_at(edges)
        if magnitudes:
            below = below - self.cumulative_at(-edges)
        below[0], below[-1] = 0, self.total
        return np.diff(np.rint(below)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class ChannelRange(_ByContent):
    """Range of each channel of a tensor over all samples, exact.

    Attributes:
        axis: Of the channels, counted from the first.
        rank: Number of axes of the tensor.
        low: Smallest values, float64 (channels,).
        high: Largest values, likewise.
    """

    axis: int
    rank: int
    low: Float64
    high: Float64

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
            ``x`` (`kenosis_ort.calibration.derived`). 0 if no element was seen.
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
            least, most = (a * one + b * two for one, two in zip(self.averaged, other.averaged, strict=True))
            averaged = least, most
        count = self.count + other.count
        return replace(self, low=low, high=high, count=count, histogram=histogram, averaged=averaged, channels=channels)


@dataclass(frozen=True, eq=False)
class Rescaling:
    """Change of the channels of a value by a change of weights: ``(x - shift) * factor``, cut to bounds.

    Attributes:
        axis: Of the channels; negative counts from the end.
        factors: By channel, positive, float64 (channels,).
        shift: By channel, taken off before; 0.0 for none.
        low: Least value of the activations before it; minus infinity without.
        high: Largest value, likewise.
        source: The value that it was before where the change made a new one; "" for the value itself.
    """

    axis: int
    factors: Float64
    shift: Float64 | float = 0.0
    low: float = -math.inf
    high: float = math.inf
    source: str = ""

    def of(self, statistics: TensorStatistics) -> TensorStatistics | None:
        """The statistics of the changed value without a histogram; None where they do not follow.

        Channels beyond those that factors are known for are padding, and stay as they are. A range set by hand or by
        moving average, which is not the one that was seen, keeps its relation to that.
        """
        seen, count = statistics.channels, len(self.factors)
        if seen is None or not statistics.count or not -seen.rank <= self.axis < seen.rank:
            return None
        if self.axis % seen.rank != seen.axis or seen.low.size < count:
            return None
        ends = np.stack([seen.low, seen.high])
        ends[:, :count] = np.clip((ends[:, :count] - self.shift) * self.factors, self.low, self.high)
        low, high = float(ends[0].min()), float(ends[1].max())

        def like(known: tuple[float, float] | None) -> tuple[float, float] | None:
            if known is None:
                return None
            return _in_proportion(known[0], statistics.low, low), _in_proportion(known[1], statistics.high, high)

        averaged, fixed = like(statistics.averaged), like(statistics.fixed)
        channels = replace(seen, low=ends[0], high=ends[1])
        return TensorStatistics(low, high, statistics.count, statistics.dtype, None, averaged, fixed, channels)


def _in_proportion(known: float, before: float, now: float) -> float:
    return known * (now / before) if before else known + now


@dataclass(frozen=True)
class ChannelStatistics:
    """Statistics of one value, one number a channel, float64 of shape (channels,).

    Attributes:
        low: Least values.
        high: Largest values.
        mean: Means.
        second_moment: Means of the squares.
        sample_means: Means of each sample (index 0 of the value's first axis) by itself, shape (samples, channels);
            of shape (0, channels) where they are not known.
    """

    low: Float64
    high: Float64
    mean: Float64
    second_moment: Float64
    sample_means: Float64

    @property
    def channels(self) -> int:
        return int(self.low.size)

    @property
    def peak(self) -> Float64:
        """Largest absolute values."""
        return np.maximum(np.abs(self.low), np.abs(self.high))
