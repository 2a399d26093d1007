"""Shows the processor, the runtime and the formats it reads, times small
convolutions and matrix products in each data type (some 3 seconds), and says
what to fix.

  kenosis-ort doctor
  kenosis-ort doctor --threads 4 --json
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from kenosis_ort.cli import exits, values
from kenosis_ort.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kenosis_ort.bench.doctor import Examination, KernelSpeed

HELP = "show what this machine's runtime can do, and what is fast on it"
USAGE = "[options]"
ONE = "done, but there is a problem that has a fix"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--threads", type=values.threads, default=1, help="of a session; 0: all (default: 1)")
    parser.add_argument("--seconds", type=values.seconds, default=3.0, help="for the timing (default: 3)")
    parser.add_argument("--no-timing", action="store_true", help="do not time data types")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.bench.doctor import examine
    from kenosis_ort.targets.machine import processor

    (cpu, flags), cores = processor(), os.cpu_count() or 1
    with screen.progress("timing") as progress:
        found = examine(
            flags=flags,
            threads=arguments.threads,
            budget_s=0.0 if arguments.no_timing else arguments.seconds,
            progress=progress,
        )
    screen.result(
        lambda: {"cpu": cpu, "cores": cores, **found.to_dict()},
        lambda: _render(cpu, cores, found),
    )
    return exits.PROBLEM if found.problems else exits.SUCCESS


def _render(cpu: str, cores: int, found: Examination) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for label, text in (
        ("processor", f"{cpu}, {cores} cores, {found.architecture}"),
        ("instructions", ", ".join(found.flags) or "not known on this system"),
        ("int8 products", found.host),
        ("runtime", f"onnxruntime {found.versions['onnxruntime']}: {', '.join(found.providers)}"),
        ("build", found.build),
        ("reads", f"IR version up to {found.max_ir}, operator sets up to {found.max_opset}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in found.versions.items())),
    ):
        facts.add_row(Text(label, style="dim"), Text(text))
    blocks: list[RenderableType] = [facts]
    if found.speeds:
        blocks.append(_speeds(found.speeds, found.threads))
    blocks += [Text.assemble(("problem: ", "bold red"), str(p)) for p in found.problems]
    blocks += [Text.assemble(("note: ", "cyan"), str(n)) for n in found.notes]
    if not found.problems:
        blocks.append(Text("Nothing to fix.", style="bold green"))
    return Group(*blocks)


def _speeds(speeds: tuple[KernelSpeed, ...], threads: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    on = {0: "all threads", 1: "one thread"}.get(threads, f"{threads} threads")
    title = f"Data types, {on}: speed beside float32, measured"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for heading in ("operator", "activations x weights", "kernel"):
        table.add_column(heading, overflow="fold")
    for heading in ("us", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict")
    for s in speeds:
        style = {"fast": "green", "slow": "red", "refused": "dim"}.get(s.verdict, "")
        time = "" if s.microseconds is None else f"{s.microseconds:.0f}"
        ratio = "" if s.ratio is None else f"{s.ratio:.2f}x"
        table.add_row(s.operator, s.types, s.kernel, time, ratio, Text(s.verdict, style=style))
    return table
