"""Ranges for grids of few levels: below 8 bits they are those of least squared error before any pass looks at them."""

from __future__ import annotations

from dataclasses import replace

from kenosis_ort.calibration.estimators import estimate_all
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.plan import PlacementPlan


def fitted_to_widths(table: CalibrationTable, plan: PlacementPlan) -> CalibrationTable:
    """Returns the table with the ranges of values of fewer bits than 8 that have the least squared error on their grid.

    Ranges that were set already, and those of a method that the caller named, stay.
    """
    levels = levels_of(plan)
    narrow = {n: s for n, s in table.tensors.items() if levels.get(n, 256) < 256 and s.fixed is None and s.histogram}
    if not narrow or table.method != "minmax":
        return table
    limits = {limit.value: limit for limit in (*plan.limits, *plan.saturations)}
    return table.with_ranges(estimate_all(replace(table, tensors=narrow), "mse", limits=limits, levels=levels))


def levels_of(plan: PlacementPlan) -> dict[str, int]:
    """Returns how many levels the grid of each quantized activation has."""
    return {value: 2**d.bits for value, d in plan.quantized_values()}
