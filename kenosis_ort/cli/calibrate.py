"""Runs a float model over data and writes the statistics of its activations to the
new file TABLE, which quantize takes as --table in place of the data. Tables of
several data sets can be put together with merge. A table holds up to 64 of the
samples, as they are, unless --no-samples leaves them out.

  kenosis-ort calibrate model.onnx day.json --data day.npz
  kenosis-ort calibrate model.onnx night.json --data night.npz
  kenosis-ort merge all.json day.json night.json
  kenosis-ort calibrate model.onnx all.json --data 'shards/*.npz' --dask local
  kenosis-ort quantize model.onnx --table all.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kenosis_ort.cli import data, exits, machines, options, values
from kenosis_ort.cli.quantize import no_data
from kenosis_ort.cli.screen import Screen, check_model

HELP = "write the calibration table of a model"
USAGE = "MODEL TABLE (--data SOURCE | --synthetic [N]) [options]"
ONE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the float model")
    parser.add_argument("table", type=Path, metavar="TABLE", help="the file to write")
    data.add_arguments(parser)
    machines.add_arguments(parser)
    parser.add_argument(
        "--resume", action="store_true", help="keep what is done in TABLE.part, and go on with what is there"
    )
    parser.add_argument(
        "--stop-when-settled",
        type=values.share,
        metavar="SHARE",
        help="end where twice the samples moved no range by more than this share of its width, e.g. 0.1%%",
    )
    parser.add_argument(
        "--no-samples",
        action="store_true",
        help="keep none of the data, as passes need it where no reader is left",
    )
    parser.add_argument("--method", choices=list(options.METHODS), help="how ranges are found (default: minmax)")
    options.add_libraries(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from rich.text import Text

    from kenosis_ort.api import calibrate
    from kenosis_ort.quantizer.stock import CalibrationMethod

    check_model(arguments.model)
    reader = data.make_reader(arguments, arguments.model)
    if reader is None:
        raise no_data()
    settings = (
        {} if arguments.method is None else {"calibrate_method": CalibrationMethod[options.METHODS[arguments.method]]}
    )
    with machines.executor(arguments, screen) as executor, screen.progress("calibrating") as progress:
        table = calibrate(
            arguments.model,
            arguments.table,
            reader,
            keep_samples=not arguments.no_samples,
            progress=progress,
            executor=executor,
            resume=arguments.resume,
            stop_when_settled=arguments.stop_when_settled,
            custom_op_libraries=arguments.custom_op_library,
            **settings,
        )
    facts = {
        "table": str(arguments.table),
        "method": table.method,
        "samples": table.samples,
        "kept_samples": 0 if table.cached is None else len(table.cached),
        "tensors": len(table.tensors),
    }
    cached = "" if table.cached is None else f"; it holds {len(table.cached)} of them"
    what = f"{table.method} ranges of {len(table.tensors)} tensors from {table.samples} samples"
    screen.result(lambda: facts, lambda: Text(f"{arguments.table}: {what}{cached}"))
    return exits.SUCCESS
