"""Races: a few built models timed against one of them, no longer than it takes to tell.

The timing is `bench.harness`: rounds in random order, in each a fresh session of every model, one alive at a time.
Added here are the looks at which a race may end, and batches for models that run in microseconds. A session of one
thread runs in the thread that calls it, so its runs are timed by that thread's processor time: what other programs take
of the processor does not count. On a machine with four times more work than cores that gives ratios within 5 %, where
wall time gives anything from 0.5x to 1.3x for a net of 1.06x.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np

from kenosis_ort.bench.harness import Block, Clock, Feed, Schedule, time_interleaved
from kenosis_ort.bench.inputs import ModelSource, candidates
from kenosis_ort.bench.model import LeftOut
from kenosis_ort.bench.noise import Comparison, compare
from kenosis_ort.errors import KenosisError, VerificationError
from kenosis_ort.graph.session import open_session
from kenosis_ort.storage.scratch import Scratch
from kenosis_ort.targets.model import Runner
from kenosis_ort.tuning.looks import FULL, Looks, early, holds

_log = logging.getLogger(__name__)

Open = Callable[[str | bytes], Runner]
MakeOpener = Callable[[str | bytes], Callable[[], Runner]]

_RESOLUTION_S: Final = 1e-6
_SAMPLE_S: Final = 1e-3  # a shorter run is timed in batches of at least this many seconds
_MOST_RUNS: Final = 4096
_PROBES: Final = 4
_BLOCK_S: Final = 0.025
_SHORT_BLOCK_S: Final = 0.002  # where the budget is short
_BLOCK_RUNS: Final = 6  # samples of a block: more of one session say little more of the model
_QUANTILE: Final = 0.25  # of a block's samples: what else the machine does makes a run longer, never shorter
_REASON_LIMIT: Final = 600


@dataclass(frozen=True)
class Standing:
    """One model's result.

    Attributes:
        name: Which model.
        comparison: Its speed relative to the baseline, above 1 is faster, with a verdict.
        milliseconds: Median over the rounds of the lower quartile of a run's time.
        rounds: Rounds it took part in.
    """

    name: str
    comparison: Comparison
    milliseconds: float
    rounds: int


@dataclass(frozen=True)
class Race:
    """What a race found.

    Attributes:
        baseline: Name of the model that the others were compared to.
        milliseconds: Its time of a run.
        standings: The others, in the order given.
        dropped: Models that do not load or run, with the runtime's message.
        seconds: What it took.
    """

    baseline: str
    milliseconds: float
    standings: tuple[Standing, ...]
    dropped: tuple[LeftOut, ...]
    seconds: float

    def standing(self, name: str) -> Standing | None:
        """Returns a model's result, None if it was dropped."""
        return next((s for s in self.standings if s.name == name), None)

    def why_dropped(self, name: str) -> str | None:
        """Returns why a model has no result, None if it has one."""
        return next((gone.reason for gone in self.dropped if gone.name == name), None)


@dataclass(frozen=True)
class Track:
    """What is the same for all races: data, threads, sessions and the clock.

    Attributes:
        feeds: A few real feeds; the rounds take turns through them.
        threads: Threads of a session, 0 for the runtime's own choice.
        custom_op_libraries: Libraries with custom operators to register.
        seed: Of the order of models within the rounds.
        clock: Seconds of wall time from any fixed point on; budgets are in it.
        stopwatch: Seconds by which runs are timed; None for what suits the threads, see `timer`.
        open_runner: Opens what a model's source is made into, a path or bytes; None for a stock session.
        make_opener: Returns what opens one source again and again; None opens each session by `open_runner`.
        in_calling_thread: What it opens with one thread runs in the thread that calls it, as a stock session does.
        name: What tells its feeds from those of other tracks; "" where there is one only.
    """

    feeds: Sequence[Feed]
    threads: int = 1
    custom_op_libraries: tuple[str, ...] = ()
    seed: int = 0
    clock: Clock = field(default=time.perf_counter, repr=False)
    stopwatch: Clock | None = field(default=None, repr=False)
    open_runner: Open | None = field(default=None, repr=False)
    make_opener: MakeOpener | None = field(default=None, repr=False)
    in_calling_thread: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not self.feeds:
            raise ValueError("a race needs at least one feed")

    @property
    def timer(self) -> Clock:
        """The clock that times runs: the calling thread's processor time where that is all a session uses."""
        if self.stopwatch is not None:
            return self.stopwatch
        fine = time.get_clock_info("thread_time").resolution <= _RESOLUTION_S
        stock = self.open_runner is None or self.in_calling_thread
        alone = self.threads == 1 and not self.custom_op_libraries and stock
        return time.thread_time if fine and alone else self.clock

    def open(self, source: str | bytes) -> Runner:
        """Returns a fresh session."""
        if self.open_runner is not None:
            return self.open_runner(source)
        runner: Runner = open_session(source, custom_op_libraries=self.custom_op_libraries, threads=self.threads)
        return runner

    def opener(self, source: str | bytes) -> Callable[[], Runner]:
        """Returns what opens fresh sessions."""
        return partial(self.open, source) if self.make_opener is None else self.make_opener(source)


