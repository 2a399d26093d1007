"""Rounds, blocks, order and budget, on a clock that only the fakes move."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.bench.harness import Schedule, time_interleaved
from kenosis_ort.errors import VerificationError
from tests.bench.fakes import FakeBench, FakeRunner


def timed(fake: FakeBench, names: list[str], *, rounds: int = 4, budget_s: float = 1e6, warmup: int = 2, seed: int = 0,
          feeds=({"x": 0},), **keywords):  # fmt: skip
    schedule = Schedule(rounds, fake.clock.now + budget_s, warmup, seed)
    return time_interleaved(names, fake.open, feeds, schedule, clock=fake.clock, **keywords)


def test_every_round_opens_every_model_once_in_its_own_order():
    names = ["a", "b", "c"]
    fake = FakeBench(dict.fromkeys(names, 0.01))
    timings = timed(fake, names, rounds=12)
    turns = [tuple(fake.opened[i : i + 3]) for i in range(0, 36, 3)]
    assert len(fake.opened) == 36
    assert all(sorted(turn) == names for turn in turns)
    assert len(set(turns)) > 2  # not always the same order
    assert [len(timings.blocks[name]) for name in names] == [12, 12, 12]


def test_blocks_do_not_mix():
    fake = FakeBench({"a": 0.01, "b": 0.02})
    timed(fake, ["a", "b"], rounds=5)
    assert [name for name, _ in groupby(fake.runs, key=lambda run: run[0])] == [
        name for name, _ in groupby(fake.opened)
    ]


def test_the_order_is_the_seeds():
    def order(seed: int) -> list[str]:
        fake = FakeBench({"a": 0.01, "b": 0.01, "c": 0.01})
        timed(fake, ["a", "b", "c"], rounds=6, seed=seed)
        return fake.opened

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_warm_up_and_loading_do_not_count():
    fake = FakeBench(lambda name, ran: 5.0 if ran <= 2 else 0.01, load=3.0)
    timings = timed(fake, ["a"], warmup=2)
    assert all(block.median == pytest.approx(0.01) for block in timings.blocks["a"])
    assert all(block.runs.max() == pytest.approx(0.01) for block in timings.blocks["a"])
    assert timings.load_seconds("a") == pytest.approx(3)


def test_a_block_is_as_long_as_asked():
    fake = FakeBench({"a": 0.01})
    timings = timed(fake, ["a"], rounds=1)
    assert float(timings.blocks["a"][0].runs.sum()) == pytest.approx(0.25, abs=0.011)
    few = Schedule(1, 1e9, warmup=1, block_runs=3)
    assert len(time_interleaved(["a"], fake.open, [{}], few, clock=fake.clock).blocks["a"][0].runs) == 3


def test_the_feeds_take_turns_by_round_and_are_the_same_for_all():
    fake = FakeBench({"a": 0.1, "b": 0.1})
    timed(fake, ["a", "b"], rounds=5, feeds=["first", "second"])
    per_block = [list(group) for _, group in groupby(fake.runs, key=lambda run: run)]
    seen: dict[str, list[str]] = {"a": [], "b": []}
    for block in per_block:
        if seen[block[0][0]][-1:] != [block[0][1]]:
            seen[block[0][0]].append(block[0][1])
    assert seen["a"] == seen["b"] == ["first", "second", "first", "second", "first"]


@given(
    seconds=st.lists(st.floats(1e-3, 2.0), min_size=1, max_size=4),
    load=st.floats(0, 1.0),
    budget=st.floats(0.5, 60.0),
    rounds=st.integers(1, 20),
    warmup=st.integers(0, 5),
)
def test_the_budget_is_kept(seconds: list[float], load: float, budget: float, rounds: int, warmup: int):
    costs = {f"m{i}": cost for i, cost in enumerate(seconds)}
    fake = FakeBench(costs, load=load)
    begin = fake.clock.now
    timings = timed(fake, list(costs), rounds=rounds, budget_s=budget, warmup=warmup)
    taken = fake.clock.now - begin
    # A round can be cut to one warm-up and one timed run per model, and the first is always made.
    least = sum(load + 2 * cost for cost in seconds)
    assert taken <= max(budget, least) + sum(2 * cost for cost in seconds) + 1e-6
    assert 1 <= timings.rounds <= rounds
    assert all(len(blocks) == timings.rounds for blocks in timings.blocks.values())
    if 4 * rounds * least < budget:
        assert timings.rounds == rounds


def test_slow_models_get_fewer_rounds_and_one_run_a_block():
    fake = FakeBench({"a": 1.0, "b": 1.0})
    timings = timed(fake, ["a", "b"], rounds=15, budget_s=20)
    assert timings.rounds == 5
    assert {len(block.runs) for block in timings.blocks["a"]} == {1}


def test_even_without_any_time_there_is_one_round():
    fake = FakeBench({"a": 1.0, "b": 1.0})
    assert timed(fake, ["a", "b"], budget_s=-1).rounds == 1


def test_a_model_that_does_not_open_is_dropped_and_the_others_go_on():
    fake = FakeBench({"a": 0.01, "c": 0.01})

    def opener(name: str) -> FakeRunner:
        if name == "b":
            raise VerificationError("the runtime does not load it", where="b")
        return fake.open(name)

    schedule = Schedule(4, fake.clock.now + 100, 1)
    timings = time_interleaved(["a", "b", "c"], opener, [{}], schedule, clock=fake.clock)
    assert timings.failed == {"b": "the runtime does not load it"}
    assert {name: len(blocks) for name, blocks in timings.blocks.items()} == {"a": 4, "c": 4}


def test_a_model_that_fails_in_a_later_round_is_dropped_whole():
    fake = FakeBench({"a": 0.01, "b": 0.01})

    class Bad(FakeRunner):
        def run(self, output_names: None, input_feed: object) -> None:
            if input_feed == "second" and self.name == "b":
                raise RuntimeError("Got invalid dimensions")
            super().run(output_names, input_feed)

    schedule = Schedule(3, fake.clock.now + 100, 1)
    timings = time_interleaved(
        ["a", "b"], lambda name: Bad(fake, name), ["first", "second"], schedule, clock=fake.clock
    )
    assert timings.failed == {"b": "it does not run: Got invalid dimensions"}
    assert {name: len(blocks) for name, blocks in timings.blocks.items()} == {"a": 3}


def test_without_the_model_that_must_run_timing_ends():
    fake = FakeBench({"a": 0.01})

    def opener(name: str) -> FakeRunner:
        if name == "base":
            raise RuntimeError("no")
        return fake.open(name)

    schedule = Schedule(50, fake.clock.now + 100, 1)
    timings = time_interleaved(["a", "base"], opener, [{}], schedule, clock=fake.clock, must_run="base")
    assert list(timings.failed) == ["base"]
    assert fake.opened.count("a") <= 1


def test_interruption_is_not_taken_for_a_failure():
    def opener(name: str) -> FakeRunner:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_interleaved(["a"], opener, [{}], Schedule(1, 0.0, 1))


def test_progress_is_told_by_round():
    fake = FakeBench({"a": 0.01})
    told: list[tuple[int, int | None]] = []
    timed(fake, ["a"], rounds=3, progress=lambda *done: told.append(done))
    assert told == [(1, 3), (2, 3), (3, 3)]
