"""Evaluator: the error of a quantized candidate against the float model on samples that no pass was fitted to.

Two questions, two answers. *Is this candidate better than that one?* is answered by the relative error of the outputs,
each taken by its use, since its resolution is fine: eight samples tell changes of a percent of the noise. *What is
lost?* is answered in what the output is for (`kenosis_ort.accuracy.measures`) or by the caller's metric, with the
number of samples and an interval, since that is what a budget means to who sets it; proportions of few samples are too
coarse to compare candidates by. A metric of the caller's answers both where its difference is clear of chance.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx

from kenosis_ort.accuracy import Outputs
from kenosis_ort.accuracy.error import Deviations, Signals, find_uses, output_error
from kenosis_ort.accuracy.find_measures import find_measures
from kenosis_ort.accuracy.measures import Measure, Measured, measure_pairs, of_parts, worst
from kenosis_ort.accuracy.metric import CheckedMetric, OutputError, Scored
from kenosis_ort.accuracy.outputs import OutputComparison, compare_pairs
from kenosis_ort.calibration.feeds import Feed, Rows
from kenosis_ort.errors import VerificationError
from kenosis_ort.passes.reference import Candidates, Model, Reference, blamed, failed
from kenosis_ort.runtime.session import HERE, Executor

T = TypeVar("T")

_ABOUT = 1.02  # how much more counts as no more: biases of SqueezeNet correct 34 % on five samples, -0.8 % without one
_CLEAR = 2.0  # standard errors that a difference of the caller's metric is clear of chance by
_REFERENCE_BYTES = 2**26  # of outputs of the float model that are kept; beyond it runs beside each candidate
_MOST_PARTS = 32  # that held-out samples which are batches are taken into, to leave each out in turn

NOISE = "error of the outputs, each by its use"
METRIC = "loss of the caller's metric, where clear; else error of the outputs"


def least_ratio(samples: int) -> float:
    """Largest share of the error that may remain after a change: with few samples the gain must be larger.

    0.75 for two samples, 0.92 for eight, 0.965 for 32: near the spread of the ratio between two halves of the samples
    of small nets, where one sample differs from another by a factor of two.
    """
    return 0.98 - 0.46 / max(samples, 1)


class Score(NamedTuple):
    """Error of a candidate.

    Attributes:
        error: Of the outputs, on all samples.
        without: On all but one, for each; empty for a single sample.
        scored: What the caller's metric says; None without one.
    """

    error: float
    without: tuple[float, ...]
    scored: Scored | None = None

    def is_better(self, other: Score) -> bool:
        """Whether the error is less, and not clearly more without any one sample; a clear metric decides first."""
        verdict = self._by_metric(other)
        pairs = zip(self.without, other.without, strict=True)
        fewer = self.error < other.error and all(a < b * _ABOUT for a, b in pairs)
        return fewer if verdict is None else verdict

    def beats(self, other: Score) -> bool:
        """Whether it is better by more than so few samples would say by chance."""
        if (verdict := self._by_metric(other)) is not None:
            return verdict
        return self.is_better(other) and self.error < other.error * least_ratio(max(len(self.without), 1))

    def _by_metric(self, other: Score) -> bool | None:
        """Decision of the caller's metric; None without one, and where chance would explain the difference.

        Where no spread is known, a lower score decides and a higher one does not: one sample of a few may make it.
        """
        if self.scored is None or other.scored is None:
            return None
        gain = self.scored.value - other.scored.value
        if len(self.scored.parts) != len(other.scored.parts) or len(self.scored.parts) < 2:
            return False if gain < 0 else None
        differences = np.subtract(self.scored.parts, other.scored.parts)
        spread = float(differences.std(ddof=1)) / math.sqrt(len(differences))
        return gain > 0 if abs(gain) > _CLEAR * spread and gain != 0.0 else None


class Evaluator:
    """Runs candidates on held-out samples and compares them with the float model.

    Args:
        original: Runs the float model as it came, the reference.
        feeds: The held-out samples that candidates are compared on. Those of a reader know their number there.
        graph: The float model's graph, which decides the kinds of outputs.
        metric: The caller's own measure; None for one that suits the outputs.
        validation: The caller's held-out data, all of it, on which losses are measured; None measures them on `feeds`.
        custom_op_libraries: Libraries with custom operators to register.
        executor: Runs candidates.
    """

    def __init__(
        self,
        original: Reference,
        feeds: Sequence[Feed],
        *,
        graph: onnx.GraphProto,
        metric: CheckedMetric | None = None,
        validation: Sequence[Feed] | None = None,
        custom_op_libraries: Sequence[str] = (),
        executor: Executor = HERE,
    ) -> None:
        self.feeds = list(feeds)
        self._metric = metric
        self._validation = validation
        self._candidates = Candidates(custom_op_libraries, executor)
        self._float = original
        self.reference = self._float.outputs(self.feeds)
        random = self._float.random(self.feeds[0]) if self.feeds else frozenset()
        uses = find_uses(self.reference)
        compared = [name for name in (self.reference[0] if self.feeds else ()) if name not in random]
        self._uses = {n: uses[n] for n in compared if n in uses}
        self.output_error: OutputError = partial(output_error, uses=self._uses)
        seen = [{name: outputs[name] for name in compared} for outputs in self.reference]
        self._find_measures = partial(find_measures, graph, seen, self.feeds)

    @property
    def measure(self) -> str:
        """Name of the measure in `Score.error`."""
        return NOISE if self._metric is None else METRIC

    def halved(self) -> tuple[list[Feed], Evaluator]:
        """Every other of its samples, and the evaluator of the rest; for two samples or more."""
        rest = copy.copy(self)
        rest.feeds, rest.reference = self.feeds[1::2], self.reference[1::2]
        for known in ("_float_scored", "_signals"):  # of all of them
            rest.__dict__.pop(known, None)
        return self.feeds[::2], rest

    # ---- is it better? ----------------------------------------------------------------------------------------------

    def score(self, candidate: onnx.ModelProto) -> Score:
        """Error of a candidate, its error without each sample, and the metric's score.

        Raises:
            OptionError: The metric raises or returns no finite number.
            CalibrationError: The candidate fails on a sample.
        """
        return next(self.scores([candidate]))

    def scores(self, candidates: Iterable[onnx.ModelProto]) -> Iterator[Score]:
        """Yields `score` of one candidate after the other; the executor may have several of them under way.

        Raises:
            OptionError: As `score`.
            CalibrationError: As `score`.
        """
        try:
            for outputs in self._candidates.each(candidates, self.feeds):
                yield self._score(list(blamed(outputs)))
        except VerificationError as error:
            raise failed(error, 0) from error

    def _score(self, outputs: Sequence[Outputs]) -> Score:
        cuts = self._cuts(outputs)
        reference = list(_parts(self.reference, cuts))
        signals = self._signals.setdefault(tuple(cuts), {})
        found = Deviations(list(_parts(outputs, cuts)), reference, uses=self._uses, signals=signals)
        pairs = zip(outputs, self.reference, strict=True)
        scored = None if self._metric is None else self._metric.score(pairs, numbers(self.feeds))
        return Score(found.error(), found.errors_without_each(), scored)

    @cached_property
    def _signals(self) -> dict[tuple[int, ...], Signals]:
        """Signals of the float model's outputs, by the number of parts of each sample."""
        return {}

    def _cuts(self, outputs: Sequence[Outputs]) -> list[int]:
        """Number of parts of the rows of each sample: one sample of four may be six pictures."""
        most = -(-_MOST_PARTS // max(len(self.feeds), 1))
        cuts = []
        for feed, found, expected in zip(self.feeds, outputs, self.reference, strict=True):
            sizes = {len(value) for value in feed.values()} if isinstance(feed, Rows) else set()
            arrays = [each[name] for each in (found, expected) for name in self._uses]
            whole = len(sizes) == 1 and all(array.ndim and {len(array)} == sizes for array in arrays)
            cuts.append(min(*sizes, most) if whole else 1)
        return cuts

    # ---- what is lost? ----------------------------------------------------------------------------------------------

    def loss(self, candidate: onnx.ModelProto, *, budget: float) -> float:
        """Loss of a candidate in the unit of the budget; 0 where nothing can be measured. Raises as `score`."""
        found = self.measured(candidate)
        return 0.0 if found is None else found.loss_for(budget)

    def measured(self, candidate: Model) -> Measured | None:
        """Quality of a candidate beside the float model; of several outputs, that of the one that lost most.

        Returns:
            None where there are no samples, or no output that can be measured.

        Raises:
            OptionError: The metric raises or returns no finite number.
            CalibrationError: The candidate fails on a sample.
        """
        return self._measured(self._run(candidate, self._data)) if self._data else None

    def comparison(self, candidate: onnx.ModelProto) -> tuple[tuple[OutputComparison, ...], Measured | None]:
        """Outputs of a candidate compared with the float model's, and its quality, from one run.

        Returns:
            As second None where there is held-out data of the caller's: `measured` runs that. Raises as `measured`.
        """
        outputs = self.outputs(candidate)
        pairs = zip(self.reference, outputs, strict=True)
        compared = compare_pairs(self._float.names, pairs, self._float.random(self.feeds[0]) if self.feeds else ())
        return compared, None if self._validation is not None or not outputs else self._measured(outputs)

    def _measured(self, outputs: Iterable[Outputs]) -> Measured | None:
        pairs = zip(outputs, self._references(), strict=True)
        if self._metric is None:
            found = measure_pairs(self._measures, pairs)
            return worst(found) if found else None
        scored, best = self._metric.score(pairs, self._numbers), self._float_scored
        differences = np.subtract(scored.parts, best.parts) if len(scored.parts) == len(best.parts) else np.zeros(0)
        interval = of_parts(scored.value, differences, samples=len(self._data), scale=abs(best.value))
        if interval is not None and 0.0 <= min(scored.value, best.value) <= max(scored.value, best.value) <= 1.0:
            interval = max(interval[0], 0.0), min(interval[1], 1.0)  # as good as surely a share
        return Measured(
            measure=f"metric '{self._metric.name}'",
            unit="as the metric says",
            value=scored.value,
            float_value=best.value,
            samples=len(self._data),
            counted=len(self._data),
            low=None if interval is None else interval[0],
            high=None if interval is None else interval[1],
        )

    @cached_property
    def _measures(self) -> tuple[Measure, ...]:
        return self._find_measures()

    @property
    def _data(self) -> Sequence[Feed]:
        return self.feeds if self._validation is None else self._validation

    @property
    def _numbers(self) -> list[int]:
        return numbers(self.feeds) if self._validation is None else list(range(len(self._validation)))

    @cached_property
    def _float_scored(self) -> Scored:
        assert self._metric is not None, "asked for with a metric only"
        return self._metric.score(((each, each) for each in self._references()), self._numbers)

    def _references(self) -> Iterator[Outputs]:
        """Yields the float model's outputs for the data, from memory where they are small."""
        if self._validation is None:
            return iter(self.reference)
        if self._cached is not None:
            return iter(self._cached)
        return self._float.stream(self._data)

    @cached_property
    def _cached(self) -> list[Outputs] | None:
        cached: list[Outputs] = []
        size = 0
        for outputs in self._float.stream(self._data):
            size += sum(value.nbytes for value in outputs.values())
            if size > _REFERENCE_BYTES:
                return None
            cached.append(outputs)
        return cached

    # ---- running ----------------------------------------------------------------------------------------------------

    def outputs(self, model: Model) -> list[dict[str, Any]]:
        """The outputs by name, one entry a sample.

        Raises:
            CalibrationError: The model fails on a sample.
        """
        return list(self._run(model, self.feeds))

    def _run(self, model: Model, feeds: Sequence[Feed]) -> Iterator[dict[str, Any]]:
        if not feeds:
            return
        try:
            yield from blamed(self._candidates.outputs(model, feeds, keep=feeds is not self._validation))
        except VerificationError as error:
            raise failed(error, 0) from error


def numbers(feeds: Sequence[Feed]) -> list[int]:
    """The numbers of samples in their reader; of those that do not know it, their place."""
    known = [getattr(feed, "index", None) for feed in feeds]
    return [place if number is None else number for place, number in enumerate(known)]


def _parts(outputs: Iterable[Outputs], cuts: Sequence[int]) -> Iterator[Outputs]:
    """Yields outputs with the rows of each sample taken into so many parts."""
    for each, cut in zip(outputs, cuts, strict=True):
        if cut == 1:
            yield each
        else:
            split = {name: np.array_split(array, cut) for name, array in each.items() if np.ndim(array)}
            yield from ({name: arrays[at] for name, arrays in split.items()} for at in range(cut))
