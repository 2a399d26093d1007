"""The shipped net and its images; quantized by stock ONNX Runtime and by kenosis-ort, both measured beside float."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime import quantization as stock
from onnxruntime.quantization.shape_inference import quant_pre_process
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kenosis_ort.accuracy.outputs import sqnr_db
from kenosis_ort.api import quantize_static
from kenosis_ort.bench.benchmark import bench
from kenosis_ort.report.evidence import fusion_verdict
from kenosis_ort.report.quantization_report import QuantizationReport
from kenosis_ort.report.text import format_bytes, make_table, render_fusion
from kenosis_ort.runtime.session import open_session
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.verify import FusionReport, verify_fusion

INPUT_NAME = "image"
_PIXEL_MAX = np.float32(16)


@dataclass(frozen=True)
class Digits:
    """Images as the net takes them.

    Attributes:
        calibration: float32 (100, 1, 8, 8), from 0 to 1, from the training split.
        images: float32 (600, 1, 8, 8), from 0 to 1, held out from training.
        labels: int64 (600,), the digits that `images` show.
    """

    calibration: npt.NDArray[np.float32]
    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


@contextmanager
def model_path() -> Iterator[Path]:
    """Yields the path of the trained float net, on disk for the duration of the block."""
    with as_file(files("kenosis_ort.demo").joinpath("digits_cnn.onnx")) as path:
        yield path


def load_digits() -> Digits:
    """The shipped images."""
    with as_file(files("kenosis_ort.demo").joinpath("digits.npz")) as path, np.load(path, allow_pickle=False) as data:
        return Digits(
            calibration=_as_input(data["calibration_images"]),
            images=_as_input(data["test_images"]),
            labels=data["test_labels"].astype(np.int64),
        )


def _as_input(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    images: npt.NDArray[np.float32] = pixels[:, None].astype(np.float32) / _PIXEL_MAX
    return images


FLOAT = "float32"
STOCK_DEFAULT = "stock, default"
STOCK_BEST = "stock, best"
OURS = "kenosis-ort"
_TIMING_SECONDS = 4.0


class DigitsReader(stock.CalibrationDataReader):  # type: ignore[misc]
    """Calibration reader as in a user's script: it yields one image at a time, once."""

    def __init__(self, images: npt.NDArray[np.float32]) -> None:
        self._feeds = iter([{INPUT_NAME: image[None]} for image in images])

    def get_next(self) -> dict[str, npt.NDArray[np.float32]] | None:
        """The next feed, None at the end."""
        return next(self._feeds, None)


@dataclass(frozen=True)
class Quality:
    """One model's quality on the held-out images.

    Attributes:
        accuracy: Share of the images classified right, 0..1.
        sqnr_db: Signal-to-noise ratio of its logits against the float net's, in dB.
        size: Bytes on disk.
    """

    accuracy: float
    sqnr_db: float
    size: int


@dataclass(frozen=True)
class DemoSpeed:
    """Median time per image in microseconds, and speed relative to float (median of per-round ratios)."""

    microseconds: float
    ratio: float


def build_models(float_model: Path, digits: Digits, folder: Path) -> tuple[dict[str, Path], QuantizationReport]:
    """Quantizes the net in three ways from the same calibration images.

    Returns:
        Paths by name, `FLOAT` first, and the report of ours.
    """
    default, best, ours = (folder / f"digits_{name}.onnx" for name in ("stock_default", "stock_best", "kenosis"))
    prepared = folder / "digits_prepared.onnx"
    with _quiet_root_logger():
        stock.quantize_static(float_model, default, DigitsReader(digits.calibration))
        quant_pre_process(float_model, prepared)
        stock.quantize_static(
            prepared,
            best,
            DigitsReader(digits.calibration),
            per_channel=True,
            activation_type=stock.QuantType.QUInt8,
            weight_type=stock.QuantType.QInt8,
        )
    report = quantize_static(float_model, ours, DigitsReader(digits.calibration))
    return {FLOAT: float_model, STOCK_DEFAULT: default, STOCK_BEST: best, OURS: ours}, report


def measure_quality(models: Mapping[str, Path], digits: Digits) -> dict[str, Quality]:
    """Runs the held-out images through every model."""
    logits = {name: _run(open_session(path), digits.images) for name, path in models.items()}
    reference = logits[FLOAT]
    return {
        name: Quality(
            accuracy=float((values.argmax(1) == digits.labels).mean()),
            sqnr_db=sqnr_db(reference, values),
            size=models[name].stat().st_size,
        )
        for name, values in logits.items()
    }


def measure_speed(
    models: Mapping[str, Path],
    digits: Digits,
    *,
    batch: int,
    rounds: int,
    on_round: Callable[[int, int | None], None] | None = None,
) -> dict[str, DemoSpeed]:
    """Times every model on one thread, side by side, see `kenosis_ort.bench`.

    Args:
        models: Paths by name, with `FLOAT` among them.
        digits: Where the input comes from.
        batch: Images per run.
        rounds: Number of rounds.
        on_round: Called with (rounds done, rounds) after each.
    """
    feed = {INPUT_NAME: digits.images[:batch]}
    report = bench(models, [feed], rounds=rounds, budget_s=_TIMING_SECONDS, baseline=FLOAT, progress=on_round)
    images = len(feed[INPUT_NAME])
    return {t.name: DemoSpeed(microseconds=t.p50_ms * 1e3 / images, ratio=t.ratio) for t in report.models}


def _run(session: ort.InferenceSession, images: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    output: npt.NDArray[np.float32] = session.run(None, {INPUT_NAME: images})[0]
    return output


@contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """Stock writes advice to the root logger; here it would stand between the reader and the result."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


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

    quality: Mapping[str, Quality]
    speed: Mapping[str, DemoSpeed]
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
    digits = load_digits()
    with Scratch("demo") as scratch, model_path() as float_model:
        folder = scratch if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        models, report = build_models(float_model, digits, folder)
        return Demonstration(
            quality=measure_quality(models, digits),
            speed=measure_speed(models, digits, batch=batch, rounds=rounds, on_round=progress),
            proofs={name: verify_fusion(path) for name, path in models.items() if name != FLOAT},
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


def _table(quality: Mapping[str, Quality], speed: Mapping[str, DemoSpeed], proofs: Mapping[str, FusionReport]) -> Table:
    rows = []
    for name, measured in quality.items():
        exact = name == FLOAT
        cells = (
            name,
            f"{100 * measured.accuracy:.2f} %",
            "-" if exact else f"{measured.sqnr_db:.1f} dB",
            f"{speed[name].microseconds:.1f}",
            f"{speed[name].ratio:.2f}x",
            format_bytes(measured.size),
            "-" if exact else _integer_count(proofs[name]),
        )
        rows.append(cells)
    styles = ["bold" if name == OURS else "" for name in quality]
    headings = ("model", ">accuracy", ">SQNR", ">us/image", ">speed", ">size", ">integer")
    return make_table(*headings, rows=rows, styles=styles)


def _integer_count(fusion: FusionReport) -> str:
    heavy = fusion.heavy()
    return f"{sum(k.integer for k in heavy)} of {len(heavy)}"
