"""One entry for all estimators: statistics and the name of a method in, a range out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from kenosis_ort.calibration.estimators.entropy import least_divergence_range
from kenosis_ort.calibration.estimators.lp_norm import least_error_range
from kenosis_ort.calibration.estimators.minmax import minmax_range
from kenosis_ort.calibration.estimators.percentile import quantile_range
from kenosis_ort.calibration.estimators.sketch import Range, sketch
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, OptionError, did_you_mean

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
    """Returns the range of a tensor.

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
        held = TensorStatistics(low, high, max(statistics.count, 1), statistics.dtype)
        return minmax_range(held, low_limit=low_limit, high_limit=high_limit)
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
    """Returns the ranges of all tensors of a table by one method.

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
