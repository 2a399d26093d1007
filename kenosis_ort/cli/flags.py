"""Options of `kenosis_ort.quantize_static` on the command line: one table of flags, and what is derived from it.

The types of the options stand in `kenosis_ort.option_types`, which loads onnx; ``--help`` does without it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kenosis_ort.checks import MOST_THREADS
from kenosis_ort.storage.writing import absolute

# -- values as the shell gives them


def _require(holds: object, text: str, what: str) -> None:
    if not holds:
        raise argparse.ArgumentTypeError(f"'{text}' is {what}")


def whole(text: str) -> int:
    """Whole number from 0 up."""
    _require(text.isdecimal(), text, "not a whole number from 0 up")
    return int(text)


def threads(text: str) -> int:
    """Number of threads, 0 for all."""
    count = whole(text)
    _require(count <= MOST_THREADS, text, f"more than {MOST_THREADS} threads")
    return count


def positive(text: str) -> int:
    """Whole number from 1 up."""
    _require(text.isdecimal() and int(text), text, "not a whole number above 0")
    return int(text)


def positives(text: str) -> list[int]:
    """Whole numbers from 1 up, with commas between them."""
    return [positive(part.strip()) for part in text.split(",")]


def number(text: str) -> float:
    """Finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    _require(math.isfinite(value), text, "not a number")
    return value


def seconds(text: str) -> float:
    """Time in seconds above 0."""
    value = number(text)
    _require(value > 0, text, "not a number of seconds above 0")
    return value


