"""Ratio, interval and verdict; and rounds, blocks, order and budget, on a clock that only fakes move."""

import math
from dataclasses import dataclass
from itertools import count, groupby
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from kenosis_ort.bench import harness
from kenosis_ort.bench.harness import LEAST_ROUNDS, MARGIN, Schedule, Verdict, compare, time_interleaved
from kenosis_ort.errors import VerificationError


@dataclass
class FakeBench:
    """Opens runners and records what is done with them; a session keeps its own noise factor.

    Attributes:
        seconds: Time of a run by name, or what tells it by name and number of the run within its session; an exception
            is raised when it is run.
        load: Seconds to open a session.
        spread: Of the noise between sessions, as standard deviation of the logarithm.
    """

    seconds: Any
    load: float = 0.0
    spread: float = 0.0
    seed: int = 0
    now: float = 1000.0

    def __post_init__(self):
        self.opened, self.runs, self.rng = [], [], np.random.default_rng(self.seed)

    def clock(self):
        return self.now

    def cost(self, name, ran):
        """Seconds of a run now."""
        found = self.seconds(name, ran) if callable(self.seconds) else self.seconds[name]
        if isinstance(found, Exception):
            raise found
        return found

    def open(self, name):
        self.opened.append(name)
        self.now += self.load
        factor, numbers = float(np.exp(self.rng.normal(0, self.spread))), count(1)

        def run(_, feed):
            self.runs.append((name, feed))
            self.now += self.cost(name, next(numbers)) * factor

        return SimpleNamespace(run=run)


# ---- ratio, interval and verdict ------------------------------------------------------------------------------------


MIRRORED = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
times, near = st.floats(1e-6, 1e3), st.floats(0.9, 1.1)  # near each other, so that all verdicts turn up
rounds = st.one_of(*(st.lists(st.tuples(each, each), min_size=1, max_size=40) for each in (times, near)))
series = st.lists(times, min_size=LEAST_ROUNDS, max_size=30)


def at_a_threshold(*ratios):
    """Whether rounding alone may turn the verdict."""
    return any(math.isclose(ratio, edge, rel_tol=1e-9) for ratio in ratios for edge in (1.0, MARGIN, 1 / MARGIN))


@given(rounds, st.floats(1e-3, 1e3), st.randoms(use_true_random=False))
def test_what_a_comparison_does_not_depend_on(pairs, scale, order):
    """The order of the series, but for the sign; the unit; the order of the rounds."""
    a, b = (list(each) for each in zip(*pairs, strict=True))
    plain, back = compare(a, b), compare(b, a)
    assert plain.low <= plain.ratio * (1 + 1e-12)
    assert plain.ratio <= plain.high * (1 + 1e-12)
    assert back.verdict is MIRRORED.get(plain.verdict, plain.verdict)
    assert (back.ratio, back.low, back.high) == pytest.approx((1 / plain.ratio, 1 / plain.high, 1 / plain.low))
    order.shuffle(pairs)
    assert compare(*zip(*pairs, strict=True)) == plain
    assert plain.verdict is Verdict.NOISY or len(pairs) >= LEAST_ROUNDS
    scaled = compare([x * scale for x in a], [x * scale for x in b])
    assert (scaled.ratio, scaled.low, scaled.high) == pytest.approx((plain.ratio, plain.low, plain.high))
    assert scaled.verdict is plain.verdict or at_a_threshold(plain.low, plain.ratio, plain.high)


@given(series, st.floats(0.2, 5.0))
def test_a_drift_that_hits_both_alike_is_cancelled(drift, speed):
    assume(not at_a_threshold(speed))
    found = compare([d * speed for d in drift], drift)
    assert found.ratio == pytest.approx(speed)
    wanted = Verdict.SAME if 1 / MARGIN < speed < MARGIN else Verdict.FASTER if speed > 1 else Verdict.SLOWER
    assert found.verdict is wanted
    assert compare(drift, drift).ratio == 1


@pytest.mark.parametrize(("reference", "own", "verdict"), [
    ([2.0] * 15, [1.0] * 14 + [100.0], Verdict.FASTER),  # one wild round
    ([1.0] * 15, [1.0] * 14 + [100.0], Verdict.SAME), ([1.0] * 16, [0.8, 1.25] * 8, Verdict.NOISY),
    ([1.01] * 15, [1.0] * 15, Verdict.SAME), ([1.05] * 15, [1.0] * 15, Verdict.FASTER),
    ([1.001] * 8 + [1.05] * 7, [1.0] * 15, Verdict.NOISY),  # a lead below the margin with a wide interval
    ([0.0] * 8, [0.0] * 8, Verdict.SAME),
])  # fmt: skip
def test_verdicts(reference, own, verdict):
    assert compare(reference, own).verdict is verdict


def test_series_that_do_not_pair_are_refused():
    for reference, own in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="rounds"):
            compare(reference, own)


