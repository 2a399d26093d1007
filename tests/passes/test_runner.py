"""The one runner: what it keeps, undoes, survives and records; and passes from outside, known once registered."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import onnx
import pytest

from kenosis_ort import RECIPES, OptionError, Recipe
from kenosis_ort.flow.call import Call
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.graph.view import PreparedModel
from kenosis_ort.option_types import RecipeFile
from kenosis_ort.passes import PASSES, between, order, passes_of, register
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, State, WeightPass
from kenosis_ort.passes.evaluator import Score
from kenosis_ort.passes.runner import PassRunner
from tests import models
from tests.flow.support import quantized

MODEL = models.bn_net()
ERRORS = {"start": 1.0, "better": 0.5, "slightly": 0.99, "worse": 2.0}


class Evaluator:
    """Knows the error of a state by the name of its graph."""

    measure = "error"

    def __init__(self, samples=8):
        self.feeds = [{}] * samples
        self.asked: list[str] = []

    def score(self, model):
        self.asked.append(model.graph.name)
        return Score(ERRORS[model.graph.name], (ERRORS[model.graph.name],) * len(self.feeds))

    def halved(self):
        return self.feeds[::2], Evaluator(len(self.feeds) // 2)


def named(name):
    model = onnx.ModelProto()
    model.graph.name = name
    return State(PreparedModel(model))


@dataclass(frozen=True)
class Rename(Pass):
    """Finds a state of a name, or what it is told to find instead."""

    name: ClassVar[str] = "rename"
    title: ClassVar[str] = "Renaming"
    finds: ClassVar[Any] = None
    to: str = "better"

    @property
    def wanted(self):
        return True

    def apply(self, state, statistics, context):
        return self.finds or Candidate(named(self.to), f"named {self.to}")


class Careful(Rename, WeightPass):
    pass


class Nothing(Rename):
    finds = Skipped("no better name")


class Compared(Rename):
    finds = Candidate(named("worse"), "as found", decided=True, scores=(Score(3.0, (3.0,)), Score(1.5, (1.5,))))


class Fits(Rename):
    fits_means: ClassVar[bool] = True
    given: ClassVar[list[tuple[int, int]]] = []

    def apply(self, state, statistics, context):
        self.given.append((len(context.fit), len(context.evaluator.feeds)))
        return super().apply(state, statistics, context)


def run(*passes, **given):
    """The name of the state that is found, and what became of each pass."""
    call = Call(loaded=LoadedModel(MODEL, None, "m"), request=None)
    usual = {"fit": [{}] * 8, "evaluator": Evaluator(), **dict.fromkeys(("quantize", "prove", "plan", "fitted_ranges"))}
    context = Context(build_of=lambda s: SimpleNamespace(quantized=s.prepared.proto), **{**usual, **given})
    runner = PassRunner(context, call)
    return runner.run(passes, named("start")).prepared.proto.graph.name, runner.journal.passes


@pytest.mark.parametrize(("each", "name", "errors"), [
    (Rename("better"), "better", (1.0, 0.5)), (Rename("slightly"), "slightly", (1.0, 0.99)),
    (Rename("worse"), "start", (1.0, 2.0)), (Careful("better"), "better", (1.0, 0.5)),
    (Careful("slightly"), "start", (1.0, 0.99)), (Compared("worse"), "worse", (3.0, 1.5)),
    (Nothing(), "start", (None, None)),
])  # fmt: skip
def test_what_is_better_is_kept(each, name, errors):
    found, (outcome,) = run(each)
    assert (found, outcome.kept, outcome.error_before, outcome.error_after) == (name, name != "start", *errors)
    assert outcome.reason


@pytest.mark.parametrize(("to", "samples", "forced", "name", "says"), [
    ("worse", 0, frozenset({"rename"}), "worse", "as asked"),
    ("better", 3, frozenset(), "start", "3 held-out calibration samples are too few"),
], ids=["the caller insists", "too few samples"])  # fmt: skip
def test_what_is_kept_or_not_unseen(to, samples, forced, name, says):
    evaluator = Evaluator(samples)
    found, (outcome,) = run(Careful(to), forced=forced, evaluator=evaluator)
    assert (found, evaluator.asked, says in outcome.reason) == (name, [], True)


def test_a_state_is_scored_once():
    evaluator = Evaluator()
    run(Rename("better"), Rename("worse"), Nothing(), evaluator=evaluator)
    assert evaluator.asked == ["start", "better", "worse"]


@pytest.mark.parametrize(("fit", "expected"), [(8, (12, 4)), (16, (16, 8))])
def test_means_are_fitted_to_more_of_few_samples(fit, expected):
    Fits.given.clear()
    run(Fits(), fit=[{}] * fit)
    assert Fits.given == [expected]


# ---- passes from outside --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen(Pass):
    """Says what it is given."""

    name: ClassVar[str] = "seen"
    title: ClassVar[str] = "Seeing"

    strength: float = between(0, 2, default=1.0)
    count: int = 3
    mode: Literal["soft", "hard"] = "soft"
    limit: float | Literal["none"] = "none"
    on: bool = True

    @property
    def wanted(self):
        return self.on

    def apply(self, state, statistics, context):
        return Skipped(f"{self.mode} {self.strength:g}, {sorted(context.active)}")


@pytest.fixture
def known():
    before = [*order._order]
    register(Seen, before="bias_correction")
    yield
    order._order[:] = before
    order.FURTHER.clear()


@pytest.mark.parametrize("each", [Seen(), Seen(0.1, 0, "hard", -1e-9, False), Seen(2, 99, "soft", 3.0)])
def test_a_recipe_file_holds_its_settings(known, each):
    recipe = Recipe("mine", equalize=False, passes=(each,))
    assert RecipeFile.from_toml(RecipeFile(recipe).to_toml()).recipe == recipe


@pytest.mark.parametrize(("given", "says"), [
    ({"strength": 3}, "strength=3 is not a number from 0 to 2"),
    ({"strength": "much"}, "strength='much' is a str"), ({"count": -1}, "count=-1"),
    ({"mode": "sofd"}, "Did you mean 'soft'"), ({"limit": "nine"}, "limit='nine' is unknown"),
    ({"on": 1}, "true or false"),
])  # fmt: skip
def test_settings_are_checked_by_their_types(given, says):
    with pytest.raises(OptionError, match=says):
        Seen(**given)


@pytest.mark.parametrize(("text", "says"), [
    ("[recipe.sen]\n", "Did you mean 'seen'"), ("[recipe.seen]\nstrenght = 1\n", "Did you mean 'strength'"),
    ("[recipe]\nseen = 1\n", "is no table"), ("[recipe.seen]\nmode = 1\n", "mode=1"),
])  # fmt: skip
def test_mistakes_in_a_file_are_named(known, text, says):
    with pytest.raises(OptionError, match=says) as caught:
        RecipeFile.from_toml(text, where="recipe.toml")
    assert caught.value.where in ("recipe.toml", "recipe.toml: mode")


def test_one_that_is_not_registered_is_refused():
    with pytest.raises(OptionError, match="no pass that is known"):
        Recipe(passes=(Seen(),))
    with pytest.raises(OptionError, match="unknown setting 'seen'"):
        Recipe.from_dict({"seen": {}})


def test_names_that_are_taken(known):
    for name in ("equalize", "accuracy_budget", "no name", "seen"):
        with pytest.raises(OptionError, match=f"cannot be named '{name}'"):
            register(type("Other", (Seen,), {"name": name}))
    with pytest.raises(OptionError, match="Did you mean 'ranges'"):
        register(Seen, before="range")
    register(Seen, before="ranges")  # again, as a notebook does
    assert [p.name for p in passes_of(replace(RECIPES["fast"], passes=(Seen(),)))][4:6] == ["seen", "ranges"]


@pytest.mark.parametrize("asked", [True, False])
def test_it_runs_where_a_recipe_asks_for_it(known, tmp_path, asked):
    recipe = replace(RECIPES["fast"], passes=(Seen(mode="hard"),)) if asked else "fast"
    report = quantized(MODEL, tmp_path / "o.onnx", models.feeds(MODEL, 8), recipe=recipe)
    ran = [p.name for p in report.passes if p.name not in ("equalize", "smooth", "row_scales")]
    assert ran == [*["seen"] * asked, "bias_correction", "ranges"]
    assert passes_of(replace(RECIPES["fast"], passes=(Seen(on=False),))) == passes_of(RECIPES["fast"])


def test_settings_of_passes_are_those_of_recipes():
    names = [entry.name for kind in PASSES for entry in fields(kind)]
    assert sorted({*names} & {f.name for f in fields(Recipe)}) == sorted(names), "each is a recipe's, and of one pass"
    assert [kind.of(Recipe()) for kind in PASSES] == [kind() for kind in PASSES]
    fast = ["row_scales", "equalize", "smooth", "bias_correction", "ranges"]
    assert [p.name for p in passes_of(RECIPES["fast"])] == fast
    strict = [p.name for p in passes_of(replace(RECIPES["strict"], equalize=False))]
    assert (strict, passes_of(RECIPES["plain"])) == ([*fast[:1], *fast[2:], "rounding", "mixed_precision"], ())
