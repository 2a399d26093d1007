"""``kenosis-ort bench A B ...``: `kenosis_ort.bench` from the shell."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rich.console import Console

from kenosis_ort.bench import bench
from kenosis_ort.bench.text import render_bench
from kenosis_ort.cli import data, exits
from kenosis_ort.cli.progress import progress_bar

HELP = "time models against each other"
DESCRIPTION = """\
Times models on the CPU, interleaved in random order with fresh sessions, and
says which are faster than the first one beyond the noise.

  kenosis-ort bench model.onnx model.int8.onnx --data samples.npz
  kenosis-ort bench model.onnx a.onnx b.onnx --threads 4 --seconds 60"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="the models; the first is the baseline")

    how = parser.add_argument_group("how to time")
    how.add_argument("--threads", type=_count, default=1, help="of a session; 0: as the runtime likes (default: 1)")
    how.add_argument("--seconds", type=_seconds, default=20.0, help="for all of it (default: 20)")
    how.add_argument("--rounds", type=_positive, default=15, help="each with fresh sessions, at most (default: 15)")
    how.add_argument("--memory", action="store_true", help="measure peak memory as well, in separate processes")
    how.add_argument(
        "--custom-op-library",
        action="append",
        default=[],
        metavar="PATH",
        help="shared library with custom operators to register first (may be repeated)",
    )
    how.add_argument("--json", action="store_true", help="print the report as JSON")
    data.add_arguments(parser, title="what the models are run with (default: --synthetic)", required=False)


def run(arguments: argparse.Namespace) -> int:
    """Performs the command and returns its exit code."""
    feeds = None
    if arguments.data is not None or arguments.synthetic is not None:
        feeds = data.make_reader(argparse.Namespace(**vars(arguments), model=arguments.models[0]))
    with progress_bar("timing", Console(stderr=True)) as progress:
        report = bench(
            arguments.models,
            feeds,
            threads=arguments.threads,
            rounds=arguments.rounds,
            budget_s=arguments.seconds,
            custom_op_libraries=arguments.custom_op_library,
            peak_memory=arguments.memory,
            seed=arguments.seed,
            progress=progress,
        )
    if arguments.json:
        print(report.to_json())
    else:
        Console().print(render_bench(report))
    return exits.LEFT_OUT if report.left_out else exits.SUCCESS


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 up")
    return int(text)


def _positive(text: str) -> int:
    number = _count(text)
    if not number:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return seconds
