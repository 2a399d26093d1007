"""Recipes: what is done for accuracy beyond placement and rounding to nearest; frozen, TOML in and out.

``fast`` is the default and costs at most about as much again as plain calibration; ``accurate`` searches ranges and
rounding on held-out calibration data; ``strict`` adds mixed precision until a budget holds; ``data-free`` relies on
what the model itself knows. ``tiny`` keeps INT8 where it is not faster. ``weight-only-4`` and ``weight-only-8``
quantize weights alone. None of them sees the caller's evaluation data.
Source: the measured ablation of each pass (see the accuracy guide); a pass that does not lower the error on held-out
calibration samples is undone.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

import tomli_w

from kenosis_ort.checks import choice, instance, mapping, real, several, truth, whole, word
from kenosis_ort.errors import ArgumentTypeError, OptionError, did_you_mean
from kenosis_ort.storage.writing import regular, write_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA: Final = 1
_LARGEST_FILE = 2**20
_TABLES: Final = ("recipe", "options", "machine", "data")

_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def between(least: float, most: float, *, default: Any) -> Any:
    """A field of a dataclass whose numbers are within bounds."""
    return field(default=default, metadata={"between": (least, most)})


@dataclass(frozen=True)
class Settings:
    """Fields that are checked as they are set: ``bool``, ``int``, ``float``, ``str``, ``Literal``, and unions of them.

    What a field of another type holds, its class checks.

    Raises:
        OptionError: A value is of another type (then also a TypeError), unknown or out of range.
    """

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for entry in fields(self):
            value = _checked(f"recipe: {entry.name}", getattr(self, entry.name), hints[entry.name], entry)
            object.__setattr__(self, entry.name, value)


def _checked(name: str, value: Any, hint: Any, entry: Field[Any]) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        words = tuple(word for part in get_args(hint) for word in get_args(part) if get_origin(part) is Literal)
        if words and isinstance(value, str):
            return choice(name, value, among=words)
        hint = next(part for part in get_args(hint) if get_origin(part) is not Literal)
    least, most = entry.metadata.get("between", (float("-inf"), float("inf")))
    if get_origin(hint) is Literal:
        return choice(name, value, among=get_args(hint))
    if hint is bool:
        return truth(name, value)
    if hint is int:
        return whole(name, value, least=int(max(least, 0)), most=None if most == float("inf") else int(most))
    if hint is float:
        return real(name, value, least=least, most=most)
    return word(name, value) if hint is str else value


@dataclass(frozen=True)
class PassSettings(Settings):
    """Settings of a pass, which are all that a recipe knows of it.

    Attributes:
        name: Of the pass in recipes and reports.
    """

    name: ClassVar[str]


FURTHER: Final[dict[str, type[PassSettings]]] = {}
"""The passes that `kenosis_ort.passes.register` made known, by name."""

_WIDTH: Final = partial(whole, least=2, most=8)


def _widths(name: str, value: Any) -> dict[str, int]:
    widths = mapping(name, value, each=_WIDTH)
    for key in widths:
        choice(name, key, among=("weights", "activations"))
    return widths


@dataclass(frozen=True)
class SpeedChoice:
    """Form that timing chose for one model; given with a recipe it is repeated, and nothing is timed.

    Attributes:
        model: Fingerprint of the float model as it came; for another one everything is timed anew.
        form: Name of the form that was delivered, e.g. ``int8``, ``first node float``, ``float``.

    Raises:
        OptionError: A value is of another kind.
    """

    model: str
    form: str

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in (self.model, self.form)):
            raise OptionError(
                "recipe: 'speed' must hold the texts 'model' and 'form'", where="recipe", fix="leave 'speed' out"
            )


@dataclass(frozen=True)
class Recipe(Settings):
    """Settings for accuracy: those of the passes, which are described there, and a few of the whole.

    Attributes:
        name: For messages and reports.
        samples: Feeds kept for the passes that need data again (at most 64 MiB of them).
        synthetic: Number of synthetic samples to calibrate on where the caller gives no reader; 0 makes a missing
            reader an error.
        weight_only: 4 or 8 quantizes the weights of linear layers and embeddings alone, in blocks, to so many bits;
            activations stay float, and no pass runs. 0 quantizes activations too.
        weight_bits: Width of weights, 2 to 8.
        activation_bits: Width of what nodes compute, 2 to 8; what enters the graph has 8.
        bits: ``{"weights": ..., "activations": ...}`` by node, where a node's are others than these.
        speed: What timing decided when a model was made; None where nothing was.
        passes: Further passes, with their settings; `kenosis_ort.passes.register` makes one known.

    Raises:
        OptionError: A value is unknown or out of range.
    """

    name: str = "custom"
    ranges: Literal["auto", "minmax", "percentile", "entropy"] = "auto"
    equalize: bool = True
    bias_correction: bool = True
    rounding: Literal["nearest", "learned"] = "nearest"
    smooth: float | Literal["auto", "off"] = between(0, 1, default="auto")
    row_scales: bool = True
    mixed_precision: bool = False
    accuracy_budget: float = between(0, 1, default=0.005)
    max_float_share: float = between(0, 1, default=0.05)
    samples: int = 32
    synthetic: int = 0
    weight_only: int = 0
    weight_bits: int = between(2, 8, default=8)
    activation_bits: int = between(2, 8, default=8)
    bits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    speed: SpeedChoice | None = None
    passes: tuple[PassSettings, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_only not in (0, 4, 8):
            raise OptionError(f"recipe: weight_only={self.weight_only!r} is unknown", where="recipe", fix="0, 4 or 8")
        if self.speed is not None and not isinstance(self.speed, SpeedChoice):
            raise OptionError(f"recipe: speed={self.speed!r} is not a SpeedChoice", where="recipe", fix="give None")
        a_pass = partial(instance, of=PassSettings, what="a kenosis_ort.passes.Pass")
        passes = several("recipe: passes", self.passes, each=a_pass, what="passes")
        for each in passes:
            if FURTHER.get(each.name) is not type(each):
                raise OptionError(
                    f"recipe: {each!r} is no pass that is known",
                    where="recipe",
                    fix="call kenosis_ort.passes.register with its class before",
                )
        checked = {"bits": mapping("recipe: bits", self.bits, each=_widths), "passes": passes}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain data, those of further passes by their names; what is None is left out."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("speed", "passes")}
        found = {**own, **{each.name: asdict(each) for each in self.passes}}
        return found if self.speed is None else {**found, "speed": asdict(self.speed)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
        """Reads what `to_dict` returned; settings that are missing keep their defaults.

        Raises:
            OptionError: An unknown setting, or a value out of range.
        """
        known = [*(f.name for f in fields(cls) if f.name != "passes"), *FURTHER]
        for key in raw:
            if key not in known:
                hint = did_you_mean(key, known)
                raise OptionError(f"unknown setting '{key}' in a recipe.{hint}", where=where, fix=f"one of {known}")
        speed = raw.get("speed")
        if speed is not None and (not isinstance(speed, Mapping) or speed.keys() != {"model", "form"}):
            raise OptionError(
                "'speed' in a recipe is not what this version writes", where=where, fix="give model, form"
            )
        own = {key: value for key, value in raw.items() if key not in FURTHER}
        try:
            passes = tuple(_pass(name, raw[name], where) for name in FURTHER if name in raw)
            return cls(**{**own, "passes": passes, "speed": None if speed is None else SpeedChoice(**speed)})
        except OptionError as error:  # a value: the class that refuses it does not know where it came from
            place, _, key = (error.where or "recipe").partition(": ")
            place = where if place in ("recipe", where) else f"{place}, {where}"
            kind = ArgumentTypeError if isinstance(error, ArgumentTypeError) else OptionError
            raise kind(error.what, where=f"{place}: {key}" if key else place, fix=error.fix) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the recipe as TOML.

        Raises:
            OutputError: The file cannot be written.
        """
        write_text(path, tomli_w.dumps({"schema": SCHEMA, "recipe": self.to_dict()}), "the recipe")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Reads a TOML file.

        Raises:
            OptionError: It is missing, too large, or no recipe.
        """
        file = Path(path)
        return cls.from_dict(parse(read_text(file), str(file))["recipe"], where=str(file))


def setting(name: str) -> Any:
    """A field of a pass that is one of `Recipe`, with its default and bounds."""
    declared = next(entry for entry in fields(Recipe) if entry.name == name)
    return field(default=declared.default, metadata=declared.metadata)


def read_text(file: Path) -> str:
    """The text of a TOML file, a recipe or a sweep.

    Raises:
        OptionError: It is missing, too large, or no text.
    """
    try:
        if regular(file).stat().st_size > _LARGEST_FILE:
            raise OptionError(
                "the file is larger than 1 MiB", where=str(file), fix="name a recipe or a sweep; they are small"
            )
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"the file cannot be read: {error}", where=str(file), fix="check the path; it has to be text in UTF-8"
        ) from error


def read_toml(text: str, where: str, *, fix: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        OptionError: Not TOML.
    """
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise OptionError(f"the file is not valid TOML: {error}", where=where, fix=fix) from error


