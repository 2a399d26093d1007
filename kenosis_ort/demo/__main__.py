"""``python -m kenosis_ort.demo``: accuracy, speed and the fusion proof on the shipped digits net."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime as ort
from rich import box
from rich.console import Console
from rich.table import Table

from kenosis_ort.demo.compare import FLOAT, OURS, Measured, Speed, build_models, measure_quality, measure_speed
from kenosis_ort.demo.digits import Digits, load_digits, model_path
from kenosis_ort.report.model import heavy_kernels
from kenosis_ort.report.text import format_bytes, render_fusion
from kenosis_ort.verify import FusionReport, verify_fusion


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration.

    Returns:
        0; 1 if a node planned as integer runs in float.
    """
    parser = argparse.ArgumentParser(prog="python -m kenosis_ort.demo", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demonstration's options to a parser."""
    parser.add_argument("--out", type=Path, help="keep the quantized models in this folder (default: thrown away)")
    parser.add_argument("--batch", type=_positive, default=32, help="images per timed run (default: 32)")
    parser.add_argument("--rounds", type=_positive, default=15, help="timing rounds (default: 15)")


def run(arguments: argparse.Namespace) -> int:
    """Quantizes, measures and prints; see `main` for the return value."""
    console = Console(file=sys.stdout)
    with tempfile.TemporaryDirectory() as scratch, model_path() as float_model:
        folder = scratch if arguments.out is None else arguments.out
        Path(folder).mkdir(parents=True, exist_ok=True)
        return _demonstrate(console, float_model, load_digits(), Path(folder), arguments.batch, arguments.rounds)


def _demonstrate(console: Console, float_model: Path, digits: Digits, folder: Path, batch: int, rounds: int) -> int:
    console.print(
        f"A residual CNN for handwritten digits: calibrated on {len(digits.calibration)} images,\n"
        f"tested on {len(digits.images)} held-out ones."
    )
    models, report = build_models(float_model, digits, folder)
    quality = measure_quality(models, digits)
    speed = measure_speed(models, digits, batch=batch, rounds=rounds)
    proofs = {name: verify_fusion(path) for name, path in models.items() if name != FLOAT}
    console.print(_table(quality, speed, proofs))
    console.print(
        f"SQNR: of the logits, against float. One image is {100 / len(digits.images):.2f} points of accuracy.\n"
        f"Speed: onnxruntime {ort.__version__}, one thread, {batch} images a run, fresh sessions in turn,\n"
        f"medians of {rounds} rounds. Integer: Conv and Gemm nodes on integer kernels.\n"
        "Stock, best: quant_pre_process, uint8 activations, per-channel int8 weights.\n",
        style="dim",
    )
    console.print("The fusion proof of kenosis-ort's model", style="bold underline")
    if report.fusion is not None:
        console.print(render_fusion(report.fusion, plan=report.plan))
    return 1 if report.left_float() else 0


def _table(quality: Mapping[str, Measured], speed: Mapping[str, Speed], proofs: Mapping[str, FusionReport]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("model")
    for heading in ("accuracy", "SQNR", "us/image", "speed", "size", "integer"):
        table.add_column(heading, justify="right")
    for name, measured in quality.items():
        exact = name == FLOAT
        table.add_row(
            name,
            f"{100 * measured.accuracy:.2f} %",
            "-" if exact else f"{measured.sqnr_db:.1f} dB",
            f"{speed[name].microseconds:.1f}",
            f"{speed[name].ratio:.2f}x",
            format_bytes(measured.size),
            "-" if exact else _integer_count(proofs[name]),
            style="bold" if name == OURS else None,
        )
    return table


def _integer_count(fusion: FusionReport) -> str:
    heavy = heavy_kernels(fusion)
    return f"{sum(k.integer for k in heavy)} of {len(heavy)}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
