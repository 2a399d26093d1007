"""Races: a built model timed against another, no longer than it takes to tell.

A session of one thread runs in the thread that calls it, so its runs are timed by that thread's processor time: what
other programs take of the processor does not count. Sessions of several threads are timed by wall time: the processor
time of threads that wait for each other says nothing about when a result is there.

What other programs do to caches, clocks and the other half of a core still counts: it makes runs up to twice as long,
for milliseconds or for seconds, and not of all models alike. So both models take turns of less than a millisecond, in
sessions that are fresh each round, and what is compared are the quietest turns of the quietest rounds, by the product
of both times, which prefers neither model. Beside three busy processes that gives ratios within 2 %, where medians of
blocks are off by up to 10 %.

Testing often and stopping at the first verdict would make noise look like a result. So a test before the last one asks
for more than the last (Haybittle, "Repeated assessment of results in clinical trials", British Journal of Radiology 44
(1971); Peto et al., British Journal of Cancer 34 (1976)): after three rounds the slowest of one model has to beat the
fastest of the other by a quarter, later a 99 % interval has to lie beyond the margin. The last test is
`bench.harness.compare`.
"""

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from kenosis_ort.bench import harness
from kenosis_ort.bench.harness import MARGIN, Clock, SpeedComparison, Verdict, compare, interval_rank
from kenosis_ort.calibration.feeds import Feed
from kenosis_ort.errors import KenosisError, VerificationError
from kenosis_ort.runtime.session import Runner, open_session
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.targets.model import TimedRuntime

_log = logging.getLogger(__name__)

_STOCK: Final = TimedRuntime(partial(open_session, spinning=True), in_calling_thread=True)
CLEAR: Final = 1.25
"""A factor that a machine fit for timing does not put between two models by chance, round after round."""
INTERIM_ROUNDS: Final = (3, 8, 12, 16, 21, 31, 45, 61)
"""Rounds after which a race may end; beyond `ORDINARY` only while the interval holds the caller's border."""
ORDINARY: Final = 21
_UNLIKE: Final = 1.12
"""By how much a disturbance was seen to change a ratio: nearer to a border no race ends before `ORDINARY` rounds."""
_QUIET: Final = 8
"""Rounds that are compared at least; of more than four times as many the quietest quarter."""
_INTERIM_CONFIDENCE: Final = 0.99
_SAME_ROUNDS: Final = 12
_RESOLUTION_S: Final = 1e-6
_TURN_S: Final = 7e-4  # a shorter run is timed in batches of at least this many seconds
_TURNS: Final = 12  # of each model in a round
_ROUND_S: Final = 0.025
_SHORT_ROUND_S: Final = 0.004  # where the budget is short
_MOST_RUNS: Final = 4096
_PROBES: Final = 4
_REASON_LIMIT: Final = 600


class Race(NamedTuple):
    """Result of a race.

    Attributes:
        comparison: The model's speed relative to the reference's, above 1 is faster; None if it does not load or run.
        milliseconds: Its time of a run, the median over the rounds compared; NaN without a comparison.
        reference_milliseconds: The reference's, likewise.
        rounds: Rounds made.
        reason: Why there is no comparison, with the runtime's message; empty if there is one.
    """

    comparison: SpeedComparison | None
    milliseconds: float = math.nan
    reference_milliseconds: float = math.nan
    rounds: int = 0
    reason: str = ""


@dataclass(frozen=True)
class RaceSetup:
    """Setup that all races share: data, threads, sessions and the clock.

    Attributes:
        feeds: A few real feeds; the rounds take turns through them.
        threads: Threads of a session, 0 for the runtime's own choice.
        custom_op_libraries: Libraries with custom operators to register.
        seed: Of the order of models within the rounds.
        clock: Seconds of wall time from any fixed point on.
        runtime: Opens models, and says how their runs are timed; stock sessions by default.
        name: What tells its feeds from those of other setups; "" where there is one only.
    """

    feeds: Sequence[Feed]
    threads: int = 1
    custom_op_libraries: tuple[str, ...] = ()
    seed: int = 0
    clock: Clock = field(default=time.perf_counter, repr=False)
    runtime: TimedRuntime = field(default=_STOCK, repr=False)
    name: str = ""

    def __post_init__(self) -> None:
        if not self.feeds:
            raise ValueError("a race needs at least one feed")

    @property
    def timer(self) -> Clock:
        """The clock that times runs: the calling thread's processor time where that is all a session uses."""
        if self.runtime.clock is not None:
            return self.runtime.clock
        fine = time.get_clock_info("thread_time").resolution <= _RESOLUTION_S
        alone = self.threads == 1 and not self.custom_op_libraries and self.runtime.in_calling_thread
        return time.thread_time if fine and alone else self.clock

    @property
    def budget(self) -> Clock:
        """The clock that budgets are in: processor time where it times runs, so that a load takes no rounds away."""
        return self.clock if self.runtime.clock is not None else self.timer

    def opener(self, source: str | bytes) -> Callable[[], Runner]:
        """Function that opens fresh sessions of a model, a path or bytes."""
        options: dict[str, Any] = {"threads": self.threads, "custom_op_libraries": self.custom_op_libraries}
        if self.runtime.opener is not None:
            return self.runtime.opener(source, **options)
        return partial(self.runtime.open, source, **options)