@given(st.integers(LEAST_ROUNDS, 400))
def test_the_rank_is_the_tightest_that_keeps_the_confidence(n):
    # Conover, Practical Nonparametric Statistics: 95 % interval of the median from ordered observations.
    assert [harness.interval_rank(n) for n in (5, 6, 9, 10, 15, 20, 25)] == [None, 1, 2, 2, 4, 6, 8]
    rank = harness.interval_rank(n)

    def coverage(k):
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    assert coverage(rank) >= harness.CONFIDENCE > coverage(rank + 1)


# ---- rounds ---------------------------------------------------------------------------------------------------------


def timed(fake, names, *, rounds=4, budget_s=1e6, warmup=2, seed=0, feeds=({"x": 0},), opener=None, **keywords):
    schedule = Schedule(rounds, fake.now + budget_s, warmup, seed)
    return time_interleaved(names, opener or fake.open, feeds, schedule, clock=fake.clock, **keywords)


def test_every_round_opens_every_model_once_in_the_seeds_order_with_one_feed():
    names, feeds = ["a", "b", "c"], ["first", "second"]

    def opened(seed):
        fake = FakeBench(dict.fromkeys(names, 0.01))
        told = []
        timings = timed(fake, names, rounds=12, seed=seed, feeds=feeds, progress=lambda *done: told.append(done))
        blocks = [run for run, _ in groupby(fake.runs)]
        assert [name for name, _ in blocks] == fake.opened, "blocks do not mix"
        assert [feed for _, feed in blocks] == [feeds[number // 3 % 2] for number in range(36)]
        assert [len(timings.blocks[name]) for name in names] == [12, 12, 12]
        assert told == [(number, 12) for number in range(1, 13)]
        return fake.opened

    turns = [tuple(opened(1)[i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(turn) == names for turn in turns)
    assert len(set(turns)) > 2  # not always the same order
    assert opened(1) == opened(1) != opened(2)


def test_warm_up_and_loading_do_not_count_and_a_block_is_as_long_as_asked():
    fake = FakeBench(lambda name, ran: 5.0 if ran <= 2 else 0.01, load=3.0)
    timings = timed(fake, ["a"], warmup=2)
    for block in timings.blocks["a"]:
        assert block.runs.max() == pytest.approx(0.01)
        assert float(block.runs.sum()) == pytest.approx(0.25, abs=0.011)
    assert timings.load_seconds("a") == pytest.approx(3)
    slow = timed(FakeBench({"a": 1.0, "b": 1.0}), ["a", "b"], rounds=15, budget_s=20)
    assert slow.rounds == 5
    assert {len(block.runs) for block in slow.blocks["a"]} == {1}


@given(st.lists(st.floats(1e-3, 2.0), min_size=1, max_size=4), st.floats(0, 1.0), st.floats(-1, 60.0),
       st.integers(1, 20), st.integers(0, 5))  # fmt: skip
def test_the_budget_is_kept(seconds, load, budget, rounds, warmup):
    costs = {f"m{i}": cost for i, cost in enumerate(seconds)}
    fake = FakeBench(costs, load=load)
    begin = fake.now
    timings = timed(fake, list(costs), rounds=rounds, budget_s=budget, warmup=warmup)
    taken = fake.now - begin
    # A round can be cut to one warm-up and one timed run per model, and the first is always made.
    least = sum(load + 2 * cost for cost in seconds)
    assert taken <= max(budget, least) + sum(2 * cost for cost in seconds) + 1e-6
    assert 1 <= timings.rounds <= rounds
    assert all(len(blocks) == timings.rounds for blocks in timings.blocks.values())
    if 4 * rounds * least < budget:
        assert timings.rounds == rounds


def test_a_model_that_does_not_open_or_fails_later_is_dropped_whole_unless_it_must_run():
    fake = FakeBench({"a": 0.01, "c": 0.01})

    def opener(name):
        if name == "b":
            raise VerificationError("the runtime does not load it", where="b")
        runner = fake.open(name)

        def run(_, feed):
            if (name, feed) == ("c", "second"):
                raise RuntimeError("Got invalid dimensions")
            runner.run(_, feed)

        return SimpleNamespace(run=run)

    timings = timed(fake, ["a", "b", "c"], feeds=["first", "second"], opener=opener)
    assert timings.failed == {"b": "the runtime does not load it", "c": "it does not run: Got invalid dimensions"}
    assert {name: len(blocks) for name, blocks in timings.blocks.items()} == {"a": 4}
    fake.opened.clear()
    assert list(timed(fake, ["a", "b"], rounds=50, opener=opener, must_run="b").failed) == ["b"]
    assert fake.opened.count("a") <= 1


def test_interruption_is_not_taken_for_a_failure():
    with pytest.raises(KeyboardInterrupt):
        timed(FakeBench({}), ["a"], opener=Mock(side_effect=KeyboardInterrupt))
