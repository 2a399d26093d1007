"""``kenosis-ort verify MODEL``: the fusion proof of any quantized model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from kenosis_ort.cli import exits
from kenosis_ort.report.model import fusion_verdict, heavy_kernels
from kenosis_ort.report.text import render_fusion
from kenosis_ort.verify import verify_fusion

HELP = "show which kernel of the runtime executes each node of a model"
DESCRIPTION = """\
Loads a quantized model in ONNX Runtime with all optimizations, reads the
optimized graph back and shows which nodes run on integer kernels, which run
in float, and why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the quantized model")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless every Conv/Gemm/MatMul is integer")
    parser.add_argument(
        "--custom-op-library",
        action="append",
        default=[],
        metavar="PATH",
        help="shared library with custom operators to register first (may be repeated)",
    )
    parser.add_argument("--full", action="store_true", help="show every float node")
    parser.add_argument("--json", action="store_true", help="print the proof as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Performs the command and returns its exit code."""
    fusion = verify_fusion(arguments.model, custom_op_libraries=tuple(arguments.custom_op_library))
    if arguments.json:
        print(json.dumps({"verdict": fusion_verdict(fusion), **fusion.to_dict()}, indent=1))
    else:
        Console().print(render_fusion(fusion, full=arguments.full))
    if arguments.strict and not all(k.integer for k in heavy_kernels(fusion)):
        return exits.NOT_INTEGER
    return exits.SUCCESS
