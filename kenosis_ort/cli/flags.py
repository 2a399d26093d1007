"""Options of `kenosis_ort.quantize_static` on the command line, and the commands that take them, as data.

Nothing slow is imported here; the module of the function that performs a command is, when it runs. The types of the
options stand in `kenosis_ort.option_types`, which loads onnx; ``--help`` does without it.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kenosis_ort.cli import parser

# -- the table


class Argument(NamedTuple):
    """One argument for ``argparse``: names, settings, and the heading in the help ("" for none)."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    group: str = ""

    @property
    def dest(self) -> str:
        """Name of the parsed value."""
        return str(self.settings.get("dest", self.names[0].lstrip("-").replace("-", "_")))

    def changed(self, **settings: Any) -> Argument:
        """The argument under no heading, with other settings, as one command has it."""
        return self._replace(settings={**self.settings, **settings}, group="")

    def spelled(self, text: str | None = None) -> str:
        """The flag with a value, given as text, or alone."""
        name, action = self.names[0], self.settings.get("action")
        if text is None:
            return name
        if action is argparse.BooleanOptionalAction and text in ("True", "False"):
            return name if text == "True" else f"--no-{name.removeprefix('--')}"
        return f"{name} '{text}'" if action == "append" else f"{name} {text}"


def argument(names: str, metavar: str = "", text: str = "", **settings: Any) -> Argument:
    """Argument as data: names with spaces between them, and parameters of ``add_argument``, empty ones left out.

    A default is told behind the text.
    """
    spelled = {
        "metavar": metavar,
        "help": f"{text} (default: {settings['default']})" if settings.get("default") else text,
    }
    return Argument(tuple(names.split()), {**{name: given for name, given in spelled.items() if given}, **settings})


def switch(name: str, text: str) -> Argument:
    """Argument without a value."""
    return argument(name, text=text, action="store_true")


def path(name: str, metavar: str, text: str, **settings: Any) -> Argument:
    """Argument that is a file or folder."""
    return argument(name, metavar, text, type=Path, **settings)


def repeated(name: str, metavar: str, text: str, **settings: Any) -> Argument:
    """Argument that may be given several times; an empty list without."""
    return argument(name, metavar, text, action="append", default=[], **settings)


def grouped(group: str, *arguments: Argument) -> tuple[Argument, ...]:
    """Arguments under a heading."""
    return tuple(one._replace(group=group) for one in arguments)


def add_arguments(to: argparse.ArgumentParser, arguments: Iterable[Argument], **more: Any) -> None:
    """Adds arguments to a parser, under their headings, with further settings for all."""
    groups: dict[str, argparse._ActionsContainer] = {"": to}
    for names, settings, title in arguments:
        if title not in groups:
            groups[title] = to.add_argument_group(title)
        groups[title].add_argument(*names, **settings, **more)


def _option(text: str = "", names: str = "", metavar: str = "", **settings: Any) -> Argument:
    """Argument of an option, None where it is not given; without a name it has the option's."""
    return argument(names, metavar, text, **settings)


def _names(text: str, names: str, metavar: str) -> Argument:
    """Argument of an option that may be given several times."""
    return argument(names, metavar, text, action="append")


