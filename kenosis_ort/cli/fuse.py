"""Writes the float MODEL to OUT with each attention layer as one operator, whatever
exporter it came from. quantize does this as well.

  kenosis-ort fuse bert.onnx fused.onnx
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kenosis_ort.cli import exits
from kenosis_ort.cli.screen import Screen

HELP = "turn the attention layers of a float model into one operator each"
USAGE = "MODEL OUT [options]"
ONE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="the float model")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from rich.text import Text

    from kenosis_ort.fusing import fuse

    fused = fuse(arguments.model, arguments.out)
    count = len(fused.attentions)
    layers = f"{count} attention layer{'' if count == 1 else 's'}"
    screen.result(
        lambda: {"model": str(arguments.out), "attentions": list(fused.attentions), "notes": list(fused.notes)},
        lambda: Text("\n".join([*fused.notes, f"{arguments.out}: {layers}"])),
    )
    return exits.SUCCESS
