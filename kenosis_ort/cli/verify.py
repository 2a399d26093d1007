"""Loads a quantized model of any origin in ONNX Runtime with all optimizations,
reads the optimized graph back and shows which nodes run on integer kernels,
which run in float, and why.

  kenosis-ort verify model.int8.onnx
  kenosis-ort verify model.int8.onnx --strict -q && echo all integer

Tells whether the file computes the same integers on every x86-64 processor:
without VNNI, kernels add two products of 8 bits in 16 and clip them. With data,
what that costs, simulated bit by bit on whichever processor this is.

  kenosis-ort verify model.int8.onnx --data samples.npz

With --patterns, holds each Conv against the quantized patterns of a document
instead, oneDNN's for one, and names the clause that it breaks; no runtime is
asked.

  kenosis-ort verify model.int8.onnx --patterns onednn
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from kenosis_ort.cli import data, exits, options
from kenosis_ort.cli.screen import Screen, check_model
from kenosis_ort.errors import KenosisWarning

if TYPE_CHECKING:
    pass

HELP = "show which kernel of the runtime executes each node of a model"
USAGE = "MODEL [options]"
ONE = "with --strict: a layer runs in float or clips on some processors, or with --patterns a Conv does not match"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the quantized model")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 unless every Conv/Gemm/MatMul is integer, and the same on every processor",
    )
    options.add_libraries(parser)
    parser.add_argument(
        "--patterns", metavar="TARGET", help="hold each Conv against this target's documented patterns, e.g. onednn"
    )
    parser.add_argument(
        "--target", metavar="TARGET", help="whose runtime to ask (default: what the file was made for, or ort-cpu)"
    )
    parser.add_argument("--full", action="store_true", help="show every float node")
    data.add_arguments(parser, title="data, for what clipped products cost on processors without VNNI")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.cli.screen import in_shell_words
    from kenosis_ort.report.explanation import fusion_verdict, heavy_kernels
    from kenosis_ort.report.text import render_fusion
    from kenosis_ort.storage.data import to_data
    from kenosis_ort.verify import verify_fusion
    from kenosis_ort.verify.processors import clipping_loss

    check_model(arguments.model)
    if arguments.patterns is not None:
        return _patterns(arguments, screen)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KenosisWarning)
        libraries = tuple(arguments.custom_op_library)
        fusion = verify_fusion(arguments.model, custom_op_libraries=libraries, target=arguments.target)
    for warning in caught:
        screen.warn(in_shell_words(str(warning.message)))
    feeds = data.make_reader(arguments, arguments.model)
    losses = () if feeds is None else clipping_loss(arguments.model, feeds)
    screen.result(
        lambda: {
            "verdict": fusion_verdict(fusion),
            "processors": to_data(fusion.processors),
            "losses": to_data(losses),
            **fusion.to_dict(),
        },
        lambda: render_fusion(fusion, losses=losses, full=arguments.full),
    )
    if arguments.strict and (fusion.clipping() or not all(k.integer for k in heavy_kernels(fusion))):
        return exits.NOT_INTEGER
    return exits.SUCCESS


def _patterns(arguments: argparse.Namespace, screen: Screen) -> int:
    from rich.text import Text

    from kenosis_ort.verify import verify_patterns

    report = verify_patterns(arguments.model, target=arguments.patterns)
    screen.result(report.to_dict, lambda: Text(str(report)))
    return exits.NOT_INTEGER if arguments.strict and not report.conforms else exits.SUCCESS
