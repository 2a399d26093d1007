"""Loads a quantized model of any origin in ONNX Runtime with all optimizations,
reads the optimized graph back and shows which nodes run on integer kernels,
which run in float, and why.

  kenosis-ort verify model.int8.onnx
  kenosis-ort verify model.int8.onnx --strict -q && echo all integer

With --patterns, holds each Conv against the quantized patterns of a document
instead, oneDNN's for one, and names the clause that it breaks; no runtime is
asked.

  kenosis-ort verify model.int8.onnx --patterns onednn
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from kenosis_ort.cli import exits, options
from kenosis_ort.cli.files import check_model
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import KenosisWarning

HELP = "show which kernel of the runtime executes each node of a model"
USAGE = "MODEL [options]"
ONE = "with --strict: a Conv, Gemm or MatMul runs in float, or with --patterns a Conv does not match"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the quantized model")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless every Conv/Gemm/MatMul is integer")
    options.add_libraries(parser)
    parser.add_argument(
        "--patterns", metavar="TARGET", help="hold each Conv against this target's documented patterns, e.g. onednn"
    )
    parser.add_argument(
        "--target", metavar="TARGET", help="whose runtime to ask (default: what the file was made for, or ort-cpu)"
    )
    parser.add_argument("--full", action="store_true", help="show every float node")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.cli.wording import in_shell_words
    from kenosis_ort.report.proof import fusion_verdict, heavy_kernels
    from kenosis_ort.report.text import render_fusion
    from kenosis_ort.verify import verify_fusion

    check_model(arguments.model)
    if arguments.patterns is not None:
        return _patterns(arguments, screen)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KenosisWarning)
        libraries = tuple(arguments.custom_op_library)
        fusion = verify_fusion(arguments.model, custom_op_libraries=libraries, target=arguments.target)
    for warning in caught:
        screen.warn(in_shell_words(str(warning.message)))
    screen.result(
        lambda: {"verdict": fusion_verdict(fusion), **fusion.to_dict()},
        lambda: render_fusion(fusion, full=arguments.full),
    )
    if arguments.strict and not all(k.integer for k in heavy_kernels(fusion)):
        return exits.NOT_INTEGER
    return exits.SUCCESS


def _patterns(arguments: argparse.Namespace, screen: Screen) -> int:
    from rich.text import Text

    from kenosis_ort.verify import verify_patterns

    report = verify_patterns(arguments.model, target=arguments.patterns)
    screen.result(report.to_dict, lambda: Text(str(report)))
    return exits.NOT_INTEGER if arguments.strict and not report.conforms else exits.SUCCESS
