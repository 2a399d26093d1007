"""Times the runtime's kernels in float and in integer by their shapes, in some 30
seconds, and keeps the result for this processor, runtime and number of threads:
later calls of quantize lay files out for it. With --out it goes to a file as
well, with which files are laid out for this machine elsewhere.

  kenosis-ort profile
  kenosis-ort profile --threads 4 --out server.json
  kenosis-ort quantize model.onnx --data samples.npz --for-host server.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kenosis_ort.cli import exits, values
from kenosis_ort.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kenosis_ort.targets.profile import HostProfile

HELP = "measure what kernels cost on this machine, so that files are laid out for it"
USAGE = "[options]"
ONE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--target", help="the runtime that is measured (default: ort-cpu)")
    parser.add_argument("--threads", type=values.threads, default=1, help="of a session; 0: all (default: 1)")
    parser.add_argument("--seconds", type=values.seconds, default=30.0, help="for all of it (default: 30)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the profile to this file too")
    parser.add_argument("--name", default="", help="what reports call it (default: the processor's name)")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.api import measure_host
    from kenosis_ort.graph.save import check_destination
    from kenosis_ort.targets import DEFAULT_TARGET

    if arguments.out is not None:
        check_destination(arguments.out)
    with screen.progress("timing") as progress:
        profile = measure_host(
            target=arguments.target or DEFAULT_TARGET,
            threads=arguments.threads,
            budget_s=arguments.seconds,
            name=arguments.name,
            progress=progress,
        )
    if arguments.out is not None:
        profile.save(arguments.out)
        screen.note(f"profile: {arguments.out}")
    screen.result(profile.to_dict, lambda: _render(profile))
    return exits.SUCCESS


def _render(profile: HostProfile) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    for heading in ("kernel", "float", "integer", "second kernel"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for name, (in_float, in_integer) in profile.kernels.items():
        second = profile.shifted.get(name)
        if in_float.product or in_float.element:
            cells = ["" if cost is None else f"{cost.product:g} / {cost.element:g}" for cost in (in_integer, second)]
            table.add_row(name, f"{in_float.product:g} / {in_float.element:g}", *cells)
    head = Text(f"'{profile.name}': {profile.machine}; picoseconds a product / an element written")
    return Group(head, table)
