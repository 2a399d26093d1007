"""Ranges by stock's methods from a histogram: percentile, entropy and distribution.

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
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.histogram import Histogram

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
