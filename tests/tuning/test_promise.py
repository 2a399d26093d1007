"""Which form is taken: on a made-up clock, and once on the installed runtime."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.bench.harness import MARGIN, SpeedComparison, Verdict
from kenosis_ort.errors import VerificationError
from kenosis_ort.report.sections import SpeedSummary
from kenosis_ort.tuning import promise
from kenosis_ort.tuning.promise import Basis, Estimate, Form, FormStatus, keep_promise
from kenosis_ort.tuning.races import RaceSetup
from tests import models
from tests.bench.fakes import FakeStadium, net
from tests.flow.support import changed

FLOAT_FORM = Form("fp32", "the float model", lambda: net("float"), is_float=True)


def form(name: str) -> Form:
    return Form(name, f"form {name}", lambda: net(name))


def consider(
    stadium: FakeStadium, candidates: Sequence[Form] | None = None, quality: Any = lambda _: 30.0, **more: Any
) -> SpeedSummary:
    """The record, of all forms that the stadium knows by default; the model that is delivered is the one taken.

    ``quality`` gives the signal of a model's output in dB.
    """
    ladder = candidates or [*(form(name) for name in stadium.seconds if name != "float"), FLOAT_FORM]
    compared = lambda _, model, *__, **___: [SimpleNamespace(name="y", sqnr_db=quality(model))]  # noqa: E731
    with patch.object(promise, "compare_outputs", compared):
        model, found = keep_promise(net("float"), ladder, stadium.setup(name="one"), **{"budget_s": 100.0, **more})
    assert model.graph.name == ("float" if found.taken.name == "fp32" else found.taken.name)
    return found


def failing(error: Exception) -> Any:
    def build(*_: object) -> onnx.ModelProto:
        raise error

    return build


@pytest.mark.parametrize(("costs", "quality", "expected", "said"), [
    ({"int8": 0.01, "weights": 0.001}, {}, "taken spare spare", {0: "2.00x of"}),
    ({"int8": 0.017, "weights": 0.001}, {}, "taken spare spare", {1: "not needed"}),  # it is clearly faster
    ({"int8": 0.0194, "weights": 0.014, "coarse": 0.01}, {"weights": 45.0, "coarse": 12.0}, "outrun taken spare spare",
     {0: "weights has", 2: "dB less"}),  # hardly faster, it is held against the others too
    ({"int8": 0.04, "regions": 0.03, "fair": 0.0194, "best": 0.014, "less": 0.016}, {},
     "slower slower outrun taken spare spare", {0: "only 0.50x", 3: "1.43x"}),
], ids=["faster", "clearly faster", "hardly faster", "slower"])  # fmt: skip
def test_which_form_is_taken(costs: dict[str, float], quality: dict[str, float], expected: str, said: dict[int, str]):
    """The first that is faster, and what is built and opened beside it; the float model takes 20 ms."""
    stadium = FakeStadium({**costs, "float": 0.02})
    forms = [form(n) for n in costs]
    if expected == "taken spare spare":
        forms[1:] = [replace(each, build=failing(AssertionError("built"))) for each in forms[1:]]
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
        Form("broken", "", failing(VerificationError("the bias is off", where="conv"))),
        Form("buggy", "", failing(KeyError("scale"))), Form("absent", "", lambda: None),
        *map(form, ("unloadable", "wrong", "good")), FLOAT_FORM,
    ]  # fmt: skip
    stadium = FakeStadium({"float": 0.01, "unloadable": RuntimeError("NOT_IMPLEMENTED"), "wrong": 0.001, "good": 0.005})
    outcome = consider(stadium, candidates, lambda m: 3.0 if m.graph.name == "wrong" else 30.0)
    assert [(record.status, record.reason) for record in outcome.candidates[:5]] == [
        ("dropped", "it cannot be built: the bias is off"), ("dropped", "it cannot be built: KeyError: 'scale'"),
        ("absent", "this net has no such form"), ("dropped", "it does not run: NOT_IMPLEMENTED"),
        ("dropped", "output 'y' keeps only 3.0 dB of the float model's"),
    ]  # fmt: skip
    assert outcome.taken.name == "good"
    assert "wrong" not in stadium.opened
    checked = [replace(form("wrong"), checked=True), FLOAT_FORM]
    assert consider(stadium, checked, failing(AssertionError("asked"))).taken.name == "wrong"


def test_where_no_race_tells_the_cost_table_does_or_the_float_model_stays():
    undecided = 0
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
            estimated = replace(form("int8"), estimate=lambda speed=speed: Estimate(speed, 1.4))
            told = consider(FakeStadium(stadium.seconds, spread=0.5, seed=seed), [estimated, FLOAT_FORM])
            assert (told.taken.name, told.basis) == (taken, Basis.ESTIMATED if taken == "int8" else Basis.UNDECIDED)
            assert f"estimated at {speed:.2f}x" in told.candidates[0].reason
    assert undecided >= 7, "an interval of 95 % is wrong now and then"


@given(st.floats(0.2, 5), st.floats(1, 3), st.floats(0.3, 3), st.floats(1, 4), st.floats(1, 3))
def test_an_estimate_and_a_race_are_weighed(speed: float, error: float, ratio: float, noise: float, more: float):
    def tells(speed: float, ratio: float, noise: float) -> bool:
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


@pytest.mark.parametrize(("ratio", "taken"), [(1.05, "int8"), (1.01, "int8"), (1.0, "int8"), (0.96, "fp32")])
def test_the_choice_does_not_flip_between_runs(ratio: float, taken: str):
    costs = {"float": 0.01, "int8": 0.01 / ratio}
    still = consider(FakeStadium(costs))
    assert (still.taken.name, still.basis) == (taken, Basis.MEASURED)
    assert ratio != 1 or "not slower" in still.taken.reason
    runs = [consider(FakeStadium(costs, spread=0.02, seed=seed)).taken.name for seed in range(20)]
    assert runs.count(taken) >= 19


@pytest.mark.parametrize(("at", "expected"), [
    (0, "absent undecided untimed taken"), (1, "slower absent untimed taken"), (2, "slower taken absent spare"),
])  # fmt: skip
def test_where_the_time_is_over_the_float_model_stays(at: int, expected: str):
    """A single round tells nothing of a form that comes late; one found slower gives way to the float model."""
    stadium = FakeStadium({"float": 1.0, "int8": 2.0, "weights": 0.1}, load=1.0)

    def late() -> None:
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


def test_on_the_installed_runtime_unusable_outputs_are_seen():
    model = models.mlp()
    made = {"zeroed": changed(model, **{tensor.name: 0.0 for tensor in model.graph.initializer}), "same": model}
    candidates = [replace(form(name), build=lambda name=name: made[name]) for name in made]
    setup = RaceSetup(models.feeds(model, 2))
    _, outcome = keep_promise(model, [*candidates, replace(FLOAT_FORM, build=lambda: model)], setup, budget_s=1.0)
    assert outcome.candidates[0].status == FormStatus.DROPPED
    assert "dB" in outcome.candidates[0].reason
    assert outcome.taken.name in ("same", "fp32")


def test_a_form_must_be_slower_in_no_situation():
    prompts, tokens = FakeStadium({"float": 0.02, "int8": 0.01}), FakeStadium({"float": 0.001, "int8": 0.002})
    further = [tokens.setup(name="tokens")]
    outcome = consider(prompts, further=further)
    assert [record.status for record in outcome.candidates] == ["slower", "taken"]
    assert outcome.candidates[0].reason.startswith("only 0.50x of the float model's speed for tokens")
    assert outcome.float_milliseconds == pytest.approx(20)


def challenged(dynamic: float, long: float | None = None, **more: Any) -> SpeedSummary:
    """What becomes of INT8 and of one that challenges it, by the latter's time of a run and of a long one."""
    further = [FakeStadium({"float": 2, "int8": 1.0, "dynamic": long}).setup(name="long")] if long else []
    candidates = [replace(form("int8"), checked=True), replace(form("dynamic"), challenges=True), FLOAT_FORM]
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
    assert outcome.taken.name == taken
    assert says in outcome.candidates[0].reason
    assert taken == "int8" or [r.status for r in outcome.candidates] == ["outrun", "taken", "spare"]
    assert taken == "int8" or outcome.taken.ratio == pytest.approx(min(0.02 / dynamic, 2 / (long or 0.01)))


def test_a_challenger_that_fails_costs_nothing():
    outcome = challenged(0.005, quality=failing(VerificationError("it does not run", where="conv")))
    assert [r.status for r in outcome.candidates] == ["taken", "dropped", "spare"]
