"""Passes from outside: known once registered, checked, in recipes and their files, and run where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort import RECIPES, OptionError, QuantizationReport, Recipe
from kenosis_ort.passes import PASSES, Candidate, Context, Pass, Skipped, State, between, passes_of, register, runner
from tests import models
from tests.flow.support import quantized


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
    def wanted(self) -> bool:
        return self.on

    def apply(self, state: State, statistics: Any, context: Context) -> Candidate | Skipped:
        return Skipped(f"{self.mode} {self.strength:g}, {sorted(context.active)}")


@pytest.fixture
def known() -> Iterator[None]:
    before = [*runner._order]
    register(Seen, before="bias_correction")
    yield
    runner._order[:] = before


seen = st.builds(
    Seen,
    strength=st.floats(0, 2),
    count=st.integers(0, 99),
    mode=st.sampled_from(["soft", "hard"]),
    limit=st.just("none") | st.floats(-9, 9),
    on=st.booleans(),
)


def test_a_recipe_file_holds_its_settings(known: None) -> None:
    @given(each=seen)
    def check(each: Seen) -> None:
        recipe = Recipe("mine", equalize=False, passes=(each,))
        assert Recipe.from_toml(recipe.to_toml()) == recipe

    check()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"strength": 3}, "strength=3 is not a number from 0 to 2"),
        ({"strength": "much"}, "strength='much' is a str"),
        ({"count": -1}, "count=-1"),
        ({"mode": "sofd"}, "Did you mean 'soft'"),
        ({"limit": "nine"}, "limit='nine' is unknown"),
        ({"on": 1}, "true or false"),
    ],
)
def test_settings_are_checked_by_their_types(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Seen(**given)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[recipe.sen]\n", "Did you mean 'seen'"),
        ("[recipe.seen]\nstrenght = 1\n", "Did you mean 'strength'"),
        ("[recipe]\nseen = 1\n", "is no table"),
        ("[recipe.seen]\nmode = 1\n", "mode=1"),
    ],
)
def test_mistakes_in_a_file_are_named(known: None, text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Recipe.from_toml(text)


def test_one_that_is_not_registered_is_refused() -> None:
    with pytest.raises(OptionError, match="no pass that is known"):
        Recipe(passes=(Seen(),))
    with pytest.raises(OptionError, match="unknown setting 'seen'"):
        Recipe.from_dict({"seen": {}})


def test_names_that_are_taken(known: None) -> None:
    for name in ("equalize", "accuracy_budget", "no name"):
        with pytest.raises(OptionError, match="cannot be named"):
            register(type("Other", (Seen,), {"name": name}))
    with pytest.raises(OptionError, match="cannot be named 'seen'"):
        register(type("Other", (Seen,), {}))
    with pytest.raises(OptionError, match="Did you mean 'ranges'"):
        register(Seen, before="range")
    register(Seen, before="ranges")  # again, as a notebook does
    assert [p.name for p in passes_of(replace(RECIPES["fast"], passes=(Seen(),)))][4:6] == ["seen", "ranges"]


def test_it_runs_where_a_recipe_asks_for_it(known: None, tmp_path: Path) -> None:
    model = models.bn_net()
    recipe = replace(RECIPES["fast"], passes=(Seen(mode="hard"),))
    for asked, expected in ((recipe, ["seen", "bias_correction", "ranges"]), ("fast", ["bias_correction", "ranges"])):
        report = quantized(model, tmp_path / "o.onnx", models.feeds(model, 8), recipe=asked)
        assert [p.name for p in report.passes if p.name not in ("equalize", "smooth", "row_scales")] == expected
        assert QuantizationReport.from_json(report.to_json()).recipe == report.recipe
    assert passes_of(replace(recipe, passes=(Seen(on=False),))) == passes_of(RECIPES["fast"])


def test_settings_of_passes_are_those_of_recipes() -> None:
    names = [entry.name for kind in PASSES for entry in fields(kind)]
    assert len(names) == len(set(names))
    assert {*names} < {f.name for f in fields(Recipe)}
    for kind in PASSES:
        assert kind.of(Recipe()) == kind()
    fast = ["row_scales", "equalize", "smooth", "bias_correction", "ranges"]
    assert [p.name for p in passes_of(RECIPES["fast"])] == fast
    strict = [p.name for p in passes_of(replace(RECIPES["strict"], equalize=False))]
    assert strict[-2:] == ["rounding", "mixed_precision"]
    assert "equalize" not in strict
    assert passes_of(RECIPES["plain"]) == ()
