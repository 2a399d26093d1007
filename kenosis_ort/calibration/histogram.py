"""Histograms that grow by doubling and merge exactly, and ranges by stock's methods from them.

The bins are fixed by a power of two and by nothing else: bin ``i`` of a histogram with exponent ``e`` covers
``[(i - HALF) * w, (i - HALF + 1) * w)`` with ``w = 2**e / HALF``. When a value falls outside, the exponent goes up
and neighbouring bins are added together; since scaling by a power of two is exact in floating point, the counts are
what they would have been with the larger exponent from the start. So the result depends neither on the order of the
data nor on how it was split, and two histograms of different exponents merge without any error. (A negative value
that scaling brings below the smallest float32, some 1e-34 of the range, counts as zero.)

With ``T`` the largest magnitude seen, the exponent is the smallest with ``T < 2**e``, so the bins are at most
``T / 2048`` wide.

Ranges by percentile, entropy and distribution: each follows the definition of ``onnxruntime.quantization`` on bins of
the same number and place, so that the only difference to it is that of the histograms. With ``T`` the largest magnitude
of the tensor, ``w`` the width of one of its bins and ``v <= T / 2048`` the width of one of ours:

* percentile: each end differs by at most ``w + v`` (``w`` is ``T / num_bins`` when symmetric, else twice that), save
  where the percentile falls between two values exactly and rounding decides for one or the other;
* entropy with ``num_bins == num_quantized_bins`` (the default): equal, since the search has a single candidate;
  with more bins, the candidate chosen has a divergence near the smallest, the values next to an edge aside;
* distribution: range equal, mean and standard deviation differ by at most ``w / 2 + v``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

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


@dataclass(frozen=True, eq=False)
class Histogram:
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return self.exponent == other.exponent and bool(np.array_equal(self.counts, other.counts))

    __hash__ = None  # type: ignore[assignment]

    @property
    def width(self) -> float:
        """Width of a bin."""
        return math.ldexp(1.0, self.exponent) / HALF

    @property
    def total(self) -> int:
        """Number of values counted."""
        return int(self.counts.sum())

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """Edges of the bins, shape ``(8193,)``."""
        edges: npt.NDArray[np.float64] = np.arange(-HALF, HALF + 1, dtype=np.float64) * np.float64(self.width)
        return edges

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both data sets together, without error."""
        exponent = max(self.exponent, other.exponent)
        return Histogram(
            exponent, fold(self.counts, exponent - self.exponent) + fold(other.counts, exponent - other.exponent)
        )

    def cumulative_at(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Number of values below each point, linear inside a bin."""
        cumulative = np.concatenate(([0], np.cumsum(self.counts)))
        return np.interp(points, self.edges, cumulative)

    def rebin(self, edges: npt.NDArray[np.float64], *, magnitudes: bool = False) -> Counts:
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


_SMOOTHING = 1e-4

Doubles = npt.NDArray[np.float64]


class Moments(NamedTuple):
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
