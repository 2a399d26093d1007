"""A real trained net with real images, and its quantization: ``kenosis-ort demo``.

``digits_cnn.onnx`` is a small residual CNN trained on scikit-learn's handwritten digits (the UCI "Optical
Recognition of Handwritten Digits" test set); ``digits.npz`` holds 100 images of its training split for
calibration and 600 held-out ones. Both are made by ``examples/train_digits.py``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime import quantization as stock
from onnxruntime.quantization.shape_inference import quant_pre_process
from rich.console import Group, RenderableType
from rich.text import Text

from kenosis_ort import ArrayReader, FusionReport, QuantizationReport, bench, quantize_static, verify_fusion
from kenosis_ort.accuracy.outputs import sqnr_db
from kenosis_ort.report.evidence import fusion_verdict
from kenosis_ort.report.text import Form, render_fusion, table
from kenosis_ort.runtime.session import open_session
from kenosis_ort.storage.data import format_bytes
from kenosis_ort.storage.writing import Scratch

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


@dataclass(frozen=True)
class MeasuredModel:
    """One model on the held-out images.

    Attributes:
        name: It.
        accuracy: Share of the images classified right, 0..1.
        sqnr_db: Signal-to-noise ratio of its logits against the float net's, in dB.
        size: Bytes on disk.
        microseconds: Median time per image on one thread.
        ratio: Speed relative to float, the median of per-round ratios.
        proof: The fusion proof; None for the float net.
    """

    name: str
    accuracy: float
    sqnr_db: float
    size: int
    microseconds: float
    ratio: float
    proof: FusionReport | None


@dataclass(frozen=True)
class Demonstration:
    """Measurements on the digits net.

    Attributes:
        models: The models, the float one first.
        report: Of kenosis-ort's quantization.
        calibration_images: Number of images calibrated on.
        test_images: Number of held-out images.
        batch: Images per timed run.
        rounds: Timing rounds at most.
    """

    models: tuple[MeasuredModel, ...]
    report: QuantizationReport
    calibration_images: int
    test_images: int
    batch: int
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        verdicts = {m.name: None if m.proof is None else fusion_verdict(m.proof) for m in self.models}
        models = {m.name: {**asdict(replace(m, proof=None)), "proof": verdicts[m.name]} for m in self.models}
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
        paths, report = _quantized(float_model, digits, folder)
        logits = {name: open_session(path).run(None, {INPUT_NAME: digits.images})[0] for name, path in paths.items()}
        feed = {INPUT_NAME: digits.images[:batch]}
        timed = bench(paths, [feed], rounds=rounds, budget_s=_TIMING_SECONDS, baseline=FLOAT, progress=progress).by_name
        models = tuple(
            MeasuredModel(
                name,
                accuracy=float((values.argmax(1) == digits.labels).mean()),
                sqnr_db=sqnr_db(logits[FLOAT], values),
                size=paths[name].stat().st_size,
                microseconds=timed[name].p50_ms * 1e3 / len(feed[INPUT_NAME]),
                ratio=timed[name].ratio,
                proof=None if name == FLOAT else verify_fusion(paths[name]),
            )
            for name, values in logits.items()
        )
    return Demonstration(models, report, len(digits.calibration), len(digits.images), batch, rounds)


def _quantized(float_model: Path, digits: Digits, folder: Path) -> tuple[dict[str, Path], QuantizationReport]:
    """Paths of the net and of what three ways make of it from the same calibration images; and the report of ours."""
    default, best, ours = (folder / f"digits_{name}.onnx" for name in ("stock_default", "stock_best", "kenosis"))
    prepared = folder / "digits_prepared.onnx"

    def reader() -> ArrayReader:
        return ArrayReader({INPUT_NAME: digits.calibration})

    logging.disable(logging.WARNING)  # stock's advice would stand between the reader and the result
    try:
        stock.quantize_static(float_model, default, reader())
        quant_pre_process(float_model, prepared)
        types = {"activation_type": stock.QuantType.QUInt8, "weight_type": stock.QuantType.QInt8}
        stock.quantize_static(prepared, best, reader(), per_channel=True, **types)
    finally:
        logging.disable(logging.NOTSET)
    report = quantize_static(float_model, ours, reader())
    return {FLOAT: float_model, STOCK_DEFAULT: default, STOCK_BEST: best, OURS: ours}, report


_COLUMNS: Mapping[str, Form] = {
    "model": "{0.name}",
    ">accuracy": lambda m: f"{100 * m.accuracy:.2f} %",
    ">SQNR": lambda m: "-" if m.proof is None else f"{m.sqnr_db:.1f} dB",
    ">us/image": "{0.microseconds:.1f}",
    ">speed": "{0.ratio:.2f}x",
    ">size": lambda m: format_bytes(m.size),
    ">integer": lambda m: "-" if m.proof is None else _integer_count(m.proof),
}


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
        table(found.models, _COLUMNS, styles=["bold" if m.name == OURS else "" for m in found.models]),
        Text(legend, style="dim"),
        Text("The fusion proof of kenosis-ort's model", style="bold underline"),
    ]
    if found.report.fusion is not None:
        blocks.append(render_fusion(found.report.fusion, plan=found.report.plan))
    return Group(*blocks)


def _integer_count(fusion: FusionReport) -> str:
    heavy = fusion.heavy()
    return f"{sum(k.integer for k in heavy)} of {len(heavy)}"
