"""Commands that write a file: convert, fuse, calibrate, merge, weights."""

import argparse
from functools import reduce
from pathlib import Path

from rich.text import Text

import kenosis_ort
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.cli.screen import Screen
from kenosis_ort.cli.sources import executor, make_reader
from kenosis_ort.errors import OutputError
from kenosis_ort.fusing import fuse
from kenosis_ort.graph.files import check_destination, check_written
from kenosis_ort.option_types import value_of
from kenosis_ort.weights.quantize import quantize_weights


def convert(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``convert``."""
    model: Path = arguments.model
    out = arguments.out or model.with_name(f"{model.stem}.{arguments.to}.onnx")
    conversion = kenosis_ort.convert(model, out, arguments.to, custom_op_libraries=tuple(arguments.custom_op_libraries))
    screen.result(conversion.to_dict, lambda: Text(str(conversion)))


def fuse_attention(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``fuse``."""
    check_written(arguments.model, arguments.out, in_place=False)
    fused = fuse(arguments.model, arguments.out)
    count = len(fused.attentions)
    layers = f"{count} attention layer{'' if count == 1 else 's'}"
    screen.result(
        lambda: {"model": str(arguments.out), "attentions": list(fused.attentions), "notes": list(fused.notes)},
        lambda: Text("\n".join([*fused.notes, f"{arguments.out}: {layers}"])),
    )


def calibrate(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``calibrate``."""
    reader = make_reader(arguments, arguments.model, required=True)
    method = arguments.calibrate_method
    settings = {} if method is None else {"calibrate_method": value_of("calibrate_method", method)}
    with executor(arguments, screen) as cluster, screen.progress("calibrating") as progress:
        table = kenosis_ort.calibrate(
            arguments.model,
            arguments.table,
            reader,
            keep_samples=not arguments.no_samples,
            progress=progress,
            executor=cluster,
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


def merge(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``merge``."""
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


def weights(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``weights``."""
    check_written(arguments.model, arguments.out, in_place=False)
    reader = make_reader(arguments, arguments.model)
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
