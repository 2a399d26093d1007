"""Commands that write or show one file: convert, fuse, calibrate, merge, weights, inspect."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kenosis_ort.cli import data_flags, exits, flags
from kenosis_ort.cli.parser import Command
from kenosis_ort.cli.quantize_command import no_data
from kenosis_ort.cli.screen import Screen, check_model
from kenosis_ort.errors import OutputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kenosis_ort.graph.load import ModelSummary, TensorSummary


# -- convert


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the quantized model")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="the file to write (MODEL.FORMAT.onnx)")
    parser.add_argument("--to", default="qdq", metavar="FORMAT", help="qdq (the default), qop, qcdq, qonnx or float")
    flags.add_libraries(parser)


def _convert(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from rich.text import Text

    from kenosis_ort import convert

    check_model(arguments.model)
    model: Path = arguments.model
    out = arguments.out or model.with_name(f"{model.stem}.{arguments.to}.onnx")
    conversion = convert(model, out, arguments.to, custom_op_libraries=tuple(arguments.custom_op_libraries))
    screen.result(conversion.to_dict, lambda: Text(str(conversion)))
    return exits.SUCCESS


CONVERT: Final = Command(
    "write a quantized model in another format",
    "MODEL [OUT] [options]",
    """Reads a quantized model (QONNX, QCDQ, QDQ or quantized operators) and writes it
in the format asked for, checked against the model as it came. What that format
cannot express is an error that names the node.

  kenosis-ort convert model.qonnx.onnx model.qdq.onnx
  kenosis-ort convert model.int8.onnx --to qop
""",
    _convert_arguments,
    _convert,
)


# -- fuse


def _fuse_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="the float model")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")


def _fuse(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from rich.text import Text

    from kenosis_ort.fusing import fuse

    fused = fuse(arguments.model, arguments.out)
    count = len(fused.attentions)
    layers = f"{count} attention layer{'' if count == 1 else 's'}"
    screen.result(
        lambda: {"model": str(arguments.out), "attentions": list(fused.attentions), "notes": list(fused.notes)},
        lambda: Text("\n".join([*fused.notes, f"{arguments.out}: {layers}"])),
    )
    return exits.SUCCESS


FUSE: Final = Command(
    "turn the attention layers of a float model into one operator each",
    "MODEL OUT [options]",
    """Writes the float MODEL to OUT with each attention layer as one operator, whatever
exporter it came from. quantize does this as well.

  kenosis-ort fuse bert.onnx fused.onnx
""",
    _fuse_arguments,
    _fuse,
)


# -- calibrate


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the float model")
    parser.add_argument("table", type=Path, metavar="TABLE", help="the file to write")
    data_flags.add_arguments(parser)
    data_flags.add_machines(parser)
    parser.add_argument(
        "--resume", action="store_true", help="keep what is done in TABLE.part, and go on with what is there"
    )
    parser.add_argument(
        "--stop-when-settled",
        type=flags.share,
        metavar="SHARE",
        help="end where twice the samples moved no range by more than this share of its width, e.g. 0.1%%",
    )
    parser.add_argument(
        "--no-samples",
        action="store_true",
        help="keep none of the data, as passes need it where no reader is left",
    )
    flags.add_flag(parser, "calibrate_method", help="how ranges are found (default: minmax)")
    flags.add_libraries(parser)


def _calibrate(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from rich.text import Text

    from kenosis_ort.api import calibrate
    from kenosis_ort.recipe_file import value_of

    check_model(arguments.model)
    reader = data_flags.make_reader(arguments, arguments.model)
    if reader is None:
        raise no_data()
    method = arguments.calibrate_method
    settings = {} if method is None else {"calibrate_method": value_of("calibrate_method", method)}
    with data_flags.executor(arguments, screen) as executor, screen.progress("calibrating") as progress:
        table = calibrate(
            arguments.model,
            arguments.table,
            reader,
            keep_samples=not arguments.no_samples,
            progress=progress,
            executor=executor,
            resume=arguments.resume,
            stop_when_settled=arguments.stop_when_settled,
            custom_op_libraries=arguments.custom_op_libraries,
            **settings,
        )
    facts = {
        "table": str(arguments.table),
        "method": table.method,
        "samples": table.samples,
        "kept_samples": 0 if table.cached is None else len(table.cached),
        "tensors": len(table.tensors),
    }
    cached = "" if table.cached is None else f"; it holds {len(table.cached)} of them"
    what = f"{table.method} ranges of {len(table.tensors)} tensors from {table.samples} samples"
    screen.result(lambda: facts, lambda: Text(f"{arguments.table}: {what}{cached}"))
    return exits.SUCCESS


CALIBRATE: Final = Command(
    "write the calibration table of a model",
    "MODEL TABLE (--data SOURCE | --synthetic [N]) [options]",
    """Runs a float model over data and writes the statistics of its activations to the
