"""State of one call, from its model loaded on: what gathers for its report, the float model, its samples divided."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import onnx

from kenosis_ort import errors
from kenosis_ort.accuracy.measures import Measured
from kenosis_ort.accuracy.outputs import OutputComparison, compare_pairs
from kenosis_ort.calibration.feeds import LEAST_FEEDS, Cut, Feed, Part, split_feeds
from kenosis_ort.calibration.readers import is_made_up
from kenosis_ort.calibration.trust_summary import TrustSummary
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.reused_tables import CalibrationCache
from kenosis_ort.flow.samples import Division, KeepingReader, Validation, find_division
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.graph.outside import refers_outside, weight_bytes
from kenosis_ort.passes.contract import Build, Pass
from kenosis_ort.passes.evaluator import Evaluator
from kenosis_ort.passes.journal import Journal
from kenosis_ort.passes.recipe import SpeedChoice
from kenosis_ort.passes.reference import Reference
from kenosis_ort.report import facts
from kenosis_ort.runtime import session

_log = logging.getLogger(__name__)
_MOST_WEIGHTS = 2**27  # bytes of a float model whose session stays open
_FEW_FEEDS: Final = 16
"""Fewer are taken apart where they are batches."""
_PIECES: Final = 32
"""So many at least are made of them: of so many a fourth is enough to evaluate on."""
REWRITTEN_DB: Final = 30.0  # the runtime's own LRN is off by three digits
REWRITTEN_ABSOLUTE: Final = 1e-6  # where the output is zero, or next to it


class RewriteMismatchError(errors.VerificationError):
    """A rewritten float model computes something else than the original."""


@dataclass(kw_only=True)
class Call(Journal):
    """State of one call, with the facts for its report.

    Attributes:
        loaded: The model as it came.
        request: What the caller wants; on a lower fallback of the ladder what is left of it.
        wanted: The passes that the request asks for, in order.
        data: The samples; None without any.
        cache: The calibration cache; None without, and on the lower fallbacks.
        choice: What timing decided, for the recipe that makes the same model again.
        rewriting: What was noted about rewrites of the float model.
        begun_cpu: When the call began, by `time.process_time`.
        executor: Where passes have work done.
        made_up: Makes a feed where no sample is at hand; none where its kind is not known.
        validation: The caller's held-out data.
        measure: What the delivered model loses.
        measured: What the build that was compared last loses on held-out samples.
        outputs: Its outputs beside the float model's; empty where they were not compared.
        division: How the kept samples are taken apart; None before that is known.
        divided: The samples that passes are fitted to, and the evaluator that knows the others; None before any.
    """

    isolates: bool = True
    loaded: LoadedModel
    request: Request
    wanted: tuple[Pass, ...] = ()
    data: KeepingReader | None = None
    cache: CalibrationCache | None = None
    speed: facts.SpeedSummary | None = None
    choice: SpeedChoice | None = None
    trust: TrustSummary | None = None
    validation: Validation | None = None
    division: Division | None = None
    divided: tuple[list[Feed], Evaluator] | None = None
    measure: facts.MeasureSummary | None = None
    measured: tuple[Build, Measured] | None = None
    outputs: tuple[OutputComparison, ...] = ()
    size_before: int = 0
    size_after: int = 0
    rewriting: tuple[str, ...] = ()
    begun_cpu: float = field(default_factory=time.process_time)
    executor: session.Executor = session.HERE
    made_up: Callable[[], list[Feed]] = list
    _prepared: Reference | None = field(default=None, init=False)

    @property
    def feeds(self) -> list[Feed]:
        """The kept samples that passes and comparisons look at."""
        return [] if self.data is None else [*self.data.feeds[: self.request.feeds_wanted]]

    @cached_property
    def original(self) -> Reference | None:
        """The float model as given, the reference of every comparison; None where the runtime is too old for it."""
        proto = self.loaded.proto
        model = proto if refers_outside(proto) else self.loaded.as_it_came
        found = self._reference_of(model)
        try:
            if len(proto.graph.node) > session.WHOLE_LIMIT:  # it takes minutes to optimize, and is never run
                session.open_session(model, custom_op_libraries=self.request.custom_op_libraries, optimize=False)
            else:
                _log.debug("compared in outputs %s", found.names)
        except errors.VerificationError as error:
            _log.info("compared with the model in prepared form: %s", error)
            return None
        return found

    def reference(self, prepared: onnx.ModelProto) -> Reference:
        """Function that runs the float model of all comparisons: as the caller gave it, or as first prepared."""
        if self.original is not None:
            return self.original
        if self._prepared is None:
            self._prepared = self._reference_of(prepared)
        return self._prepared

    def compared(
        self, prepared: onnx.ModelProto, model: onnx.ModelProto, feeds: Sequence[Feed]
    ) -> tuple[OutputComparison, ...]:
        """A model's outputs beside the float model's; of large models one is open at a time.

        Args:
            prepared: As for `reference`.
            model: It.
            feeds: At least one.

        Raises:
            VerificationError: One of them does not run.
        """
        reference = self.reference(prepared)
        expected, random = reference.outputs(feeds), reference.random(feeds[0])
        with session.open_session(model, custom_op_libraries=self.request.custom_op_libraries) as runner:
            return compare_pairs(list(expected[0]), zip(expected, map(runner.answer, feeds), strict=True), random)

    def check_rewritten(self, rewritten: onnx.ModelProto, feed: Feed) -> None:
        """Checks that a rewritten float model computes what the original does.

        Raises:
            RewriteMismatchError: It does not.
            VerificationError: It does not run.
        """
        if self.original is None:
            return
        for found in self.compared(rewritten, rewritten, [feed]):
            if found.skipped and not found.random:
                off = f"returns another number of rows in output '{found.name}'"
            elif found.floating and found.sqnr_db < REWRITTEN_DB and found.max_abs > REWRITTEN_ABSOLUTE:
                off = f"is off by {found.max_abs:.3g} in output '{found.name}' ({found.sqnr_db:.1f} dB)"
            else:
                continue
            raise RewriteMismatchError(f"the rewritten float model {off}", where=self.loaded.name)

    def _reference_of(self, model: Path | onnx.ModelProto) -> Reference:
        stays_open = weight_bytes(self.loaded.proto) <= _MOST_WEIGHTS
        return Reference(model, custom_op_libraries=self.request.custom_op_libraries, stays_open=stays_open)

    def again(self, request: Request, wanted: tuple[Pass, ...]) -> Call:
        """A call that starts anew from the loaded model; failures so far stay in the report."""
        fresh = replace(
            self,
            request=request,
            wanted=wanted,
            seconds={"load": self.seconds["load"]},
            passes=[],
            notes=list(self.notes),
            warnings=list(self.warnings),
            fallbacks=list(self.fallbacks),
        )
        fresh.__dict__.update({k: v for k, v in self.__dict__.items() if k == "original"})  # asked once
        return fresh

    def divide(self, model: onnx.ModelProto, feeds: Sequence[Feed]) -> tuple[list[Feed], Evaluator]:
        """The samples to fit to and the evaluator of the others, as they were first asked for.

        Args:
            model: The prepared float model, the reference where the runtime does not take the original.
            feeds: The kept samples.
        """
        if self.divided is None:
            samples = self._division(model, feeds).of(feeds)
            fit, held_out = split_feeds(samples)
            if self.validation is not None and fit:
                fit, held_out = samples, list(self.validation.some())
            evaluator = self.evaluator_on(model, held_out)
            self.divided = fit if held_out else samples, evaluator
        return self.divided

    @property
    def evaluator(self) -> Evaluator | None:
        """Knows the samples that no pass was fitted to; None where there were none."""
        return None if self.divided is None or not self.divided[1].feeds else self.divided[1]

    def evaluator_of(self, build: Build) -> Evaluator | None:
        """The evaluator for what is delivered: on the caller's held-out data too where no pass needed one."""
        if self.evaluator is None and self.validation is not None and build.is_whole:
            self.divided = self.feeds, self.evaluator_on(build.float_model, self.validation.some())
        return self.evaluator if build.is_whole else None

    @property
    def held_out_kind(self) -> str:
        """What a sample is that no pass was fitted to."""
        return "held-out calibration sample" if self.validation is None else "evaluation sample"

    @property
    def compared_on(self) -> str:
        """Samples that outputs are compared on, in words."""
        if self.validation is None and (self.data is None or not self.data.feeds or is_made_up(self.data.reader)):
            return "made-up samples"
        if self.evaluator is None:
            return "calibration samples, none of them held out"
        seen = self.validation is None and not self.request.recipe.weight_only
        return f"{self.held_out_kind}s{', whose values the ranges cover' if seen else ''}"

    def part_to_fit(self, model: onnx.ModelProto) -> Part:
        """The part of the samples that passes will be fitted to, where it is known before they are read.

        Args:
            model: As for `divide`.
        """
        data = self.data
        wanted = self.request.chooses_ranges or any(each.before_calibration for each in self.wanted)
        if data is None or not wanted:
            return {}
        places = data.foreseen(self.request.feeds_wanted) or []
        feeds = data.ahead(places)
        whole = Division(tuple(() for _ in feeds))
        division = self.attempt("Taking batches apart", lambda: self._division(model, feeds), whole)
        if division.is_full:
            return {}  # rows are repeated there: what is read as it comes is another thing
        ends = list(itertools.accumulate(max(len(rows), 1) for rows in division.rows))
        numbers = range(ends[-1] if ends else 0)
        fit = set(split_feeds(numbers)[0] if self.validation is None or len(numbers) < LEAST_FEEDS else numbers)
        part: dict[int, Sequence[Cut]] = {}
        for place, rows, first in zip(places, division.rows, (0, *ends), strict=False):
            if rows:
                part[place] = [Cut(r.start, r.stop, n in fit) for n, r in enumerate(rows, first)]
            elif first in fit:
                part[place] = ()
        return part

    def evaluator_on(self, model: onnx.ModelProto, held_out: Sequence[Feed]) -> Evaluator:
        """An evaluator that compares candidates on held-out samples, and measures on the caller's data if any."""
        return Evaluator(
            self.reference(model),
            held_out,
            graph=self.loaded.proto.graph if self.original is not None else model.graph,
            metric=self.request.metric,
            validation=self.validation,
            custom_op_libraries=self.request.custom_op_libraries,
            executor=self.executor,
        )

    def _division(self, model: onnx.ModelProto, feeds: Sequence[Feed]) -> Division:
        """Division of the recorded samples, as at its first use in a call.

        Batches are where there are few and their rows are samples of their own; not for a metric that looks labels up
        by the number of a feed.
        """
        if self.division is None or len(self.division.rows) != len(feeds):
            metric = self.request.metric
            numbered = metric is not None and metric.takes_indices and self.validation is None
            count = _PIECES if 0 < len(feeds) < _FEW_FEEDS and not numbered else 0
            self.division = find_division(lambda feed: self.reference(model).run(feed), feeds, count=count)
        return self.division
