"""Times models on the CPU, interleaved in random order with fresh sessions, and
says which are faster than the first one beyond the noise.

  kenosis-ort bench model.onnx model.int8.onnx --data samples.npz
  kenosis-ort bench model.onnx a.onnx b.onnx --threads 4 --seconds 60
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kenosis_ort.cli import data, exits, options, values
from kenosis_ort.cli.screen import Screen

HELP = "time models against each other"
USAGE = "MODEL [MODEL ...] [options]"
ONE = "done, but a model did not load or run and is left out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="the models; the first is the baseline")

    how = parser.add_argument_group("how to time")
    how.add_argument(
        "--threads", type=values.threads, default=1, help="of a session; 0: as the runtime likes (default: 1)"
    )
    how.add_argument("--seconds", type=values.seconds, default=20.0, help="for all of it (default: 20)")
    how.add_argument("--rounds", type=values.positive, default=15, help="with fresh sessions, at most (default: 15)")
    how.add_argument("--memory", action="store_true", help="measure peak memory as well, in separate processes")
    options.add_libraries(how)
    data.add_arguments(parser, title="what the models are run with (default: --synthetic)")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.bench import bench
    from kenosis_ort.bench.bench_report import render_bench

    if arguments.data is None and arguments.synthetic is None and data.given(arguments).keys() - {"seed"}:
        arguments.synthetic = data.DEFAULT_SYNTHETIC  # an option about made-up samples was given
    feeds = data.make_reader(arguments, arguments.models[0])
    with screen.progress("timing") as progress:
        report = bench(
            arguments.models,
            feeds,
            threads=arguments.threads,
            rounds=arguments.rounds,
            budget_s=arguments.seconds,
            custom_op_libraries=arguments.custom_op_library,
            peak_memory=arguments.memory,
            seed=arguments.seed or 0,
            progress=progress,
        )
    screen.result(report.to_dict, lambda: render_bench(report))
    return exits.LEFT_OUT if report.left_out else exits.SUCCESS
