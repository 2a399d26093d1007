"""Options of `kenosis_ort.quantize_static` on the command line: one table of flags, and what is derived from it.

The types of the options stand in `kenosis_ort.option_types`, which loads onnx; ``--help`` does without it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kenosis_ort.checks import MOST_THREADS
from kenosis_ort.storage.writing import absolute

# -- values as the shell gives them


def whole(text: str) -> int:
    """Reads a whole number from 0 up."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 up")
    return int(text)


def threads(text: str) -> int:
    """Reads a number of threads, 0 for all."""
    number = whole(text)
    if number > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {MOST_THREADS} threads")
    return number


def positives(text: str) -> list[int]:
    """Reads whole numbers from 1 up, with commas between them."""
    return [positive(part.strip()) for part in text.split(",")]


def positive(text: str) -> int:
    """Reads a whole number from 1 up."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def number(text: str) -> float:
    """Reads a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number")
    return value


def seconds(text: str) -> float:
    """Reads a time in seconds above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return value


def share(text: str) -> float:
    """Reads a share from 0 to 1, or one in percent like ``0.5%``."""
    value = number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share from 0 to 1, e.g. 0.005 or 0.5%")
    return value


def numbers(text: str) -> tuple[float, ...]:
    """Reads numbers with commas between them."""
    try:
        return tuple(number(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers like 0.485,0.456,0.406") from None


def image_size(text: str) -> tuple[int, int]:
    """Reads height and width, e.g. ``224x224``."""
    sizes = _sizes(text)
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not HxW, e.g. 224x224")
    return sizes[0], sizes[1]


def named_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Reads ``NAME=1x3x224x224``."""
    name, sizes = _named(text, "1x3x224x224")
    return name, _sizes(sizes)


def named_word(text: str) -> tuple[str, str]:
    """Reads ``NAME=WORD``."""
    return _named(text, "WORD")


def input_range(text: str) -> tuple[str | None, tuple[float, float]]:
    """Reads ``LOW,HIGH`` or ``NAME=LOW,HIGH``; the name is None where there is none."""
    name, equals, bounds = text.rpartition("=")
    found = numbers(bounds)
    if len(found) != 2 or not found[0] < found[1]:
        raise argparse.ArgumentTypeError(f"'{text}' is not LOW,HIGH or NAME=LOW,HIGH, e.g. 0,255")
    return name if equals else None, (found[0], found[1])


