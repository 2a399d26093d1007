"""The table of options of `kenosis_ort.quantize_static`: type and range, and how files and the shell spell them.

What a name means (a node, a target, a rewrite) is not decided here. A recipe file, TOML, makes a model again: the
command writes one, and ``recipe=`` reads it. ``[recipe]`` is a `kenosis_ort.Recipe`; ``[options]`` holds options of
`kenosis_ort.quantize_static` by name, those that a machine decided included; ``[data]`` holds how the command read its
samples or made them up, in the words of its options. What is unknown in it is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_args

import numpy as np
import onnx
import tomli_w

from kenosis_ort import checks
from kenosis_ort.errors import ArgumentTypeError, OptionError, did_you_mean, unknown_name
from kenosis_ort.options import FIELDS, UNSET, Evidence, Failure, Format, Placement, Speed, Stages
from kenosis_ort.passes.recipe import NAMED_OPTIONS, SCHEMA, Recipe, is_recipe_file, parse, read_text, resolve_recipe
from kenosis_ort.quantizer.stock import CalibrationMethod, QuantFormat, QuantType
from kenosis_ort.storage.data import plain
from kenosis_ort.storage.writing import write_text
from kenosis_ort.targets import DEFAULT_TARGET


@dataclass(frozen=True)
class Option:
    """One option of `kenosis_ort.quantize_static`.

    Attributes:
        check: The value in Python's own types, or an error that names the option; not asked about `UNSET`.
        default: What holds where nobody gives it; `UNSET` where target and machine decide.
        in_file: A recipe file may hold it.
        words: Its values by their words in files and on the command line; empty where they stand for themselves.
    """

    check: checks.Check
    default: Any = None
    in_file: bool = True
    words: Mapping[str, Enum] = field(default_factory=dict)


def _provider(name: str, value: Any) -> Any:
    """An execution provider: its name, or a pair of name and options."""
    named = isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[1], Mapping)
    if isinstance(value[0] if named else value, str):
        return value
    raise checks.wrong_type(
        name, value, "the name of an execution provider, or a pair of it and a dictionary of options"
    )


def _recipe(name: str, value: Any) -> Any:
    if isinstance(value, Recipe):
        return value
    if isinstance(value, (str, os.PathLike)):
        return checks.path(name, value)
    raise checks.wrong_type(name, value, "a recipe's name, a Recipe, or the path of a .toml file")


def _reader(name: str, value: Any) -> Any:
    """A source of feeds; what it yields is checked when it is read."""
    iterated = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    if callable(getattr(value, "get_next", None)) or iterated:
        return value
    raise checks.wrong_type(name, value, "a CalibrationDataReader, or an iterable of feeds")


def _executor(_: str, value: Any) -> Any:
    if value is None:
        return None
    from kenosis_ort.cluster.client import as_cluster  # loads asyncio

    return as_cluster(value)


def _metric(name: str, value: Any) -> Any:
    """A callable that may be a metric; its arguments are checked later."""
    if callable(value) or hasattr(value, "update"):
        return value
    raise checks.wrong_type(name, value, "a function, or an object with update(), compute() and reset()")


_FLAGS: Final = (
    *("ActivationSymmetric", "ActivationRestrictedAsymmetric", "AddQDQPairToWeight", "CalibMovingAverage"),
    *("CalibTensorRangeSymmetric", "DedicatedQDQPair", "EnableSubgraph", "ForceQuantizeNoInputCheck"),
    *("MatMulConstBOnly", "QDQDisableWeightAdjustForInt32Bias", "QDQKeepRemovableActivations", "QuantizeBias"),
    *("SmoothQuant", "SmoothQuantFolding", "UseQDQContribOps", "WeightSymmetric", "extra.Sigmoid.nnapi"),
)
EXTRA_OPTION_CHECKS: Final[Mapping[str, checks.Check]] = MappingProxyType(
    {
        **dict.fromkeys(_FLAGS, checks.flag),
        "BlockSize": checks.whole,
        "CalibMaxIntermediateOutputs": checks.whole,
        "CalibMovingAverageConstant": partial(checks.real, least=0, most=1),
        "CalibPercentile": partial(checks.real, least=0, most=100),
        "CalibStridedMinMax": checks.whole,
        "DefaultTensorType": checks.whole,
        "MinimumRealRange": partial(checks.real, least=0),
        "OpTypesToExcludeOutputQuantization": checks.several,
        "QDQOpTypePerChannelSupportToAxis": partial(checks.mapping, each=partial(checks.whole, least=-16)),
        "SmoothQuantAlpha": partial(checks.real, least=0, most=1),
        "TensorQuantOverrides": checks.mapping,
        "scenario": checks.word,
    }
)
"""Every key that stock's quantizer reads from ``extra_options`` (1.31) with its check; None leaves any of them open."""


