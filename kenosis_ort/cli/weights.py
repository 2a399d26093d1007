"""Writes the float MODEL to OUT with the weights of its linear layers and embeddings
in blocks of few bits, which is what decoders wait for at one token. With samples
the weights are rounded so that the outputs of their layers change least.

  kenosis-ort weights decoder.onnx int4.onnx --data prompts.npz
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kenosis_ort.cli import data, exits, options
from kenosis_ort.cli.screen import Screen, check_model

HELP = "quantize the weights of linear layers and embeddings alone, to 4 or 8 bits"
USAGE = "MODEL OUT [--bits 4|8] [--data SOURCE] [options]"
ONE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    data.add_arguments(parser)
    options.add_libraries(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from rich.text import Text

    from kenosis_ort.weights.quantize import quantize_weights

    check_model(arguments.model)
    reader = data.make_reader(arguments, arguments.model)
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
            custom_op_libraries=arguments.custom_op_library,
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
