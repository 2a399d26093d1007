"""Range estimators: from what was seen of a tensor to the range that it is quantized over.

A tensor's distribution is what its histogram holds, cut to what the consumers still tell apart. From it follows

* the range that leaves out the same small share of the values at either end (``percentile``), against outliers that
  are rarer than the share; a percentile of 99.9 and below cuts real signal on many nets (9 dB on some, where 99.999
  gains up to 6 dB on others);
* the range with the smallest mean of ``|x - Q(x)|**p`` (``mse``, ``lp``): rounding inside weighed against clipping
  outside. ``p = 2`` is the mean squared error, the noise that a linear consumer adds up. A larger ``p`` counts what is
  clipped for more: outliers are few but carry the signal (``p = 2.4`` in "LAPQ: Loss Aware Post-training Quantization",
  Nahshan et al., 2019, https://arxiv.org/abs/1911.07190, which finds the best ``p`` between 2 and 4).

Ranges as the grids and kernels of a plan want them, whatever chose them.

Below 8 bits they are those of least squared error before any pass looks at them. In front of a Relu at which a kernel
does not clip, half of the grid would be spent on numbers that nobody sees: the farthest 2 % of the values are cut off,
which is rare enough for the processor to foresee (2.5 dB finer for normally distributed values).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.statistics import HALF, Float64, Histogram, TensorStatistics
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError
from kenosis_ort.plan import PlacementPlan, RangeLimit

Range = tuple[float, float]

_FINE = HALF // 16
"""Bins on each side of zero that stay single; where outliers stretch the range, the bulk lies there."""
_MERGED = 4


def _within(range_: Range, low_limit: float | None, high_limit: float | None) -> Range:
    """A range cut to limits."""
    least, most = -np.inf if low_limit is None else low_limit, np.inf if high_limit is None else high_limit
    low, high = (min(max(end, least), most) for end in range_)
    return low, high


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

    left: Float64
    right: Float64
    mass: Float64
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
        cumulative = np.cumsum(self.mass)
        goal = min(max(share, 0.0), 1.0) * cumulative[-1]
        index = min(int(np.searchsorted(cumulative, goal)), self.mass.size - 1)
        before = float(cumulative[index] - self.mass[index])
        inside = min(max((goal - before) / self.mass[index], 0.0), 1.0)
        return float(self.left[index] + inside * (self.right[index] - self.left[index]))

    def errors(self, ranges: npt.ArrayLike, *, power: float, levels: int = 256) -> Float64:
        """The mean of ``|x - Q(x)|**power`` for each of several ranges.

        ``Q`` rounds to the grid that the range gets when it is widened to hold 0 and its zero point is rounded, and
        clips to it. The mean over an interval is the exact integral.

        Args:
            ranges: (low, high) pairs, shape ``(k, 2)``.
            power: Exponent, at least 1: 2 for the mean squared error.
            levels: Number of grid points.

        Returns:
            Means, shape ``(k,)``.
        """
        pairs = np.asarray(ranges, np.float64).reshape(-1, 2)
        edges, change, points, masses = self._integrable
        steps, lowest, highest = _grids(pairs, levels)
        # The integral from 0 to an edge, in steps: whole cells, in each of which x - Q(x) goes from -1/2 to 1/2, and
        # what is left. That between two edges, times the density, sums up to these times the changes of density.
        more = power + 1.0
        cells, rest = _rounded(edges, steps, lowest, highest)
        # The power keeps the sign; numpy's is several times slower for the cube.
        power_of_rest = rest * rest * rest if more == 3.0 else np.copysign(np.abs(rest) ** more, rest)
        integrals = (2.0 * 0.5**more * (cells @ change) + power_of_rest @ change) / more
        totals: Float64 = integrals * steps**more
        if points.size:
            _, rest = _rounded(points, steps, lowest, highest)
            totals += (np.abs(rest) ** power @ masses) * steps**power
        return totals / self.total

    @cached_property
    def _integrable(self) -> tuple[Float64, Float64, Float64, Float64]:
        """Edges and by how much the density falls there, then the point masses' places and the masses."""
        wide = self.right > self.left
        edges = np.sort(np.concatenate((self.left[wide], self.right[wide])))
        edges = edges[np.diff(edges, prepend=-np.inf) > 0.0]  # as `np.unique`, which loads numpy.ma
        density = np.zeros(max(edges.size - 1, 0))
        at = np.searchsorted(edges, self.left[wide])
        density[at] = self.mass[wide] / (self.right[wide] - self.left[wide])
        if edges.size:
            # What shares a bin with 0 is mostly exact zeros, which every grid holds; the rest loses less than a bin.
            density[(edges[:-1] <= 0.0) & (edges[1:] >= 0.0)] = 0.0
        return edges, -np.diff(density, prepend=0.0, append=0.0)[: edges.size], self.left[~wide], self.mass[~wide]


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
    low, high = _within((statistics.low, statistics.high), low_limit, high_limit)
    left, right, mass = _occupied(histogram, statistics)
    return Sketch(np.clip(left, low, high), np.clip(right, low, high), mass, low, high)


