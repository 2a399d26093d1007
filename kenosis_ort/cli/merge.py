"""``kenosis-ort merge OUT TABLE TABLE ...``: calibration tables of several data sets as one."""

from __future__ import annotations

import argparse
import json
from functools import reduce
from pathlib import Path

from rich.console import Console

from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.cli import exits
from kenosis_ort.errors import OutputError

HELP = "put calibration tables of several data sets together"
DESCRIPTION = """\
Merges tables of the same model and settings into the new file OUT, as if one run
had seen all samples.

  kenosis-ort merge all.json day.json night.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="tables that calibrate wrote")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Performs the command and returns its exit code."""
    out: Path = arguments.out
    if out.exists():
        raise OutputError("the calibration table exists already", where=str(out), fix="name another file or delete it")
    merged = reduce(CalibrationTable.merge, map(CalibrationTable.load, arguments.tables))
    merged.save(out)
    if arguments.json:
        print(json.dumps({"table": str(out), "samples": merged.samples, "tensors": len(merged.tensors)}, indent=1))
    else:
        Console(highlight=False).print(f"{out}: {len(merged.tensors)} tensors from {merged.samples} samples")
    return exits.SUCCESS