def race(
    models: Mapping[str, ModelSource],
    track: Track,
    *,
    baseline: str,
    budget_s: float,
    looks: Looks = FULL,
    border: float | None = None,
    seed: int = 0,
) -> Race:
    """Times models against one of them.

    Args:
        models: Paths, serialized models or ModelProto objects by name; not changed. All take the same inputs.
        track: Data, threads and clock.
        baseline: Name of the model that the others are compared to.
        budget_s: Seconds for all of it. One round is made in any case.
        looks: Rounds at most, and after which of them it ends for a model whose result is clear.
        border: Ratio at which the caller's decision turns: a race ends early for a model that is clearly on one side
            of it, and ``looks.further`` are for one whose noise interval holds it. None where there is none.
        seed: Distinguishes races on the same track.

    Returns:
        The result, with a model that does not load or run named and dropped.

    Raises:
        VerificationError: The baseline does not load or run.
    """
    begin = track.clock()
    with Scratch("race") as scratch:
        block_s = min(max(budget_s / (2 * len(models) * looks.most), _SHORT_BLOCK_S), _BLOCK_S)
        course = _Course(track, baseline, begin + budget_s, seed, block_s)
        course.admit(models, scratch)
        done = 0
        for look in looks.rounds:
            if not course.running or not course.run(look - done, done):
                break
            done = look
            course.look(border)
        if border is not None and done == looks.most:
            course.look_closer(border, looks.further, done)
        return course.result(track.clock() - begin)


