"""Shows inputs, outputs, operators, parameters, sizes, operator sets and whether
a model is quantized already, and how.

  kenosis-ort inspect model.onnx
  kenosis-ort inspect model.onnx --json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kenosis_ort.cli import exits
from kenosis_ort.cli.screen import Screen, check_model

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kenosis_ort.graph.summary import ModelSummary, TensorSummary

HELP = "show what a model file holds"
USAGE = "MODEL [options]"
ONE = ""

_SHOWN_OPERATORS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="any ONNX model")
    parser.add_argument("--full", action="store_true", help="show every operator")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.graph.summary import summarize

    check_model(arguments.model)
    summary = summarize(arguments.model)
    screen.result(summary.to_dict, lambda: _render(summary, full=arguments.full))
    return exits.SUCCESS


def _render(summary: ModelSummary, *, full: bool) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from kenosis_ort.report.text import format_bytes

    facts = Table.grid(padding=(0, 2))
    weights = f"{summary.parameters:,} in {format_bytes(summary.weight_bytes)} ({_shares(summary)})"
    for label, text in (
        ("model", summary.path),
        ("size", format_bytes(summary.file_bytes)),
        ("quantization", summary.quantization),
        ("parameters", weights),
        ("operator sets", ", ".join(f"{domain} {version}" for domain, version in summary.opsets.items())),
        ("file format", f"IR version {summary.ir_version}, written by {summary.producer or 'nobody named'}"),
    ):
        facts.add_row(Text(label, style="dim"), Text(text))
    table = Table(box=box.SIMPLE)
    for heading in ("", "name", "type", "shape"):
        table.add_column(heading, overflow="fold")
    for kind, tensors in (("input", summary.inputs), ("output", summary.outputs)):
        for tensor in tensors:
            table.add_row(kind, Text(tensor.name), tensor.dtype, Text(_shape(tensor)))
    return Group(facts, table, Text(_operators(summary.operators, summary.nodes, full=full)))


def _shares(summary: ModelSummary) -> str:
    total = sum(summary.weight_types.values()) or 1
    return ", ".join(f"{100 * size / total:.0f} % {name}" for name, size in summary.weight_types.items()) or "none"


def _shape(tensor: TensorSummary) -> str:
    return "any" if tensor.shape is None else f"[{', '.join(map(str, tensor.shape))}]"


def _operators(operators: Mapping[str, int], nodes: int, *, full: bool) -> str:
    shown = list(operators.items())[: None if full else _SHOWN_OPERATORS]
    rest = len(operators) - len(shown)
    listed = ", ".join(f"{count} {name}" for name, count in shown)
    return f"{nodes} nodes: {listed}" + (f", and {rest} other operators (--full)" if rest else "")
