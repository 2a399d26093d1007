"""``kenosis-ort quantize MODEL OUT``: `kenosis_ort.quantize_static` from the shell."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from kenosis_ort.api import quantize_static
from kenosis_ort.cli import data, exits
from kenosis_ort.cli.progress import progress_bar
from kenosis_ort.errors import KenosisWarning
from kenosis_ort.quantizer.stock import QuantFormat, QuantType
from kenosis_ort.report.text import render_report

HELP = "quantize a float model to INT8"
DESCRIPTION = """\
Quantizes MODEL to the file OUT, from data of yours (--data) or from synthetic
data (--synthetic). Whatever is not said is chosen for this machine's runtime.

  kenosis-ort quantize model.onnx model.int8.onnx --data samples.npz
  kenosis-ort quantize model.onnx model.int8.onnx --data photos/ --mean 0.485,0.456,0.406 \\
                       --std 0.229,0.224,0.225
  kenosis-ort quantize model.onnx model.int8.onnx --synthetic 32"""

_TYPES = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8, "uint16": QuantType.QUInt16, "int16": QuantType.QInt16}
_FORMATS = {"qdq": QuantFormat.QDQ, "qoperator": QuantFormat.QOperator}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the float model")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    data.add_arguments(parser)

    how = parser.add_argument_group("how to quantize (default: what suits this machine)")
    how.add_argument("--method", choices=sorted(data.METHODS), help="how ranges are found (default: minmax)")
    how.add_argument("--format", choices=sorted(_FORMATS), help="of the quantized model (default: qdq)")
    how.add_argument("--activation-type", choices=sorted(_TYPES))
    how.add_argument("--weight-type", choices=sorted(_TYPES))
    how.add_argument("--per-channel", action=argparse.BooleanOptionalAction, help="weight scales by channel or tensor")
    how.add_argument(
        "--reduce-range", action=argparse.BooleanOptionalAction, help="7-bit weights, for CPUs without VNNI"
    )
    how.add_argument(
        "--option", action="append", default=[], type=_option, metavar="KEY=VALUE", help="an extra_options entry"
    )
    how.add_argument("--protect-outputs", choices=("auto", "float", "int8"), help="graph outputs (default: auto)")
    how.add_argument("--target", help="the runtime to place Q/DQ for (default: ort-cpu)")

    which = parser.add_argument_group("what to quantize")
    which.add_argument("--exclude", action="append", metavar="NODE", help="leave this node float (may be repeated)")
    which.add_argument("--only", action="append", metavar="NODE", help="quantize this node only (may be repeated)")
    which.add_argument("--op-type", action="append", metavar="TYPE", help="quantize this type only (may be repeated)")
    which.add_argument("--primary-input", action="append", metavar="NAME", help="input that carries the data proper")

    files = parser.add_argument_group("files and output")
    files.add_argument("--external-data", action="store_true", help="write weights to OUT.data")
    files.add_argument("--cache", type=Path, metavar="PATH", help="calibration table to reuse or to write")
    files.add_argument(
        "--custom-op-library", action="append", metavar="PATH", help="library of custom operators to register"
    )
    files.add_argument("--no-verify", action="store_true", help="skip the fusion proof")
    files.add_argument("--full", action="store_true", help="show every float node and all options")
    files.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Performs the command and returns its exit code."""
    reader = data.make_reader(arguments)
    with progress_bar("calibrating", Console(stderr=True)) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", KenosisWarning)  # the report holds them
        report = quantize_static(arguments.model, arguments.out, reader, progress=progress, **_keywords(arguments))
    if arguments.json:
        print(report.to_json())
    else:
        Console().print(render_report(report, full=arguments.full))
    return exits.NOT_INTEGER if report.left_float() else exits.SUCCESS


def _keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what the caller said and nothing else, so that the rest stays with the host's defaults."""
    said = {
        "quant_format": _FORMATS.get(arguments.format),
        "op_types_to_quantize": arguments.op_type,
        "per_channel": arguments.per_channel,
        "reduce_range": arguments.reduce_range,
        "activation_type": _TYPES.get(arguments.activation_type),
        "weight_type": _TYPES.get(arguments.weight_type),
        "nodes_to_quantize": arguments.only,
        "nodes_to_exclude": arguments.exclude,
        "use_external_data_format": arguments.external_data or None,
        "calibrate_method": data.METHODS.get(arguments.method),
        "extra_options": dict(arguments.option) or None,
        "calibration_cache_path": arguments.cache,
        "target": arguments.target,
        "protect_outputs": arguments.protect_outputs,
        "primary_inputs": arguments.primary_input,
        "custom_op_libraries": arguments.custom_op_library,
        "verify": False if arguments.no_verify else None,
    }
    return {key: value for key, value in said.items() if value is not None}


def _option(text: str) -> tuple[str, Any]:
    """Reads ``KEY=VALUE``; the value as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    if value in ("True", "False"):
        value = value.lower()
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
