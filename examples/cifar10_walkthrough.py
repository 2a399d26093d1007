"""CIFAR10Net from float to deployment: float, dynamic, static (stock) and kenosis-ort side by side.

    python examples/cifar10_walkthrough.py                                    # trains a little, on what is there
    python examples/cifar10_walkthrough.py --cifar FOLDER --trainer torch --epochs 40
    python examples/cifar10_walkthrough.py --model cifar10.onnx               # as `cifar10_train.py` or torch wrote it

For each variant: size, p50, p95 and p99 of single-image latency on one thread, top-1 on images that neither training
nor calibration saw, agreement with the float model, and the SHA-256 of the file. A deployment checks that sum before
it loads the file, as `load_verified` does; the table is measured on sessions that passed the check.

Below stand other formats of 8 and 4 bits. No runtime loads QONNX: its top-1 is that of the QDQ model which `convert`
makes of the file.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import cifar10_data
import cifar10_net
import cifar10_train
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from cifar10_data import Images, as_input
from onnxruntime import quantization as stock
from onnxruntime.quantization.shape_inference import quant_pre_process

from kenosis_ort import KenosisWarning, QuantizationReport, bench, convert, quantize_static

Floats = npt.NDArray[np.float32]


class CIFAR10Calib(stock.CalibrationDataReader):  # type: ignore[misc]
    """The walk-through's reader: one training image a feed."""

    def __init__(self, images: Images, samples: int) -> None:
        self.it: Iterator[dict[str, Floats]] = iter([{"image": x[None]} for x in as_input(images.train[:samples])])

    def get_next(self) -> dict[str, Floats] | None:
        """Returns the next feed, None at the end."""
        return next(self.it, None)


def build(float_model: Path, images: Images, samples: int, folder: Path) -> tuple[dict[str, Path], QuantizationReport]:
    """Writes the variants; returns their paths by name, and the report of ours."""
    names = ("dynamic", "static, as in the text", "static, stock's best", "kenosis-ort")
    paths = {name: folder / f"cifar10_{i}.onnx" for i, name in enumerate(names)}
    stock.quantize_dynamic(float_model, paths["dynamic"], weight_type=stock.QuantType.QUInt8)
    stock.quantize_static(
        float_model,
        paths["static, as in the text"],
        CIFAR10Calib(images, samples),
        quant_format=stock.QuantFormat.QDQ,
        activation_type=stock.QuantType.QInt8,
        weight_type=stock.QuantType.QInt8,
        per_channel=True,
    )
    prepared = folder / "cifar10_prepared.onnx"
    quant_pre_process(float_model, prepared)
    stock.quantize_static(
        prepared,
        paths["static, stock's best"],
        CIFAR10Calib(images, samples),
        activation_type=stock.QuantType.QUInt8,
        weight_type=stock.QuantType.QInt8,
        per_channel=True,
    )
    report = quantize_static(float_model, paths["kenosis-ort"], CIFAR10Calib(images, samples))
    return {"float32": float_model, **paths}, report


def build_formats(float_model: Path, images: Images, samples: int, folder: Path) -> tuple[dict[str, Path], set[str]]:
    """Writes quantized operators, QCDQ and QONNX of 8 and 4 bits; returns their paths, and what is QONNX."""
    paths = {}
    for form, bits in (("qop", 8), ("qonnx", 8), ("qcdq", 4)):
        name = {"qop": "QOperator", "qonnx": "QONNX", "qcdq": "QCDQ"}[form] + f", {bits} bits"
        paths[name] = folder / f"cifar10_{form}{bits}.onnx"
        reader = CIFAR10Calib(images, samples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KenosisWarning)  # of 4 bits it is said that they keep little
            quantize_static(
                float_model, paths[name], reader, format=form, weight_bits=bits, activation_bits=bits, promise=False
            )
    paths["QONNX, 4 bits"] = folder / "cifar10_qonnx4.onnx"
    convert(paths["QCDQ, 4 bits"], paths["QONNX, 4 bits"], "qonnx")
    return paths, {"QONNX, 8 bits", "QONNX, 4 bits"}


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_verified(path: Path, expected: str) -> ort.InferenceSession:
    """Returns a session of exactly the bytes that were approved.

    The file is read once, so that nobody can exchange it between the check and the load. This holds for models whose
    weights are in the file itself, as they are below 2 GiB.
    """
    raw = path.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != expected:
        raise SystemExit(f"{path}: SHA-256 is {found}, approved was {expected}; not loaded")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(raw, options, providers=["CPUExecutionProvider"])


def main(argv: Sequence[str] | None = None) -> None:
    """Trains where no model is given, builds the variants, prints the table."""
    parser = argparse.ArgumentParser(description="CIFAR10Net from float to deployment.")
    cifar10_data.add_arguments(parser)
    parser.add_argument("--model", type=Path, help="trained float model; trained now if not given")
    parser.add_argument("--trainer", choices=cifar10_train.TRAINERS, default="numpy")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=512, help="calibration images")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of timing")
    parser.add_argument("--out", type=Path, help="folder to keep the models in")
    arguments = parser.parse_args(argv)
    logging.getLogger().setLevel(logging.ERROR)  # stock's advice would stand between the lines of the table

    images = cifar10_data.load(arguments)
    print(f"{images.source}; {len(images.test)} held out")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = arguments.model
        if model is None:
            model = folder / "cifar10.onnx"
            weights = cifar10_train.TRAINERS[arguments.trainer](images, epochs=arguments.epochs, seed=0)
            onnx.save(cifar10_net.export(weights), model)
        models, report = build(model, images, arguments.samples, folder)
        formats, exported = build_formats(model, images, arguments.samples, folder)
        models |= formats
        approved = {name: sha256(path) for name, path in models.items()}
        feeds = [{"image": x[None]} for x in as_input(images.test[: arguments.rounds])]
        loadable = {name: path for name, path in models.items() if name not in exported}
        timed = bench(loadable, feeds, rounds=arguments.rounds, baseline="float32").by_name
        test = as_input(images.test)
        for name in exported:  # read back: the file that was approved, as the runtime takes it
            loadable[name] = folder / f"{models[name].stem}_read_back.onnx"
            convert(models[name], loadable[name], "qdq")
        sums = {name: approved[name] if path == models[name] else sha256(path) for name, path in loadable.items()}
        told = {n: load_verified(p, sums[n]).run(None, {"image": test})[0].argmax(1) for n, p in loadable.items()}
        print(f"{'':22s} {'size':>8s} {'p50':>6s} {'p95':>6s} {'p99':>6s} ms   speed  top-1  agreement  SHA-256")
        for name, path in models.items():
            top1 = (told[name] == images.test_labels).mean()
            agree = (told[name] == told["float32"]).mean()
            speed = f"{'-':>6s} {'-':>6s} {'-':>6s}    {'-':>5s} "
            if name in timed:
                t = timed[name]
                speed = f"{t.p50_ms:6.3f} {t.p95_ms:6.3f} {t.p99_ms:6.3f}    {t.ratio:5.2f}x"
            size = path.stat().st_size / 2**20
            print(f"{name:22s} {size:5.2f} MB {speed}  {top1:.3f}  {agree:9.3f}  {approved[name][:16]}...")
        if arguments.out:
            lines = [f"{approved[name]}  {path.name}\n" for name, path in models.items() if path.parent == folder]
            (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")  # for sha256sum --check
        print(report.verdict())
        print(f"deploy: sha256 {approved['kenosis-ort']}")


if __name__ == "__main__":
    main()