_SWITCH: Final = argparse.BooleanOptionalAction  # --name and --no-name
_TYPES: Final = ("uint8", "int8", "uint16", "int16")
_GOAL: Final = "what to aim at"
FILES: Final = "files"
_TABLE: Final[Mapping[str, Mapping[str, Argument]]] = {
    _GOAL: {
        "recipe": _option(
            "fast: the default; accurate: searches ranges and rounding, takes longer; strict: and leaves nodes float "
            "until a budget holds; data-free: from made-up data; plain: no passes; "
            "tiny: INT8 is kept even where it is not faster; weight-only-4: weights of 4 bits in blocks, "
            "activations float; weight-only-8: of 8; or a .toml file, such as the one that is "
            "saved beside an output and makes the same model again from the same data",
            "--recipe --preset",
            "NAME|FILE",
        ),
        "accuracy_budget": _option(
            "loss allowed on held-out data, in what is measured, e.g. 0.5%%; nodes stay float until it holds",
            metavar="SHARE",
            type=parser.share,
        ),
        "target": _option("the runtime that it will run on, see: kenosis-ort targets (default: ort-cpu)"),
        "nodes_to_exclude": _names("leave this node float (may be repeated)", "--exclude", "NODE"),
    },
    "the promise that the result is not slower than the float model": {
        "promise": _option("--no-promise: keep INT8 even where it is slower than the float model", action=_SWITCH),
        "threads": _option("of the sessions that are timed; 0: all (default: 1)", type=parser.threads),
        "tune": _option("off: no layer is left float for speed (default: model)", choices=("off", "model")),
        "host": _option(
            "machine that the file is laid out for: the name of a profile (amx, vnni, zen4, avx2), or a file of "
            "kenosis-ort profile (default: this machine)",
            "--for-host",
            "NAME|FILE",
        ),
        "sequence_lengths": _option(
            "lengths that it is timed at, e.g. 1,128 for tokens and prompts (default: those of the samples)",
            metavar="N,N",
            type=parser.positives,
        ),
    },
    "how to quantize (default: what suits this machine)": {
        "calibrate_method": _option(
            "how ranges are found (default: the recipe's)",
            "--method",
            choices=("distribution", "entropy", "minmax", "percentile"),
        ),
        "format": _option(
            "of the quantized model: qdq; qop, operators of integers; qcdq and qop-clip, for fewer bits too; "
            "qcdq-qonnx and qonnx, for QONNX' tools (default: qdq)",
            choices=("qdq", "qop", "qcdq", "qcdq-qonnx", "qop-clip", "qonnx", "qoperator"),
        ),
        "weight_bits": _option("width of weights (default: 8)", metavar="2..8", type=parser.whole),
        "activation_bits": _option("width of activations (default: 8)", metavar="2..8", type=parser.whole),
        "kv_cache": _option(
            "the cache of a decoder goes in and out as int8; FILE: at the scales of that file (default: float)",
            metavar="int8|FILE",
        ),
        "max_opset": _option(
            "highest operator set of the result (default: the model's, or a higher one if 5 %% faster)",
            metavar="N",
            type=parser.whole,
        ),
        "activation_type": _option(choices=_TYPES),
        "weight_type": _option(choices=_TYPES),
        "per_channel": _option("weight scales by channel or tensor", action=_SWITCH),
        "reduce_range": _option("7-bit weights, for CPUs without VNNI", action=_SWITCH),
        "extra_options": _option(
            "an extra_options entry", "--option", "KEY=VALUE", action="append", type=parser.extra_option
        ),
        "protect_outputs": _option("graph outputs (default: auto)", choices=("auto", "float", "int8")),
        "rewrites": _option("--no-rewrites: leave the graph's form", action=_SWITCH),
        "on_failure": _option(
            "what a defect of kenosis-ort ends in; float: the float model as it came (default: error)",
            choices=("error", "float"),
        ),
    },
    "what to quantize": {
        "nodes_to_quantize": _names("quantize this node only (may be repeated)", "--only", "NODE"),
        "op_types_to_quantize": _names("quantize this type only (may be repeated)", "--op-type", "TYPE"),
        "primary_inputs": _names("input that carries the data proper", "--primary-input", "NAME"),
    },
    FILES: {
        "use_external_data_format": _option("write weights to OUT.data", "--external-data", action=_SWITCH),
        "calibration_cache_path": _option(
            "calibration table in place of data, or to write", "--cache --table", metavar="PATH"
        ),
        "custom_op_libraries": _names(
            "shared library with custom operators to register first (may be repeated)", "--custom-op-library", "PATH"
        ),
        "verify": _option("--no-verify: skip the fusion proof", action=_SWITCH),
    },
}
FLAGS: Final = MappingProxyType(
    {
        option: Argument(flag.names or (f"--{option.replace('_', '-')}",), {"dest": option, **flag.settings}, group)
        for group, table in _TABLE.items()
        for option, flag in table.items()
    }
)
"""Arguments by the name of their option, which is also that of the parsed value."""
LIBRARIES: Final = FLAGS["custom_op_libraries"].changed(default=[])

