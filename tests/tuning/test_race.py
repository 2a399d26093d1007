"""Races on a clock that only the fakes move, and one on the installed runtime."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kenosis_ort.bench.noise import Verdict
from kenosis_ort.errors import VerificationError
from kenosis_ort.runtime.session import counted
from kenosis_ort.targets.ort_cpu.session import open_runner, opener
from kenosis_ort.tuning.looks import FULL, SCREENING
from kenosis_ort.tuning.race import Track, race
from tests import models
from tests.tuning.fakes import FEED, FakeStadium, net


def run(stadium: FakeStadium, *, budget_s: float = 100.0, **keywords):
    nets = {name: net(name) for name in stadium.seconds}
    return race(nets, stadium.track(), baseline="float", budget_s=budget_s, **keywords)


def test_a_clear_win_ends_after_three_rounds():
    stadium = FakeStadium({"float": 0.2, "int8": 0.1}, load=0.1)
    found = run(stadium)
    standing = found.standing("int8")
    assert standing.rounds == 3
    assert standing.comparison.verdict is Verdict.FASTER
    assert standing.comparison.ratio == pytest.approx(2)
    assert standing.milliseconds == pytest.approx(100)
    assert found.milliseconds == pytest.approx(200)
    assert found.seconds == pytest.approx(stadium.clock() - 1000)
    assert found.seconds < 4


def test_a_microsecond_net_is_timed_in_batches_and_decided_within_a_second():
    stadium = FakeStadium({"float": 30e-6, "int8": 60e-6}, load=0.01)
    found = run(stadium)
    assert found.standing("int8").comparison.verdict is Verdict.SLOWER
    assert found.standing("int8").milliseconds == pytest.approx(0.06)
    assert found.milliseconds == pytest.approx(0.03)
    assert found.seconds < 1


def test_a_small_difference_takes_all_the_rounds_it_needs():
    stadium = FakeStadium({"float": 0.0103, "int8": 0.01}, spread=0.05, seed=1)
    assert run(stadium).standing("int8").rounds > 8


def test_a_decided_model_leaves_the_race_and_the_others_go_on():
    stadium = FakeStadium({"float": 0.01, "clear": 0.005, "close": 0.0098}, spread=0.03)
    found = run(stadium)
    assert found.standing("clear").rounds < found.standing("close").rounds
    assert stadium.opened.count("clear") == found.standing("clear").rounds
    assert stadium.opened.count("float") == found.standing("close").rounds


def test_a_model_that_does_not_run_is_dropped_with_the_message():
    stadium = FakeStadium({"float": 0.01, "broken": RuntimeError("no such\n kernel"), "int8": 0.005})
    found = run(stadium)
    assert found.standing("broken") is None
    assert "no such kernel" in found.why_dropped("broken")
    assert found.standing("int8").comparison.verdict is Verdict.FASTER


def test_a_baseline_that_does_not_run_is_an_error():
    with pytest.raises(VerificationError, match="out of order"):
        run(FakeStadium({"float": RuntimeError("out of order"), "int8": 0.01}))


def test_without_a_contender_nothing_is_timed():
    found = run(FakeStadium({"float": 0.01}))
    assert not found.standings
    assert not found.dropped


@pytest.mark.parametrize("budget_s", [0.0, 1.0, 5.0, 20.0])
def test_the_budget_is_kept_but_for_the_first_round(budget_s: float):
    stadium = FakeStadium({"float": 0.2, "same": 0.2}, load=0.1)
    found = run(stadium, budget_s=budget_s)
    first_round = 2 * (0.1 + 0.2 + 0.2 + 0.2)  # opened, probed, warmed up, timed
    assert found.seconds <= max(budget_s, first_round) + 0.2 + 1e-9
    assert found.standing("same").rounds >= 1


def test_a_budget_for_few_rounds_gives_no_verdict_but_a_clear_one():
    close = run(FakeStadium({"float": 0.2, "int8": 0.19}, load=0.1), budget_s=4)
    assert close.standing("int8").rounds < 6
    assert close.standing("int8").comparison.verdict is Verdict.NOISY


def test_screening_is_shorter():
    stadium = FakeStadium({"float": 0.01, "close": 0.01}, spread=0.05)
    assert run(stadium, looks=SCREENING).standing("close").rounds == SCREENING.most
    assert run(stadium, looks=FULL).standing("close").rounds > SCREENING.most


def test_the_order_is_the_seeds():
    def order(seed: int) -> list[str]:
        stadium = FakeStadium({"float": 0.01, "a": 0.01, "b": 0.01}, spread=0.1)
        run(stadium, seed=seed)
        return stadium.opened

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_equal_models_are_rarely_called_different():
    wrong = 0
    for seed in range(100):
        stadium = FakeStadium({"float": 0.01, "same": 0.01}, spread=0.08, seed=seed)
        verdict = run(stadium, seed=seed).standing("same").comparison.verdict
        wrong += verdict in (Verdict.FASTER, Verdict.SLOWER)
    assert wrong <= 8  # two-sided, about 5 %


def test_a_track_needs_a_feed():
    with pytest.raises(ValueError, match="feed"):
        Track([])


@pytest.mark.real_clock
def test_one_thread_is_timed_by_its_own_processor_time():
    fine = time.get_clock_info("thread_time").resolution <= 1e-6
    assert Track([FEED]).timer is (time.thread_time if fine else time.perf_counter)
    assert Track([FEED], threads=2).timer is time.perf_counter  # work of other threads would not count
    assert Track([FEED], custom_op_libraries=("ops.so",)).timer is time.perf_counter  # it may have threads of its own
    assert Track([FEED], stopwatch=time.monotonic).timer is time.monotonic
    stadium = FakeStadium({})
    assert stadium.track().timer is stadium.clock


def test_what_other_programs_take_does_not_count():
    """Half of the wall time passes without the thread: the ratio is that of the thread's time."""
    stadium = FakeStadium({"float": 0.02, "int8": 0.01})
    processor = stadium.clock

    def wall() -> float:
        return 3 * processor()

    track = Track([FEED], clock=wall, stopwatch=processor, open_runner=stadium.open)
    found = race({n: net(n) for n in ("float", "int8")}, track, baseline="float", budget_s=1000)
    assert found.standing("int8").comparison.ratio == pytest.approx(2)
    assert found.milliseconds == pytest.approx(20)
    assert found.seconds == pytest.approx(wall() - 3000)