def race(
    reference: harness.Model,
    model: harness.Model,
    setup: RaceSetup,
    *,
    budget_s: float,
    border: float | None = None,
    seed: int = 0,
) -> Race:
    """Times a model against another.

    Args:
        reference: Path, serialized model or ModelProto; not changed.
        model: Likewise; it takes the same inputs.
        setup: Data, threads and clock.
        budget_s: Seconds for all of it, by ``setup.budget``. One round is made in any case.
        border: Ratio at which the caller's decision turns: the race ends early where the ratio is clearly on one side
            of it, and goes on for longer while its noise interval holds it. None where there is none.
        seed: Distinguishes races on the same setup.

    Returns:
        The result, also of a model that does not load or run.

    Raises:
        VerificationError: The reference does not load or run.
    """
    with Scratch("race") as scratch:
        rounds = _Rounds(setup, setup.budget() + budget_s, seed, budget_s)
        try:
            rounds.admit(_REFERENCE, reference, scratch)
            rounds.admit(_MODEL, model, scratch)
            return rounds.result(border)
        except _FailedError as failed:
            _log.info("the %s is dropped: %s", failed.name, failed.reason)
            if failed.name != _REFERENCE:
                return Race(None, reason=failed.reason)
            raise VerificationError(
                f"the model that others are compared to cannot be timed: {failed.reason}",
                where=failed.name,
                fix="check the model and the feeds in onnxruntime alone",
            ) from failed


_REFERENCE, _MODEL = "reference", "model"


class _FailedError(Exception):
    """A model does not load or run."""

    def __init__(self, name: str, error: Exception) -> None:
        text = error.what if isinstance(error, KenosisError) else f"it does not run: {error}"
        self.name, self.reason = name, " ".join(text.split())[:_REASON_LIMIT]
        super().__init__(name)