def share(text: str) -> float:
    """Share from 0 to 1, or one in percent like ``0.5%``."""
    value = number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    _require(0 <= value <= 1, text, "not a share from 0 to 1, e.g. 0.005 or 0.5%")
    return value


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(number(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers like 0.485,0.456,0.406") from None


def sizes(text: str) -> tuple[int, ...]:
    """Sizes with an x between them, e.g. ``1x3x224x224``."""
    parts = text.lower().split("x")
    _require(all(part.isdecimal() and int(part) for part in parts), text, "not a list of sizes like 1x3x224x224")
    return tuple(int(part) for part in parts)


def image_size(text: str) -> tuple[int, int]:
    """Height and width, e.g. ``224x224``."""
    found = sizes(text)
    _require(len(found) == 2, text, "not HxW, e.g. 224x224")
    return found[0], found[1]


def named_word(text: str, example: str = "WORD") -> tuple[str, str]:
    """Name and text of ``NAME=WORD``; a tensor's name may hold an equals sign."""
    name, _, value = text.rpartition("=")
    _require(name and value, text, f"not NAME={example}")
    return name, value


def named_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Name and sizes of ``NAME=1x3x224x224``."""
    name, shape = named_word(text, "1x3x224x224")
    return name, sizes(shape)


def input_range(text: str) -> tuple[str | None, tuple[float, float]]:
    """Name and bounds of ``NAME=LOW,HIGH``; the name is None in ``LOW,HIGH``."""
    name, equals, bounds = text.rpartition("=")
    found = numbers(bounds)
    _require(len(found) == 2 and found[0] < found[-1], text, "not LOW,HIGH or NAME=LOW,HIGH, e.g. 0,255")
    return name if equals else None, (found[0], found[1])


def extra_option(text: str) -> tuple[str, Any]:
    """Key and value of ``KEY=VALUE``; the value as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    _require(key and equals, text, "not KEY=VALUE")
    try:
        return key, json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return key, value


# -- the table


class Argument(NamedTuple):
    """What ``argparse`` is told of one argument: names, settings, and the heading in the help ("" for none)."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    group: str = ""

    @property
    def dest(self) -> str:
        """Name of the parsed value."""
        return str(self.settings.get("dest", self.names[0].lstrip("-").replace("-", "_")))

    @property
    def choices(self) -> Sequence[str]:
        """The texts it takes; empty for any."""
        choices: Sequence[str] = self.settings.get("choices", ())
        return choices

    def changed(self, **settings: Any) -> Argument:
        """The argument under no heading, with other settings, as one command has it."""
        return self._replace(settings={**self.settings, **settings}, group="")

    def spelled(self, text: str | None = None) -> str:
        """The flag with a value, given as text, or alone."""
        name, action = self.names[0], self.settings.get("action")
        if text is None:
            return name
        if action is argparse.BooleanOptionalAction:
            return name if text == "True" else f"--no-{name.removeprefix('--')}"
        return f"{name} '{text}'" if action == "append" else f"{name} {text}"


_REPEATED: Final[Mapping[str, Any]] = {"action": "append", "default": []}


def argument(*names: str, group: str = "", **settings: Any) -> Argument:
    """Argument as data, with the parameters of ``add_argument``."""
    return Argument(names, settings, group)


def switch(name: str, text: str, group: str = "") -> Argument:
    """Argument without a value."""
    return argument(name, action="store_true", help=text, group=group)


def path(name: str, metavar: str, text: str, **settings: Any) -> Argument:
    """Argument that is a file or folder."""
    return argument(name, type=Path, metavar=metavar, help=text, **settings)


def add_arguments(parser: argparse.ArgumentParser, arguments: Iterable[Argument]) -> None:
    """Adds arguments to a parser, under their headings."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for names, settings, title in arguments:
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(*names, **settings)


_SWITCH: Final = argparse.BooleanOptionalAction  # --name and --no-name


def _option(group: str, text: str = "", *, name: str = "", alias: str = "", **settings: Any) -> Argument:
    """Argument of an option, None where it is not given; without a name it has the option's."""
    names = (name, alias) if alias else (name,)
    return argument(*names, group=group, **({"help": text} if text else {}), **settings)


_GOAL: Final = "what to aim at"
_SPEED: Final = "the promise that the result is not slower than the float model"
_HOW: Final = "how to quantize (default: what suits this machine)"
_WHICH: Final = "what to quantize"
FILES: Final = "files"
_TYPES: Final = ("uint8", "int8", "uint16", "int16")
_TABLE: Final[Mapping[str, Argument]] = {
    "recipe": _option(
        _GOAL,
        "fast: the default; accurate: searches ranges and rounding, takes longer; strict: and leaves nodes float "
        "until a budget holds; data-free: from made-up data; plain: no passes; "
        "tiny: INT8 is kept even where it is not faster; weight-only-4: weights of 4 bits in blocks, "
        "activations float; weight-only-8: of 8; or a .toml file, such as the one that is "
        "saved beside an output and makes the same model again from the same data",
        alias="--preset",
        metavar="NAME|FILE",
    ),
    "accuracy_budget": _option(
        _GOAL,
        "loss allowed on held-out data, in what is measured, e.g. 0.5%%; nodes stay float until it holds",
        type=share,
        metavar="SHARE",
    ),
    "target": _option(_GOAL, "the runtime that it will run on, see: kenosis-ort targets (default: ort-cpu)"),
    "nodes_to_exclude": _option(
        _GOAL, "leave this node float (may be repeated)", name="--exclude", action="append", metavar="NODE"
    ),
    "promise": _option(_SPEED, "--no-promise: keep INT8 even where it is slower than the float model", action=_SWITCH),
    "threads": _option(_SPEED, "of the sessions that are timed; 0: all (default: 1)", type=threads),
    "tune": _option(_SPEED, "off: no layer is left float for speed (default: model)", choices=("off", "model")),
    "host": _option(
        _SPEED,
        "machine that the file is laid out for: the name of a profile (amx, vnni, avx2), or a file of kenosis-ort "
        "profile (default: this machine)",
        name="--for-host",
        metavar="NAME|FILE",
    ),
    "sequence_lengths": _option(
        _SPEED,
        "lengths that it is timed at, e.g. 1,128 for tokens and prompts (default: those of the samples)",
        type=positives,
        metavar="N,N",
    ),
    "calibrate_method": _option(
        _HOW,
        "how ranges are found (default: the recipe's)",
        name="--method",
        choices=("distribution", "entropy", "minmax", "percentile"),
    ),
    "format": _option(
        _HOW,
        "of the quantized model: qdq; qop, operators of integers; qcdq and qop-clip, for fewer bits too; "
        "qcdq-qonnx and qonnx, for QONNX' tools (default: qdq)",
        choices=("qdq", "qop", "qcdq", "qcdq-qonnx", "qop-clip", "qonnx", "qoperator"),
    ),
    "weight_bits": _option(_HOW, "width of weights (default: 8)", type=whole, metavar="2..8"),
    "activation_bits": _option(_HOW, "width of activations (default: 8)", type=whole, metavar="2..8"),
    "kv_cache": _option(
        _HOW,
        "the cache of a decoder goes in and out as int8; FILE: at the scales of that file (default: float)",
        metavar="int8|FILE",
    ),
    "max_opset": _option(
        _HOW,
        "highest operator set of the result (default: the model's, or a higher one if 5 %% faster)",
        type=whole,
        metavar="N",
    ),
    "activation_type": _option(_HOW, choices=_TYPES),
    "weight_type": _option(_HOW, choices=_TYPES),
    "per_channel": _option(_HOW, "weight scales by channel or tensor", action=_SWITCH),
    "reduce_range": _option(_HOW, "7-bit weights, for CPUs without VNNI", action=_SWITCH),
    "extra_options": _option(
        _HOW, "an extra_options entry", name="--option", action="append", type=extra_option, metavar="KEY=VALUE"
    ),
    "protect_outputs": _option(_HOW, "graph outputs (default: auto)", choices=("auto", "float", "int8")),
    "rewrites": _option(_HOW, "--no-rewrites: leave the graph's form", action=_SWITCH),
    "on_failure": _option(
        _HOW,
        "what a defect of kenosis-ort ends in; float: the float model as it came (default: error)",
        choices=("error", "float"),
    ),
    "nodes_to_quantize": _option(
        _WHICH, "quantize this node only (may be repeated)", name="--only", action="append", metavar="NODE"
    ),
    "op_types_to_quantize": _option(
        _WHICH, "quantize this type only (may be repeated)", name="--op-type", action="append", metavar="TYPE"
    ),
    "primary_inputs": _option(
        _WHICH, "input that carries the data proper", name="--primary-input", action="append", metavar="NAME"
    ),
    "use_external_data_format": _option(FILES, "write weights to OUT.data", name="--external-data", action=_SWITCH),
    "calibration_cache_path": _option(
        FILES, "calibration table in place of data, or to write", name="--cache", alias="--table", metavar="PATH"
    ),
    "custom_op_libraries": _option(
        FILES,
        "shared library with custom operators to register first (may be repeated)",
        name="--custom-op-library",
        action="append",
        metavar="PATH",
    ),
    "verify": _option(FILES, "--no-verify: skip the fusion proof", action=_SWITCH),
}
FLAGS: Final = MappingProxyType(
    {
        option: flag._replace(
            names=(flag.names[0] or f"--{option.replace('_', '-')}", *flag.names[1:]),
            settings={"dest": option, **flag.settings},
        )
        for option, flag in _TABLE.items()
    }
)
"""Arguments by the name of their option, which is also that of the parsed value."""
LIBRARIES: Final = FLAGS["custom_op_libraries"].changed(default=[])

# -- arguments that several commands share

DEFAULT_SYNTHETIC: Final = 32
_SOURCE: Final = (
    argument(
        "--data",
        metavar="SOURCE",
        help="an .npz file with one array per input, an .npy file, a folder of such files, a pattern of them such as "
        "'day*.npz', a folder of images, or module:function, a function of yours without arguments that returns a "
        "reader, a dictionary of stacked arrays, or an iterable of feeds or arrays",
    ),
    argument(
        "--synthetic",
        type=positive,
        nargs="?",
        const=DEFAULT_SYNTHETIC,
        metavar="N",
        help=f"make N samples up (default {DEFAULT_SYNTHETIC}); with --data, beside those few real ones",
    ),
    argument("--batch-size", type=positive, help="samples per run (default: 1, or the model's own)"),
)
_MADE_UP: Final = (
    argument("--seed", type=whole, help="of the random numbers (default: 0)"),
    argument(
        "--input-range",
        type=input_range,
        metavar="[NAME=]LOW,HIGH",
        help="lowest and highest value of an input; without NAME what black and white pixels are",
        **_REPEATED,
    ),
    argument(
        "--input-shape",
        type=named_shape,
        metavar="NAME=1x3x224x224",
        help="shape of an input of dynamic shape",
        **_REPEATED,
    ),
    argument(
        "--input-kind",
        type=named_word,
        metavar="NAME=KIND",
        help="what an input is, e.g. image or token ids, where it cannot be told",
        **_REPEATED,
    ),
)
_OF_BOTH: Final = (
    argument("--mean", type=numbers, metavar="A,B,C", help="subtracted after scaling, per channel"),
    argument("--std", type=numbers, metavar="A,B,C", help="divided by, per channel"),
    argument("--input", metavar="NAME", help="the input that takes the images (default: the only one)"),
)
_IMAGES: Final = (
    argument("--size", type=image_size, metavar="HxW", help="resize to (default: the input's size)"),
    argument("--layout", choices=("NCHW", "NHWC"), help="default: read off the input's shape"),
    argument("--scale", type=number, help="multiplied to the pixels 0 to 255 first (default: 1/255)"),
    argument("--channel-order", choices=("RGB", "BGR", "GRAY")),
    argument("--resize", choices=("stretch", "crop", "letterbox")),
    argument("--fill", type=whole, metavar="0..255", help="value of letterbox bars (default: 114)"),
    argument("--limit", type=positive, metavar="N", help="use the first N images only"),
)
OF_MADE_UP: Final = tuple(one.dest for one in _MADE_UP)
OF_IMAGES: Final = tuple(one.dest for one in _IMAGES)
DATA_NAMES: Final = tuple(one.dest for one in (*_SOURCE, *_MADE_UP, *_OF_BOTH, *_IMAGES))
"""Names of the arguments about data; None or an empty list means not given."""
_MANY: Final = "many machines (needs the extra dask)"
MACHINES: Final = (
    argument(
        "--dask",
        metavar="ADDRESS",
        help="run the float model over the samples on the workers of the Dask scheduler at host:port; local:N starts N "
        "workers on this machine, local one a processor",
        group=_MANY,
    ),
    switch("--skip-bad-shards", "leave data out that cannot be read or run, shard by shard", _MANY),
)


def data_arguments(title: str = "data") -> list[Argument]:
    """Arguments that say where data comes from, the first ones under a heading as given."""
    groups = {
        title: _SOURCE,
        "samples that are made up": _MADE_UP,
        "images, from a folder or made up": (*_OF_BOTH, *_IMAGES),
    }
    return [one._replace(group=group) for group, arguments in groups.items() for one in arguments]


OPTIONS: Final = (
    *(one for one in FLAGS.values() if one.group == _GOAL),
    argument(
        "--set",
        dest="settings",
        type=extra_option,
        metavar="SETTING=VALUE",
        help="a setting of the recipe in place of its own, e.g. equalize=false (may be repeated)",
        group=_GOAL,
        **_REPEATED,
    ),
    argument(
        "--eval-data",
        metavar="SOURCE",
        help="held-out data of yours, read like --data and never calibrated on: what is lost is measured on all of it "
        "(default: calibration samples that are held out)",
        group=_GOAL,
    ),
    argument(
        "--metric",
        metavar="MODULE:NAME",
        help="what is measured, more is better: a function of outputs, reference and indices, or an object with update "
        "and compute (default: what suits the outputs)",
        group=_GOAL,
    ),
    *(one for one in FLAGS.values() if one.group != _GOAL),
    switch("--dry-run", "print the plan and write nothing; needs no data", FILES),
    path("--report", "FILE.html", "save the report as one HTML file", group=FILES),
    path("--save-recipe", "FILE.toml", "where the recipe goes (default: OUT with .recipe.toml)", group=FILES),
    switch("--no-save-recipe", "save no recipe", FILES),
    switch("--strict", "exit with 1 where the file holds a float model", FILES),
    switch("--full", "show every float node and all options", FILES),
)
"""Arguments that say how and what to quantize."""


# -- what is derived from it


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options that were given, by the API's names and as the shell gave them, and nothing else."""
    named = {option: getattr(arguments, option) for option in FLAGS}
    named |= {"recipe": _recipe(arguments), "extra_options": dict(arguments.extra_options or ()) or None}
    return {option: value for option, value in named.items() if value is not None}


def given_data(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options about data that were given, and nothing else."""
    return {name: value for name in DATA_NAMES if (value := getattr(arguments, name)) not in (None, [])}


def _recipe(arguments: argparse.Namespace) -> Any:
    if not arguments.settings:
        return arguments.recipe
    from kenosis_ort.option_types import resolve

    return resolve(arguments.recipe or "fast").with_settings(dict(arguments.settings))


def to_api(words: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `kenosis_ort.quantize_static` for options in the shell's words."""
    from kenosis_ort.option_types import value_of

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
            return FLAGS[found["bare"]].spelled()
        value = found["value"].strip("[]'")
        kind, _, member = value.rpartition(".")
        if kind or re.fullmatch(r"QU?Int\d+", value):  # QuantType.QInt8 and the like
            value = member.removeprefix("Q").lower() if "Int" in member else member.lower()
        return FLAGS["format" if found["option"] == "quant_format" else found["option"]].spelled(value)

    text = _NAMED.sub(option, text)
    text = _BY_INPUT.sub(lambda found: "{0} {2}={1}".format(*_OF_A_READER[found[1]], found[2]), text)
    return re.sub(r"\b(mean|std)=(?=[\s,.)]|$)", r"--\1", text)