new file TABLE, which quantize takes as --table in place of the data. Tables of
several data sets can be put together with merge. A table holds up to 64 of the
samples, as they are, unless --no-samples leaves them out.

  kenosis-ort calibrate model.onnx day.json --data day.npz
  kenosis-ort calibrate model.onnx night.json --data night.npz
  kenosis-ort merge all.json day.json night.json
  kenosis-ort calibrate model.onnx all.json --data 'shards/*.npz' --dask local
  kenosis-ort quantize model.onnx --table all.json
""",
    _calibrate_arguments,
    _calibrate,
)


# -- merge


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="tables that calibrate wrote")


def _merge(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from rich.text import Text

    from kenosis_ort.calibration.table import CalibrationTable
    from kenosis_ort.graph.save import check_destination

    out: Path = arguments.out
    if out.exists():
        raise OutputError("the calibration table exists already", where=str(out), fix="name another file or delete it")
    check_destination(out)
    merged = reduce(CalibrationTable.merge, map(CalibrationTable.load, arguments.tables))
    merged.save(out)
    screen.result(
        lambda: {"table": str(out), "samples": merged.samples, "tensors": len(merged.tensors)},
        lambda: Text(f"{out}: {len(merged.tensors)} tensors from {merged.samples} samples"),
    )
    return exits.SUCCESS


MERGE: Final = Command(
    "put calibration tables of several data sets together",
    "OUT TABLE [TABLE ...] [options]",
    """Merges tables of the same model and settings into the new file OUT, as if one run
had seen all samples.

  kenosis-ort merge all.json day.json night.json
""",
    _merge_arguments,
    _merge,
)


# -- weights


def _weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the float model")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8), help="of a weight (default: 4)")
    parser.add_argument(
        "--block", type=int, default=32, choices=(16, 32, 64, 128, 256), help="weights that share a scale (default: 32)"
    )
    parser.add_argument("--symmetric", action="store_true", help="without zero points")
    parser.add_argument("--no-embeddings", action="store_true", help="leave embeddings float")
    parser.add_argument("--exclude", action="append", default=[], metavar="NODE", help="a node that stays float")
    data_flags.add_arguments(parser)
    flags.add_libraries(parser)


def _weights(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from rich.text import Text

    from kenosis_ort.weights.quantize import quantize_weights

    check_model(arguments.model)
    reader = data_flags.make_reader(arguments, arguments.model)
    with screen.progress("rounding") as progress:
        report = quantize_weights(
            arguments.model,
            arguments.out,
            reader,
            bits=arguments.bits,
            block_size=arguments.block,
            symmetric=arguments.symmetric,
            embeddings=not arguments.no_embeddings,
            nodes_to_exclude=arguments.exclude,
            custom_op_libraries=arguments.custom_op_libraries,
            progress=progress,
        )
    outputs = {compared.name: compared.sqnr_db for compared in report.outputs}
    facts = {
        "model": str(arguments.out),
        "layers": {layer.node: layer.bits for layer in report.layers},
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
        "outputs_db": outputs,
    }
    sizes = f"{report.bytes_before / 1e6:.1f} MB -> {report.bytes_after / 1e6:.1f} MB"
    losses = "".join(f", {name} {decibels:.1f} dB" for name, decibels in outputs.items())
    screen.result(
        lambda: facts,
        lambda: Text("\n".join([*report.notes, f"{arguments.out}: {len(report.layers)} layers, {sizes}{losses}"])),
    )
    return exits.SUCCESS


WEIGHTS: Final = Command(
    "quantize the weights of linear layers and embeddings alone, to 4 or 8 bits",
    "MODEL OUT [--bits 4|8] [--data SOURCE] [options]",
    """Writes the float MODEL to OUT with the weights of its linear layers and embeddings
in blocks of few bits, which is what decoders wait for at one token. With samples
the weights are rounded so that the outputs of their layers change least.

  kenosis-ort weights decoder.onnx int4.onnx --data prompts.npz
""",
    _weights_arguments,
    _weights,
)


# -- inspect

_SHOWN_OPERATORS = 12


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="any ONNX model")
    parser.add_argument("--full", action="store_true", help="show every operator")


def _inspect(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.graph.load import summarize

    check_model(arguments.model)
    summary = summarize(arguments.model)
    screen.result(summary.to_dict, lambda: _render(summary, full=arguments.full))
    return exits.SUCCESS


def _render(summary: ModelSummary, *, full: bool) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from kenosis_ort.report.sections import make_table
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
    table = make_table("", "name", "type", "shape")
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


INSPECT: Final = Command(
    "show what a model file holds",
    "MODEL [options]",
    """Shows inputs, outputs, operators, parameters, sizes, operator sets and whether
a model is quantized already, and how.

  kenosis-ort inspect model.onnx
  kenosis-ort inspect model.onnx --json
""",
    _inspect_arguments,
    _inspect,
)