def parse(text: str, where: str) -> dict[str, Any]:
    """The tables of a recipe file.

    Raises:
        OptionError: Not TOML, not a recipe, of another schema version, or with a table that none has.
    """
    raw = read_toml(text, where, fix="write one with Recipe.save")
    if raw.get("schema", SCHEMA) != SCHEMA:
        what = f"a recipe of schema {raw['schema']}; this version reads {SCHEMA}"
        raise OptionError(what, where=where, fix="use the version of kenosis-ort that wrote it, or write it anew")
    if "recipe" not in raw:
        raise OptionError("the file holds no [recipe] table", where=where, fix="write one with Recipe.save")
    for name in raw:
        if name not in ("schema", *_TABLES):
            hint = did_you_mean(name, _TABLES)
            raise OptionError(f"unknown '{name}' in a recipe file.{hint}", where=where, fix=f"one of {[*_TABLES]}")
    for name in _TABLES:
        if not isinstance(raw.get(name, {}), dict):
            raise OptionError(f"{name} = {raw[name]!r} is no table", where=where, fix=f"write it as [{name}]")
    return raw


def _pass(name: str, settings: Any, where: str) -> PassSettings:
    """A registered pass with the settings of its table."""
    kind = FURTHER[name]
    known = [entry.name for entry in fields(kind)]
    if not isinstance(settings, Mapping):
        raise OptionError(f"{name} = {settings!r} is no table", where=where, fix=f"write [recipe.{name}]")
    for key in settings:
        if key not in known:
            hint = did_you_mean(key, known)
            raise OptionError(f"unknown setting '{key}' of {name}.{hint}", where=where, fix=f"one of {known}")
    return kind(**settings)


