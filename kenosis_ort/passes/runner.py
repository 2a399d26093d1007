"""The one runner of passes: try, evaluate on held-out samples, keep or undo, survive what raises, record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kenosis_ort.accuracy.channel_statistics import ChannelStatistics, channel_statistics
from kenosis_ort.calibration.origin import WeightChange
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped
from kenosis_ort.passes.evaluator import Evaluator, Score
from kenosis_ort.passes.outcome import PassOutcome
from kenosis_ort.passes.state import State, noted

_log = logging.getLogger(__name__)

Attempt = Callable[[str, Callable[[], "_Tried | None"], "_Tried | None"], "_Tried | None"]
"""Returns what a step returns; where the step raises, tells of it and returns what it is given instead."""


@dataclass(frozen=True)
class _Tried:
    """What a pass led to: the state and its score as they are now, and what to record."""

    state: State
    score: Score | None
    outcome: PassOutcome


@dataclass
class Runner:
    """Runs passes one after the other.

    Attributes:
        context: What passes may ask for.
        attempt: Performs a step that may fail.
        outcomes: What became of each pass.
        score: Of the state so far; None until it is needed.
    """

    context: Context
    attempt: Attempt
    outcomes: list[PassOutcome] = field(default_factory=list)
    score: Score | None = None

    def run(self, passes: Sequence[Pass], state: State) -> State:
        """Returns the state after those passes that are worth it."""
        for each in passes:
            start = time.perf_counter()
            tried = self.attempt(each.title, partial(self._try, each, state), None)
            if tried is None:
                tried = _Tried(state, self.score, PassOutcome(each.name, False, reason="it failed, see the warnings"))
            state, self.score = tried.state, tried.score
            outcome = replace(tried.outcome, seconds=time.perf_counter() - start)
            self.outcomes.append(outcome)
            kept = "kept" if outcome.kept else "undone"
            _log.info("%s: %s (%s), %.2f s", each.name, kept, outcome.reason, outcome.seconds)
        return state

    def _try(self, each: Pass, state: State) -> _Tried:
        context = self.context.with_more_to_fit() if each.fits_means else self.context
        forced, held_out = each.name in context.forced, len(context.evaluator.feeds)
        if held_out < each.least_held_out and not forced:
            found: Candidate | Skipped = Skipped(f"{held_out} held-out calibration samples are too few")
        else:
            found = each.apply(state, self._statistics(each, state), context)
        if isinstance(found, Skipped):
            return _Tried(noted(state, found.notes), self.score, PassOutcome(each.name, False, reason=found.why))
        if forced:
            outcome = PassOutcome(each.name, True, reason=f"{found.what}, as asked")
            return _Tried(found.state, None, outcome)
        return self._evaluated(each, state, found, context.evaluator)

    def _statistics(self, each: Pass, state: State) -> dict[str, ChannelStatistics]:
        points = each.points(state, self.context)
        if not points:
            return {}
        libraries = self.context.custom_op_libraries
        return channel_statistics(state.prepared.proto, self.context.fit, points, custom_op_libraries=libraries)

    def _evaluated(self, each: Pass, state: State, found: Candidate, evaluator: Evaluator) -> _Tried:
        own = evaluator is not self.context.evaluator  # of fewer samples: its scores are this pass's alone
        if not own and self.score is None:
            self.score = self._score(state, evaluator)
        before = self.score if self.score is not None and not own else self._score(state, evaluator)
        after = self._score(found.state, evaluator)
        kept = found.decided or (after.beats(before) if each.must_beat else after.is_better(before))
        samples = len(evaluator.feeds)
        falls = "falls" if kept else "does not fall clearly" if each.must_beat else "does not fall"
        reason = found.what
        if not found.decided:
            judgement = f"the error {falls} on {samples} calibration samples that it was not fitted to"
            reason = f"{reason}; {judgement}" if reason else judgement
        outcome = PassOutcome(each.name, kept, before.error, after.error, evaluator.measure, reason)
        if not kept:
            return _Tried(state, self.score, outcome)
        return _Tried(found.state, None if own else after, outcome)

    def _score(self, state: State, evaluator: Evaluator) -> Score:
        return evaluator.score(self.context.build_of(state).quantized)


def repeated(
    passes: Sequence[Pass], changes: Sequence[WeightChange], state: State, context: Context
) -> tuple[State, list[PassOutcome]]:
    """Returns the state with its weights changed as a calibration cache says, by the statistics that it holds.

    Args:
        passes: Those that may be named there.
        changes: What was kept when the cache was written.
        state: The net as it came.
        context: Its samples and evaluator are not asked for.
    """
    named = {each.name: each for each in passes}
    outcomes = []
    for change in changes:
        start = time.perf_counter()
        statistics = {value: ChannelStatistics(**parts) for value, parts in change.statistics.items()}
        found = named[change.name].apply(state, statistics, context)
        if isinstance(found, Candidate):
            state = found.state
            reason = f"{found.what}, as the calibration cache says"
            outcomes.append(PassOutcome(change.name, True, reason=reason, seconds=time.perf_counter() - start))
    return state, outcomes