class _Course:
    """One race while it is run.

    Args:
        track: Data, threads and clock.
        baseline: Name of the model that has to run.
        deadline: Time of the clock by which all is done, give or take a run.
        seed: Of this race.
        block_s: Seconds of timed runs of a model in a round.
    """

    def __init__(self, track: Track, baseline: str, deadline: float, seed: int, block_s: float) -> None:
        self.track = track
        self.baseline = baseline
        self.deadline = deadline
        self.seed = f"{track.seed} {seed}"
        self.block_s = block_s
        self.openers: dict[str, Callable[[], Runner]] = {}
        self.running: list[str] = []
        self.batch: dict[str, int] = {}  # runs that make one sample
        self.taken: dict[str, list[float]] = {}  # milliseconds of a run, by round
        self.last: dict[str, Block] = {}
        self.decided: dict[str, Comparison] = {}
        self.dropped: dict[str, str] = {}
        self.order: list[str] = []

    def admit(self, models: Mapping[str, ModelSource], scratch: Path) -> None:
        """Makes of each model what the runtime opens."""
        for index, candidate in enumerate(candidates(models)):
            name = candidate.name
            try:
                self.openers[name] = self.track.opener(candidate.openable(scratch / str(index)))
            except KenosisError as error:
                self._drop(name, error.what)
            if name != self.baseline:
                self.order.append(name)
        self.running = [name for name in self.order if name in self.openers]
        self._check_baseline()

    def run(self, rounds: int, done: int) -> bool:
        """Makes some rounds; tells whether all of them fitted into the time."""
        names = [self.baseline, *self.running]
        if done and self.deadline - self.track.clock() < sum(self.last[name].least for name in names):
            return False
        turn = done % len(self.track.feeds)
        timer = self.track.timer
        deadline = timer() + max(self.deadline - self.track.clock(), 0.0)
        timings = time_interleaved(
            names,
            self._open,
            [*self.track.feeds[turn:], *self.track.feeds[:turn]],
            Schedule(
                rounds,
                deadline,
                warmup=1,
                seed=crc32(f"{self.seed} {done}".encode()),
                block_s=self.block_s,
                block_runs=_BLOCK_RUNS,
            ),
            clock=timer,
            must_run=self.baseline,
        )
        for name, reason in timings.failed.items():
            self._drop(name, reason)
        self._check_baseline()
        for name, blocks in timings.blocks.items():
            samples = (float(np.quantile(block.runs, _QUANTILE)) for block in blocks)
            self.taken.setdefault(name, []).extend(seconds * 1e3 / self.batch[name] for seconds in samples)
            self.last[name] = blocks[-1]
        return timings.rounds == rounds

    def look(self, border: float | None) -> None:
        """Ends the race for the models whose result is clear, or clearly on one side of a border."""
        for name in tuple(self.running):
            found = early(self._reference(name), self.taken[name], border)
            if found is not None:
                self.decided[name] = found
                self.running.remove(name)

    def look_closer(self, border: float, looks: Sequence[int], done: int) -> None:
        """Makes further rounds for the models that are not clearly on one side of a border."""
        for look in looks:
            for name in tuple(self.running):
                found = compare(self._reference(name), self.taken[name])
                if not holds(found, border):
                    self.decided[name] = found
                    self.running.remove(name)
            if not self.running or not self.run(look - done, done):
                break
            done = look

    def result(self, seconds: float) -> Race:
        """Returns what was found."""
        standings = []
        for name in self.order:
            if name in self.dropped:
                continue
            own = self.taken[name]
            found = self.decided.get(name) or early(self._reference(name), own) or compare(self._reference(name), own)
            standings.append(Standing(name, found, statistics.median(own), len(own)))
            _log.debug("%s: %.3fx (%.3f..%.3f), %s", name, found.ratio, found.low, found.high, found.verdict)
        gone = tuple(LeftOut(name, reason) for name, reason in self.dropped.items())
        milliseconds = statistics.median(self.taken[self.baseline]) if self.baseline in self.taken else math.nan
        return Race(self.baseline, milliseconds, tuple(standings), gone, seconds)

    def _reference(self, name: str) -> list[float]:
        """Returns the baseline's times in the rounds that a model took part in: always the first ones."""
        return self.taken[self.baseline][: len(self.taken[name])]

    def _open(self, name: str) -> Runner:
        runner = self.openers[name]()
        if name not in self.batch:
            self.batch[name] = self._runs_per_sample(runner)
        return runner if self.batch[name] == 1 else _Batch(runner, self.batch[name])

    def _runs_per_sample(self, runner: Runner) -> int:
        """Returns how many runs make a sample long enough for the clock and for the noise of single runs."""
        taken, timer = 0.0, self.track.timer
        for _ in range(_PROBES):
            start = timer()
            runner.run(None, self.track.feeds[0])
            taken = timer() - start
            if taken >= _SAMPLE_S:
                return 1
        return min(math.ceil(_SAMPLE_S / taken), _MOST_RUNS) if taken > 0 else _MOST_RUNS

    def _drop(self, name: str, reason: str) -> None:
        _log.info("'%s' is dropped: %s", name, reason)
        self.dropped[name] = " ".join(reason.split())[:_REASON_LIMIT]
        self.taken.pop(name, None)
        if name in self.running:
            self.running.remove(name)

    def _check_baseline(self) -> None:
        reason = self.dropped.get(self.baseline)
        if reason is not None:
            raise VerificationError(
                f"the model that others are compared to cannot be timed: {reason}",
                where=self.baseline,
                fix="check the model and the feeds in onnxruntime alone",
            )


@dataclass(frozen=True)
class _Batch:
    """Runs a model several times for one sample."""

    runner: Runner
    runs: int

    def run(self, output_names: None, input_feed: Any) -> None:
        for _ in range(self.runs):
            self.runner.run(output_names, input_feed)
