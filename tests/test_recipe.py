"""Recipes: TOML in and out, checked."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.errors import OptionError
from kenosis_ort.recipe import RECIPES, Recipe, resolve_recipe

shares = st.floats(0, 1)
recipes = st.builds(
    Recipe,
    name=st.text(st.characters(codec="utf-8"), max_size=20),
    ranges=st.sampled_from(["auto", "minmax", "percentile", "entropy"]),
    equalize=st.booleans(),
    bias_correction=st.booleans(),
    rounding=st.sampled_from(["nearest", "learned"]),
    smooth=st.sampled_from(["auto", "off"]) | shares,
    row_scales=st.booleans(),
    mixed_precision=st.booleans(),
    accuracy_budget=shares,
    max_float_share=shares,
    samples=st.integers(0, 1000),
    synthetic=st.integers(0, 1000),
    weight_only=st.sampled_from([0, 4, 8]),
)


@given(recipes)
def test_toml_round_trip(recipe: Recipe) -> None:
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize("name", RECIPES)
def test_names_and_files(name: str, tmp_path: Path) -> None:
    recipe = resolve_recipe(name)
    assert recipe.name == name
    recipe.save(tmp_path / "r.toml")
    assert resolve_recipe(tmp_path / "r.toml") == resolve_recipe(str(tmp_path / "r.toml")) == recipe
    assert resolve_recipe(recipe) is recipe


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        RECIPES["fast"].samples = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "not valid TOML"),
        ("schema = 9\n[recipe]\n", "schema 9"),
        ("a = 1\n", "no \\[recipe\\]"),
        ("[recipe]\nequalise = true\n", "Did you mean 'equalize'"),
        ("[recipe]\nsmooth = 2.0\n", "smooth=2.0"),
        ("[recipe]\nequalize = 1\n", "true or false"),
        ('[recipe]\nranges = "maxmin"\n', "ranges='maxmin'"),
        ("[recipe]\nsamples = -1\n", "samples=-1"),
    ],
)
def test_bad_files(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=says):
        resolve_recipe(path)


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Did you mean 'accurate'"):
        resolve_recipe("acurate")
    with pytest.raises(OptionError, match="cannot be read"):
        resolve_recipe(tmp_path / "missing.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(OptionError, match="larger than"):
        resolve_recipe(tmp_path / "big.toml")
