"""``python -m kenosis_ort.demo``: accuracy, speed and the fusion proof on the shipped digits net."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kenosis_ort.demo import measurements
from kenosis_ort.report.console import make_table
from kenosis_ort.report.evidence import fusion_verdict, heavy_kernels
from kenosis_ort.report.quantization_report import QuantizationReport
from kenosis_ort.report.text import format_bytes, render_fusion
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.verify import FusionReport, verify_fusion


@dataclass(frozen=True)
class Demonstration:
    """Measurements on the digits net.

    Attributes:
        quality: Accuracy, signal to noise ratio and size by model.
        speed: Time per image by model.
        proofs: The fusion proof by quantized model.
        report: Of kenosis-ort's quantization.
        calibration_images: Number of images calibrated on.
        test_images: Number of held-out images.
        batch: Images per timed run.
        rounds: Timing rounds at most.
    """

    quality: Mapping[str, measurements.Quality]
    speed: Mapping[str, measurements.DemoSpeed]
    proofs: Mapping[str, FusionReport]
    report: QuantizationReport
    calibration_images: int
    test_images: int
    batch: int
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        models = {
            name: {
                **asdict(measured),
                **asdict(self.speed[name]),
                "proof": fusion_verdict(self.proofs[name]) if name in self.proofs else None,
            }
            for name, measured in self.quality.items()
        }
        counts = ("calibration_images", "test_images", "batch", "rounds")
        return {"models": models, **{name: getattr(self, name) for name in counts}}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration.

    Returns:
        0; 1 if a node planned as integer runs in float.
    """
    parser = argparse.ArgumentParser(prog="python -m kenosis_ort.demo", description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the quantized models in this folder (default: thrown away)")
    parser.add_argument("--batch", type=_positive, default=32, help="images per timed run (default: 32)")
    parser.add_argument("--rounds", type=_positive, default=15, help="timing rounds (default: 15)")
    arguments = parser.parse_args(argv)
    found = demonstrate(arguments.out, batch=arguments.batch, rounds=arguments.rounds)
    Console(file=sys.stdout).print(render(found))
    return 1 if found.report.left_float() else 0


def demonstrate(
    out: Path | None = None,
    *,
    batch: int = 32,
    rounds: int = 15,
    progress: Callable[[int, int | None], None] | None = None,
) -> Demonstration:
    """Quantizes the digits net in three ways and measures the results.

    Args:
        out: Folder to keep the models in, made if it is missing; None throws them away.
        batch: Images per timed run.
        rounds: Timing rounds.
        progress: Called with (rounds done, rounds).
    """
    digits = measurements.load_digits()
    with Scratch("demo") as scratch, measurements.model_path() as float_model:
        folder = scratch if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        models, report = measurements.build_models(float_model, digits, folder)
        return Demonstration(
            quality=measurements.measure_quality(models, digits),
            speed=measurements.measure_speed(models, digits, batch=batch, rounds=rounds, on_round=progress),
            proofs={name: verify_fusion(path) for name, path in models.items() if name != measurements.FLOAT},
            report=report,
            calibration_images=len(digits.calibration),
            test_images=len(digits.images),
            batch=batch,
            rounds=rounds,
        )


def render(found: Demonstration) -> RenderableType:
    """The demonstration for a rich console."""
    head = (
        f"A residual CNN for handwritten digits: calibrated on {found.calibration_images} images,\n"
        f"tested on {found.test_images} held-out ones."
    )
    legend = (
        f"SQNR: of the logits, against float. One image is {100 / found.test_images:.2f} points of accuracy.\n"
        f"Speed: onnxruntime {ort.__version__}, one thread, {found.batch} images a run, fresh sessions in turn,\n"
        f"medians of {found.rounds} rounds; speed: the median of the rounds' ratios.\n"
        "Integer: Conv and Gemm nodes on integer kernels.\n"
        "Stock, best: quant_pre_process, uint8 activations, per-channel int8 weights.\n"
    )
    blocks: list[RenderableType] = [
        Text(head),
        _table(found.quality, found.speed, found.proofs),
        Text(legend, style="dim"),
        Text("The fusion proof of kenosis-ort's model", style="bold underline"),
    ]
    if found.report.fusion is not None:
        blocks.append(render_fusion(found.report.fusion, plan=found.report.plan))
    return Group(*blocks)


def _table(
    quality: Mapping[str, measurements.Quality],
    speed: Mapping[str, measurements.DemoSpeed],
    proofs: Mapping[str, FusionReport],
) -> Table:
    rows = []
    for name, measured in quality.items():
        exact = name == measurements.FLOAT
        cells = (
            name,
            f"{100 * measured.accuracy:.2f} %",
            "-" if exact else f"{measured.sqnr_db:.1f} dB",
            f"{speed[name].microseconds:.1f}",
            f"{speed[name].ratio:.2f}x",
            format_bytes(measured.size),
            "-" if exact else _integer_count(proofs[name]),
        )
        rows.append([Text(cell, style="bold" if name == measurements.OURS else "") for cell in cells])
    headings = ("model", ">accuracy", ">SQNR", ">us/image", ">speed", ">size", ">integer")
    return make_table(*headings, rows=rows, box=box.SIMPLE)


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
