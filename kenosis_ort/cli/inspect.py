"""``kenosis-ort inspect MODEL``: what a model file holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kenosis_ort.cli import exits
from kenosis_ort.graph.summary import ModelSummary, TensorSummary, summarize
from kenosis_ort.report.text import format_bytes

HELP = "show what a model file holds"
DESCRIPTION = """\
Shows inputs, outputs, operators, parameters, sizes, operator sets and whether
a model is quantized already, and how.

  kenosis-ort inspect model.onnx
  kenosis-ort inspect model.onnx --json"""

_SHOWN_OPERATORS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="any ONNX model")
    parser.add_argument("--full", action="store_true", help="show every operator")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Performs the command and returns its exit code."""
    summary = summarize(arguments.model)
    if arguments.json:
        print(json.dumps(summary.to_dict(), indent=1))
    else:
        Console().print(_render(summary, full=arguments.full))
    return exits.SUCCESS


def _render(summary: ModelSummary, *, full: bool) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    for label, text in (
        ("model", summary.path),
        ("quantization", summary.quantization),
        ("parameters", f"{summary.parameters:,} in {format_bytes(summary.weight_bytes)} ({_shares(summary)})"),
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
