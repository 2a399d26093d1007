"""The timing itself: rounds, blocks and the budget. Knows clocks and runners, nothing of models or files.

In a round every model gets a fresh runner and one block: warm-up, then timed runs. The order within a round is
random, so a slow drift of the machine hits all alike, and the ratio of two models is formed within the round. All
blocks of a round use the same feed; the rounds take turns through the feeds.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kenosis_ort.errors import KenosisError
from kenosis_ort.targets.model import Runner

_log = logging.getLogger(__name__)

_AIM = 0.9  # of the time left, so that one slow block does not cost the last round

Clock = Callable[[], float]
Feed = Mapping[str, Any]
Opener = Callable[[str], Runner]


@dataclass(frozen=True)
class Schedule:
    """Numbers of rounds and runs.

    Attributes:
        rounds: Rounds at most.
        deadline: Time of the clock by which all is done, give or take a run. The first round is made in any case; a
            further one only if one warm-up and one timed run of each model still fit.
        warmup: Runs at most before the timed ones; at least one is made.
        seed: Of the order.
        block_s: Seconds of timed runs in a block at most (a single run may take longer).
        block_runs: Timed runs in a block at most.
    """

    rounds: int
    deadline: float
    warmup: int
    seed: int = 0
    block_s: float = 0.25
    block_runs: float = math.inf


@dataclass(frozen=True)
class Block:
    """One model's part of one round, all in seconds: making the runner, and each timed run."""

    load: float
    runs: npt.NDArray[np.float64]

    @property
    def median(self) -> float:
        """Median time of a run."""
        return float(np.median(self.runs))

    @property
    def least(self) -> float:
        """Time that another block would take at least: loading, one warm-up and one timed run."""
        return self.load + 2 * self.median


@dataclass
class Timings:
    """Times of all models, by round.

    Attributes:
        blocks: By name, one block a round.
        failed: By name, what stopped a model; such a model has no blocks.
        rounds: Rounds made.
    """

    blocks: dict[str, list[Block]]
    failed: dict[str, str] = field(default_factory=dict)
    rounds: int = 0

    def round_ms(self, name: str) -> tuple[float, ...]:
        """The median milliseconds of a run by round."""
        return tuple(block.median * 1e3 for block in self.blocks[name])

    def load_seconds(self, name: str) -> float:
        """The median time to make a runner."""
        return statistics.median(block.load for block in self.blocks[name])


def time_interleaved(
    names: Sequence[str],
    open_runner: Opener,
    feeds: Sequence[Feed],
    schedule: Schedule,
    *,
    clock: Clock = time.perf_counter,
    must_run: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Timings:
    """Times several models against each other.

    Args:
        names: The models' names.
        open_runner: Makes a fresh runner for a name.
        feeds: At least one feed; all models take the same.
        schedule: How much is timed.
        clock: Seconds from any fixed point on.
        must_run: Name of a model without which the rest is worth nothing: if it fails, timing ends.
        progress: Called with (rounds done, rounds at most) after each round.

    Returns:
        The blocks of the models that ran; a model that fails in any round is dropped and reported.
    """
    timings = Timings({name: [] for name in names})
    order = random.Random(schedule.seed)
    for index in range(schedule.rounds):
        if index and schedule.deadline - clock() < sum(blocks[-1].least for blocks in timings.blocks.values()):
            _log.info("the time is up after %d of %d rounds", index, schedule.rounds)
            break
        turn = list(timings.blocks)
        order.shuffle(turn)
        waiting = (schedule.rounds - index) * len(turn)
        for name in turn:
            share = _AIM * (schedule.deadline - clock()) / waiting
            waiting -= 1
            try:
                block = _time_block(partial(open_runner, name), feeds[index % len(feeds)], schedule, share, clock)
            except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
                timings.failed[name] = error.what if isinstance(error, KenosisError) else f"it does not run: {error}"
                del timings.blocks[name]
                if name == must_run or not timings.blocks:
                    return timings
                continue
            timings.blocks[name].append(block)
        timings.rounds = index + 1
        if progress is not None:
            progress(index + 1, schedule.rounds)
    return timings


def _time_block(open_one: Callable[[], Runner], feed: Feed, schedule: Schedule, share: float, clock: Clock) -> Block:
    """Times one model.

    Args:
        open_one: Makes the runner.
        feed: What it takes.
        schedule: Says how much warm-up there is and how long the timed part is at most.
        share: Seconds for all of the block, half of them for loading and warm-up; both end early when they are over.
        clock: Says the time.
    """
    begin = clock()
    runner = open_one()
    now = clock()
    load = now - begin
    for _ in range(max(schedule.warmup, 1)):
        runner.run(None, feed)
        now = clock()
        if now - begin >= share / 2:
            break
    end = min(begin + share, now + schedule.block_s)
    runs: list[float] = []
    while not runs or (now < end and len(runs) < schedule.block_runs):
        start = clock()
        runner.run(None, feed)
        now = clock()
        runs.append(now - start)
    return Block(load, np.asarray(runs))