def _occupied(histogram: Histogram, statistics: TensorStatistics) -> tuple[Float64, Float64, Float64]:
    used = np.flatnonzero(histogram.counts)
    bins = used - HALF
    coarse = np.abs(bins) >= _FINE
    first = np.where(coarse, bins // _MERGED * _MERGED, bins)
    starts = np.flatnonzero(np.diff(first, prepend=first[0] - 1))
    mass = np.add.reduceat(histogram.counts[used], starts).astype(np.float64)
    left = first[starts].astype(np.float64) * histogram.width
    right = left + np.where(coarse[starts], _MERGED, 1) * histogram.width
    # A histogram of a part of the elements may have missed the extremes: each stands for one element.
    share = min(histogram.total / max(statistics.count, histogram.total), 1.0)
    low, high = statistics.low, statistics.high
    if low < left[0]:
        left, right, mass = np.insert(left, 0, low), np.insert(right, 0, low), np.insert(mass, 0, share)
    if high > right[-1]:
        left, right, mass = np.append(left, high), np.append(right, high), np.append(mass, share)
    return np.clip(left, low, high), np.clip(right, low, high), mass


def _grids(pairs: Float64, levels: int) -> tuple[Float64, Float64, Float64]:
    """Step of the asymmetric grid of each range, which is widened to hold 0, and its ends in steps."""
    lows, highs = np.minimum(pairs[:, 0], 0.0), np.maximum(pairs[:, 1], 0.0)
    steps = (highs - lows) / (levels - 1)
    has_points = steps > 0.0
    steps[~has_points] = 1.0
    below = np.where(has_points, np.rint(-lows / steps), 0.0)
    return steps, -below, np.where(has_points, levels - 1 - below, 0.0)


def _rounded(x: Float64, steps: Float64, lowest: Float64, highest: Float64) -> tuple[Float64, Float64]:
    """``Q(x)`` and ``x - Q(x)`` in steps, a row for each grid."""
    rest: Float64 = x / steps[:, None]
    cells = np.rint(rest)
    np.clip(cells, lowest[:, None], highest[:, None], out=cells)
    rest -= cells
    return cells, rest


_COARSE = np.geomspace(1.0, 1.0 / 64.0, 19)
_STEPS = (1.26, 1.12, 1.06, 1.03)  # one coarse step apart, then finer


def least_error_range(values: Sketch, *, power: float = 2.0, levels: int = 256) -> Range:
    """The range with the smallest mean error.

    Both ends are scaled down together over a coarse grid, then one after the other over ever finer ones. The full
    range is among the candidates, so that the result is never worse than it.

    Args:
        values: The distribution.
        power: Exponent, at least 1.
        levels: Number of levels of the quantization grid, 256 for 8 bits.
    """
    if not values.high > values.low:
        return values.low, values.high
    candidates = [values.shrunk(float(share)) for share in _COARSE]
    errors = values.errors(candidates, power=power, levels=levels)
    best, least = candidates[int(errors.argmin())], errors.min()
    moving = [end for end, used in enumerate((values.low < 0.0, values.high > 0.0)) if used]
    for step in _STEPS:
        for end in moving:
            tried = _around(best, (values.low, values.high), end, step)
            errors = values.errors(tried, power=power, levels=levels)
            if errors.min(initial=np.inf) < least:
                best, least = tried[int(errors.argmin())], errors.min()
    return best


def _around(best: Range, full: Range, end: int, step: float) -> list[Range]:
    """Other ranges with one end a few steps inward and outward, never beyond the full range."""
    inner = min(0.0, full[1]) if end == 0 else max(0.0, full[0])
    low, high = min(full[end], inner), max(full[end], inner)
    moved = (min(max(best[end] * by, low), high) for by in (step**-2, 1 / step, step, step**2))
    places = [place for place in dict.fromkeys(moved) if place != best[end]]
    return [(place, best[1]) if end == 0 else (best[0], place) for place in places]


def quantile_range(values: Sketch, percentile: float) -> tuple[float, float]:
    """The range that holds a percentage of the values, half of the rest beyond either end.

    Args:
        values: The distribution. An end that many values share (0 behind a Relu, 6 behind a Relu6) is kept.
        percentile: Percentage, 0 to 100.
    """
    cut = (100.0 - percentile) / 200.0
    low, high = values.quantile(cut), values.quantile(1.0 - cut)
    return min(low, high), max(low, high)


ESTIMATORS: Final[Mapping[str, Callable[[Sketch, int], Range]]] = {
    "percentile": lambda values, _: quantile_range(values, 99.999),
    "percentile:99.99": lambda values, _: quantile_range(values, 99.99),
    "mse": lambda values, levels: least_error_range(values, power=2.0, levels=levels),
    # Over twelve nets at most 0.7 dB behind the best of five estimators, and up to 1.8 dB ahead of a power of 3.
    "lp": lambda values, levels: least_error_range(values, power=2.4, levels=levels),
}
"""By name, the range of a distribution on a grid of some levels."""


def estimates(
    statistics: TensorStatistics,
    estimators: Sequence[str],
    *,
    low_limit: float | None = None,
    high_limit: float | None = None,
    levels: int = 256,
) -> dict[str, Range]:
    """The ranges of a tensor by estimator.

    Args:
        statistics: What was seen of it, with a histogram.
        estimators: Some of `ESTIMATORS`.
        low_limit: Nothing below matters to the consumers (an absorbed Relu or Clip, a saturating function): such
            values count as this one, and the range does not reach below.
        high_limit: The same above.
        levels: Number of levels of the quantization grid: 256 for 8 bits, 65536 for 16.

    Returns:
        (low, high), within the tensor's extremes and the limits; (0, 0) for a tensor without elements. A range set by
        hand (``statistics.fixed``) is returned as it is, cut to the limits.

    Raises:
        CalibrationError: There is no histogram.
    """
    if statistics.fixed is not None or not statistics.count:
        given = statistics.fixed or (statistics.low, statistics.high)
        return dict.fromkeys(estimators, _within(given, low_limit, high_limit))
    values = sketch(statistics, low_limit=low_limit, high_limit=high_limit)
    return {each: ESTIMATORS[each](values, levels) for each in estimators}


def estimate_all(
    table: CalibrationTable,
    estimators: Sequence[str],
    *,
    limits: Mapping[str, RangeLimit] = MappingProxyType({}),
    levels: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, dict[str, Range]]:
    """The ranges of all tensors of a table, by estimator and tensor name.

    Args:
        table: A table; tensors without a histogram (constants, tables from stock's files) keep their own range.
        estimators: As in `estimates`.
        limits: Bounds by tensor name, e.g. those of a plan's ``limits`` and ``saturations`` together.
        levels: As in `estimates`, by tensor name; 256 of those that are not named.
    """
    found: dict[str, dict[str, Range]] = {each: {} for each in estimators}
    for name, own in table.tensors.items():
        limit = limits.get(name)
        low, high = (None, None) if limit is None else (limit.low, limit.high)
        if own.histogram is None:
            seen = table.range_of(name) if table.method == "minmax" else own.fixed or (own.low, own.high)
            ranges = dict.fromkeys(estimators, _within(seen, low, high))
        else:
            ranges = estimates(own, estimators, low_limit=low, high_limit=high, levels=levels.get(name, 256))
        for each, range_ in ranges.items():
            found[each][name] = range_
    return found


_FARTHEST: Final = 0.02
"""Share of the values below the range in front of a Relu."""


def fitted_to_widths(table: CalibrationTable, plan: PlacementPlan) -> CalibrationTable:
    """The table with the ranges of values of fewer bits than 8 that have the least squared error on their grid.

    Ranges that were set already, and those of a method that the caller named, stay.
    """
    table = _without_farthest(table, plan)
    levels = levels_of(plan)
    narrow = {n: s for n, s in table.tensors.items() if levels.get(n, 256) < 256 and s.fixed is None and s.histogram}
    if not narrow or table.method != "minmax":
        return table
    limits = {limit.value: limit for limit in (*plan.limits, *plan.saturations)}
    found = estimate_all(replace(table, tensors=narrow), ("mse",), limits=limits, levels=levels)
    return table.with_ranges(found["mse"])


def _without_farthest(table: CalibrationTable, plan: PlacementPlan) -> CalibrationTable:
    """The table with the low ends of `PlacementPlan.quantile_lows` at the quantile that few values lie below."""
    ranges = {}
    for name in plan.quantile_lows if table.method == "minmax" else ():
        histogram = table.tensors[name].histogram if name in table.tensors else None
        if histogram is not None and histogram.total:
            low, high = table.range_of(name)
            bin_ = int(np.searchsorted(np.cumsum(histogram.counts), _FARTHEST * histogram.total))
            cut = min(float(histogram.edges[bin_]), 0.0)
            if low < cut < high:
                ranges[name] = (cut, high)
    return table.with_ranges(ranges) if ranges else table


def levels_of(plan: PlacementPlan) -> dict[str, int]:
    """Number of levels of each quantized activation's grid."""
    return {value: 2**d.bits for value, d in plan.quantized_values()}
