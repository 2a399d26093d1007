"""One entry for all estimators: statistics and the name of a method in, a range out.

The range that leaves out the same small share of the values at either end.

Against outliers that are rarer than the share; a percentile of 99.9 and below cuts real signal on many nets (9 dB on
some, where 99.999 gains up to 6 dB on others).

The range whose quantized distribution diverges least from the real one.

Kullback-Leibler divergence between the distribution clipped to a candidate range and the same spread evenly over each
level of the grid. Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017; here with ranges on both sides of 0,
and at the resolution of the histogram. Stock's symmetric method is in `kenosis_ort.calibration.statistics`.

The range with the smallest mean of ``|x - Q(x)|**p``: rounding inside weighed against clipping outside.

``p = 2`` is the mean squared error, the noise that a linear consumer adds up. A larger ``p`` counts what is clipped for
more: outliers are few but carry the signal (``p = 2.4`` in "LAPQ: Loss Aware Post-training Quantization", Nahshan et
al., 2019, https://arxiv.org/abs/1911.07190, which finds the best ``p`` between 2 and 4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from kenosis_ort.calibration.estimators.sketch import Doubles, Range, Sketch, minmax_range, sketch
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, OptionError, did_you_mean

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
    full = np.array([values.low, values.high])
    if not values.mass.size or not values.high > values.low:
        return values.low, values.high
    candidates = np.array([values.shrunk(float(share)) for share in _COARSE])
    errors = values.errors(candidates, power=power, levels=levels)
    best, least = candidates[int(errors.argmin())], float(errors.min())
    moving = [end for end, used in enumerate((values.low < 0.0, values.high > 0.0)) if used]
    for step in _STEPS:
        for end in moving:
            tried = _around(best, full, end, step)
            errors = values.errors(tried, power=power, levels=levels)
            if errors.min() < least:
                best, least = tried[int(errors.argmin())], float(errors.min())
    return float(best[0]), float(best[1])


def _around(best: Doubles, full: Doubles, end: int, step: float) -> Doubles:
    """Ranges with one end a few steps inward and outward, never beyond the full range."""
    tried = np.repeat(best[None], 4, axis=0)
    tried[:, end] *= np.array([step**-2, 1 / step, step, step**2])
    inner = min(0.0, full[1]) if end == 0 else max(0.0, full[0])
    tried[:, end] = np.clip(tried[:, end], min(full[end], inner), max(full[end], inner))
    return tried


_SHARES = np.linspace(0.1, 1.0, 46)
_TINY = 1e-9


def least_divergence_range(values: Sketch, *, levels: int = 256) -> Range:
    """The range with the smallest divergence; both ends are scaled together.

    Args:
        values: The distribution.
        levels: Number of levels of the quantization grid.
    """
    if not values.mass.size or not values.high > values.low:
        return values.low, values.high
    centres = (values.left + values.right) / 2
    nonzero = (values.left > 0.0) | (values.right < 0.0)  # exact zeros would outweigh all else, and cost nothing
    if not nonzero.any():
        return values.low, values.high
    centres, mass = centres[nonzero], values.mass[nonzero]
    ranges = [values.shrunk(float(share)) for share in _SHARES]
    divergences = [_divergence(centres, mass, low, high, levels) for low, high in ranges]
    return ranges[int(np.argmin(divergences))]


def _divergence(centres: Doubles, mass: Doubles, low: float, high: float, levels: int) -> float:
    inside = (centres >= low) & (centres <= high)
    if not inside.any():
        return float("inf")
    counts_inside = mass[inside]
    reference = counts_inside.copy()
    reference[0] += mass[centres < low].sum()
    reference[-1] += mass[centres > high].sum()
    bottom, top = min(low, 0.0), max(high, 0.0)
    level = np.rint((centres[inside] - bottom) / ((top - bottom) / (levels - 1))).astype(np.int64)
    sums, holders = np.bincount(level, counts_inside), np.bincount(level)
    spread = (sums / np.maximum(holders, 1))[level]
    p, q = reference / reference.sum(), spread / max(float(spread.sum()), _TINY)
    return float(np.sum(p * np.log(np.maximum(p, _TINY) / np.maximum(q, _TINY))))


def quantile_range(values: Sketch, percentile: float) -> tuple[float, float]:
    """The range that holds a percentage of the values, half of the rest beyond either end.

    Args:
        values: The distribution. An end that many values share (0 behind a Relu, 6 behind a Relu6) is kept.
        percentile: Percentage, 0 to 100.
    """
    cut = (100.0 - percentile) / 200.0
    low, high = values.quantile(cut), values.quantile(1.0 - cut)
    return min(low, high), max(low, high)


METHODS = ("minmax", "percentile", "mse", "lp", "entropy")
"""Names that `estimate` takes; ``percentile`` and ``lp`` take a number behind a colon, as in ``"percentile:99.99"``."""

_DEFAULT_PERCENTILE = 99.999
_DEFAULT_POWER = 2.4
"""Over twelve nets at most 0.7 dB behind the best of five estimators, and up to 1.8 dB ahead of a power of 3."""
_NUMBERED = re.compile(r"(percentile|lp):([0-9.]+)")


class Limit(Protocol):
    """Bounds of a value; ``kenosis_ort.plan.RangeLimit`` is one."""

    @property
    def value(self) -> str:
        """Name of the value."""

    @property
    def low(self) -> float | None:
        """Lower bound, None without."""

    @property
    def high(self) -> float | None:
        """Upper bound, None without."""


def check_method(method: str) -> tuple[str, float]:
    """Splits a method into its name and its number.

    Raises:
        OptionError: There is no such method, or the number is out of range.
    """
    numbered = _NUMBERED.fullmatch(method)
    name, number = (numbered[1], numbered[2]) if numbered else (method, "")
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise OptionError(
            f"Unknown range estimator {method!r}.{hint}",
            fix=f"Use one of {', '.join(METHODS)}; percentile and lp take a number, e.g. 'percentile:99.99', 'lp:2.4'.",
        )
    try:
        value = float(number) if number else (_DEFAULT_PERCENTILE if name == "percentile" else _DEFAULT_POWER)
    except ValueError:
        value = -1.0
    low, high = (0.0, 100.0) if name == "percentile" else (1.0, 16.0)
    if not low <= value <= high:
        raise OptionError(f"The number of the range estimator {method!r} must lie between {low:g} and {high:g}.")
    return name, value


def estimate(
    statistics: TensorStatistics,
    method: str,
    *,
    low_limit: float | None = None,
    high_limit: float | None = None,
    levels: int = 256,
) -> Range:
    """The range of a tensor.

    Args:
        statistics: What was seen of it; all methods but ``"minmax"`` need a histogram.
        method: One of `METHODS`, e.g. ``"mse"``, ``"lp:2.4"``, ``"percentile:99.999"``.
        low_limit: Nothing below matters to the consumers (an absorbed Relu or Clip, a saturating function): such
            values count as this one, and the range does not reach below.
        high_limit: The same above.
        levels: Number of levels of the quantization grid: 256 for 8 bits, 65536 for 16.

    Returns:
        (low, high), within the tensor's extremes and the limits; (0, 0) for a tensor without elements. A range set by
        hand (``statistics.fixed``) is returned as it is, cut to the limits.

    Raises:
        OptionError: The method is unknown.
        CalibrationError: The method needs a histogram and there is none.
    """
    name, number = check_method(method)
    if statistics.fixed is not None:
        low, high = statistics.fixed
        clipped = TensorStatistics(low, high, max(statistics.count, 1), statistics.dtype)
        return minmax_range(clipped, low_limit=low_limit, high_limit=high_limit)
    if name == "minmax" or not statistics.count:
        return minmax_range(statistics, low_limit=low_limit, high_limit=high_limit)
    values = sketch(statistics, low_limit=low_limit, high_limit=high_limit)
    if name == "percentile":
        return quantile_range(values, number)
    if name == "entropy":
        return least_divergence_range(values, levels=levels)
    return least_error_range(values, power=2.0 if name == "mse" else number, levels=levels)


def estimate_all(
    table: CalibrationTable,
    method: str,
    *,
    limits: Mapping[str, Limit] | None = None,
    levels: Mapping[str, int] | None = None,
) -> dict[str, Range]:
    """The ranges of all tensors of a table by one method.

    Args:
        table: A table; tensors without a histogram (constants, tables from stock's files) keep their own range.
        method: As in `estimate`.
        limits: Bounds by tensor name, e.g. those of a plan's ``limits`` and ``saturations`` together.
        levels: As in `estimate`, by tensor name; 256 of those that are not named.

    Raises:
        OptionError: The method is unknown.
        CalibrationError: The method needs histograms, and no tensor has one.
    """
    name, _ = check_method(method)
    if name != "minmax" and table.tensors and all(s.histogram is None for s in table.tensors.values()):
        raise CalibrationError(
            f"The range estimator '{method}' needs histograms, and this table holds none.",
            fix="Collect again with them.",
        )
    found = {}
    for tensor, statistics in table.tensors.items():
        limit = (limits or {}).get(tensor)
        bounds = (None, None) if limit is None else (limit.low, limit.high)
        if name == "minmax" or statistics.histogram is None:
            own = replace(statistics, fixed=table.range_of(tensor)) if table.method == "minmax" else statistics
            found[tensor] = estimate(own, "minmax", low_limit=bounds[0], high_limit=bounds[1])
        else:
            points = (levels or {}).get(tensor, 256)
            found[tensor] = estimate(statistics, method, low_limit=bounds[0], high_limit=bounds[1], levels=points)
    return found