_FAST = Recipe("fast")

RECIPES: Final[Mapping[str, Recipe]] = {
    "fast": _FAST,
    "accurate": replace(_FAST, name="accurate", rounding="learned", samples=64),
    "strict": replace(_FAST, name="strict", rounding="learned", mixed_precision=True, samples=64),
    "data-free": replace(_FAST, name="data-free", synthetic=64),
    "plain": Recipe(
        "plain", ranges="minmax", equalize=False, bias_correction=False, smooth="off", row_scales=False, samples=4
    ),
    "tiny": replace(_FAST, name="tiny"),
    "weight-only-4": replace(_FAST, name="weight-only-4", weight_only=4),
    "weight-only-8": replace(_FAST, name="weight-only-8", weight_only=8),
}
"""The named recipes. ``plain`` switches every pass off: stock's ranges, weights rounded to nearest."""

NAMED_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": {"promise": False, "tune": "off"},
    "weight-only-4": {"promise": False, "tune": "off"},
    "weight-only-8": {"promise": False, "tune": "off"},
}
"""What a named recipe says beside the passes; an option that is given as well goes before it."""


def resolve_recipe(value: str | os.PathLike[str] | Recipe) -> Recipe:
    """The recipe that the caller gave: a `Recipe`, one of the names, or the path of a TOML file.

    Raises:
        OptionError: None of these.
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str) and value in RECIPES:
        return RECIPES[value]
    if is_recipe_file(value):
        return Recipe.load(value)
    hint = did_you_mean(str(value), RECIPES)
    raise OptionError(
        f"recipe={value!r} is unknown.{hint}",
        where="recipe",
        fix=f"one of {', '.join(RECIPES)}, a Recipe, or the path of a .toml file",
    )


def is_recipe_file(item: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether the caller gave a recipe by the path of a file."""
    return isinstance(item, os.PathLike) or (isinstance(item, str) and item not in RECIPES and item.endswith(".toml"))
