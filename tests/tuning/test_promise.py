"""Which form is taken: on a made-up clock, and once on the installed runtime."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.bench.harness import MARGIN, SpeedComparison, Verdict
from kenosis_ort.errors import VerificationError
from kenosis_ort.report import SpeedSummary
from kenosis_ort.tuning.promise import Basis, Estimate, Form, FormStatus, keep_promise
from kenosis_ort.tuning.races import RaceSetup
from tests import models
from tests.flow.support import changed
from tests.tuning.fakes import FakeStadium, net

FLOAT_FORM = Form("fp32", "the float model", lambda: net("float"), is_float=True)


def form(name: str) -> Form:
    return Form(name, f"form {name}", lambda: net(name))


def deliver(stadium: FakeStadium, candidates: Sequence[Form], **more: Any) -> tuple[str, SpeedSummary]:
    """The name of the model that is delivered, and the record."""
    how = {"budget_s": 100.0, "usable": lambda model: None, **more}
    model, found = keep_promise(net("float"), candidates, stadium.setup(), **how)
    return model.graph.name, found


def consider(stadium: FakeStadium, candidates: Sequence[Form], **more: Any) -> SpeedSummary:
    return deliver(stadium, candidates, **more)[1]


def statuses(found: SpeedSummary) -> dict[str, str]:
    return {record.name: record.status for record in found.candidates}


def test_a_faster_plan_is_taken_and_nothing_else_is_built():
    def never() -> onnx.ModelProto:
        raise AssertionError("built")

    stadium = FakeStadium({"float": 0.02, "int8": 0.01})
    name, found = deliver(stadium, [form("int8"), Form("weights", "weight-only", never), FLOAT_FORM])
    assert name == found.taken.name == "int8"
    assert statuses(found) == {"int8": FormStatus.TAKEN, "weights": FormStatus.SPARE, "fp32": FormStatus.SPARE}
    assert found.taken.verdict == "faster"
    assert found.taken.milliseconds == pytest.approx(10)
    assert found.float_milliseconds == pytest.approx(20)
    assert found.basis == Basis.MEASURED
    assert "2.00x" in found.sentence()


def test_a_slower_plan_gives_way_to_the_best_of_the_others():
    stadium = FakeStadium({"float": 0.01, "int8": 0.02, "regions": 0.015, "fair": 0.0097, "best": 0.007, "less": 0.008})
    names = ["int8", "regions", "fair", "best", "less"]
    outcome = consider(stadium, [*(form(n) for n in names), FLOAT_FORM], quality=lambda model: 30.0)
    assert outcome.taken.name == "best"
    assert [record.status for record in outcome.candidates] == ["slower", "slower", "outrun", "taken", "spare", "spare"]
    assert outcome.candidates[0].ratio == pytest.approx(0.5)
    assert outcome.taken.ratio == pytest.approx(10 / 7)
    assert "only 0.50x" in outcome.candidates[0].reason


def test_a_plan_that_is_hardly_faster_is_held_against_the_others_too():
    costs = {"float": 0.0103, "int8": 0.01, "weights": 0.007, "coarse": 0.005}
    stadium = FakeStadium(costs)
    loss = {"int8": 30.0, "weights": 45.0, "coarse": 12.0}
    outcome = consider(
        stadium,
        [*map(form, ("int8", "weights", "coarse")), FLOAT_FORM],
        quality=lambda model: loss[model.graph.name],
    )
    assert outcome.taken.name == "weights"
    assert "dB less" in outcome.candidates[2].reason
    assert "coarse" not in stadium.opened, "what it computes is asked before its speed"


def test_a_plan_that_is_clearly_faster_is_not_held_against_the_others():
    stadium = FakeStadium({"float": 0.0115, "int8": 0.01, "weights": 0.007})
    assert consider(stadium, [form("int8"), form("weights"), FLOAT_FORM]).taken.name == "int8"
    assert "weights" not in stadium.opened


def test_a_rung_that_fails_is_dropped_and_named():
    def broken() -> onnx.ModelProto:
        raise VerificationError("the bias is off", where="conv")

    def buggy() -> onnx.ModelProto:
        raise KeyError("scale")

    candidates = [
        Form("broken", "", broken),
        Form("buggy", "", buggy),
        Form("absent", "", lambda: None),
        form("unloadable"),
        form("wrong"),
        form("good"),
        FLOAT_FORM,
    ]
    stadium = FakeStadium({"float": 0.01, "unloadable": RuntimeError("NOT_IMPLEMENTED"), "wrong": 0.001, "good": 0.005})
    outcome = consider(stadium, candidates, usable=lambda m: "only 3 dB" if m.graph.name == "wrong" else None)
    assert outcome.taken.name == "good"
    steps = {record.name: record for record in outcome.candidates}
    assert steps["broken"].reason == "it cannot be built: the bias is off"
    assert steps["buggy"].reason == "it cannot be built: KeyError: 'scale'"
    assert steps["absent"].status == FormStatus.ABSENT
    assert "NOT_IMPLEMENTED" in steps["unloadable"].reason
    assert steps["wrong"].reason == "only 3 dB"
    assert all(steps[n].status == FormStatus.DROPPED for n in ("broken", "buggy", "unloadable", "wrong"))
    assert "wrong" not in stadium.opened
    checked = [Form("wrong", "", lambda: net("wrong"), checked=True), FLOAT_FORM]
    assert consider(stadium, checked, usable=lambda _: "never asked").taken.name == "wrong"


def test_where_no_race_tells_the_cost_table_does_or_the_float_model_stays():
    undecided = 0
    for seed in range(10):
        stadium = FakeStadium({"float": 0.01, "int8": 0.0105}, spread=0.5, seed=seed)
        outcome = consider(stadium, [form("int8"), FLOAT_FORM])
        if outcome.basis == Basis.MEASURED:
            continue
        undecided += 1
        assert (outcome.taken.name, outcome.basis) == ("fp32", Basis.UNDECIDED)
        assert "the machine is too noisy to tell" in outcome.candidates[0].reason
        assert "the cost table says nothing of it" in outcome.candidates[0].reason
        for speed, taken in ((2.0, "int8"), (0.7, "fp32")):
            estimated = replace(form("int8"), estimate=lambda speed=speed: Estimate(speed, 1.4))
            told = consider(FakeStadium(stadium.seconds, spread=0.5, seed=seed), [estimated, FLOAT_FORM])
            assert (told.taken.name, told.basis) == (taken, Basis.ESTIMATED if taken == "int8" else Basis.UNDECIDED)
            assert f"estimated at {speed:.2f}x" in told.candidates[0].reason
    assert undecided >= 7, "an interval of 95 % is wrong now and then"


@given(
    speed=st.floats(0.2, 5), error=st.floats(1, 3), ratio=st.floats(0.3, 3), noise=st.floats(1, 4), more=st.floats(1, 3)
)
def test_an_estimate_and_a_race_are_weighed(speed: float, error: float, ratio: float, noise: float, more: float):
    def tells(speed: float, ratio: float, noise: float) -> bool:
        return Estimate(speed, error).tells_faster(SpeedComparison(ratio, ratio / noise, ratio * noise, Verdict.NOISY))

    assert Estimate(speed, error).tells_faster() == (speed >= error)
    if min(speed, ratio) >= 1 / MARGIN * 1.001:
        assert tells(speed, ratio, noise), "both say so"
    if max(speed, ratio) < 1 / MARGIN / 1.001:
        assert not tells(speed, ratio, noise), "neither does"
    if tells(speed, ratio, noise):
        assert tells(speed * more, ratio, noise)
        assert tells(speed, ratio * more, noise)


def test_a_race_that_hardly_misses_the_border_outweighs_the_table():
    race = SpeedComparison(0.93, 0.89, 0.985, Verdict.SLOWER)
    assert not Estimate(1.53, 1.42).tells_faster(race)
    assert Estimate(1.53, 1.42).tells_faster(SpeedComparison(0.93, 0.4, 2.1, Verdict.NOISY))


def test_a_lower_rung_that_looks_slower_is_not_taken_on_a_guess():
    # 0.97x with an interval around 1: enough to keep the plan, too little to choose another form for its speed.
    costs = {"float": 0.01, "int8": 0.02, "weights": 0.0104}
    taken = [consider(FakeStadium(costs, spread=0.08, seed=s), [form("int8"), form("weights"), FLOAT_FORM]).taken.name
             for s in range(6)]  # fmt: skip
    assert taken.count("fp32") >= 4


@pytest.mark.parametrize(("ratio", "taken"), [(1.05, "int8"), (1.01, "int8"), (1.0, "int8"), (0.96, "fp32")])
def test_the_choice_does_not_flip_between_runs(ratio: float, taken: str):
    costs = {"float": 0.01, "int8": 0.01 / ratio}
    name, still = deliver(FakeStadium(costs), [form("int8"), FLOAT_FORM])
    assert (still.taken.name, still.basis) == (taken, Basis.MEASURED)
    assert ratio != 1 or "not slower" in still.taken.reason
    assert name == ("int8" if taken == "int8" else "float")
    runs = [consider(FakeStadium(costs, spread=0.02, seed=s), [form("int8"), FLOAT_FORM]).taken.name for s in range(20)]
    assert runs.count(taken) >= 19


def test_a_slow_net_needs_time_for_a_verdict():
    stadium = FakeStadium({"float": 1.0, "int8": 2.0, "weights": 0.1}, load=1.0)
    outcome = consider(stadium, [form("int8"), form("weights"), FLOAT_FORM], budget_s=60.0)
    assert statuses(outcome)["int8"] == FormStatus.SLOWER
    slow = FakeStadium({"float": 1.0, "int8": 2.0, "weights": 0.1}, load=1.0)

    def waste() -> onnx.ModelProto:
        slow.bench.clock.now += 1000
        return net("int8")

    outcome = consider(slow, [Form("int8", "", waste), form("weights"), FLOAT_FORM], budget_s=30.0)
    assert outcome.taken.name == "fp32"  # a single round: no verdict, and nothing is known of it
    assert outcome.basis == Basis.UNDECIDED


def test_a_plan_found_slower_at_the_end_of_the_time_gives_way_to_the_float_model():
    stadium = FakeStadium({"float": 1.0, "int8": 2.0, "weights": 0.1})

    def late() -> onnx.ModelProto | None:
        stadium.bench.clock.now += 1000
        return None

    candidates = [form("int8"), Form("late", "", late), form("weights"), FLOAT_FORM]
    outcome = consider(stadium, candidates, budget_s=60.0)
    assert statuses(outcome) == {
        "int8": FormStatus.SLOWER, "late": FormStatus.ABSENT, "weights": FormStatus.UNTIMED, "fp32": FormStatus.TAKEN
    }  # fmt: skip


def test_the_float_model_has_to_run_and_to_be_the_last_form():
    with pytest.raises(VerificationError, match="boom"):
        consider(FakeStadium({"float": RuntimeError("boom"), "int8": 0.01}), [form("int8"), FLOAT_FORM])
    with pytest.raises(ValueError, match="float model"):
        consider(FakeStadium({"float": 0.01}), [form("int8")])


def test_on_the_installed_runtime_unusable_outputs_are_seen():
    float_model = models.mlp()
    zeroed = changed(float_model, **{tensor.name: 0.0 for tensor in float_model.graph.initializer})
    candidates = [
        Form("zeroed", "all weights are 0", lambda: zeroed),
        Form("same", "a copy", lambda: models.mlp()),
        Form("fp32", "the float model", lambda: float_model, is_float=True),
    ]
    _, outcome = keep_promise(float_model, candidates, RaceSetup(models.feeds(float_model, 2)), budget_s=1.0)
    assert outcome.candidates[0].status == FormStatus.DROPPED
    assert "dB" in outcome.candidates[0].reason
    assert outcome.taken.name in ("same", "fp32")


def test_a_form_must_be_slower_in_no_situation():
    prompts, tokens = FakeStadium({"float": 0.02, "int8": 0.01}), FakeStadium({"float": 0.001, "int8": 0.002})
    candidates = [form("int8"), FLOAT_FORM]
    _, outcome = keep_promise(
        net("float"), candidates, prompts.setup(name="prompts"), further=[tokens.setup(name="tokens")], budget_s=100.0,
        usable=lambda model: None,
    )  # fmt: skip
    assert statuses(outcome) == {"int8": FormStatus.SLOWER, "fp32": FormStatus.TAKEN}
    assert outcome.candidates[0].reason.startswith("only 0.50x of the float model's speed for tokens")
    assert outcome.float_milliseconds == pytest.approx(20)


def challenged(times: dict[str, float], lost: dict[str, float], *, more: dict[str, float] | None = None):
    setups = [FakeStadium(t).setup(name=str(i)) for i, t in enumerate([times, *([more] if more else [])])]
    candidates = [
        form("int8"),
        Form("dynamic", "form dynamic", lambda: net("dynamic"), challenges=True),
        FLOAT_FORM,
    ]
    return keep_promise(
        net("float"), candidates, setups[0], further=setups[1:], budget_s=100.0, usable=lambda model: None,
        quality=lambda model: 40.0 - lost.get(model.graph.name, 0.0),
    )[1]  # fmt: skip


def test_a_faster_form_that_computes_as_well_takes_the_place_of_one_that_is_not_slower():
    times = {"float": 0.02, "int8": 0.01, "dynamic": 0.008}
    outcome = challenged(times, {})
    assert statuses(outcome) == {"int8": FormStatus.OUTRUN, "dynamic": FormStatus.TAKEN, "fp32": FormStatus.SPARE}
    assert outcome.taken.ratio == pytest.approx(2.5)
    assert "1.25x of the speed of form int8" in outcome.candidates[0].reason
    assert challenged(times, {"dynamic": 5.0}).taken.name == "int8"
    assert challenged(times, {"int8": 5.0}).taken.name == "dynamic"
    assert challenged({**times, "dynamic": 0.0099}, {}).taken.name == "int8", "within the margin"
    assert challenged({**times, "dynamic": 0.0097}, {}).taken.name == "int8", "clearly faster, but not worth it"


def test_a_challenger_has_to_be_faster_over_all_situations_and_slower_than_float_in_none():
    times, long = {"float": 0.02, "int8": 0.01, "dynamic": 0.005}, {"float": 2, "int8": 1.0, "dynamic": 1.1}
    outcome = challenged(times, {}, more=long)
    assert outcome.taken.name == "dynamic"
    assert "1.35x of the speed of form int8 (2.00x for 0, 0.91x for 1)" in outcome.candidates[0].reason
    assert challenged(times, {}, more={**long, "dynamic": 3.0}).taken.name == "int8"
    assert challenged({**times, "dynamic": 0.001}, {}, more={**long, "dynamic": 3.0}).taken.name == "int8"


def test_a_challenger_that_fails_costs_nothing():
    def broken(model: onnx.ModelProto) -> float:
        raise VerificationError("it does not run", where="conv")

    stadium = FakeStadium({"float": 0.02, "int8": 0.01, "dynamic": 0.005})
    candidates = [form("int8"), Form("dynamic", "dynamic", lambda: net("dynamic"), challenges=True), FLOAT_FORM]
    outcome = consider(stadium, candidates, quality=broken)
    assert statuses(outcome) == {"int8": FormStatus.TAKEN, "dynamic": FormStatus.DROPPED, "fp32": FormStatus.SPARE}
