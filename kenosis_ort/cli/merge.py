"""Merges tables of the same model and settings into the new file OUT, as if one run
had seen all samples.

  kenosis-ort merge all.json day.json night.json
"""

from __future__ import annotations

import argparse
from functools import reduce
from pathlib import Path

from kenosis_ort.cli import exits
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import OutputError

HELP = "put calibration tables of several data sets together"
USAGE = "OUT TABLE [TABLE ...] [options]"
ONE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="tables that calibrate wrote")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from rich.text import Text

    from kenosis_ort.calibration.table import CalibrationTable
    from kenosis_ort.graph.save import check_destination

    out: Path = arguments.out
    if out.exists():
        raise OutputError("the calibration table exists already", where=str(out), fix="name another file or delete it")
    check_destination(out)
    merged = reduce(CalibrationTable.merge, map(CalibrationTable.load, arguments.tables))
    merged.save(out)
    screen.result(
        lambda: {"table": str(out), "samples": merged.samples, "tensors": len(merged.tensors)},
        lambda: Text(f"{out}: {len(merged.tensors)} tensors from {merged.samples} samples"),
    )
    return exits.SUCCESS
