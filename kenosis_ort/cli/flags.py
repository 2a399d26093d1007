"""Options of `kenosis_ort.quantize_static` on the command line: flags, their words, and what the API takes."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kenosis_ort.checks import MOST_THREADS
from kenosis_ort.cli import flags
from kenosis_ort.cli.screen import Screen
from kenosis_ort.storage.writing import absolute

if TYPE_CHECKING:
    from kenosis_ort.cluster import Cluster


TYPES: Final = ("uint8", "int8", "uint16", "int16")


FORMATS: Final = MappingProxyType(
    {
        **{name: name for name in ("qdq", "qop", "qcdq", "qcdq-qonnx", "qop-clip", "qonnx")},
        "qoperator": "qop",
    }
)


METHODS: Final = MappingProxyType(
    {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile", "distribution": "Distribution"}
)


_PATHS: Final = ("calibration_cache_path",)


_API: Final = {
    "for_host": "host",
    "method": "calibrate_method",
    "exclude": "nodes_to_exclude",
    "only": "nodes_to_quantize",
    "op_type": "op_types_to_quantize",
    "primary_input": "primary_inputs",
    "external_data": "use_external_data_format",
    "custom_op_library": "custom_op_libraries",
}


"""Names of `kenosis_ort.quantize_static`'s options for arguments of another name."""