# -- arguments that several commands share

DEFAULT_SYNTHETIC: Final = 32
_SOURCE: Final = (
    argument(
        "--data",
        "SOURCE",
        "an .npz file with one array per input, an .npy file, a folder of such files, a pattern of them such as "
        "'day*.npz', a folder of images, or module:function, a function of yours without arguments that returns a "
        "reader, a dictionary of stacked arrays, or an iterable of feeds or arrays",
    ),
    argument(
        "--synthetic",
        "N",
        f"make N samples up (default {DEFAULT_SYNTHETIC}); with --data, beside those few real ones",
        type=parser.positive,
        nargs="?",
        const=DEFAULT_SYNTHETIC,
    ),
    argument("--batch-size", text="samples per run (default: 1, or the model's own)", type=parser.positive),
)
_MADE_UP: Final = (
    argument("--seed", text="of the random numbers (default: 0)", type=parser.whole),
    repeated(
        "--input-range",
        "[NAME=]LOW,HIGH",
        "lowest and highest value of an input; without NAME what black and white pixels are",
        type=parser.input_range,
    ),
    repeated("--input-shape", "NAME=1x3x224x224", "shape of an input of dynamic shape", type=parser.named_shape),
    repeated(
        "--input-kind",
        "NAME=KIND",
        "what an input is, e.g. image or token ids, where it cannot be told",
        type=parser.named_word,
    ),
)
_OF_BOTH: Final = (
    argument("--mean", "A,B,C", "subtracted after scaling, per channel", type=parser.numbers),
    argument("--std", "A,B,C", "divided by, per channel", type=parser.numbers),
    argument("--input", "NAME", "the input that takes the images (default: the only one)"),
)
_IMAGES: Final = (
    argument("--size", "HxW", "resize to (default: the input's size)", type=parser.image_size),
    argument("--layout", text="default: read off the input's shape", choices=("NCHW", "NHWC")),
    argument("--scale", text="multiplied to the pixels 0 to 255 first (default: 1/255)", type=parser.number),
    argument("--channel-order", choices=("RGB", "BGR", "GRAY")),
    argument("--resize", choices=("stretch", "crop", "letterbox")),
    argument("--fill", "0..255", "value of letterbox bars (default: 114)", type=parser.whole),
    argument("--limit", "N", "use the first N images only", type=parser.positive),
)
OF_MADE_UP: Final = tuple(one.dest for one in _MADE_UP)
OF_IMAGES: Final = tuple(one.dest for one in _IMAGES)
DATA_NAMES: Final = tuple(one.dest for one in (*_SOURCE, *_MADE_UP, *_OF_BOTH, *_IMAGES))
"""Names of the arguments about data; None or an empty list means not given."""
MACHINES: Final = grouped(
    "many machines (needs the extra dask)",
    argument(
        "--dask",
        "ADDRESS",
        "run the float model over the samples on the workers of the Dask scheduler at host:port; local:N starts N "
        "workers on this machine, local one a processor",
    ),
    switch("--skip-bad-shards", "leave data out that cannot be read or run, shard by shard"),
)


def data_arguments(title: str = "data") -> tuple[Argument, ...]:
    """Arguments that say where data comes from, the first ones under a heading as given."""
    return (
        *grouped(title, *_SOURCE),
        *grouped("samples that are made up", *_MADE_UP),
        *grouped("images, from a folder or made up", *_OF_BOTH, *_IMAGES),
    )


