"""Races on a clock that only the fakes move, and some on the installed runtime."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kenosis_ort.bench.harness import MARGIN, Verdict
from kenosis_ort.errors import VerificationError
from kenosis_ort.runtime.counting import counted
from kenosis_ort.targets.model import TimedRuntime
from kenosis_ort.targets.ort_cpu.work import open_runner, opener
from kenosis_ort.tuning.races import CLEAR, INTERIM_ROUNDS, ORDINARY, Race, RaceSetup, early, quietest, race
from tests import models
from tests.bench.fakes import FEED, Disturbed, FakeStadium, net
from tests.bench.test_harness import MIRRORED

ratios = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=70)


def run(stadium: FakeStadium, *, budget_s: float = 100.0, **keywords) -> Race:
    return race(net("float"), net("int8"), stadium.setup(), budget_s=budget_s, **keywords)


@pytest.mark.parametrize(("reference", "own", "load", "verdict", "least"), [
    (0.2, 0.1, 0.1, Verdict.FASTER, 4), (30e-6, 60e-6, 0.01, Verdict.SLOWER, 1),  # which is timed in batches
])  # fmt: skip
def test_a_clear_race_ends_after_three_rounds(reference: float, own: float, load: float, verdict: Verdict, least: int):
    stadium = FakeStadium({"float": reference, "int8": own}, load=load)
    found = run(stadium)
    assert (found.rounds, found.comparison.verdict) == (3, verdict)
    assert found.comparison.ratio == pytest.approx(reference / own)
    assert (found.milliseconds, found.reference_milliseconds) == pytest.approx((1e3 * own, 1e3 * reference))
    assert stadium.clock() - 1000 < least


def test_only_near_the_callers_border_more_rounds_than_usual_are_made():
    def rounds(cost: float, border: float | None) -> list[int]:
        costs = {"float": 0.01, "int8": cost}
        return [run(FakeStadium(costs, spread=0.03, seed=seed), border=border).rounds for seed in range(5)]

    assert max(rounds(0.01 * MARGIN, 1 / MARGIN)) == INTERIM_ROUNDS[-1]
    assert max(rounds(0.01 * MARGIN, None)) <= ORDINARY
    assert max(rounds(0.0085, 1 / MARGIN)) <= ORDINARY
    assert min(rounds(0.0098, None)) > 8, "a small difference takes all the rounds it needs"


def test_a_model_that_does_not_run_has_no_comparison_and_a_reference_is_an_error():
    found = run(FakeStadium({"float": 0.01, "int8": RuntimeError("no such\n kernel")}))
    assert found.comparison is None
    assert "no such kernel" in found.reason
    with pytest.raises(VerificationError, match="out of order"):
        run(FakeStadium({"float": RuntimeError("out of order"), "int8": 0.01}))


@pytest.mark.parametrize("budget_s", [0.0, 1.0, 5.0, 20.0])
def test_the_budget_is_kept_but_for_the_first_round(budget_s: float):
    stadium = FakeStadium({"float": 0.2, "int8": 0.2}, load=0.1)
    found = run(stadium, budget_s=budget_s)
    first_round = 2 * (0.1 + 0.2 + 0.2 + 0.2)  # opened, probed, warmed up, timed
    assert stadium.clock() - 1000 <= max(budget_s, first_round) + 0.2 + 1e-9
    assert found.rounds >= 1
    if budget_s == 5.0:
        assert found.rounds < 6
        assert found.comparison.verdict is Verdict.NOISY


def test_the_order_is_the_seeds():
    stadiums = [FakeStadium({"float": 0.01, "int8": 0.01}, spread=0.1) for _ in range(3)]
    for stadium, seed in zip(stadiums, (1, 1, 2), strict=True):
        run(stadium, seed=seed)
    assert stadiums[0].opened == stadiums[1].opened != stadiums[2].opened


def test_equal_models_are_rarely_called_different():
    stadiums = [FakeStadium({"float": 0.01, "int8": 0.01}, spread=0.08, seed=seed) for seed in range(100)]
    verdicts = [run(stadium, seed=stadium.seed).comparison.verdict for stadium in stadiums]
    assert sum(verdict in (Verdict.FASTER, Verdict.SLOWER) for verdict in verdicts) <= 8  # two-sided, about 5 %


@pytest.mark.parametrize("seed", range(6))
def test_what_a_disturbance_does_to_the_models_unlike_does_not_count(seed: int):
    """Half of the time the machine is disturbed, which makes one model 1.5 times and the other 1.65 times slower."""
    stadium = Disturbed({"float": 20e-6, "int8": 20e-6}, slower={"float": 1.5, "int8": 1.65}, load=0.001, seed=seed)
    assert run(stadium, border=1 / MARGIN).comparison.ratio == pytest.approx(1, abs=0.01)


@given(ratios, st.floats(1.0, 3.0))
def test_the_quietest_rounds_prefer_neither_model(times: list[float], factor: float):
    ones = [factor] * len(times)
    own, reference = quietest(times, ones), quietest(ones, times)
    assert own == reference[::-1]
    assert len(own[0]) == min(len(times), max(8, math.ceil(len(times) / 4)))
    assert max(own[0]) <= min((t for t in times if t not in own[0]), default=math.inf)


@given(ratios)
def test_exchanging_the_series_mirrors_the_verdict(times: list[float]):
    assume(all(abs(abs(math.log(t)) - math.log(limit)) > 1e-9 for t in times for limit in (MARGIN, CLEAR)))
    there, back = early(times, [1.0] * len(times)), early([1.0] * len(times), times)
    assert (there is None) == (back is None)
    if there is not None:
        assert back.verdict is MIRRORED.get(there.verdict, there.verdict)
        assert (back.ratio, back.low) == pytest.approx((1 / there.ratio, 1 / there.high))


@pytest.mark.parametrize(("times", "verdict"), [
    ([2.0] * 2, None), ([2.0] * 3, Verdict.FASTER), ([0.5] * 3, Verdict.SLOWER), ([1.2] * 3, None),
    ([2.0, 2.0, 1.1], None), ([2.0, 2.0, 1.3], Verdict.FASTER), ([1.1] * 7, None), ([1.1] * 8, Verdict.FASTER),
    ([1.1] * 7 + [0.9], None), ([1.0] * 8, None), ([1.0] * 12, Verdict.SAME), ([0.0] * 12, None),
])  # fmt: skip
def test_what_it_takes(times: list[float], verdict: Verdict | None):
    found = early(times, [1.0] * len(times))
    assert (None if found is None else found.verdict) is verdict


def test_a_race_about_a_border_ends_where_it_is_clear_on_which_side_the_ratio_lies():
    reference = [1.0] * 8
    own = [0.89, 0.9, 0.885, 0.895, 0.89, 0.9, 0.89, 0.885]
    found = early(reference, own, border=0.98)
    assert found.low > 1.1
    assert early(reference, [*own[:-1], 1.03], border=0.98) is None
    assert early(reference[:5], own[:5], border=0.98) is None
    near = [0.99, 1.0, 0.985, 0.995, 0.99, 1.0, 0.99, 0.985]
    assert early(reference, near, border=0.98) is None, "a disturbance may have lasted as long"
    assert early(reference * 3, near * 3, border=0.98) is not None


@pytest.mark.real_clock
def test_one_thread_is_timed_by_its_own_processor_time_and_so_is_its_budget():
    own = time.thread_time if time.get_clock_info("thread_time").resolution <= 1e-6 else time.perf_counter
    stadium, elsewhere = FakeStadium({}), TimedRuntime(open_runner, clock=time.monotonic)
    for setup, timer, budget in (
        (RaceSetup([FEED]), own, own),  # a load takes nothing of the budget
        (RaceSetup([FEED], threads=2), time.perf_counter, time.perf_counter),  # work of other threads would not count
        (RaceSetup([FEED], custom_op_libraries=("ops.so",)), time.perf_counter, time.perf_counter),
        (RaceSetup([FEED], runtime=elsewhere), time.monotonic, time.perf_counter),
        (stadium.setup(), stadium.clock, stadium.clock),
    ):
        assert (setup.timer, setup.budget) == (timer, budget)
    with pytest.raises(ValueError, match="feed"):
        RaceSetup([])


def test_what_other_programs_take_does_not_count():
    """Half of the wall time passes without the thread: the ratio is that of the thread's time."""
    stadium = FakeStadium({"float": 0.02, "int8": 0.01})
    setup = replace(stadium.setup(runtime={"clock": stadium.clock}), clock=lambda: 3 * stadium.clock())
    found = race(net("float"), net("int8"), setup, budget_s=1000)
    assert (found.comparison.ratio, found.reference_milliseconds) == pytest.approx((2, 20))


def test_what_all_sessions_of_a_model_share_is_done_once():
    stadium, prepared = FakeStadium({"float": 0.2, "int8": 0.19}), []

    def make(source, **_):
        prepared.append(source)
        return lambda: stadium.opened_of(source)

    race(net("float"), net("int8"), stadium.setup(runtime={"opener": make}), budget_s=100)
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
    assert [value.name for value in again().get_inputs()] == [value.name for value in model.graph.input]
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(VerificationError, match="NoSuchOperator"):
        opener(model.SerializeToString(), **options)()


def test_feeds_take_turns():
    stadium = FakeStadium({"float": 0.01, "int8": 0.01})
    feeds = [{"x": np.full(1, i, np.float32)} for i in range(3)]
    race(net("float"), net("int8"), stadium.setup(feeds=feeds), budget_s=100)
    assert {int(feed["x"][0]) for _, feed in stadium.runs} == {0, 1, 2}
