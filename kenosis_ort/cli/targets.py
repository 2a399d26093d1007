"""Lists the targets: data types, where Q/DQ stands, and whether the runtime can
be asked and timed on this machine. With TARGET its whole table: each rule with
what it rests on.

  kenosis-ort targets
  kenosis-ort targets tensorrt
  kenosis-ort quantize model.onnx --data samples.npz --target tensorrt
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kenosis_ort.cli import exits
from kenosis_ort.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kenosis_ort.targets import Target

HELP = "list the runtimes that files can be made for, and the rules of one"
USAGE = "[TARGET] [options]"
ONE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("target", nargs="?", metavar="TARGET", help="show the table of this one")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.targets import TARGETS, get_target

    if arguments.target is None:
        screen.result(lambda: [summary(t) for t in TARGETS.values()], lambda: _list([*TARGETS.values()]))
    else:
        target = get_target(arguments.target)
        screen.result(lambda: {**summary(target), "rules": _rules(target)}, lambda: _table(target))
    return exits.SUCCESS


def summary(target: Target) -> dict[str, Any]:
    """Rules of a target as plain data in words."""
    types = target.data_types()
    return {
        "target": target.name,
        "activations": f"{_type(types.activation)}, zero point {'0' if types.symmetric else 'by the range'}",
        "weights": f"{_type(types.weight)}, a scale {'a channel' if types.per_channel else 'a tensor'}",
        "bias": target.bias,
        "taken_in": [*target.absorbs, *(f"x * {gate}(x)" for gate in target.gates)],
        "longest_epilogue": target.longest_epilogue,
        "residual": "Q on both inputs of an Add" if target.residual == "both" else "Q on the shortcut alone",
        "q_on_outputs": "wherever something reads integers" if target.float_output else "always",
        "formats": list(target.formats),
        "why": types.why,
        "proved": target.prove is not None,
        "timed": target.time is not None,
    }


def _type(element_type: int) -> str:
    from onnx import TensorProto

    return str(TensorProto.DataType.Name(element_type)).lower()


def _rules(target: Target) -> list[dict[str, Any]]:
    rules = [
        {"id": r.id, "operators": list(r.op_types), "role": r.role.value, "why": r.why, "source": r.source}
        for r in target.rules
    ]
    return [*rules, *({"id": i, "operators": [], "role": "fact", "why": why, "source": ""} for i, why in target.facts)]


def _list(targets: list[Target]) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("target", "activations", "weights", "bias", "a kernel takes in", "residual", "here"):
        table.add_column(heading, overflow="fold")
    for target in targets:
        s = summary(target)
        clamps = "where the range allows it: " if target.clamps else ""
        table.add_row(
            s["target"],
            s["activations"],
            s["weights"],
            s["bias"],
            clamps + (", ".join(s["taken_in"]) or "nothing"),
            s["residual"],
            ", ".join(word for word, can in (("proved", s["proved"]), ("timed", s["timed"])) if can) or "not run",
        )
    return table


def _table(target: Target) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for name, entry in summary(target).items():
        text = ", ".join(map(str, entry)) if isinstance(entry, list) else str(entry)
        facts.add_row(Text(name.replace("_", " "), style="bold"), Text(text))
    table = Table(box=box.SIMPLE_HEAD, title="Rules", title_justify="left", title_style="bold")
    for heading in ("rule", "operators", "what becomes of them", "rests on"):
        table.add_column(heading, overflow="fold")
    for rule in _rules(target):
        rests = rule["source"] or f"test_rule_{rule['id'].replace('-', '_')}"
        table.add_row(rule["id"], ", ".join(rule["operators"]), f"{rule['role']}: {rule['why']}", rests)
    return Group(facts, table)
