r"""Runs a float and a quantized model on the same samples and shows how far each
output agrees, which layers lose most, where the error jumps first, and what to
do next.

  kenosis-ort compare model.onnx model.int8.onnx --data test.npz
  kenosis-ort compare model.onnx model.int8.onnx --data test.npz --samples 32 \
                      --min-agreement 99%
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenosis_ort.cli import data, exits, options, values
from kenosis_ort.cli.quantize import no_data
from kenosis_ort.cli.screen import Screen, check_model

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kenosis_ort.accuracy.comparison import Comparison, OutputAgreement, TensorComparison

HELP = "show where a quantized model departs from the float one"
USAGE = "FLOAT QUANTIZED (--data SOURCE | --synthetic [N]) [options]"
ONE = "done, but an output agrees less than --min-agreement or --min-sqnr demands"

_LAYERS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("float_model", type=Path, metavar="FLOAT", help="the float model")
    parser.add_argument("quantized_model", type=Path, metavar="QUANTIZED", help="what was made of it")
    parser.add_argument("--samples", type=values.positive, help="samples to compare on (default: all that are given)")
    parser.add_argument("--full", action="store_true", help=f"show every layer, not the {_LAYERS} that lose most")
    parser.add_argument(
        "--min-agreement", type=values.share, metavar="SHARE", help="least share of equal argmax, e.g. 99%%"
    )
    parser.add_argument("--min-sqnr", type=values.number, metavar="DB", help="least signal to noise ratio, dB")
    parser.add_argument("--threads", type=values.threads, default=1, help="of a session; 0: all (default: 1)")
    options.add_libraries(parser)
    data.add_arguments(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.accuracy.compare import compare

    check_model(arguments.float_model)
    check_model(arguments.quantized_model)
    feeds = data.make_reader(arguments, arguments.float_model)
    if feeds is None:
        raise no_data()
    found = compare(
        arguments.float_model,
        arguments.quantized_model,
        feeds,
        samples=arguments.samples,
        custom_op_libraries=tuple(arguments.custom_op_library),
        threads=arguments.threads,
    )
    short = [o.name for o in found.outputs if _falls_short(o, arguments.min_agreement, arguments.min_sqnr)]
    made_up = arguments.synthetic is not None and arguments.data is None
    screen.result(
        lambda: _to_data(found, short, made_up=made_up),
        lambda: _render(found, short, full=arguments.full, made_up=made_up),
    )
    return exits.BELOW if short else exits.SUCCESS


def _falls_short(output: OutputAgreement, agreement: float | None, sqnr_db: float | None) -> bool:
    disagrees = agreement is not None and output.agreement is not None and output.agreement < agreement
    return disagrees or (sqnr_db is not None and not output.sqnr_db >= sqnr_db)


def _to_data(found: Comparison, short: list[str], *, made_up: bool) -> dict[str, Any]:
    return {**found.to_dict(), "below": short, "made_up_data": made_up}


def _render(found: Comparison, short: list[str], *, full: bool, made_up: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from kenosis_ort.cli.screen import in_shell_words

    shown = found.worst(len(found.tensors) if full else _LAYERS)
    compared = (
        f"{found.samples} samples; {len(found.tensors)} quantized activations have a counterpart in the float model, "
        f"{found.unmatched} do not"
    )
    blocks: list[RenderableType] = [_outputs(found, short)]
    if shown:
        blocks.append(_layers(shown, found.jump, full=full))
    if found.weights and full:
        blocks.append(_weights(found))
    blocks.append(Text(compared, style="dim"))
    if made_up:
        blocks.append(Text("note: on made-up data; agreement on real data may differ", style="yellow"))
    return Group(*blocks, Text(f"next: {in_shell_words(found.advice)}", style="bold"))


def _outputs(found: Comparison, short: list[str]) -> Table:
    from rich.text import Text

    table = _table("Outputs", "output", ("agreement", "SQNR", "cosine", "largest difference"))
    for o in found.outputs:
        agreement = "-" if o.agreement is None else f"{100 * o.agreement:.1f} %"
        style = "red" if o.name in short else "" if o.is_fine else "yellow"
        cells = (agreement, f"{o.sqnr_db:.1f} dB", f"{o.cosine:.5f}", f"{o.max_abs:.3g}")
        table.add_row(Text(o.name), *cells, style=style)
    return table


def _layers(shown: tuple[TensorComparison, ...], jump: str | None, *, full: bool) -> Table:
    from rich.text import Text

    title = "Layers, most lost first" if full else f"The {len(shown)} layers that lose most"
    table = _table(title, "tensor", ("SQNR", "lost here", "cosine", "clipped", "float range"))
    for t in shown:
        name = Text(t.name) if t.name != jump else Text.assemble(t.name, (" first jump", "bold red"))
        span, clipped = f"{t.low:.3g} .. {t.high:.3g}", f"{100 * t.clipping:.2f} %"
        table.add_row(name, f"{t.sqnr_db:.1f} dB", f"{t.drop_db:.1f} dB", f"{t.cosine:.5f}", clipped, span)
    return table


def _weights(found: Comparison) -> Table:
    from rich.text import Text

    table = _table("Weights, worst first", "weight", ("SQNR", "cosine", "scales", "float range"))
    for w in sorted(found.weights, key=lambda w: w.sqnr_db):
        scales = "by channel" if w.per_channel else "one"
        table.add_row(Text(w.name), f"{w.sqnr_db:.1f} dB", f"{w.cosine:.5f}", scales, f"{w.low:.3g} .. {w.high:.3g}")
    return table


def _table(title: str, first: str, headings: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column(first, overflow="fold", min_width=12)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