OPTIONS: Final = (
    *(one for one in FLAGS.values() if one.group == _GOAL),
    *grouped(
        _GOAL,
        repeated(
            "--set",
            "SETTING=VALUE",
            "a setting of the recipe in place of its own, e.g. equalize=false (may be repeated)",
            dest="settings",
            type=parser.extra_option,
        ),
        argument(
            "--eval-data",
            "SOURCE",
            "held-out data of yours, read like --data and never calibrated on: what is lost is measured on all of it "
            "(default: calibration samples that are held out)",
        ),
        argument(
            "--metric",
            "MODULE:NAME",
            "what is measured, more is better: a function of outputs, reference and indices, or an object with update "
            "and compute (default: what suits the outputs)",
        ),
    ),
    *(one for one in FLAGS.values() if one.group != _GOAL),
    *grouped(
        FILES,
        switch("--dry-run", "print the plan and write nothing; needs no data"),
        path("--report", "FILE.html", "save the report as one HTML file"),
        path("--save-recipe", "FILE.toml", "where the recipe goes (default: OUT with .recipe.toml)"),
        switch("--no-save-recipe", "save no recipe"),
        switch("--strict", "exit with 1 where the file holds a float model"),
        switch("--full", "show every float node and all options"),
    ),
)
"""Arguments that say how and what to quantize."""


# -- what is derived from it


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options that were given, by the API's names and as the shell gave them, and nothing else."""
    named = {option: getattr(arguments, option) for option in FLAGS}
    named["extra_options"] = dict(arguments.extra_options or ()) or None
    if arguments.settings:
        from kenosis_ort.option_types import resolve

        named["recipe"] = resolve(arguments.recipe or "fast").with_settings(dict(arguments.settings))
    return {option: value for option, value in named.items() if value is not None}


def given_data(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options about data that were given, and nothing else."""
    return {name: value for name in DATA_NAMES if (value := getattr(arguments, name)) not in (None, [])}


def to_api(words: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `kenosis_ort.quantize_static` for options in the shell's words."""
    from kenosis_ort.option_types import value_of

    found = {name: word if name == "extra_options" else value_of(name, word) for name, word in words.items()}
    return {**found, "format": "qop"} if words.get("format") == "qoperator" else found


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
        if kind.isidentifier() or re.fullmatch(r"QU?Int\d+", value):  # QuantType.QInt8 and the like
            value = member.removeprefix("Q").lower() if "Int" in member else member.lower()
        return FLAGS["format" if found["option"] == "quant_format" else found["option"]].spelled(value)

    text = _NAMED.sub(option, text)
    text = _BY_INPUT.sub(lambda found: "{0} {2}={1}".format(*_OF_A_READER[found[1]], found[2]), text)
    return re.sub(r"\b(mean|std)=(?=[\s,.)]|$)", r"--\1", text)


# -- what a command is


class Command:
    """One command: a class of its own, whose docstring is what it says of itself, with examples.

    Attributes:
        name: What it is called by.
        summary: One line for the list of commands.
        arguments: Its arguments, those that all commands take aside.
        function: ``module:function`` of this package that performs it: takes the parsed arguments and the screen,
            returns whether something that was wanted is not so.
        one: What its exit code 1 says; empty where it has none.
        first: Options that ``--help`` shows where others are left to ``--help-all``; empty for all.
        needs_data: Whether nothing is done without data.
    """

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    function: str
    one: str = ""
    first: tuple[str, ...] = ()
    needs_data: bool = False

    @property
    def about(self) -> str:
        """What it does, with examples."""
        return inspect.getdoc(type(self)) or ""

    @property
    def usage(self) -> str:
        """Arguments of the command, shortened."""
        forms = {None: "{0}", "?": "[{0}]", "+": "{0} [{0} ...]"}
        named = [one.settings for one in self.arguments if not one.names[0].startswith("-")]
        words = [forms[settings.get("nargs")].format(settings["metavar"]) for settings in named]
        return " ".join([*words, *(["(--data SOURCE | --synthetic [N])"] if self.needs_data else []), "[options]"])

    @property
    def run(self) -> Callable[..., bool | None]:
        """The function that performs it, imported."""
        module, _, name = self.function.partition(":")
        found: Callable[..., bool | None] = getattr(import_module(f"kenosis_ort.cli.{module}"), name)
        return found