def extra_option(text: str) -> tuple[str, Any]:
    """Reads ``KEY=VALUE``; the value as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    if value in ("True", "False"):
        value = value.lower()
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _named(text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")  # a tensor's name may hold an equals sign
    if not name or not equals or not value:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME={example}")
    return name, value


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of sizes like 1x3x224x224")
    return tuple(int(part) for part in parts)


# -- the table


@dataclass(frozen=True)
class Flag:
    """How the command line spells one option.

    Attributes:
        group: Heading in the help.
        help: What it does, one line.
        name: The flag; empty for the option's own name.
        alias: A second flag for it.
        metavar: Its value in the help.
        read: The value of its text, or an error; None where the text is the value.
        choices: The texts it takes; empty for any.
        switch: It has no value: ``--name`` and ``--no-name``.
        repeated: It may be given several times, once for each value.
    """

    group: str
    help: str = ""
    name: str = ""
    alias: str = ""
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    choices: Sequence[str] = ()
    switch: bool = False
    repeated: bool = False

    def spelled(self, text: str | None) -> str:
        """The flag with a value, given as text, or alone."""
        if text is None:
            return self.name
        if self.switch:
            return self.name if text == "True" else f"--no-{self.name.removeprefix('--')}"
        return f"{self.name} '{text}'" if self.repeated else f"{self.name} {text}"


_GOAL: Final = "what to aim at"
_SPEED: Final = "the promise that the result is not slower than the float model"
_HOW: Final = "how to quantize (default: what suits this machine)"
_WHICH: Final = "what to quantize"
FILES: Final = "files"
_TYPES: Final = ("uint8", "int8", "uint16", "int16")
_TABLE: Final[Mapping[str, Flag]] = {
    "recipe": Flag(
        _GOAL,
        "fast: the default; accurate: searches ranges and rounding, takes longer; strict: and leaves nodes float "
        "until a budget holds; data-free: from made-up data; plain: no passes; "
        "tiny: INT8 is kept even where it is not faster; weight-only-4: weights of 4 bits in blocks, "
        "activations float; weight-only-8: of 8; or a .toml file, such as the one that is "
        "saved beside an output and makes the same model again from the same data",
        alias="--preset",
        metavar="NAME|FILE",
    ),
    "accuracy_budget": Flag(
        _GOAL,
        "loss allowed on held-out data, in what is measured, e.g. 0.5%%; nodes stay float until it holds",
        metavar="SHARE",
        read=share,
    ),
    "target": Flag(_GOAL, "the runtime that it will run on, see: kenosis-ort targets (default: ort-cpu)"),
    "nodes_to_exclude": Flag(
        _GOAL, "leave this node float (may be repeated)", name="--exclude", metavar="NODE", repeated=True
    ),
    "promise": Flag(_SPEED, "--no-promise: keep INT8 even where it is slower than the float model", switch=True),
    "threads": Flag(_SPEED, "of the sessions that are timed; 0: all (default: 1)", read=threads),
    "tune": Flag(_SPEED, "off: no layer is left float for speed (default: model)", choices=("off", "model")),
    "host": Flag(
        _SPEED,
        "machine that the file is laid out for: the name of a profile (amx, vnni, avx2), or a file of kenosis-ort "
        "profile (default: this machine)",
        name="--for-host",
        metavar="NAME|FILE",
    ),
    "sequence_lengths": Flag(
        _SPEED,
        "lengths that it is timed at, e.g. 1,128 for tokens and prompts (default: those of the samples)",
        metavar="N,N",
        read=positives,
    ),
    "calibrate_method": Flag(
        _HOW,
        "how ranges are found (default: the recipe's)",
        name="--method",
        choices=("distribution", "entropy", "minmax", "percentile"),
    ),
    "format": Flag(
        _HOW,
        "of the quantized model: qdq; qop, operators of integers; qcdq and qop-clip, for fewer bits too; "
        "qcdq-qonnx and qonnx, for QONNX' tools (default: qdq)",
        choices=("qdq", "qop", "qcdq", "qcdq-qonnx", "qop-clip", "qonnx", "qoperator"),
    ),
    "weight_bits": Flag(_HOW, "width of weights (default: 8)", metavar="2..8", read=whole),
    "activation_bits": Flag(_HOW, "width of activations (default: 8)", metavar="2..8", read=whole),
    "kv_cache": Flag(
        _HOW,
        "the cache of a decoder goes in and out as int8; FILE: at the scales of that file (default: float)",
        metavar="int8|FILE",
    ),
    "max_opset": Flag(
        _HOW,
        "highest operator set of the result (default: the model's, or a higher one if 5 %% faster)",
        metavar="N",
        read=whole,
    ),
    "activation_type": Flag(_HOW, choices=_TYPES),
    "weight_type": Flag(_HOW, choices=_TYPES),
    "per_channel": Flag(_HOW, "weight scales by channel or tensor", switch=True),
    "reduce_range": Flag(_HOW, "7-bit weights, for CPUs without VNNI", switch=True),
    "extra_options": Flag(
        _HOW, "an extra_options entry", name="--option", metavar="KEY=VALUE", read=extra_option, repeated=True
    ),
    "protect_outputs": Flag(_HOW, "graph outputs (default: auto)", choices=("auto", "float", "int8")),
    "rewrites": Flag(_HOW, "--no-rewrites: leave the graph's form", switch=True),
    "on_failure": Flag(
        _HOW,
        "what a defect of kenosis-ort ends in; float: the float model as it came (default: error)",
        choices=("error", "float"),
    ),
    "nodes_to_quantize": Flag(
        _WHICH, "quantize this node only (may be repeated)", name="--only", metavar="NODE", repeated=True
    ),
    "op_types_to_quantize": Flag(
        _WHICH, "quantize this type only (may be repeated)", name="--op-type", metavar="TYPE", repeated=True
    ),
    "primary_inputs": Flag(
        _WHICH, "input that carries the data proper", name="--primary-input", metavar="NAME", repeated=True
    ),
    "use_external_data_format": Flag(FILES, "write weights to OUT.data", name="--external-data", switch=True),
    "calibration_cache_path": Flag(
        FILES, "calibration table in place of data, or to write", name="--cache", alias="--table", metavar="PATH"
    ),
    "custom_op_libraries": Flag(
        FILES,
        "shared library with custom operators to register first (may be repeated)",
        name="--custom-op-library",
        metavar="PATH",
        repeated=True,
    ),
    "verify": Flag(FILES, "--no-verify: skip the fusion proof", switch=True),
}
FLAGS: Final = MappingProxyType(
    {option: replace(flag, name=flag.name or f"--{option.replace('_', '-')}") for option, flag in _TABLE.items()}
)
"""Flags by the name of their option."""


def add_flag(parser: argparse._ActionsContainer, option: str, **settings: Any) -> None:
    """Adds one option's argument; the value is left None where it is not given.

    Args:
        parser: The parser or group to add it to.
        option: Name of the option.
        settings: Arguments of ``add_argument`` that differ for one command.
    """
    flag = FLAGS[option]
    found: dict[str, Any] = {"dest": option, "help": flag.help}
    if flag.switch:
        found["action"] = argparse.BooleanOptionalAction
    else:
        found |= {"type": flag.read, "metavar": flag.metavar, "choices": flag.choices or None}
    if flag.repeated:
        found["action"] = "append"
    names = [name for name in (flag.name, flag.alias) if name]
    parser.add_argument(*names, **{name: value for name, value in (found | settings).items() if value is not None})


def add_libraries(parser: argparse._ActionsContainer) -> None:
    """Adds the argument that names libraries of custom operators, none unless it is given."""
    add_flag(parser, "custom_op_libraries", default=[])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say how and what to quantize, by groups."""
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(f.group for f in FLAGS.values())}
    for option, flag in FLAGS.items():
        add_flag(groups[flag.group], option)
    goal, files = groups[_GOAL], groups[FILES]
    goal.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        type=extra_option,
        metavar="SETTING=VALUE",
        help="a setting of the recipe in place of its own, e.g. equalize=false (may be repeated)",
    )
    goal.add_argument(
        "--eval-data",
        metavar="SOURCE",
        help="held-out data of yours, read like --data and never calibrated on: what is lost is measured on all of it "
        "(default: calibration samples that are held out)",
    )
    goal.add_argument(
        "--metric",
        metavar="MODULE:NAME",
        help="what is measured, more is better: a function of outputs, reference and indices, or an object with update "
        "and compute (default: what suits the outputs)",
    )
    files.add_argument("--dry-run", action="store_true", help="print the plan and write nothing; needs no data")
    files.add_argument("--report", type=Path, metavar="FILE.html", help="save the report as one HTML file")
    files.add_argument(
        "--save-recipe", type=Path, metavar="FILE.toml", help="where the recipe goes (default: OUT with .recipe.toml)"
    )
    files.add_argument("--no-save-recipe", action="store_true", help="save no recipe")
    files.add_argument("--strict", action="store_true", help="exit with 1 where the file holds a float model")
    files.add_argument("--full", action="store_true", help="show every float node and all options")


