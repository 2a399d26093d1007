"""Races on a clock that only the fakes move, and which form they let be delivered; some on the installed runtime."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, strategies as st

from kenosis_ort.bench.harness import MARGIN, SpeedComparison, Verdict
from kenosis_ort.errors import VerificationError
from kenosis_ort.runtime.counting import counted
from kenosis_ort.targets.model import TimedRuntime
from kenosis_ort.targets.ort_cpu.work import open_runner, opener
from kenosis_ort.tuning import promise
from kenosis_ort.tuning.promise import Basis, Estimate, Form, keep_promise
from kenosis_ort.tuning.races import CLEAR, INTERIM_ROUNDS, ORDINARY, RaceSetup, early, quietest, race
from tests import models
from tests.bench.test_harness import MIRRORED, FakeBench
from tests.planning import parse

FEED = {"x": np.zeros(1, np.float32)}


def net(name):
    """A valid model that carries a name."""
    return parse(f"{name} (float[1] x) => (float[1] y) {{ y = Relu (x) }}")


@dataclass
class FakeStadium(FakeBench):
    """Opens named models."""

    load: float = 0.01

    def opened_of(self, source):
        return self.open(onnx.load_model_from_string(source).graph.name)

    def setup(self, *, feeds=(FEED,), **keywords):
        runtime = replace(TimedRuntime(lambda source, **_: self.opened_of(source)), **keywords.pop("runtime", {}))
        return RaceSetup(feeds, clock=self.clock, runtime=runtime, **keywords)


@dataclass
class Disturbed(FakeStadium):
    """A machine that something else disturbs for half of the time, a twentieth of a second at once.

    Attributes:
        slower: By how much, by the model's name.
    """

    slower: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        self.calm = self.rng.random(4096) < 1 / 2

    def cost(self, name, ran):
        calm = self.calm[int(self.now / 0.05) % len(self.calm)]
        return super().cost(name, ran) * (1.0 if calm else self.slower[name])


ratios = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=70)


def run(stadium, *, budget_s=100.0, **keywords):
    return race(net("float"), net("int8"), stadium.setup(), budget_s=budget_s, **keywords)


@pytest.mark.parametrize(("reference", "own", "load", "verdict", "least"), [
    (0.2, 0.1, 0.1, Verdict.FASTER, 4), (30e-6, 60e-6, 0.01, Verdict.SLOWER, 1),  # which is timed in batches
])  # fmt: skip
def test_a_clear_race_ends_after_three_rounds(reference, own, load, verdict, least):
    stadium = FakeStadium({"float": reference, "int8": own}, load=load)
    found = run(stadium)
    assert (found.rounds, found.comparison.verdict, found.comparison.ratio) == (
        3,
        verdict,
        pytest.approx(reference / own),
    )
    assert (found.milliseconds, found.reference_milliseconds) == pytest.approx((1e3 * own, 1e3 * reference))
    assert stadium.clock() - 1000 < least


def test_only_near_the_callers_border_more_rounds_than_usual_are_made():
    def rounds(cost, border):
        costs = {"float": 0.01, "int8": cost}
        return [run(FakeStadium(costs, spread=0.03, seed=seed), border=border).rounds for seed in range(5)]

    assert max(rounds(0.01 * MARGIN, 1 / MARGIN)) == INTERIM_ROUNDS[-1]
    assert max(rounds(0.01 * MARGIN, None)) <= ORDINARY
    assert max(rounds(0.0085, 1 / MARGIN)) <= ORDINARY
    assert min(rounds(0.0098, None)) > 8, "a small difference takes all the rounds it needs"


def test_a_model_that_does_not_run_has_no_comparison_and_a_reference_is_an_error():
    found = run(FakeStadium({"float": 0.01, "int8": RuntimeError("no such\n kernel")}))
    assert (found.comparison, "no such kernel" in found.reason) == (None, True)
    with pytest.raises(VerificationError, match="out of order"):
        run(FakeStadium({"float": RuntimeError("out of order"), "int8": 0.01}))


@pytest.mark.parametrize("budget_s", [0.0, 1.0, 5.0, 20.0])
def test_the_budget_is_kept_but_for_the_first_round(budget_s):
    stadium = FakeStadium({"float": 0.2, "int8": 0.2}, load=0.1)
    found = run(stadium, budget_s=budget_s)
    first_round = 2 * (0.1 + 0.2 + 0.2 + 0.2)  # opened, probed, warmed up, timed
    assert stadium.clock() - 1000 <= max(budget_s, first_round) + 0.2 + 1e-9
    assert found.rounds >= 1
    if budget_s == 5.0:
        assert (found.rounds < 6, found.comparison.verdict) == (True, Verdict.NOISY)


def test_the_order_is_the_seeds():
    stadiums = [FakeStadium({"float": 0.01, "int8": 0.01}, spread=0.1) for _ in range(3)]
    for stadium, seed in zip(stadiums, (1, 1, 2), strict=True):
        run(stadium, seed=seed)
    assert stadiums[0].opened == stadiums[1].opened != stadiums[2].opened


@pytest.mark.parametrize("seed", range(6))
def test_what_a_disturbance_does_to_the_models_unlike_does_not_count(seed):
    """Half of the time the machine is disturbed, which makes one model 1.5 times and the other 1.65 times slower."""
    stadium = Disturbed({"float": 20e-6, "int8": 20e-6}, slower={"float": 1.5, "int8": 1.65}, load=0.001, seed=seed)
    assert run(stadium, border=1 / MARGIN).comparison.ratio == pytest.approx(1, abs=0.01)


@given(ratios, st.floats(1.0, 3.0))
def test_the_quietest_rounds_prefer_neither_model(times, factor):
    ones = [factor] * len(times)
    own, reference = quietest(times, ones), quietest(ones, times)
    assert (own, len(own[0])) == (reference[::-1], min(len(times), max(8, math.ceil(len(times) / 4))))
    assert max(own[0]) <= min((t for t in times if t not in own[0]), default=math.inf)


@given(ratios)
def test_exchanging_the_series_mirrors_the_verdict(times):
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
def test_what_it_takes(times, verdict):
    found = early(times, [1.0] * len(times))
    assert (None if found is None else found.verdict) is verdict


def test_a_race_about_a_border_ends_where_it_is_clear_on_which_side_the_ratio_lies():
    own = [0.89, 0.9, 0.885, 0.895, 0.89, 0.9, 0.89, 0.885]
    near = [
        0.99,
        1.0,
        0.985,
        0.995,
        0.99,
        1.0,
        0.99,
        0.985,
    ]  # a disturbance may last for these, not for three times as long
    assert early([1.0] * 8, own, border=0.98).low > 1.1
    for times, tells in (([*own[:-1], 1.03], False), (own[:5], False), (near, False), (near * 3, True)):
        assert (early([1.0] * len(times), times, border=0.98) is not None) is tells, times


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
    assert (len(prepared), stadium.opened.count("int8") > 3) == (2, True)


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


# ---- which form is taken --------------------------------------------------------------------------------------------


FLOAT_FORM = Form("fp32", "the float model", lambda: net("float"), is_float=True)


def form(name):
    return Form(name, f"form {name}", lambda: net(name))


def consider(stadium, candidates=None, quality=lambda _: 30.0, **more):
    """The record, of all forms that the stadium knows by default; the model that is delivered is the one taken.

    ``quality`` gives the signal of a model's output in dB.
    """
    ladder = candidates or [*(form(name) for name in stadium.seconds if name != "float"), FLOAT_FORM]
    compared = lambda _, model, *__, **___: [SimpleNamespace(name="y", sqnr_db=quality(model))]  # noqa: E731
    with patch.object(promise, "compare_outputs", compared):
        model, found = keep_promise(net("float"), ladder, stadium.setup(name="one"), **{"budget_s": 100.0, **more})
    assert model.graph.name == ("float" if found.taken.name == "fp32" else found.taken.name)
    return found


@pytest.mark.parametrize(("costs", "quality", "expected", "said"), [
    ({"int8": 0.01, "weights": 0.001}, {}, "taken spare spare", {0: "2.00x of"}),
    ({"int8": 0.017, "weights": 0.001}, {}, "taken spare spare", {1: "not needed"}),  # it is clearly faster
    ({"int8": 0.0194, "weights": 0.014, "coarse": 0.01}, {"weights": 45.0, "coarse": 12.0}, "outrun taken spare spare",
     {0: "weights has", 2: "dB less"}),  # hardly faster, it is held against the others too
    ({"int8": 0.04, "regions": 0.03, "fair": 0.0194, "best": 0.014, "less": 0.016}, {},
     "slower slower outrun taken spare spare", {0: "only 0.50x", 3: "1.43x"}),
], ids=["faster", "clearly faster", "hardly faster", "slower"])  # fmt: skip
def test_which_form_is_taken(costs, quality, expected, said):
    """The first that is faster, and what is built and opened beside it; the float model takes 20 ms."""
    stadium = FakeStadium({**costs, "float": 0.02})
    forms = [form(n) for n in costs]
    if expected == "taken spare spare":
        forms[1:] = [each._replace(build=Mock(side_effect=AssertionError("built"))) for each in forms[1:]]
    found = consider(stadium, [*forms, FLOAT_FORM], quality=lambda model: quality.get(model.graph.name, 30.0))
    assert [record.status for record in found.candidates] == expected.split()
    assert all(text in found.candidates[at].reason for at, text in said.items())
    taken, cost = found.taken, costs[found.taken.name]
    assert (taken.verdict, found.basis) == ("faster", Basis.MEASURED)
    assert (taken.milliseconds, taken.ratio, found.float_milliseconds) == pytest.approx((1e3 * cost, 0.02 / cost, 20))
    assert f"{taken.ratio:.2f}x" in found.sentence()
    assert "coarse" not in stadium.opened, "what it computes is asked before its speed"


def test_a_rung_that_fails_is_dropped_and_named():
    candidates = [
        Form("broken", "", Mock(side_effect=VerificationError("the bias is off", where="conv"))),
        Form("buggy", "", Mock(side_effect=KeyError("scale"))), Form("absent", "", lambda: None),
        *map(form, ("unloadable", "wrong", "good")), FLOAT_FORM,
    ]  # fmt: skip
    stadium = FakeStadium({"float": 0.01, "unloadable": RuntimeError("NOT_IMPLEMENTED"), "wrong": 0.001, "good": 0.005})
    outcome = consider(stadium, candidates, lambda m: 3.0 if m.graph.name == "wrong" else 30.0)
    assert [(record.status, record.reason) for record in outcome.candidates[:5]] == [
        ("dropped", "it cannot be built: the bias is off"), ("dropped", "it cannot be built: KeyError: 'scale'"),
        ("absent", "this net has no such form"), ("dropped", "it does not run: NOT_IMPLEMENTED"),
        ("dropped", "output 'y' keeps only 3.0 dB of the float model's"),
    ]  # fmt: skip
    assert (outcome.taken.name, "wrong" in stadium.opened) == ("good", False)
    checked = [form("wrong")._replace(checked=True), FLOAT_FORM]
    assert consider(stadium, checked, Mock(side_effect=AssertionError("asked"))).taken.name == "wrong"


def test_where_no_race_tells_the_cost_table_does_or_the_float_model_stays():
    undecided, hurried = 0, consider(FakeStadium({"float": 0.01, "int8": 0.02}), budget_s=0.0)
    assert "undecided: the time is too short to tell (0.50x" in hurried.candidates[0].reason
    assert consider(FakeStadium({"float": 0.01, "int8": 0.009}), budget_s=0.0).basis == Basis.UNDECIDED
    clear = consider(FakeStadium({"float": 0.01, "int8": 0.005}), budget_s=0.0)  # no noise makes up for twice the speed
    reason = "2.00x of the float model's speed for one (2.00 to 2.00), measured"
    assert (clear.taken.name, clear.basis, clear.candidates[0].reason) == ("int8", Basis.MEASURED, reason)
    for seed in range(10):
        stadium = FakeStadium({"float": 0.01, "int8": 0.0105}, spread=0.5, seed=seed)
        outcome = consider(stadium)
        if outcome.basis == Basis.MEASURED:
            continue
        undecided += 1
        assert (outcome.taken.name, outcome.basis) == ("fp32", Basis.UNDECIDED)
        assert "the machine is too noisy to tell" in outcome.candidates[0].reason
        assert "the cost table says nothing of it" in outcome.candidates[0].reason
        for speed, taken in ((2.0, "int8"), (0.7, "fp32")):
            estimated = form("int8")._replace(estimate=lambda speed=speed: Estimate(speed, 1.4))
            told = consider(FakeStadium(stadium.seconds, spread=0.5, seed=seed), [estimated, FLOAT_FORM])
            assert (told.taken.name, told.basis) == (taken, Basis.ESTIMATED if taken == "int8" else Basis.UNDECIDED)
            assert f"estimated at {speed:.2f}x" in told.candidates[0].reason
    assert undecided >= 7, "an interval of 95 % is wrong now and then"


@given(st.floats(0.2, 5), st.floats(1, 3), st.floats(0.3, 3), st.floats(1, 4), st.floats(1, 3))
def test_an_estimate_and_a_race_are_weighed(speed, error, ratio, noise, more):
    def tells(speed, ratio, noise):
        return Estimate(speed, error).tells_faster(SpeedComparison(ratio, ratio / noise, ratio * noise, Verdict.NOISY))

    hardly = SpeedComparison(0.93, 0.89, 0.985, Verdict.SLOWER)  # misses the border, and outweighs the table
    assert not Estimate(1.53, 1.42).tells_faster(hardly)
    assert Estimate(1.53, 1.42).tells_faster(replace(hardly, low=0.4, high=2.1, verdict=Verdict.NOISY))
    assert Estimate(speed, error).tells_faster() == (speed >= error)
    if min(speed, ratio) >= 1 / MARGIN * 1.001:
        assert tells(speed, ratio, noise), "both say so"
    if max(speed, ratio) < 1 / MARGIN / 1.001:
        assert not tells(speed, ratio, noise), "neither does"
    if tells(speed, ratio, noise):
        assert tells(speed * more, ratio, noise)
        assert tells(speed, ratio * more, noise)


@pytest.mark.parametrize(("at", "expected"), [
    (0, "absent undecided untimed taken"), (1, "slower absent untimed taken"), (2, "slower taken absent spare"),
])  # fmt: skip
def test_where_the_time_is_over_the_float_model_stays(at, expected):
    """A single round tells nothing of a form that comes late; one found slower gives way to the float model."""
    stadium = FakeStadium({"float": 1.0, "int8": 2.0, "weights": 0.1}, load=1.0)

    def late():
        stadium.now += 1000

    candidates = [form("int8"), form("weights"), FLOAT_FORM]
    candidates.insert(at, Form("late", "", late))
    found = consider(stadium, candidates, budget_s=60.0)
    assert [record.status for record in found.candidates] == expected.split()
    assert (found.basis == Basis.UNDECIDED) == (at < 2)


def test_the_float_model_has_to_run_and_to_be_the_last_form():
    with pytest.raises(VerificationError, match="boom"):
        consider(FakeStadium({"float": RuntimeError("boom"), "int8": 0.01}))
    with pytest.raises(ValueError, match="float model"):
        consider(FakeStadium({"float": 0.01}), [form("int8")])


def test_a_form_must_be_slower_in_no_situation():
    prompts, tokens = FakeStadium({"float": 0.02, "int8": 0.01}), FakeStadium({"float": 0.001, "int8": 0.002})
    further = [tokens.setup(name="tokens")]
    outcome = consider(prompts, further=further)
    assert [record.status for record in outcome.candidates] == ["slower", "taken"]
    assert outcome.candidates[0].reason.startswith("only 0.50x of the float model's speed for tokens")
    assert outcome.float_milliseconds == pytest.approx(20)


def challenged(dynamic, long=None, **more):
    """What becomes of INT8 and of one that challenges it, by the latter's time of a run and of a long one."""
    further = [FakeStadium({"float": 2, "int8": 1.0, "dynamic": long}).setup(name="long")] if long else []
    candidates = [form("int8")._replace(checked=True), form("dynamic")._replace(challenges=True), FLOAT_FORM]
    stadium = FakeStadium({"float": 0.02, "int8": 0.01, "dynamic": dynamic})
    return consider(stadium, candidates, further=further, **more)