@pytest.mark.real_clock
def test_on_the_installed_runtime():
    float_model = models.conv_relu_chain(2)
    broken = models.conv_relu_chain(2)
    broken.graph.node[0].op_type = "NoSuchOperator"
    feeds = models.feeds(float_model, 2)
    before = float_model.SerializeToString()
    found = race({"a": float_model, "b": float_model, "c": broken}, Track(feeds), baseline="a", budget_s=0.4)
    assert found.standing("b").milliseconds > 0
    assert np.isfinite(found.standing("b").comparison.ratio)
    assert "NoSuchOperator" in found.why_dropped("c")
    assert float_model.SerializeToString() == before


def test_what_all_sessions_of_a_model_share_is_done_once():
    stadium, prepared = FakeStadium({"float": 0.2, "int8": 0.19}), []

    def make(source):
        prepared.append(source)
        return lambda: stadium.open(source)

    track = Track([FEED], clock=stadium.clock, open_runner=stadium.open, make_opener=make)
    race({n: net(n) for n in ("float", "int8")}, track, baseline="float", budget_s=100)
    assert len(prepared) == 2
    assert stadium.opened.count("int8") > 3


@pytest.mark.real_clock
def test_the_runtime_opens_what_it_has_optimized_once():
    model = models.residual_block()
    feed, options = models.feeds(model, 1)[0], {"threads": 1, "custom_op_libraries": ()}
    with counted() as counts:
        again = opener(model.SerializeToString(), **options)
        outputs = [again().run(None, feed) for _ in range(3)]
    assert counts.total.sessions == 3
    for found in outputs:
        np.testing.assert_array_equal(found, open_runner(model.SerializeToString(), **options).run(None, feed))
    names = {value.name for value in again().get_inputs()}
    assert names == {value.name for value in model.graph.input}
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(VerificationError, match="NoSuchOperator"):
        opener(model.SerializeToString(), **options)()


def test_feeds_take_turns():
    stadium = FakeStadium({"float": 0.01, "same": 0.01})
    seen = []
    feeds = [{"x": np.full(1, i, np.float32)} for i in range(3)]
    opened = stadium.open

    def spying(source):
        runner = opened(source)
        run = runner.run
        runner.run = lambda names, feed: (seen.append(int(feed["x"][0])), run(names, feed))[1]
        return runner

    track = Track(feeds, clock=stadium.clock, open_runner=spying)
    race({n: net(n) for n in ("float", "same")}, track, baseline="float", budget_s=100)
    assert set(seen) == {0, 1, 2}
