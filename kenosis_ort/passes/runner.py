"""The one runner of passes: try, evaluate on held-out samples, keep or undo, survive what raises, record."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from kenosis_ort.accuracy.channel_statistics import channel_statistics
from kenosis_ort.calibration.feeds import some_of
from kenosis_ort.calibration.statistics import ChannelStatistics
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, State, noted
from kenosis_ort.passes.evaluator import Evaluator, Score
from kenosis_ort.passes.journal import Journal, PassOutcome
from kenosis_ort.runtime.session import make_room

_log = logging.getLogger(__name__)

_ENOUGH: Final = 16  # samples for statistics by channel, where each tells a layer many numbers
_LARGE: Final = 4096  # numbers in a sample


_Tried = tuple[State, Score | None, PassOutcome]
"""The state and its score as they are after a pass, and the record."""


@dataclass
class PassRunner:
    """Runs passes one after the other.

    Attributes:
        context: What passes may ask for.
        journal: Isolates each pass, and takes what became of it.
        score: Of the state so far; None until it is needed.
        seen: Statistics by channel by value and axis, None where there are none; of values that no pass scaled since.
    """

    context: Context
    journal: Journal
    score: Score | None = None
    seen: dict[tuple[str, int], ChannelStatistics | None] = field(default_factory=dict)

    def run(self, passes: Sequence[Pass], state: State) -> State:
        """The state after those passes that are worth it."""
        for at, each in enumerate(passes):
            start = time.perf_counter()
            tried = self.journal.attempt(each.title, partial(self._try, each, state, passes[at + 1 :]), None)
            failed = PassOutcome(each.name, False, reason="it failed, see the warnings")
            state, self.score, outcome = tried or (state, self.score, failed)
            outcome = replace(outcome, seconds=time.perf_counter() - start)
            self.journal.passes.append(outcome)
            status = "kept" if outcome.kept else "undone"
            _log.info("%s: %s (%s), %.2f s", each.name, status, outcome.reason, outcome.seconds)
        return state

    def _try(self, each: Pass, state: State, later: Sequence[Pass]) -> _Tried:
        context = self.context.with_more_to_fit() if each.fits_means else self.context
        forced, held_out = each.name in context.forced, len(context.evaluator.feeds)
        if held_out < each.least_held_out and not forced:
            found: Candidate | Skipped = Skipped(f"{held_out} held-out calibration samples are too few")
        else:
            statistics = self._statistics(each, state, later)
            make_room(state.prepared.proto)
            found = each.apply(state, statistics, context)
        if isinstance(found, Candidate) and each.before_calibration:
            after = found.state  # one that does not list the values that it rescaled is believed nothing
            if after.prepared is not state.prepared and after.rescaled.keys() == state.rescaled.keys():
                found = replace(found, state=replace(after, is_reported=False))
        if isinstance(found, Skipped):
            return noted(state, found.notes), self.score, PassOutcome(each.name, False, reason=found.why)
        if forced:
            return found.state, None, PassOutcome(each.name, True, reason=f"{found.what}, as asked")
        return self._evaluated(each, state, found, context.evaluator)

    def _statistics(self, each: Pass, state: State, later: Sequence[Pass]) -> dict[str, ChannelStatistics]:
        """Statistics of a pass; those that later passes need of the same net are collected along with it."""
        points = each.points(state, self.context)
        if not state.is_reported:
            self.seen = {}
        if any(point not in self.seen for point in points.items()):
            wanted = dict(points)
            for other in later if state.is_reported and each.before_calibration else ():
                wanted = {**other.points(state, self.context), **wanted} if other.before_calibration else wanted
            libraries = self.context.custom_op_libraries
            feeds = self.context.fit
            if feeds and max((int(np.size(value)) for value in feeds[0].values()), default=0) > _LARGE:
                feeds = some_of(feeds, _ENOUGH)
            found = channel_statistics(state.prepared.proto, feeds, wanted, custom_op_libraries=libraries)
            self.seen |= {(value, axis): found.get(value) for value, axis in wanted.items()}
        known = {value: self.seen[value, axis] for value, axis in points.items()}
        return {value: statistics for value, statistics in known.items() if statistics is not None}

    def _evaluated(self, each: Pass, state: State, found: Candidate, evaluator: Evaluator) -> _Tried:
        own = found.scores is not None or evaluator is not self.context.evaluator  # scores are this pass's alone
        if not own and self.score is None:
            self.score = self.context.score(state)
        if found.scores is not None:
            before, after = found.scores
        else:
            before = self.score if self.score is not None and not own else self.context.score(state, evaluator)
            after = self.context.score(found.state, evaluator)
        is_kept = found.decided or (after.beats(before) if each.must_beat else after.is_better(before))
        falls = "falls" if is_kept else "does not fall clearly" if each.must_beat else "does not fall"
        reason = found.what
        if not found.decided or found.scores is not None:
            judgement = f"the error {falls} on {len(evaluator.feeds)} calibration samples that it was not fitted to"
            reason = f"{reason}; {judgement}" if reason else judgement
        outcome = PassOutcome(each.name, is_kept, before.error, after.error, evaluator.measure, reason)
        return (found.state, None if own else after, outcome) if is_kept else (state, self.score, outcome)
