"""``kenosis-ort calibrate MODEL TABLE``: the calibration table on its own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from kenosis_ort.api import calibrate
from kenosis_ort.cli import data, exits
from kenosis_ort.cli.progress import progress_bar

HELP = "write the calibration table of a model"
DESCRIPTION = """\
Runs a float model over data and writes the statistics of its activations to the
new file TABLE, which quantize takes as --cache. Tables of several data sets can
be put together with merge.

  kenosis-ort calibrate model.onnx day.json --data day.npz
  kenosis-ort calibrate model.onnx night.json --data night.npz
  kenosis-ort merge all.json day.json night.json
  kenosis-ort quantize model.onnx model.int8.onnx --cache all.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the float model")
    parser.add_argument("table", type=Path, metavar="TABLE", help="the file to write")
    data.add_arguments(parser)
    parser.add_argument("--method", choices=sorted(data.METHODS), help="how ranges are found (default: minmax)")
    parser.add_argument(
        "--custom-op-library", action="append", default=[], metavar="PATH", help="library of custom operators"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Performs the command and returns its exit code."""
    reader = data.make_reader(arguments)
    said = {} if arguments.method is None else {"calibrate_method": data.METHODS[arguments.method]}
    with progress_bar("calibrating", Console(stderr=True)) as progress:
        table = calibrate(
            arguments.model,
            arguments.table,
            reader,
            progress=progress,
            custom_op_libraries=arguments.custom_op_library,
            **said,
        )
    facts = {
        "table": str(arguments.table),
        "method": table.method,
        "samples": table.samples,
        "tensors": len(table.tensors),
    }
    if arguments.json:
        print(json.dumps(facts, indent=1))
    else:
        Console(highlight=False).print(
            f"{arguments.table}: {table.method} ranges of {len(table.tensors)} tensors from {table.samples} samples"
        )
    return exits.SUCCESS
