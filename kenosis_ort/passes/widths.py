"""Ranges as the grids and kernels of a plan want them, whatever chose them.

Below 8 bits they are those of least squared error before any pass looks at them. In front of a Relu at which a kernel
does not clip, half of the grid would be spent on numbers that nobody sees: the farthest 2 % of the values are cut off,
which is rare enough for the processor to foresee (2.5 dB finer for normally distributed values).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from kenosis_ort.calibration.estimators import estimate_all
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.plan import PlacementPlan

_FARTHEST: Final = 0.02
"""Share of the values below the range in front of a Relu."""


def fitted_to_widths(table: CalibrationTable, plan: PlacementPlan) -> CalibrationTable:
    """Returns the table with the ranges of values of fewer bits than 8 that have the least squared error on their grid.

    Ranges that were set already, and those of a method that the caller named, stay.
    """
    table = _without_farthest(table, plan)
    levels = levels_of(plan)
    narrow = {n: s for n, s in table.tensors.items() if levels.get(n, 256) < 256 and s.fixed is None and s.histogram}
    if not narrow or table.method != "minmax":
        return table
    limits = {limit.value: limit for limit in (*plan.limits, *plan.saturations)}
    return table.with_ranges(estimate_all(replace(table, tensors=narrow), "mse", limits=limits, levels=levels))


def _without_farthest(table: CalibrationTable, plan: PlacementPlan) -> CalibrationTable:
    """Returns the table with the low ends of spared values at the quantile that few values lie below."""
    ranges = {}
    for name in plan.spared if table.method == "minmax" else ():
        histogram = table.tensors[name].histogram if name in table.tensors else None
        if histogram is not None and histogram.total:
            low, high = table.range_of(name)
            bin_ = int(np.searchsorted(np.cumsum(histogram.counts), _FARTHEST * histogram.total))
            cut = min(float(histogram.edges[bin_]), 0.0)
            if low < cut < high:
                ranges[name] = (cut, high)
    return table.with_ranges(ranges) if ranges else table


def levels_of(plan: PlacementPlan) -> dict[str, int]:
    """Returns how many levels the grid of each quantized activation has."""
    return {value: 2**d.bits for value, d in plan.quantized_values()}
