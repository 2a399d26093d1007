"""``kenosis-ort explain MODEL [NODE]``: why a node is integer or float, and what would change it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from kenosis_ort.api import preview
from kenosis_ort.cli import exits
from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.graph.summary import summarize
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.report.explanation import Explanation, explain_kernel, explain_plan
from kenosis_ort.verify import verify_fusion

HELP = "say why nodes are integer or float, and what would change it"
DESCRIPTION = """\
For a float model: what quantize would do with each node, and by which rule.
For a quantized model: what the installed runtime makes of each node, read off
its optimized graph. Without NODE all float nodes that carry arithmetic.

  kenosis-ort explain model.onnx
  kenosis-ort explain model.onnx /layer1/conv/Conv
  kenosis-ort explain model.int8.onnx --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a float or a quantized model")
    parser.add_argument("node", nargs="?", metavar="NODE", help="name of a node (default: all that stay float)")
    parser.add_argument("--all", action="store_true", help="without NODE: the integer nodes too")
    parser.add_argument(
        "--custom-op-library", action="append", default=[], metavar="PATH", help="library of custom operators"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Performs the command and returns its exit code."""
    libraries = tuple(arguments.custom_op_library)
    if summarize(arguments.model).quantization in ("float", "float16"):
        explained = explain_plan(_plan(arguments.model, libraries))
    else:
        explained = [explain_kernel(k) for k in verify_fusion(arguments.model, custom_op_libraries=libraries).kernels]
    chosen = _chosen(explained, arguments.node, everything=arguments.all)
    if arguments.json:
        print(json.dumps([e.to_dict() for e in chosen], indent=1))
    else:
        console = Console(highlight=False, markup=False)
        for explanation in chosen:
            console.print(str(explanation), soft_wrap=True)
        if not chosen:
            console.print("No Conv, Gemm, MatMul or the like stays float.")
    return exits.SUCCESS


def _plan(model: Path, libraries: tuple[str, ...]) -> PlacementPlan:
    plan = preview(model, custom_op_libraries=libraries)
    if not plan:
        raise OptionError(
            "nothing in this model can run in integer, so there is no plan to explain",
            where=str(model),
            fix="kenosis-ort inspect shows its operators",
        )
    return plan


def _chosen(explained: list[Explanation], node: str | None, *, everything: bool) -> list[Explanation]:
    if node is None:
        return [e for e in explained if everything or (e.is_heavy and e.kind == Kind.FLOAT.value)]
    named = [e for e in explained if e.node == node]
    if not named:
        hint = did_you_mean(node, [e.node for e in explained])
        raise OptionError(f"the model has no node '{node}'.{hint}", where="NODE", fix="kenosis-ort explain MODEL --all")
    return named
