"""Evaluator: the error of a quantized candidate against the float model on samples that no pass was fitted to.

Two questions, two answers. *Is this candidate better than that one?* is answered by the relative error of the outputs,
each taken by its use, since its resolution is fine: eight samples tell changes of a percent of the noise. *What is
lost?* is answered in what the output is for (`kenosis_ort.accuracy.measures`) or by the caller's metric, with the
number of samples and an interval, since that is what a budget means to who sets it; proportions of few samples are too
coarse to compare candidates by. A metric of the caller's answers both where its difference is clear of chance.

Runs of the float model and of candidates on samples: no model runs twice on the same sample, outputs are kept.

The float model, with which everything is compared, has one session for a whole call. Of candidates the latest few keep
theirs.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import onnx

from kenosis_ort.accuracy.error import Deviations, Outputs, Signals, find_uses, output_error
from kenosis_ort.accuracy.find_measures import find_measures
from kenosis_ort.accuracy.measures import Measure, Measured, measure_pairs, of_parts, worst
from kenosis_ort.accuracy.metric import CheckedMetric, OutputError, Scored
from kenosis_ort.accuracy.outputs import OutputComparison, compare_pairs
from kenosis_ort.calibration.feeds import Feed, Rows
from kenosis_ort.errors import CalibrationError, VerificationError
from kenosis_ort.graph.outside import weight_bytes
from kenosis_ort.runtime.session import HERE, Array, Executor, Running, Session, open_session, repeats

Model = Path | onnx.ModelProto

_MOST_WEIGHTS: Final = 2**26
"""Bytes of weights of a candidate whose session is cached."""
_MOST_OUTPUTS: Final = 2**26
"""Bytes of a candidate's outputs that are kept."""
_MOST_FLOAT_OUTPUTS: Final = 2**28
"""The same of the float model's."""
_CACHED: Final = 2  # what stood before a change, and what it led to
_REMEMBERED: Final = 8
"""Candidates whose outputs are kept longer than their sessions: what stands after a pass has tried some of its own."""
_FEW_OUTPUTS: Final = 2**23
"""Bytes of a candidate's outputs that are kept longer."""


class _Run:
    """A model that is run, which is held, so that no other object takes its identity.

    Args:
        model: It.
        most: Bytes of outputs that are kept.

    Attributes:
        runner: Its session, here or elsewhere; None where it is not open.
        bytes: Of the outputs that are kept.
    """

    def __init__(self, model: Model, most: int) -> None:
        self.model, self._most, self.bytes = model, most, 0
        self.runner: Running | None = None
        self._outputs: dict[int, tuple[Feed, dict[str, Array]]] = {}  # by the identity of the feed, held likewise

    def known(self, feed: Feed) -> dict[str, Array] | None:
        """The outputs for a feed, None where they are not kept."""
        found = self._outputs.get(id(feed))
        return None if found is None else found[1]

    def joined(
        self, feeds: Iterable[tuple[Feed, dict[str, Array] | None]], computed: Iterator[dict[str, Array]], *, keep: bool
    ) -> Iterator[dict[str, Array]]:
        """Yields known and computed outputs in the order of the feeds, and keeps them as long as there is room."""
        for feed, known in feeds:
            outputs = next(computed) if known is None else known
            size = sum(array.nbytes for array in outputs.values())
            if keep and known is None and self.bytes + size <= self._most:
                self._outputs[id(feed)] = feed, outputs
                self.bytes += size
            yield outputs


