"""Reads a quantized model (QONNX, QCDQ, QDQ or quantized operators) and writes it
in the format asked for, checked against the model as it came. What that format
cannot express is an error that names the node.

  kenosis-ort convert model.qonnx.onnx model.qdq.onnx
  kenosis-ort convert model.int8.onnx --to qop
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kenosis_ort.cli import exits, options
from kenosis_ort.cli.screen import Screen, check_model

HELP = "write a quantized model in another format"
USAGE = "MODEL [OUT] [options]"
ONE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the quantized model")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="the file to write (MODEL.FORMAT.onnx)")
    parser.add_argument("--to", default="qdq", metavar="FORMAT", help="qdq (the default), qop, qcdq, qonnx or float")
    options.add_libraries(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from rich.text import Text

    from kenosis_ort import convert

    check_model(arguments.model)
    model: Path = arguments.model
    out = arguments.out or model.with_name(f"{model.stem}.{arguments.to}.onnx")
    conversion = convert(model, out, arguments.to, custom_op_libraries=tuple(arguments.custom_op_library))
    screen.result(conversion.to_dict, lambda: Text(str(conversion)))
    return exits.SUCCESS