# -- what is derived from it


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options that were given, by the API's names and as the shell gave them, and nothing else."""
    named = {option: getattr(arguments, option) for option in FLAGS}
    named |= {"recipe": _recipe(arguments), "extra_options": dict(arguments.extra_options or ()) or None}
    return {option: value for option, value in named.items() if value is not None}


def _recipe(arguments: argparse.Namespace) -> Any:
    if not arguments.settings:
        return arguments.recipe
    from kenosis_ort.recipe_file import resolve

    return resolve(arguments.recipe or "fast").with_settings(dict(arguments.settings))


def to_api(words: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `kenosis_ort.quantize_static` for options in the shell's words."""
    from kenosis_ort.recipe_file import value_of

    found = {name: word if name == "extra_options" else value_of(name, word) for name, word in words.items()}
    return {**found, "format": "qop"} if words.get("format") == "qoperator" else found


def with_absolute_paths(called: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `kenosis_ort.quantize_static` with paths that hold wherever the working directory goes."""
    from kenosis_ort.options import INT8_CACHE
    from kenosis_ort.recipe import is_recipe_file

    def absolute_path(name: str, value: Any) -> Any:
        if name == "custom_op_libraries":  # one that is no file here is for the system's loader to find
            return [str(absolute(path)) if os.path.exists(path) else path for path in value]
        is_path = name == "calibration_cache_path" or (name == "host" and os.path.exists(value))
        is_path = is_path or (name == "kv_cache" and value != INT8_CACHE)
        is_path = is_path or (name == "recipe" and is_recipe_file(value))
        return absolute(value) if is_path else value

    return {name: absolute_path(name, value) for name, value in called.items()}


_BARE: Final = "|".join(option for option in FLAGS if "_" in option)
_NAMED: Final = re.compile(
    rf"(?<![\w./'-])(?:(?P<option>{'|'.join([*FLAGS, 'quant_format'])})=(?P<value>\[?'[^']*'\]?|\w+(?:\.\w+)?)"
    rf"|(?P<bare>{_BARE})(?![\w=/'\[-]))"
)
_OF_A_READER: Final = {
    "kinds": ("--input-kind", "KIND"),
    "input_ranges": ("--input-range", "LOW,HIGH"),
    "input_shapes": ("--input-shape", "1x3x224x224"),
}
_BY_INPUT: Final = re.compile(rf"(?:SyntheticReader\()?\b({'|'.join(_OF_A_READER)})=\{{'?([^':}}]+)'?: [^}}]*\}}\)?")


def in_shell_words(text: str) -> str:
    """A message with options of the Python API spelled as flags: ``per_channel=False`` as ``--no-per-channel``.

    Plans and reports name options as Python spells them, since they are read in both places.
    """

    def option(found: re.Match[str]) -> str:
        if found["bare"]:
            return FLAGS[found["bare"]].name
        value = found["value"].strip("[]'")
        kind, _, member = value.rpartition(".")
        if kind or re.fullmatch(r"QU?Int\d+", value):  # QuantType.QInt8 and the like
            value = member.removeprefix("Q").lower() if "Int" in member else member.lower()
        return FLAGS["format" if found["option"] == "quant_format" else found["option"]].spelled(value)

    text = _NAMED.sub(option, text)
    text = _BY_INPUT.sub(lambda found: "{0} {2}={1}".format(*_OF_A_READER[found[1]], found[2]), text)
    return re.sub(r"\b(mean|std)=(?=[\s,.)]|$)", r"--\1", text)