class Reference:
    """Runs the float model.

    Args:
        model: The model, or its file. Not changed.
        custom_op_libraries: Libraries with custom operators to register.
        stays_open: Whether the session stays open; that of a large model is opened when it is needed again.
    """

    def __init__(self, model: Model, *, custom_op_libraries: Sequence[str] = (), stays_open: bool = True) -> None:
        self._run = _Run(model, _MOST_FLOAT_OUTPUTS)
        self._libraries, self._stays_open = tuple(custom_op_libraries), stays_open
        self._session: Session | None = None
        self._random: frozenset[str] | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs.

        Raises:
            VerificationError: The runtime does not load the model.
        """
        with self._opened() as session:
            return session.outputs

    def outputs(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """The outputs by name for each of some feeds; those of the same object are computed once.

        With the first ones it is found out which are random, while the model is open.

        Raises:
            CalibrationError: The model fails on a feed.
            VerificationError: The runtime does not load the model.
        """
        known = [outputs for outputs in map(self._run.known, feeds) if outputs is not None]
        if len(known) == len(feeds):
            return known
        asked, answers = itertools.tee((feed, self._run.known(feed)) for feed in feeds)
        with self._opened() as session:
            computed = (session.answer(feed) for feed, outputs in asked if outputs is None)
            found = list(blamed(self._run.joined(answers, computed, keep=True)))
            if self._random is None:
                first, again = found[0], session.answer(feeds[0])
                self._random = frozenset(name for name in first if not repeats(first[name], again[name]))
        return found

    def stream(self, feeds: Iterable[Feed]) -> Iterator[dict[str, Array]]:
        """Yields the outputs by name for each feed, and keeps none; raises as `outputs`."""
        known = ((feed, self._run.known(feed)) for feed in feeds)
        with self._opened() as session:
            yield from blamed(session.answer(feed) if outputs is None else outputs for feed, outputs in known)

    def run(self, feed: Feed) -> list[Array]:
        """The outputs for one feed in the order of the model, computed anew.

        Raises:
            VerificationError: The runtime does not load the model, or refuses the feed.
        """
        with self._opened() as session:
            return list(session.answer(feed).values())

    def random(self, feed: Feed) -> frozenset[str]:
        """The names of outputs that are others on each run of the same feed; found out once.

        Raises:
            CalibrationError: The model fails on the feed.
        """
        if self._random is None:
            self.outputs([feed])
        return self._random or frozenset()

    @contextmanager
    def _opened(self) -> Iterator[Session]:
        session = self._session or open_session(self._run.model, threads=0, custom_op_libraries=self._libraries)
        self._session = session if self._stays_open else None
        yield session


class Candidates:
    """Runs candidates. They must not be changed while they are compared.

    Args:
        custom_op_libraries: Libraries with custom operators to register.
        executor: Runs them.
    """

    def __init__(self, custom_op_libraries: Sequence[str] = (), executor: Executor = HERE) -> None:
        self._libraries = tuple(custom_op_libraries)
        self._executor = executor
        self._latest: deque[_Run] = deque(maxlen=_REMEMBERED)

    def outputs(self, model: Model, feeds: Iterable[Feed], *, keep: bool = True) -> Iterator[dict[str, Array]]:
        """The outputs by name for each feed.

        Args:
            model: The candidate; the cache key is its identity.
            feeds: Samples, likewise.
            keep: Whether the outputs may be asked for again.

        Raises:
            VerificationError: The runtime refuses the candidate; while iterated, a feed.
        """
        run = next((run for run in self._latest if run.model is model), None)
        if run is None:
            run = _Run(model, _MOST_OUTPUTS)
            if isinstance(model, onnx.ModelProto) and weight_bytes(model) <= _MOST_WEIGHTS:
                self._let_go()
                self._latest.append(run)
        asked, answers = itertools.tee((feed, run.known(feed)) for feed in feeds)
        if run.runner is None and run.bytes and all(run.known(feed) is not None for feed in feeds):
            return run.joined(answers, iter(()), keep=keep)
        if run.runner is None:
            run.runner = self._executor.open(model, threads=0, custom_op_libraries=self._libraries)
        computed = run.runner.runs(feed for feed, known in asked if known is None)
        return run.joined(answers, computed, keep=keep)

    def _let_go(self) -> None:
        """Closes the sessions of all but the latest candidates, of which one more is to come."""
        for run in list(self._latest)[: 1 - _CACHED]:
            run.runner = None
            if not 0 < run.bytes <= _FEW_OUTPUTS:
                self._latest.remove(run)

    def each(self, models: Iterable[Model], feeds: Sequence[Feed]) -> Iterator[Iterator[dict[str, Array]]]:
        """Yields `outputs` of one candidate after the other, each to be iterated before the next; raises as that.

        Args:
            models: Candidates; each is made when the executor has room for it.
            feeds: Samples.
        """
        under_way: deque[Iterator[dict[str, Array]]] = deque()
        for model in models:
            under_way.append(self.outputs(model, feeds))
            if len(under_way) > self._executor.ahead:
                yield under_way.popleft()
        while under_way:
            yield under_way.popleft()


def blamed(outputs: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields outputs, one entry a sample; where that raises, the sample is named."""
    index = 0
    try:
        for each in outputs:
            yield each
            index += 1
    except VerificationError as error:
        raise failed(error, index) from error


def failed(error: VerificationError, sample: int) -> CalibrationError:
    """The error for a sample that a model fails on."""
    return CalibrationError(error.what, where=f"held-out sample {sample}", fix=error.fix)


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
        found = Deviations(_parts(outputs, cuts), reference, uses=self._uses, signals=signals)
        without = tuple(found.error(without=i) for i in range(len(reference) if len(reference) > 1 else 0))
        pairs = zip(outputs, self.reference, strict=True)
        scored = None if self._metric is None else self._metric.score(pairs, numbers(self.feeds))
        return Score(found.error(), without, scored)

    @cached_property
    def _signals(self) -> dict[tuple[int, ...], Signals]:
        """What is known of the float model's outputs, by how the rows of the samples are cut."""
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
