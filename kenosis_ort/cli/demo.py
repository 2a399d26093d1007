"""Quantizes a trained CNN for handwritten digits with stock ONNX Runtime and
with kenosis-ort, and prints accuracy on held-out images, speed and the
fusion proof.

  kenosis-ort demo
  kenosis-ort demo --out models/
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kenosis_ort.cli import exits, values
from kenosis_ort.cli.screen import Screen

HELP = "quantize the shipped digits net; print accuracy, speed and the fusion proof"
USAGE = "[options]"
ONE = "done, but a node that was planned as integer runs in float"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the models there (default: thrown away)")
    parser.add_argument("--batch", type=values.positive, default=32, help="images per timed run (default: 32)")
    parser.add_argument("--rounds", type=values.positive, default=15, help="timing rounds (default: 15)")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.demo.__main__ import demonstrate, render

    with screen.progress("timing") as progress:
        found = demonstrate(arguments.out, batch=arguments.batch, rounds=arguments.rounds, progress=progress)
    screen.result(found.to_dict, lambda: render(found))
    return exits.NOT_INTEGER if found.report.left_float() else exits.SUCCESS
