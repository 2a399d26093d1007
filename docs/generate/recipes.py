"""The named recipes and what can be set in one."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

from kenosis_ort.passes import PASSES
from kenosis_ort.passes.recipe import RECIPES, Recipe

from .markdown import code, table


def recipe_table() -> str:
    """Returns the settings by recipe."""
    names = [f.name for f in fields(Recipe) if f.name not in ("name", "speed", "passes")]
    rows = [[code(name), *(_shown(getattr(recipe, name)) for recipe in RECIPES.values())] for name in names]
    return table(["Setting", *(code(name) for name in RECIPES)], rows)


def setting_table() -> str:
    """Returns what each setting means, from the docstrings of the passes and the recipe."""
    defaults = {f.name: getattr(Recipe(), f.name) for f in fields(Recipe)}
    described = [entry for kind in (*PASSES, Recipe) for entry in attributes(kind)]
    rows = [[code(name), _shown(defaults[name]), text] for name, text in described]
    return table(["Setting", "Default", "Meaning"], rows)


def attributes(documented: type) -> list[tuple[str, str]]:
    """Returns name and text of the attributes that a class's docstring describes.

    Raises:
        ValueError: It describes none.
    """
    text = inspect.getdoc(documented) or ""
    section = re.search(r"^Attributes:\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
    if section is None:
        raise ValueError(f"{documented.__name__} describes no attributes")
    found = re.findall(r"^    (\w+): ((?:.*\n?)(?:^     +.*\n?)*)", section[1], re.MULTILINE)
    return [(name, re.sub(r"\s+", " ", meaning).strip()) for name, meaning in found]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
