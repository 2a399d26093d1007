"""A tensor's distribution as the range estimators see it: occupied bins, cut to what the consumers still tell apart.

The range that holds every value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.histogram import HALF, Histogram
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.errors import CalibrationError


def minmax_range(
    statistics: TensorStatistics, *, low_limit: float | None = None, high_limit: float | None = None
) -> tuple[float, float]:
    """The smallest and the largest value, cut to the limits; no histogram is needed."""
    low, high = statistics.low, statistics.high
    if low_limit is not None:
        low, high = max(low, low_limit), max(high, low_limit)
    if high_limit is not None:
        low, high = min(low, high_limit), min(high, high_limit)
    return low, high


Doubles = npt.NDArray[np.float64]
Range = tuple[float, float]

_FINE = HALF // 16
"""Bins on each side of zero that stay single; where outliers stretch the range, the bulk lies there."""
_MERGED = 4


@dataclass(frozen=True, eq=False)
class Sketch:
    """Intervals of equal density, in increasing order.

    Values are taken to be spread evenly inside an interval. Below ``T / 8`` (``T`` is the largest magnitude) that is a
    bin of the histogram, at most ``T / 2048`` wide, or 1/8 of the step of a one-sided 8-bit grid over the full range;
    above, four bins, or half a step. Exact zeros, which every grid holds, are told from small values only as far as the
    bin next to zero goes.

    Attributes:
        left: Lower ends, shape ``(n,)``.
        right: Upper ends, shape ``(n,)``; equal to ``left`` for a point mass.
        mass: Number of values in each interval, shape ``(n,)``, not necessarily whole.
        low: Smallest value.
        high: Largest value.
    """

    left: Doubles
    right: Doubles
    mass: Doubles
    low: float
    high: float

    @property
    def total(self) -> float:
        """Number of values."""
        return float(self.mass.sum())

    def shrunk(self, share: float) -> Range:
        """The range with its ends at a share of their distance from 0; an end that no grid uses stays."""
        low = min(share * self.low, self.high) if self.low < 0.0 else self.low
        high = max(share * self.high, self.low) if self.high > 0.0 else self.high
        return low, high

    def quantile(self, share: float) -> float:
        """The value below which a share (0 to 1) of the values lie, linear inside a bin."""
        if not self.mass.size:
            return 0.0
        cumulative = np.cumsum(self.mass)
        goal = min(max(share, 0.0), 1.0) * cumulative[-1]
        index = min(int(np.searchsorted(cumulative, goal)), self.mass.size - 1)
        before = float(cumulative[index] - self.mass[index])
        inside = min(max((goal - before) / self.mass[index], 0.0), 1.0)
        return float(self.left[index] + inside * (self.right[index] - self.left[index]))

    def errors(self, ranges: npt.ArrayLike, *, power: float, levels: int = 256) -> Doubles:
        """The mean of ``|x - Q(x)|**power`` for each of several ranges.

        ``Q`` rounds to the grid that the range gets when it is widened to hold 0 and its zero point is rounded, and
        clips to it. The mean over an interval is the exact integral.

        Args:
            ranges: (low, high) pairs, shape ``(k, 2)``.
            power: Exponent, at least 1: 2 for the mean squared error.
            levels: Number of grid points.

        Returns:
            Means, shape ``(k,)``; 0 of no values.
        """
        pairs = np.asarray(ranges, np.float64).reshape(-1, 2)
        if not self.mass.size:
            return np.zeros(len(pairs))
        edges, weight, points, masses = self._integrable
        steps, bottoms, tops = (part[:, None] for part in _grids(pairs, levels))
        integrals = np.diff(_integral(edges, steps, bottoms, tops, power), axis=1)
        totals = np.array([float(weight @ integral) for integral in integrals])
        if points.size:
            offsets = np.abs(_offset(points, steps, bottoms, tops)) ** power
            totals += np.array([float(masses @ offset) for offset in offsets])
        return totals / self.total

    @cached_property
    def _integrable(self) -> tuple[Doubles, Doubles, Doubles, Doubles]:
        """Edges and the density between them, then the point masses and their places."""
        wide = self.right > self.left
        edges = np.unique(np.concatenate((self.left[wide], self.right[wide])))
        density = np.zeros(max(edges.size - 1, 0))
        at = np.searchsorted(edges, self.left[wide])
        density[at] = self.mass[wide] / (self.right[wide] - self.left[wide])
        if edges.size:
            # What shares a bin with 0 is mostly exact zeros, which every grid holds; the rest loses less than a bin.
            density[(edges[:-1] <= 0.0) & (edges[1:] >= 0.0)] = 0.0
        return edges, density, self.left[~wide], self.mass[~wide]


def sketch(statistics: TensorStatistics, *, low_limit: float | None = None, high_limit: float | None = None) -> Sketch:
    """A tensor's distribution.

    Args:
        statistics: Statistics with a histogram.
        low_limit: What lies below counts as this value: the consumers see no difference.
        high_limit: The same above.

    Raises:
        CalibrationError: The statistics hold no histogram.
    """
    histogram = statistics.histogram
    if histogram is None:
        raise CalibrationError("This range estimator needs a histogram.", fix="Collect again with one.")
    low, high = minmax_range(statistics, low_limit=low_limit, high_limit=high_limit)
    left, right, mass = _occupied(histogram, statistics)
    return Sketch(np.clip(left, low, high), np.clip(right, low, high), mass, low, high)


def _occupied(histogram: Histogram, statistics: TensorStatistics) -> tuple[Doubles, Doubles, Doubles]:
    used = np.flatnonzero(histogram.counts)
    if not used.size:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    bins = used - HALF
    coarse = np.abs(bins) >= _FINE
    first = np.where(coarse, bins // _MERGED * _MERGED, bins)
    starts = np.flatnonzero(np.diff(first, prepend=first[0] - 1))
    mass = np.add.reduceat(histogram.counts[used], starts).astype(np.float64)
    left = first[starts].astype(np.float64) * histogram.width
    right = left + np.where(coarse[starts], _MERGED, 1) * histogram.width
    # A histogram of a part of the elements may have missed the extremes: each stands for one element.
    share = min(histogram.total / max(statistics.count, histogram.total), 1.0)
    if statistics.low < left[0]:
        left, right, mass = _prepend(left, statistics.low), _prepend(right, statistics.low), _prepend(mass, share)
    if statistics.high > right[-1]:
        left, right = np.append(left, statistics.high), np.append(right, statistics.high)
        mass = np.append(mass, share)
    return np.clip(left, statistics.low, statistics.high), np.clip(right, statistics.low, statistics.high), mass


def _prepend(array: Doubles, value: float) -> Doubles:
    return np.concatenate(([value], array))


def _grids(pairs: Doubles, levels: int) -> tuple[Doubles, Doubles, Doubles]:
    """Step, smallest and largest point of the asymmetric grid of each range, which is widened to hold 0."""
    lows, highs = np.minimum(pairs[:, 0], 0.0), np.maximum(pairs[:, 1], 0.0)
    steps = (highs - lows) / (levels - 1)
    has_points = steps > 0.0
    steps[~has_points] = 1.0
    below = np.where(has_points, np.rint(-lows / steps), 0.0)
    return steps, -below * steps, np.where(has_points, levels - 1 - below, 0.0) * steps


def _offset(x: Doubles, step: Doubles, bottom: Doubles, top: Doubles) -> Doubles:
    """``x - Q(x)``, a row for each grid."""
    return x - np.clip(np.rint(x / step) * step, bottom, top)


def _integral(x: Doubles, step: Doubles, bottom: Doubles, top: Doubles, power: float) -> Doubles:
    """The integral of ``|t - Q(t)|**power`` from 0 to ``x``, in closed form, a row for each grid."""
    more = power + 1.0
    half = (step / 2.0) ** more / more
    cell: Doubles = x / step
    np.rint(cell, out=cell)
    np.maximum(cell, np.rint(bottom / step), out=cell)
    np.minimum(cell, np.rint(top / step), out=cell)
    rest = cell * step
    np.subtract(x, rest, out=rest)
    cell *= 2.0 * half
    size = _power(np.abs(rest), more)
    size /= more
    np.copysign(size, rest, out=size)
    cell += size
    return cell


def _power(x: Doubles, power: float) -> Doubles:
    """``x**power``, several times faster than numpy for small whole powers."""
    if power == 3.0:
        return x * x * x
    if power == 4.0:
        square = x * x
        return square * square
    return x**power
