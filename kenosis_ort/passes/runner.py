"""The one runner of passes: try, evaluate on held-out samples, keep or undo, survive what raises, record.

`Journal` is the one place where optional work is isolated, passes among it.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

import numpy as np

from kenosis_ort import errors
from kenosis_ort.accuracy.channel_statistics import channel_statistics
from kenosis_ort.calibration.statistics import ChannelStatistics
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, State, noted
from kenosis_ort.passes.evaluator import Evaluator, Score, some_of
from kenosis_ort.runtime.counting import at_stage
from kenosis_ort.runtime.session import make_room


@dataclass(frozen=True)
class PassOutcome:
    """One accuracy pass that was tried.

    Attributes:
        name: Of the pass, as the recipe calls it, e.g. ``equalize``.
        kept: Whether its result was kept; False for one that was undone or found nothing to do.
        error_before: Error on held-out calibration samples before it, in units of `measure`; None if not measured.
        error_after: The same after it.
        measure: What the error is, e.g. ``noise power over signal power of the outputs``.
        reason: Why it was kept, undone or skipped, one sentence.
        seconds: Wall time.
    """

    name: str
    kept: bool
    error_before: float | None = None
    error_after: float | None = None
    measure: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def change(self) -> float | None:
        """Relative change of the error, -0.2 for a fifth less; None if it was not measured."""
        if self.error_before is None or self.error_after is None or not self.error_before:
            return None
        return self.error_after / self.error_before - 1.0


_log = logging.getLogger(__name__)

_ENOUGH: Final = 16  # samples for statistics by channel, where each tells a layer many numbers
_LARGE: Final = 4096  # numbers in a sample

_MESSAGE_LIMIT: Final = 300
OF_THE_MODEL: Final = (errors.CalibrationError, errors.UnsupportedModelError)
"""What the model computes or is, and no defect of ours."""
T = TypeVar("T")


@dataclass
class Journal:
    """What gathers on the way of a call, and the one place where optional work is isolated.

    Attributes:
        isolates: An optional step that raises is left out, and told of; else its error is the caller's.
        seconds: Wall time by stage.
        passes: What became of each pass.
    """

    isolates: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    passes: list[PassOutcome] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a named stage."""
        start = time.perf_counter()
        with at_stage(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def attempt(self, what: str, step: Callable[[], T], otherwise: T) -> T:
        """Result of an optional step; where it raises, the value before the step, with a warning.

        Args:
            what: The step, as the subject of a sentence.
            step: Leaves nothing changed where it raises.
            otherwise: What holds without the step.

        Raises:
            OptionError: The caller's own metric or options are at fault.
            ClusterError: The caller's cluster is.
        """
        try:
            return step()
        except (errors.OptionError, errors.ClusterError):
            raise
        except Exception as error:
            self.tell(what, error)
            return otherwise

    def tell(self, what: str, error: Exception) -> None:
        """Records a failure that the call survives; raises it where nothing is isolated."""
        if not self.isolates:
            raise error
        _log.debug("%s failed", what, exc_info=error)
        bug = "" if isinstance(error, OF_THE_MODEL) else "; please report this as a bug of kenosis-ort, with the model"
        fix = f"nothing, the file is made without it{bug}"
        if isinstance(error, errors.VerificationError) and error.fix:  # of the runtime, not of an attempt of ours
            fix = error.fix
        self.warnings.append(f"{what} failed and was left out: {reason_of(error)}. Fix: {fix}.")


def reason_of(error: Exception) -> str:
    """Message of an error, without a full stop."""
    text = error.what if isinstance(error, errors.KenosisError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_MESSAGE_LIMIT].rstrip(".")


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
