"""Activation ranges chosen by their effect on the outputs of the whole net: tensor by tensor the choice overfits.

Biases are corrected before. A mean error that they take away hides what ranges differ by: in MLPerf's ResNet-8, whose
layers were equalized, percentiles leave 0.99 of the error of minima and maxima before the correction, and 0.81 of it
behind. The shifts that were found for minima and maxima do for all of them.

For the ranges chosen, shifts are found from the biases as they were. On top of shifts found for other ranges they would
keep what these had of chance: where the standard error leaves a mean open, it is not taken back (YOLOX-Nano: 12.4 dB on
top, 14.5 dB from the start).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import onnx

from kenosis_ort.calibration.estimators import estimate_all, fitted_to_widths, levels_of
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.passes.contract import LEAST_HELD_OUT, Build, Candidate, Context, Pass, Skipped, State, Statistics
from kenosis_ort.passes.recipe import setting

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

    ranges: Literal["auto", "minmax", "percentile", "entropy"] = setting("ranges")

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