class _Rounds:
    """The rounds of one race.

    Args:
        setup: Data, threads and clock.
        deadline: Time of ``setup.budget`` by which all is done, give or take a run.
        seed: Of this race.
        budget_s: Seconds for all of it.
    """

    def __init__(self, setup: RaceSetup, deadline: float, seed: int, budget_s: float) -> None:
        self._setup, self._deadline = setup, deadline
        self._timer, self._budget = setup.timer, setup.budget
        self._random = random.Random(f"{setup.seed} {seed}")
        self._round_s = min(max(budget_s / (2 * ORDINARY), _SHORT_ROUND_S), _ROUND_S)
        self._openers: dict[str, Callable[[], Runner]] = {}
        self._runs: dict[str, int] = {}  # that make one turn
        self._turns, self._together = 1, True
        self._taken: dict[str, list[float]] = {_REFERENCE: [], _MODEL: []}  # seconds of a run, by round

    def admit(self, name: str, model: harness.Model, folder: Path) -> None:
        """Adds a model in the form that the runtime opens; of large ones only one session is open at a time."""
        try:
            source = harness.opened(model, folder / name, name)
            self._openers[name] = self._setup.opener(source)
        except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
            raise _FailedError(name, error) from error
        self._together = self._together and isinstance(source, bytes)

    def result(self, border: float | None) -> Race:
        """Makes rounds until it is clear who is faster, or which side of the border the ratio lies on."""
        done, took, found = 0, 0.0, None
        for goal in INTERIM_ROUNDS:
            while done < goal and (not done or self._deadline - self._budget() >= took):
                begin = self._budget()
                self._round(done)
                done, took = done + 1, self._budget() - begin
            reference, own = self._taken.values()
            found = early(reference, own, border)
            if found is not None or done < goal:
                break
            last = compare(*quietest(reference, own))
            if done >= ORDINARY and (border is None or not holds(last, border)):
                break
        reference, own = quietest(*self._taken.values())
        found = found or compare(reference, own)
        _log.debug("%.3fx (%.3f..%.3f), %s in %d rounds", found.ratio, found.low, found.high, found.verdict, done)
        return Race(found, 1e3 * statistics.median(own), 1e3 * statistics.median(reference), done)

    def _round(self, number: int) -> None:
        """Takes turns through fresh sessions and keeps the quietest pair of turns."""
        order = list(self._taken)
        self._random.shuffle(order)
        feed = self._setup.feeds[number % len(self._setup.feeds)]
        opened: dict[str, Runner] = {}
        pairs: list[dict[str, float]] = []
        begin = self._timer()
        for _ in range(self._turns):
            pair = {}
            for name in order:
                try:
                    runner = opened.pop(name, None) or self._openers[name]()
                    pair[name] = self._turn(name, runner, feed)
                except Exception as error:  # the runtime raises several unrelated classes
                    raise _FailedError(name, error) from error
                if self._together:
                    opened[name] = runner
                del runner
            pairs.append(pair)
            order.reverse()
        for name, seconds in min(pairs, key=lambda pair: math.prod(pair.values())).items():
            self._taken[name].append(seconds)
        if number > 1:
            return
        took, spent = self._timer() - begin, sum((self._runs[name] + 1) * each for name, each in pairs[0].items())
        if not self._together:
            spent = took
        # The first round optimizes the models; where opening later takes longer than running, turns cost little.
        wanted = max(self._round_s, 2 * (took - spent * self._turns)) if number else self._round_s
        self._turns = max(1, min(_TURNS, int(wanted / spent))) if spent > 0 else _TURNS

    def _turn(self, name: str, runner: Runner, feed: Feed) -> float:
        """The seconds of a run, behind one that is not timed: it warms the caches."""
        runner.run(None, feed)
        if name not in self._runs:
            self._runs[name] = self._runs_per_turn(runner, feed)
        runs = self._runs[name]
        start = self._timer()
        for _ in range(runs):
            runner.run(None, feed)
        return (self._timer() - start) / runs

    def _runs_per_turn(self, runner: Runner, feed: Feed) -> int:
        """Number of runs that make a turn long enough for the clock and for the noise of single runs."""
        taken = math.inf
        for _ in range(_PROBES):
            start = self._timer()
            runner.run(None, feed)
            taken = min(taken, self._timer() - start)
            if taken >= _TURN_S:
                return 1
        return min(math.ceil(_TURN_S / taken), _MOST_RUNS) if taken > 0 else _MOST_RUNS


def quietest(reference: Sequence[float], own: Sequence[float]) -> tuple[list[float], list[float]]:
    """The rounds in which the machine was fastest: a quarter of them, but not less than 8.

    Args:
        reference: Time of the reference by round.
        own: Time of the model by round.
    """
    count = max(_QUIET, math.ceil(len(own) / 4))
    chosen = sorted(range(len(own)), key=lambda i: reference[i] * own[i])[:count]
    return [reference[i] for i in chosen], [own[i] for i in chosen]


def early(reference: Sequence[float], own: Sequence[float], border: float | None = None) -> SpeedComparison | None:
    """The comparison of the quietest rounds if it is clear before the last test, else None.

    Args:
        reference: Time of the reference by round.
        own: Time of the model by round.
        border: Ratio at which the caller's decision turns; None where all that matters is which of them is faster.

    Returns:
        The comparison with a verdict; its interval is the 99 % one, or all ratios where few rounds were enough.
    """
    rounds = len(own)
    if rounds < INTERIM_ROUNDS[0] or min(*reference, *own) <= 0:  # a time of zero: the clock is too coarse to be sure
        return None
    reference, own = quietest(reference, own)
    ratios = sorted(theirs / ours for theirs, ours in zip(reference, own, strict=True))
    plain = compare(reference, own)
    for slower, faster, verdict in ((reference, own, Verdict.FASTER), (own, reference, Verdict.SLOWER)):
        if max(faster) * CLEAR < min(slower):
            return SpeedComparison(plain.ratio, ratios[0], ratios[-1], verdict)
    rank = interval_rank(len(own), _INTERIM_CONFIDENCE)
    if rank is not None:
        low, high = ratios[rank - 1], ratios[-rank]
        found = SpeedComparison(plain.ratio, low, high, plain.verdict)
        if border is not None:
            least = 1.0 if rounds >= ORDINARY else _UNLIKE
            return found if low > border * least or high < border / least else None
        if low > MARGIN or high < 1 / MARGIN:
            return found
    return plain if border is None and rounds >= _SAME_ROUNDS and plain.verdict is Verdict.SAME else None


def holds(comparison: SpeedComparison, border: float) -> bool:
    """Whether more rounds may decide on which side of a border a ratio lies."""
    return comparison.low <= border <= comparison.high