@pytest.mark.parametrize(("dynamic", "long", "worse", "taken", "says"), [
    (0.008, None, "", "dynamic", "1.25x of the speed of form int8"), (0.008, None, "int8", "dynamic", ""),
    (0.008, None, "dynamic", "int8", ""),  # it computes worse
    (0.0099, None, "", "int8", ""),  # within the margin
    (0.0097, None, "", "int8", ""),  # clearly faster, but not worth it
    (0.005, 1.1, "", "dynamic", "1.35x of the speed of form int8 (2.00x for one, 0.91x for long)"),  # over all
    (0.005, 3.0, "", "int8", ""), (0.001, 3.0, "", "int8", ""),  # slower than float in one
])  # fmt: skip
def test_a_faster_form_that_computes_as_well_takes_the_place(dynamic, long, worse, taken, says):
    outcome = challenged(dynamic, long, quality=lambda model: 35.0 if model.graph.name == worse else 40.0)
    assert (outcome.taken.name, says in outcome.candidates[0].reason) == (taken, True)
    assert taken == "int8" or [r.status for r in outcome.candidates] == ["outrun", "taken", "spare"]
    assert taken == "int8" or outcome.taken.ratio == pytest.approx(min(0.02 / dynamic, 2 / (long or 0.01)))


def test_a_challenger_that_fails_costs_nothing():
    outcome = challenged(0.005, quality=Mock(side_effect=VerificationError("it does not run", where="conv")))
    assert [r.status for r in outcome.candidates] == ["taken", "dropped", "spare"]
