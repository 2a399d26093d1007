"""The file that makes a model again, as TOML; the command writes one, and ``recipe=`` reads it.

``[recipe]`` is a `kenosis_ort.Recipe`; ``[options]`` holds options of `kenosis_ort.quantize_static` by name, those that
a machine decided included; ``[data]`` holds how the command read its samples or made them up, in the words of its
options; ``[made]`` says what came out, and with which versions. What is unknown in it is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.option_types import IN_FILE, OPTIONS, TYPES
from kenosis_ort.options import Stages
from kenosis_ort.quantizer.stock import QuantType
from kenosis_ort.recipe import NAMED_OPTIONS, SCHEMA, Recipe, is_recipe_file, parse, read_text, resolve_recipe
from kenosis_ort.storage.writing import write_text


@dataclass(frozen=True)
class RecipeFile:
    """Content of a recipe file.

    Attributes:
        recipe: The accuracy passes.
        options: Options of `kenosis_ort.quantize_static`, as that takes them.
        data: Options of the command about samples, as it spells them.
        made: What came out; empty in a file that no output belongs to.
    """

    recipe: Recipe
    options: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)

    def to_toml(self) -> str:
        """The recipe as text that `from_toml` reads."""
        options = {name: _word(name, value) for name, value in self.options.items()}
        tables = {"options": options, "data": dict(self.data), "made": dict(self.made)}
        filled = {name: table for name, table in tables.items() if table}
        return tomli_w.dumps({"schema": SCHEMA, "recipe": self.recipe.to_dict(), **filled})

    @classmethod
    def from_toml(cls, text: str, *, where: str = "recipe") -> RecipeFile:
        """Reads what `to_toml` returned; a file that holds nothing but ``[recipe]`` is fine.

        Raises:
            OptionError: It is no recipe, or holds something unknown or of another kind.
        """
        raw = parse(text, where)
        recipe = Recipe.from_dict(raw["recipe"], where=where)
        options = {name: _value(name, word, where) for name, word in raw.get("options", {}).items()}
        return cls(recipe, options, raw.get("data", {}), raw.get("made", {}))

    def with_settings(self, given: Mapping[str, Any]) -> RecipeFile:
        """A copy with settings of the recipe replaced; ``my_pass.strength`` is one of a further pass.

        Raises:
            OptionError: A setting is unknown, or its value is.
        """
        raw = {**self.recipe.to_dict(), "name": "custom"}
        for name, value in given.items():
            head, _, rest = name.partition(".")
            of_a_pass = rest and isinstance(raw.get(head, {}), dict)
            raw.update({head: {**raw.get(head, {}), rest: value}} if of_a_pass else {name: value})
        return replace(self, recipe=Recipe.from_dict(raw)) if given else self

    def save(self, path: str | os.PathLike[str], *, head: str = "") -> None:
        """Writes it, behind a comment.

        Raises:
            OutputError: The file cannot be written.
        """
        write_text(path, (f"# {head}\n" if head else "") + self.to_toml(), "the recipe")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RecipeFile:
        """Reads a file; raises as `from_toml`, and where it is missing or too large."""
        file = Path(path)
        return cls.from_toml(read_text(file), where=str(file))


def resolve(given: str | os.PathLike[str] | Recipe | RecipeFile) -> RecipeFile:
    """The recipe and options that the caller gave: a `Recipe`, one of the names, or a file or its path.

    Raises:
        OptionError: None of these.
    """
    if isinstance(given, RecipeFile):
        return given
    if is_recipe_file(given):
        return RecipeFile.load(given)
    recipe = resolve_recipe(given)
    return RecipeFile(recipe, NAMED_OPTIONS.get(recipe.name, {}) if isinstance(given, str) else {})


def value_of(name: str, word: Any) -> Any:
    """An option's value for the word that stands for it in a file, or for its name in a report's JSON."""
    words = OPTIONS[name].words if name in OPTIONS else {}
    if words and isinstance(word, str):
        return words.get(word) or next((e for e in words.values() if e.name == word), word)
    if name == "stages" and isinstance(word, Mapping):
        return Stages(**word)
    if name == "extra_options" and isinstance(word, Mapping):
        return {key: _unpacked(key, entry) for key, entry in word.items()}
    return word


def _word(name: str, value: Any) -> Any:
    if name == "stages":
        switches = value if isinstance(value, Mapping) else {f.name: getattr(value, f.name) for f in fields(value)}
        return {stage: False for stage, on in switches.items() if not on}
    value = value_of(name, value)
    if name in OPTIONS and OPTIONS[name].words:
        return next((word for word, kind in OPTIONS[name].words.items() if kind is value), value)
    return _packed(value)


def _value(name: str, word: Any, where: str) -> Any:
    """An option's value, checked."""
    if name == "custom_op_libraries":
        raise OptionError(
            "a recipe file names custom_op_libraries, which run code of their own when they are loaded",
            where=where,
            fix="take them out of the file and pass them in the call, or by --custom-op-library",
        )
    if name not in IN_FILE:
        hint = did_you_mean(name, IN_FILE)
        raise OptionError(f"unknown option '{name}' in a recipe file.{hint}", where=where, fix=f"one of {[*IN_FILE]}")
    known = OPTIONS[name].words
    if known and (not isinstance(word, str) or word not in known):
        hint = did_you_mean(str(word), known)
        raise OptionError(
            f"[options] {name} = {word!r} is unknown.{hint}", where=where, fix=f"one of {', '.join(known)}"
        )
    if name == "stages" and isinstance(word, Mapping):
        for stage in word:
            if stage not in Stages.__dataclass_fields__:
                hint = did_you_mean(stage, Stages.__dataclass_fields__)
                raise OptionError(f"[options.stages] knows no '{stage}'.{hint}", where=where, fix="see Stages")
    try:
        return OPTIONS[name].check(name, value_of(name, word))
    except OptionError as error:
        raise OptionError(f"[options] {error.what}", where=where, fix=error.fix) from error
    except (TypeError, ValueError, OverflowError) as error:  # an array of another type than it names
        raise OptionError(f"[options] {name} cannot be read: {error}", where=where) from error


def _packed(value: Any) -> Any:
    """A value of `extra_options` and the like as TOML has them; what is None is left out."""
    if isinstance(value, QuantType):
        return next(word for word, kind in TYPES.items() if kind is value)
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _packed(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (set, frozenset)):
        return sorted(_packed(entry) for entry in value)
    if isinstance(value, (list, tuple)):
        return [_packed(entry) for entry in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _unpacked(key: str, word: Any) -> Any:
    """Value that was given to `_packed`."""
    if key == "quant_type" and isinstance(word, str):
        return value_of("weight_type", word)
    if key == "recv_nodes" and isinstance(word, (list, tuple)):
        return set(word)
    if isinstance(word, Mapping):
        if word.keys() == {"dtype", "values"}:
            return np.array(word["values"], np.dtype(word["dtype"]))
        return {name: _unpacked(name, entry) for name, entry in word.items()}
    return [_unpacked("", entry) for entry in word] if isinstance(word, (list, tuple)) else word