def check_extra_options(extra_options: Mapping[str, Any] | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A copy of ``extra_options`` without its unknown keys, and a warning about each of those.

    Raises:
        OptionError: An unknown key within `strict_names`.
    """
    options = dict(extra_options or {})
    complaints = [
        unknown_name(
            f"unknown extra_options key '{key}'.{did_you_mean(str(key), EXTRA_OPTION_CHECKS)}",
            where="extra_options",
            fix="remove it or correct its spelling.",
        )
        for key in options
        if key not in EXTRA_OPTION_CHECKS
    ]
    return {k: v for k, v in options.items() if k in EXTRA_OPTION_CHECKS}, tuple(complaints)


def _extra_options(name: str, value: Any) -> dict[str, Any]:
    found = {}
    for key, entry in checks.mapping(name, value).items():
        check = EXTRA_OPTION_CHECKS.get(key)
        if check is None or (entry is None and check is checks.flag):
            found[key] = entry  # None is stock's False
        elif entry is not None:
            found[key] = check(f"{name}[{key!r}]", entry)
    return found


def as_given(_: str, value: Any) -> Any:
    """The value as it is: what it may be is told where data types, formats, methods and targets are known."""
    return value


TYPES: Final[Mapping[str, Enum]] = {kind.name.removeprefix("Q").lower(): kind for kind in QuantType}
"""Words for data types: ``uint8`` for ``QuantType.QUInt8``."""
_NAMES: Final = checks.or_none(checks.several)
_WIDTH: Final = Option(checks.or_none(partial(checks.whole, least=2, most=8)))
OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(
    {
        # stock's
        "model_output": Option(checks.path, in_file=False),
        "quant_format": Option(as_given, QuantFormat.QDQ, words={kind.name.lower(): kind for kind in QuantFormat}),
        "op_types_to_quantize": Option(_NAMES),
        "per_channel": Option(checks.flag, UNSET),
        "reduce_range": Option(checks.flag, UNSET),
        "activation_type": Option(as_given, UNSET, words=TYPES),
        "weight_type": Option(as_given, UNSET, words=TYPES),
        "nodes_to_quantize": Option(_NAMES),
        "nodes_to_exclude": Option(_NAMES),
        "use_external_data_format": Option(checks.flag, False),
        "calibrate_method": Option(as_given, UNSET, words={kind.name.lower(): kind for kind in CalibrationMethod}),
        "calibration_providers": Option(
            checks.or_none(partial(checks.several, each=_provider, what="execution providers"))
        ),
        "extra_options": Option(checks.or_none(_extra_options)),
        "calibration_cache_path": Option(checks.or_none(checks.path), in_file=False),
        # ours
        "recipe": Option(_recipe, "fast", in_file=False),
        "accuracy_budget": Option(checks.or_none(partial(checks.real, least=0, most=1)), in_file=False),
        "metric": Option(checks.or_none(_metric), in_file=False),
        "eval_reader": Option(checks.or_none(_reader), in_file=False),
        "target": Option(as_given, DEFAULT_TARGET),
        "format": Option(checks.or_none(partial(checks.choice, among=get_args(Format)))),
        "speed": Option(checks.or_none(partial(checks.instance, of=Speed, what="a kenosis_ort.Speed")), in_file=False),
        "placement": Option(
            checks.or_none(partial(checks.instance, of=Placement, what="a kenosis_ort.Placement")), in_file=False
        ),
        "custom_op_libraries": Option(
            partial(checks.several, each=checks.path, what="paths"), (), in_file=False
        ),  # they run code
        "progress": Option(checks.or_none(checks.function), in_file=False),
        # further keywords
        "verify": Option(checks.flag, True),
        "evidence": Option(partial(checks.choice, among=get_args(Evidence)), "light", in_file=False),
        "executor": Option(_executor, in_file=False),
        "kv_cache": Option(checks.or_none(checks.path)),
        "on_failure": Option(partial(checks.choice, among=get_args(Failure)), "error"),
        "weight_bits": _WIDTH,
        "activation_bits": _WIDTH,
        "max_opset": Option(checks.or_none(partial(checks.whole, least=13))),
        **{name: Option(check, getattr(Placement, name, getattr(Speed, name, None))) for name, check in FIELDS.items()},
    }
)
"""Options of `kenosis_ort.quantize_static` by name: all but the model and the reader."""
IN_FILE: Final = tuple(sorted(name for name, option in OPTIONS.items() if option.in_file))
"""Names of the options that a recipe file may hold; the others stand elsewhere in it, or belong to one run."""


def check_model(value: Any) -> None:
    """Checks that something can be a model at all.

    Raises:
        ArgumentTypeError: It is neither a path nor a ModelProto.
    """
    if isinstance(value, onnx.ModelProto):
        return
    if not isinstance(value, (str, os.PathLike)):
        kind = type(value).__name__
        raise ArgumentTypeError(
            f"the model must be a path or an onnx.ModelProto, not {kind}", where="model_input", fix="pass one of them"
        )
    checks.path("model_input", value)


def checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `kenosis_ort.quantize_static` in Python's own types, without those that are `UNSET`.

    Raises:
        OptionError: One is of the wrong type (then also a TypeError) or out of range.
    """
    return {name: OPTIONS[name].check(name, value) for name, value in given.items() if value is not UNSET}


@dataclass(frozen=True)
class RecipeFile:
    """Content of a recipe file.

    Attributes:
        recipe: The accuracy passes.
        options: Options of `kenosis_ort.quantize_static`, as that takes them.
        data: Options of the command about samples, as it spells them.
        host: The profile that a machine chose, where the caller named none: by its costs the file is laid out again,
            and nothing says that the file is for that machine alone.
    """

    recipe: Recipe
    options: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    host: str | None = None

    def to_toml(self) -> str:
        """The recipe as text that `from_toml` reads."""
        options = {name: _word(name, value) for name, value in self.options.items()}
        machine = {} if self.host is None else {"host": self.host}
        tables = ("options", options), ("machine", machine), ("data", dict(self.data))
        filled = {name: table for name, table in tables if table}
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
        machine = raw.get("machine", {})
        for name in machine.keys() - {"host"}:
            raise OptionError(f"unknown '{name}' in [machine] of a recipe file", where=where, fix="host alone")
        host = _value("host", machine["host"], where) if machine else None
        return cls(recipe, options, raw.get("data", {}), host)

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
    """An option's value for the word that stands for it in a file."""
    if name in OPTIONS and isinstance(word, str):
        return OPTIONS[name].words.get(word, word)
    if name == "stages" and isinstance(word, Mapping):
        return Stages(**word)
    if name == "extra_options" and isinstance(word, Mapping):
        return {key: _unpacked(key, entry) for key, entry in word.items()}
    return word


def _word(name: str, value: Any) -> Any:
    if name == "stages":
        switches = value if isinstance(value, Mapping) else {f.name: getattr(value, f.name) for f in fields(value)}
        return {stage: False for stage, on in switches.items() if not on}
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
    check = checks.word if name == "target" else OPTIONS[name].check  # in a file it is a name
    try:
        return check(name, value_of(name, word))
    except OptionError as error:
        raise OptionError(f"[options] {error.what}", where=where, fix=error.fix) from error
    except (TypeError, ValueError, OverflowError) as error:  # an array of another type than it names
        raise OptionError(
            f"[options] {name} cannot be read: {error}", where=where, fix="write it as Recipe files are saved"
        ) from error


def _packed(value: Any) -> Any:
    """A value of `extra_options` and the like as TOML has them; what is None is left out."""
    if isinstance(value, QuantType):
        return next(word for word, kind in TYPES.items() if kind is value)
    if isinstance(value, Mapping):
        return {str(key): _packed(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_packed(entry) for entry in value]
    return value if isinstance(value, float) else plain(value)


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
