"""The recipe's passes after calibration: each is evaluated on held-out calibration samples, and kept or undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import onnx

from kenosis_ort.accuracy.bias_correction import bias_shifts
from kenosis_ort.accuracy.biases import with_shifts
from kenosis_ort.accuracy.metric import Budget
from kenosis_ort.accuracy.mixed_precision import MixedPrecision, search_mixed_precision
from kenosis_ort.accuracy.rounding import learn_rounding
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.estimators import estimate_all
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.flow import steps
from kenosis_ort.flow.course import Course
from kenosis_ort.flow.improve import Passes
from kenosis_ort.flow.workshop import Build, Workshop
from kenosis_ort.passes.evaluator import LEAST_HELD_OUT, Evaluator, Feed, Score
from kenosis_ort.plan import PlacementPlan

_RANGES = ("percentile", "mse", "lp")
_MORE_RANGES = ("percentile:99.99",)
_RANKING_FEEDS = 2


@dataclass
class Refinement:
    """One build on its way through the passes.

    Attributes:
        course: What gathers on the way.
        passes: Records what became of each.
        workshop: Of the float model that was calibrated, with its weights as they were.
        build: The build so far.
        fit: Samples that passes may be fitted to.
        evaluator: Knows the held-out samples.
        score: The build's error there.
        is_real: Some samples are real; ranges are not chosen by made-up ones, which do not show what clipping costs.
    """

    course: Course
    passes: Passes
    workshop: Workshop
    build: Build
    fit: Sequence[Feed]
    evaluator: Evaluator
    is_real: bool = True
    score: Score = field(default_factory=lambda: Score(0.0, ()))

    def run(self) -> tuple[Workshop, Build]:
        """Returns the build after all passes, with the workshop of its float model."""
        self.score = self.evaluator.score(self.build.quantized)
        recipe, request = self.workshop.request.recipe, self.workshop.request
        enough = len(self.evaluator.feeds) >= LEAST_HELD_OUT
        if request.chooses_ranges and enough and self.is_real and self.build.table.config.keeps_histogram:
            self._attempt("The choice of ranges", partial(self._choose_ranges, thorough=recipe.rounding == "learned"))
        if recipe.bias_correction:
            self._attempt("Bias correction", self._correct_biases)
        if recipe.rounding == "learned":
            self._attempt("Learned rounding", self._round)
        if recipe.mixed_precision:
            self._attempt("Mixed precision", self._leave_float)
        return self.workshop.on(self.build.float_model), self.build

    def _attempt(self, what: str, refine: Callable[[], None]) -> None:
        """Performs a pass; where it raises, the build is what it was."""
        before = self.build, self.score

        def step() -> tuple[Build, Score]:
            refine()
            return self.build, self.score

        self.build, self.score = self.course.attempt(what, step, before)

    def _choose_ranges(self, *, thorough: bool) -> None:
        """Takes the estimator whose ranges of the samples to fit to are best on the others, for all samples' ranges."""
        start, build = time.perf_counter(), self.build
        methods = (*_RANGES, *(_MORE_RANGES if thorough else ()))
        fitted = self._candidates(self._fitted_table(), methods)

        def evaluate(ranges: Mapping[str, tuple[float, float]]) -> Score:
            table = build.table.with_ranges(ranges)
            return self.evaluator.score(self.workshop.quantize(table, build.keep_float).quantized)

        plain = evaluate(fitted["minmax"])  # chosen for the whole net: tensor by tensor it overfits
        scores = {m: evaluate(fitted[m]) for m in methods if fitted[m] != fitted["minmax"]}
        best = min((m for m in scores if scores[m].beats(plain)), key=lambda m: scores[m].error, default=None)
        score, reason = self.score, "no other estimator is better than minmax"
        if best is not None:
            ranges = self._candidates(build.table, (best,))[best]
            ranged = self.workshop.build(build.table.with_ranges(ranges), build.keep_float)
            score, reason = self.evaluator.score(ranged.quantized), f"{best} ranges"
            self.build = replace(ranged, notes=(*build.notes, *ranged.notes))
        self._record("ranges", start, score, kept=best is not None, reason=reason)

    def _fitted_table(self) -> CalibrationTable:
        """Returns ranges that know nothing of the samples to evaluate on."""
        return collect(
            self.build.float_model,
            self.fit,
            tensors=list(self.build.table.tensors),
            config=replace(self.build.table.config, strided=None, max_intermediate_outputs=None),
            custom_op_libraries=self.workshop.request.custom_op_libraries,
            seen_as=self.workshop.seen_as(),
        )

    def _candidates(self, table: CalibrationTable, methods: Sequence[str]) -> dict[str, dict[str, tuple[float, float]]]:
        limits = {limit.value: limit for limit in (*self.build.plan.limits, *self.build.plan.saturations)}
        present = {name: table.range_of(name) for name in table.tensors}
        estimated = {method: {**present, **estimate_all(table, method, limits=limits)} for method in methods}
        return {"minmax": present, **estimated}

    def _correct_biases(self) -> None:
        """Corrects by three quarters of the samples, of few too: a mean needs many, and is shrunk where unsure."""
        start, fit, evaluator = time.perf_counter(), list(self.fit), self.evaluator
        few = len(evaluator.feeds) > 1 and len(fit) < 2 * len(evaluator.feeds)
        if few and self.workshop.request.metric is None:
            more, evaluator = evaluator.halved()
            fit += more
        candidate = self._corrected(self.build, fit)
        self._try("bias_correction", start, candidate, evaluator)

    def _round(self) -> None:
        """Tries rounded weights with biases corrected for them, beside nearest rounding with its own."""
        start, build = time.perf_counter(), self.build
        nodes = set(build.plan.integer_nodes())
        request = self.workshop.request
        base = self.workshop.prepared.proto
        nearest = self.workshop.quantize(build.table, build.keep_float)
        libraries = request.custom_op_libraries
        rounded = learn_rounding(base, nearest.quantized, self.fit, nodes=nodes, custom_op_libraries=libraries)
        candidate = self.workshop.on(rounded.model).quantize(build.table, build.keep_float)
        if request.recipe.bias_correction:
            candidate = self._corrected(candidate, self.fit)
        self._try("rounding", start, candidate, self.evaluator)

    def _corrected(self, build: Build, fit: Sequence[Feed]) -> Build:
        """Returns a build with the mean error of its layers moved into the biases."""
        shifts = bias_shifts(
            self.workshop.prepared.proto,
            build.quantized,
            fit,
            nodes=set(build.plan.integer_nodes()),
            custom_op_libraries=self.workshop.request.custom_op_libraries,
        )
        return self.workshop.on(with_shifts(build.float_model, shifts)).quantize(build.table, build.keep_float)

    def _try(self, name: str, start: float, candidate: Build, evaluator: Evaluator) -> None:
        """Keeps a candidate that differs in its weights if on samples it was not fitted to the error falls."""
        same = evaluator is self.evaluator
        before = self.score if same else evaluator.score(self.build.quantized)
        after = evaluator.score(candidate.quantized)
        kept = after.is_better(before)
        falls = "falls" if kept else "does not fall"
        reason = f"the error on held-out calibration samples {falls}"
        self._record(name, start, after, kept=kept, reason=reason, before=before)
        if kept:
            self.build = replace(candidate, fusion=self.build.fusion, notes=self.build.notes)
            self.score = after if same else self.evaluator.score(candidate.quantized)

    def _leave_float(self) -> None:
        start, build, request = time.perf_counter(), self.build, self.workshop.request
        shop = self.workshop.on(build.float_model)  # rounded, corrected

        def make(keep: Mapping[str, str]) -> tuple[onnx.ModelProto, PlacementPlan]:
            made = shop.build(build.table, keep)  # with its repair: a neighbour may become float too
            return made.quantized, made.plan

        def replan(keep: Mapping[str, str]) -> PlacementPlan:
            return steps.make_plan(self.workshop.planner(keep), request, build.table)

        found = search_mixed_precision(
            self.workshop.prepared.proto,
            make,
            feeds=self.fit[:_RANKING_FEEDS],
            merit=self.evaluator.merit,
            float_merit=self.evaluator.float_merit,
            error=self.evaluator.output_error,
            budget=Budget(request.recipe.accuracy_budget),
            max_float_share=request.recipe.max_float_share,
            replan=replan,
            keep_float=build.keep_float,
            custom_op_libraries=request.custom_op_libraries,
        )
        kept, score = bool(found.left_float), self.score
        if kept:
            made = shop.build(build.table, found.keep_float)
            self.build = replace(made, notes=(*build.notes, *made.notes, *_notes(found)))
            score = self.evaluator.score(made.quantized)
        elif not found.met:
            self.build = replace(build, notes=(*build.notes, *_notes(found)))
        reason = "the budget holds without" if found.met and not kept else "; ".join(_notes(found))
        self._record("mixed_precision", start, score, kept=kept, reason=reason)

    def _record(
        self, name: str, start: float, score: Score, *, kept: bool, reason: str, before: Score | None = None
    ) -> None:
        was, after, measure = (before or self.score).error, score.error, self.evaluator.measure
        self.passes.add(name, start, kept=kept, reason=reason, before=was, after=after, measure=measure)
        if kept:
            self.score = score


def _notes(found: MixedPrecision) -> tuple[str, ...]:
    notes = []
    if found.left_float:
        names = ", ".join(f"'{node.node}'" for node in found.left_float[:6])
        more = f" and {len(found.left_float) - 6} more" if len(found.left_float) > 6 else ""
        share = 100 * found.float_share
        notes.append(f"Left float for accuracy: {names}{more} ({share:.1f} % of the multiply-accumulates).")
    if not found.met:
        notes.append(f"The accuracy budget of {found.budget} does not hold: {found.reachable or 'no more to gain'}.")
    return tuple(notes)
