"""Plans a float model for every target, without data and without writing, and
shows side by side how many layers run in integer, what their kernels take in
and how many values carry Q/DQ; then where the plans differ.

  kenosis-ort compare-targets model.onnx
  kenosis-ort compare-targets model.onnx --target ort-cpu --target tensorrt
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenosis_ort.cli import exits
from kenosis_ort.cli.screen import Screen, check_model

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kenosis_ort.plan import PlacementPlan

HELP = "show what each target would do to a float model"
USAGE = "MODEL [options]"
ONE = ""
_SHOWN = 20
_HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a float model")
    parser.add_argument("--target", action="append", metavar="TARGET", help="this one (may be repeated; default: all)")
    parser.add_argument("--full", action="store_true", help="show every node on which the targets differ")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.api import preview
    from kenosis_ort.targets import TARGETS, get_target

    check_model(arguments.model)
    names = [get_target(name).name for name in arguments.target or TARGETS]
    plans = {name: preview(arguments.model, target=name) for name in dict.fromkeys(names)}
    screen.result(
        lambda: {
            "model": str(arguments.model),
            "targets": [_row(plan) for plan in plans.values()],
            "differ": _differ(plans),
        },
        lambda: _render(plans, full=arguments.full),
    )
    return exits.SUCCESS


def _row(plan: PlacementPlan) -> dict[str, Any]:
    from kenosis_ort.plan import EdgeRole, Kind

    heavy, role = [n for n in plan.nodes if n.op_type in _HEAVY], EdgeRole.ACTIVATION
    return {
        "target": plan.target,
        "heavy": len(heavy),
        "integer_heavy": sum(n.kind is Kind.INTEGER for n in heavy),
        "taken_in": sum(n.kind is Kind.ABSORBED for n in plan.nodes),
        "float": sum(n.kind is Kind.FLOAT for n in plan.nodes),
        "quantized_values": sum(1 for _ in plan.quantized_values()),
        "grids": sorted({d.grid for d in plan.decisions if d.role is role and d.dtype and d.axis is None}),
    }


def _differ(plans: Mapping[str, PlacementPlan]) -> list[dict[str, Any]]:
    """The nodes of which two targets make different things, and the values that carry Q/DQ on some only."""
    found = []
    nodes = {name: {n.node: n.kind.value for n in plan.nodes} for name, plan in plans.items()}
    values = {name: {value for value, _ in plan.quantized_values()} for name, plan in plans.items()}
    for node in dict.fromkeys(name for kinds in nodes.values() for name in kinds):
        kinds = {target: by_node.get(node, "rewritten") for target, by_node in nodes.items()}
        if len(set(kinds.values())) > 1:
            found.append({"what": f"node '{node}'", **kinds})
    for value in dict.fromkeys(v for quantized in values.values() for v in sorted(quantized)):
        carries = {target: "Q/DQ" if value in quantized else "float" for target, quantized in values.items()}
        if len(set(carries.values())) > 1:
            found.append({"what": f"value '{value}'", **carries})
    return found


def _render(plans: Mapping[str, PlacementPlan], *, full: bool) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("target", "layers in integer", "taken in", "float nodes", "values with Q/DQ", "types"):
        table.add_column(heading, overflow="fold")
    for row in map(_row, plans.values()):
        table.add_row(
            row["target"],
            f"{row['integer_heavy']} of {row['heavy']}",
            *(str(row[name]) for name in ("taken_in", "float", "quantized_values")),
            ", ".join(row["grids"]),
        )
    differ = _differ(plans)
    if not differ:
        return Group(table, Text("They do the same, but for data types."))
    shown = Table(box=box.SIMPLE_HEAD, title="Where they differ", title_justify="left", title_style="bold")
    for heading in ("", *plans):
        shown.add_column(heading, overflow="fold")
    for entry in differ if full else differ[:_SHOWN]:
        shown.add_row(*(str(entry[name]) for name in ("what", *plans)))
    more = len(differ) - _SHOWN
    rest = [Text(f"and {more} more; --full shows them")] if more > 0 and not full else []
    return Group(table, shown, *rest)
