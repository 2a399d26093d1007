"""Activation ranges chosen by their effect on the outputs of the whole net: tensor by tensor the choice overfits.

Biases are corrected before. A mean error that they take away hides what ranges differ by: in MLPerf's ResNet-8, whose
layers were equalized, percentiles leave 0.99 of the error of minima and maxima before the correction, and 0.81 of it
behind. The shifts that were found for minima and maxima do for all of them.

For the ranges chosen, shifts are found from the biases as they were. On top of shifts found for other ranges they would
keep what these had of chance: where the standard error leaves a mean open, it is not taken back (YOLOX-Nano: 12.4 dB on
top, 14.5 dB from the start).

Ranges as the grids and kernels of a plan want them, whatever chose them.

Below 8 bits they are those of least squared error before any pass looks at them. In front of a Relu at which a kernel
does not clip, half of the grid would be spent on numbers that nobody sees: the farthest 2 % of the values are cut off,
which is rare enough for the processor to foresee (2.5 dB finer for normally distributed values).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal

import numpy as np
import onnx

from kenosis_ort.calibration.estimators import estimate_all
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.passes.contract import LEAST_HELD_OUT, Build, Candidate, Context, Pass, Skipped, State, Statistics
from kenosis_ort.plan import PlacementPlan

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
    """The table with the low ends of spared values at the quantile that few values lie below."""
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
    """Number of levels of each quantized activation's grid."""
    return {value: 2**d.bits for value, d in plan.quantized_values()}


Ranges = Mapping[str, tuple[float, float]]

_ESTIMATORS: Final = ("percentile", "mse", "lp")
_MORE_ESTIMATORS: Final = ("percentile:99.99",)


@dataclass(frozen=True)
class RangeChoice(Pass):
    """The estimator whose ranges of some samples are best on others, for the ranges of all samples.

    Attributes:
        ranges: How activation ranges follow from the data where the caller names no ``calibrate_method``; ``auto``
            chooses by the output error on held-out calibration samples.
    """

    name: ClassVar[str] = "ranges"
    title: ClassVar[str] = "The choice of ranges"
    least_held_out: ClassVar[int] = LEAST_HELD_OUT
    chooses_ranges: ClassVar[bool] = True
    off: ClassVar[tuple[str, ...]] = ("minmax", "percentile", "entropy")

    ranges: Literal["auto", "minmax", "percentile", "entropy"] = "auto"

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        build = state.built
        if not context.real_samples:
            return Skipped("made-up samples do not show what clipping costs")
        if not build.table.config.keeps_histogram:
            return Skipped("the calibration table holds no histograms")
        estimators = (*_ESTIMATORS, *(_MORE_ESTIMATORS if "rounding" in context.active else ()))
        fitted = _candidates(build, context.fitted_ranges(state), estimators)

        def made(ranges: Ranges) -> onnx.ModelProto:
            table = build.table.with_ranges(ranges)
            return context.quantize(table, build.keep_float, build.corrections).quantized

        names = ["minmax", *(e for e in estimators if fitted[e] != fitted["minmax"])]
        found = context.evaluator.scores(made(fitted[name]) for name in names)
        scores = dict(zip(names, found, strict=True))
        plain = scores.pop("minmax")
        best = min((e for e in scores if scores[e].beats(plain)), key=lambda e: scores[e].error, default=None)
        if best is None:
            return Skipped("no other estimator is better than minmax")
        table = build.table.with_ranges(_candidates(build, build.table, (best,))[best])
        chosen = context.with_placement(state.with_own_biases(), table=table)
        if state.uncorrected is not None:
            chosen = context.with_more_to_fit().after("bias_correction", chosen)
        return Candidate(chosen, f"{best} ranges", decided=True, scores=(plain, scores[best]))


def _candidates(build: Build, table: CalibrationTable, estimators: Sequence[str]) -> dict[str, Ranges]:
    limits = {limit.value: limit for limit in (*build.plan.limits, *build.plan.saturations)}
    plain = fitted_to_widths(table, build.plan)
    present = {name: plain.range_of(name) for name in table.tensors}
    estimated = estimate_all(table, estimators, limits=limits, levels=levels_of(build.plan))
    return {"minmax": present, **{e: {**present, **ranges} for e, ranges in estimated.items()}}
