"""The recipe's passes around calibration: each is tried, judged on held-out calibration samples, and kept or undone."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from kenosis_ort.accuracy.bias_correction import bias_shifts
from kenosis_ort.accuracy.biases import with_biases, with_shifts
from kenosis_ort.accuracy.channel_statistics import ChannelStatistics, channel_statistics
from kenosis_ort.accuracy.equalization import equalize, values_for_equalization
from kenosis_ort.accuracy.smooth_quant import smooth, values_for_smoothing
from kenosis_ort.calibration.estimators import choose_ranges, estimate_all
from kenosis_ort.errors import CalibrationError
from kenosis_ort.flow.judge import Feed, Judge
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.workshop import Build, Workshop
from kenosis_ort.graph.prepare import PreparedModel
from kenosis_ort.report.sections import PassOutcome

_log = logging.getLogger(__name__)

EQUALIZATION_FEEDS = 16
_RANGES = ("minmax", "percentile", "mse", "lp")
_KEPT = "the error on held-out calibration samples falls"
_UNDONE = "the error on held-out calibration samples does not fall"


@dataclass
class Passes:
    """The passes of one quantization and what became of each.

    Attributes:
        request: What the caller wants.
        outcomes: One entry a pass that was tried.
    """

    request: Request
    outcomes: list[PassOutcome] = field(default_factory=list)

    @property
    def change_weights(self) -> bool:
        """Whether `before_planning` has anything to do."""
        recipe = self.request.recipe
        return recipe.equalize or recipe.bias_correction or recipe.smooth != "off"

    @property
    def change_results(self) -> bool:
        """Whether `after_calibration` has anything to do."""
        recipe = self.request.recipe
        return recipe.bias_correction or recipe.mixed_precision or self.request.chooses_ranges

    # -- before calibration: the float model's weights change, its function does not ---------------------------------

    def before_planning(
        self, prepared: PreparedModel, feeds: Sequence[Feed], touched: Collection[str]
    ) -> PreparedModel:
        """Returns the float model equalized and smoothed, with biases that bias correction can move.

        Args:
            prepared: The prepared model.
            feeds: A few samples; without any, only what needs no data is done.
            touched: Names of the nodes that will run in integer.
        """
        recipe, model, notes = self.request.recipe, prepared.proto, prepared.notes
        if feeds and (recipe.equalize or recipe.smooth != "off"):
            inserts = self.request.inserts_smoothing
            wanted = values_for_equalization(model, nodes=touched) if recipe.equalize else {}
            if recipe.smooth != "off":
                wanted |= values_for_smoothing(model, nodes=touched, insert=inserts)
            peaks = self._peaks(model, feeds, wanted) if wanted else None
            if peaks is not None and recipe.equalize:
                start = time.perf_counter()
                equalized = equalize(model, peaks=peaks, nodes=touched, per_channel=self.request.per_channel)
                model, notes = equalized.model, (*notes, *equalized.notes)
                self._add_exact("equalize", start, len(equalized.pairs), "pairs of layers")
            if peaks is not None and recipe.smooth != "off":
                start = time.perf_counter()
                smoothed = smooth(model, peaks=peaks, alpha=recipe.smooth, nodes=touched, insert=inserts)
                model, notes = smoothed.model, (*notes, *smoothed.notes)
                self._add_exact("smooth", start, len(smoothed.layers), "values")
        if recipe.bias_correction:
            model = with_biases(model, nodes=touched).model
        return prepared if model is prepared.proto else PreparedModel(model, notes, prepared.nodes)

    def _add_exact(self, name: str, start: float, count: int, what: str) -> None:
        reason = f"{count} {what}, each by predicted noise" if count else "nothing to gain by prediction"
        self._add(name, start, kept=bool(count), reason=reason)

    def _peaks(
        self, model: onnx.ModelProto, feeds: Sequence[Feed], wanted: Mapping[str, int]
    ) -> dict[str, ChannelStatistics] | None:
        """Returns statistics by channel; None for bad data, which calibration is about to report with its place."""
        try:
            return channel_statistics(model, feeds, wanted, custom_op_libraries=self.request.custom_op_libraries)
        except CalibrationError as error:
            _log.info("no equalization: %s", error)
            return None

    # -- after calibration: ranges, biases, weights ------------------------------------------------------------------

    def after_calibration(
        self, workshop: Workshop, build: Build, fit: Sequence[Feed], judge: Judge
    ) -> tuple[Workshop, Build]:
        """Returns the improved build.

        Args:
            workshop: Of the float model that was calibrated.
            build: The first build, verified.
            fit: Samples to fit to.
            judge: Knows the held-out samples.
        """
        error = judge.error(build.quantized)
        if self.request.chooses_ranges and build.table.config.keeps_histogram:
            build, error = self._choose_ranges(workshop, build, judge, error)
        if self.request.recipe.bias_correction:
            workshop, build, error = self._correct_biases(workshop, build, fit, judge, error)
        return workshop, build

    def _choose_ranges(self, workshop: Workshop, build: Build, judge: Judge, error: float) -> tuple[Build, float]:
        start = time.perf_counter()
        limits = {limit.value: limit for limit in (*build.plan.limits, *build.plan.saturations)}
        present = {name: build.table.range_of(name) for name in build.table.tensors}
        candidates: dict[str, Mapping[str, Any]] = {"minmax": present}
        for method in _RANGES[1:]:
            candidates[method] = {**present, **estimate_all(build.table, method, limits=limits)}

        def evaluate(ranges: Mapping[str, tuple[float, float]]) -> float:
            if ranges == present:
                return error
            return judge.error(workshop.quantize(build.table.with_ranges(ranges), build.keep_float).quantized)

        choice = choose_ranges(candidates, evaluate)
        kept = choice.method != "minmax" or bool(choice.exceptions)
        reason = f"{choice.method} ranges" if kept else "no other estimator is better than minmax"
        self._add("ranges", start, kept=kept, before=error, after=choice.error, reason=reason, judge=judge)
        if not kept:
            return build, error
        return workshop.build(build.table.with_ranges(choice.ranges), build.keep_float), choice.error

    def _correct_biases(
        self, workshop: Workshop, build: Build, fit: Sequence[Feed], judge: Judge, error: float
    ) -> tuple[Workshop, Build, float]:
        start = time.perf_counter()
        model, libraries = build.float_model, self.request.custom_op_libraries
        shifts = bias_shifts(
            model,
            build.quantized,
            fit,
            nodes=set(build.plan.integer_nodes()),
            custom_op_libraries=libraries,
        )
        corrected = workshop.on(with_shifts(model, shifts))
        candidate = corrected.quantize(build.table, build.keep_float)
        after = judge.error(candidate.quantized)
        kept = after < error
        self._add(
            "bias_correction",
            start,
            kept=kept,
            before=error,
            after=after,
            judge=judge,
            reason=_KEPT if kept else _UNDONE,
        )
        if not kept:
            return workshop, build, error
        return corrected, replace(candidate, fusion=build.fusion, notes=build.notes), after

    def _add(
        self,
        name: str,
        start: float,
        *,
        kept: bool,
        reason: str,
        before: float | None = None,
        after: float | None = None,
        judge: Judge | None = None,
    ) -> None:
        seconds = time.perf_counter() - start
        measure = "" if judge is None else judge.measure
        self.outcomes.append(PassOutcome(name, kept, before, after, measure, reason, seconds))
        _log.info("%s: %s (%s), %.2f s", name, "kept" if kept else "undone", reason, seconds)