def add_libraries(parser: argparse._ActionsContainer, *, default: Sequence[str] | None = ()) -> None:
    """Adds the argument that names libraries of custom operators."""
    parser.add_argument(
        "--custom-op-library",
        action="append",
        default=None if default is None else [*default],
        metavar="PATH",
        help="shared library with custom operators to register first (may be repeated)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say how and what to quantize."""
    goal = parser.add_argument_group("what to aim at")
    goal.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help="fast: the default; accurate: searches ranges and rounding, takes longer; strict: and leaves nodes float "
        "until a budget holds; data-free: from made-up data; plain: no passes; "
        "tiny: INT8 is kept even where it is not faster; weight-only-4: weights of 4 bits in blocks, "
        "activations float; weight-only-8: of 8; or a .toml file, such as the one that is "
        "saved beside an output and makes the same model again from the same data",
    )
    goal.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        type=flags.extra_option,
        metavar="SETTING=VALUE",
        help="a setting of the recipe in place of its own, e.g. equalize=false (may be repeated)",
    )
    goal.add_argument(
        "--accuracy-budget",
        type=flags.share,
        metavar="SHARE",
        help="loss allowed on held-out data, in what is measured, e.g. 0.5%%; nodes stay float until it holds",
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
    goal.add_argument("--target", help="the runtime that it will run on, see: kenosis-ort targets (default: ort-cpu)")
    goal.add_argument("--exclude", action="append", metavar="NODE", help="leave this node float (may be repeated)")
    goal.add_argument("--preset", dest="recipe", metavar="NAME", help="the same as --recipe NAME")

    speed = parser.add_argument_group("the promise that the result is not slower than the float model")
    speed.add_argument(
        "--promise",
        action=argparse.BooleanOptionalAction,
        help="--no-promise: keep INT8 even where it is slower than the float model",
    )
    speed.add_argument("--threads", type=flags.threads, help="of the sessions that are timed; 0: all (default: 1)")
    speed.add_argument(
        "--tune", choices=("off", "model"), help="off: no layer is left float for speed (default: model)"
    )
    speed.add_argument(
        "--for-host",
        metavar="NAME|FILE",
        help="machine that the file is laid out for: the name of a profile (amx, vnni, avx2), or a file of kenosis-ort "
        "profile (default: this machine)",
    )
    speed.add_argument(
        "--sequence-lengths",
        type=flags.positives,
        metavar="N,N",
        help="lengths that it is timed at, e.g. 1,128 for tokens and prompts (default: those of the samples)",
    )

    how = parser.add_argument_group("how to quantize (default: what suits this machine)")
    how.add_argument("--method", choices=sorted(METHODS), help="how ranges are found (default: the recipe's)")
    how.add_argument(
        "--format",
        choices=list(FORMATS),
        help="of the quantized model: qdq; qop, operators of integers; qcdq and qop-clip, for fewer bits too; "
        "qcdq-qonnx and qonnx, for QONNX' tools (default: qdq)",
    )
    for what in ("weight", "activation"):
        how.add_argument(f"--{what}-bits", type=flags.whole, metavar="2..8", help=f"width of {what}s (default: 8)")
    how.add_argument(
        "--kv-cache",
        metavar="int8|FILE",
        help="the cache of a decoder goes in and out as int8; FILE: at the scales of that file (default: float)",
    )
    how.add_argument(
        "--max-opset",
        type=flags.whole,
        metavar="N",
        help="highest operator set of the result (default: the model's, or a higher one if 5 %% faster)",
    )
    how.add_argument("--activation-type", choices=TYPES)
    how.add_argument("--weight-type", choices=TYPES)
    how.add_argument("--per-channel", action=argparse.BooleanOptionalAction, help="weight scales by channel or tensor")
    how.add_argument(
        "--reduce-range", action=argparse.BooleanOptionalAction, help="7-bit weights, for CPUs without VNNI"
    )
    how.add_argument(
        "--option",
        action="append",
        default=[],
        type=flags.extra_option,
        metavar="KEY=VALUE",
        help="an extra_options entry",
    )
    how.add_argument("--protect-outputs", choices=("auto", "float", "int8"), help="graph outputs (default: auto)")
    how.add_argument("--rewrites", action=argparse.BooleanOptionalAction, help="--no-rewrites: leave the graph's form")

    how.add_argument(
        "--on-failure",
        choices=("error", "float"),
        help="what a defect of kenosis-ort ends in; float: the float model as it came (default: error)",
    )

    which = parser.add_argument_group("what to quantize")
    which.add_argument("--only", action="append", metavar="NODE", help="quantize this node only (may be repeated)")
    which.add_argument("--op-type", action="append", metavar="TYPE", help="quantize this type only (may be repeated)")
    which.add_argument("--primary-input", action="append", metavar="NAME", help="input that carries the data proper")


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options that were given, by the API's names and as the shell gave them, and nothing else."""
    from kenosis_ort.option_types import OPTIONS

    named = {_API.get(name, name): value for name, value in vars(arguments).items() if name not in ("metric", "option")}
    named |= {"recipe": _recipe(arguments), "extra_options": dict(arguments.option) or None}
    named["calibration_cache_path"] = None if arguments.cache is None else str(arguments.cache)
    return {name: named[name] for name in OPTIONS if named.get(name) is not None}


def _recipe(arguments: argparse.Namespace) -> Any:
    if not arguments.settings:
        return arguments.recipe
    from kenosis_ort.recipe_file import resolve

    return resolve(arguments.recipe or "fast").with_settings(dict(arguments.settings))


def to_api(words: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `kenosis_ort.quantize_static` for options in the shell's words."""
    from kenosis_ort.recipe_file import value_of

    found = {name: word if name == "extra_options" else value_of(name, word) for name, word in words.items()}
    return {**found, "format": FORMATS[words["format"]]} if "format" in words else found


def with_absolute_paths(called: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `kenosis_ort.quantize_static` with paths that hold wherever the working directory goes."""
    from kenosis_ort.options import INT8_CACHE
    from kenosis_ort.recipe import is_recipe_file

    def absolute_path(name: str, value: Any) -> Any:
        if name == "custom_op_libraries":  # one that is no file here is for the system's loader to find
            return [str(absolute(path)) if os.path.exists(path) else path for path in value]
        is_path = name in _PATHS or (name == "host" and os.path.exists(value))
        is_path = is_path or (name == "kv_cache" and value != INT8_CACHE)
        is_path = is_path or (name == "recipe" and is_recipe_file(value))
        return absolute(value) if is_path else value

    return {name: absolute_path(name, value) for name, value in called.items()}


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


def add_machines(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    where = parser.add_argument_group("many machines (needs the extra dask)")
    where.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="run the float model over the samples on the workers of the Dask scheduler at host:port; local:N starts N "
        "workers on this machine, local one a processor",
    )
    where.add_argument(
        "--skip-bad-shards", action="store_true", help="leave data out that cannot be read or run, shard by shard"
    )


@contextmanager
def executor(arguments: argparse.Namespace, screen: Screen) -> Iterator[Cluster | None]:
    """Yields what ``--dask`` names, with shards reported on stderr; None where it names nothing.

    Raises:
        OptionError: It is spelled wrong, or Dask is not installed.
        ClusterError: Nobody answers.
    """
    if arguments.dask is None:
        yield None
        return
    from kenosis_ort.cluster import Cluster
    from kenosis_ort.cluster.client import BadShards, connected

    with connected(arguments.dask) as client:
        bad: BadShards = "skip" if arguments.skip_bad_shards else "stop"
        cluster = Cluster(client, bad_shards=bad, on_shard=lambda done: screen.tell(str(done)))
        if cluster.dashboard:
            screen.tell(f"dashboard: {cluster.dashboard}")
        yield cluster
