"""Formats and bits: accuracy, bit operations and ONNX Runtime's time by bits, and every format beside `qonnx` itself.

    python benchmarks/interop.py                                # the shipped net; a few minutes
    python benchmarks/interop.py --trained tfc.onnx cnv.onnx    # and nets of `few_bits.py`, converted
    python benchmarks/interop.py --resnet                       # and ResNet-20 of the zoo, with `--samples` images

Bit operations are multiply-accumulates x bits of weights x bits of what they read, as in the paper's model zoo. Times
are medians of interleaved runs on one thread. "qonnx" is the largest difference to that package's `execute_onnx`, in
steps of the output's spread over 255; it needs the extra `interop`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import few_bits
import numpy as np
import onnx
from _session import session
from onnxruntime import quantization as stock
from onnxruntime.quantization.shape_inference import quant_pre_process

from kenosis_ort import ArrayReader, bench, convert, quantize_static, verify_fusion
from kenosis_ort.demo import load_digits, model_path
from kenosis_ort.formats.qonnx_nodes import spell_out
from kenosis_ort.formats.tensors import quantizers_of
from kenosis_ort.graph.shapes import value_types

BITS = ((8, 8), (4, 8), (4, 4), (3, 3), (2, 4), (2, 2))
FORMATS = ("qdq", "qop", "qcdq", "qop-clip", "qcdq-qonnx", "qonnx")
ZOO = Path(__file__).resolve().parents[2] / "shared" / "zoo"


@dataclass(frozen=True)
class Task:
    """A float net with images to calibrate on and to test."""

    name: str
    model: Path
    input: str
    calibration: np.ndarray
    images: np.ndarray
    labels: np.ndarray


def cost(model: onnx.ModelProto) -> tuple[float, int]:
    """Returns the bit operations of a canonical model and the bits of its weights."""
    types = value_types(model)
    bits = {t.dequantize.output[0]: t.quantizer.bits for t in quantizers_of(model)}
    held = {t.dequantize.output[0]: t.constant for t in quantizers_of(model) if t.constant is not None}
    operations, weight_bits = 0.0, 0
    for node in model.graph.node:
        weight = held.get(node.input[1]) if node.op_type in ("Conv", "Gemm", "MatMul") else None
        if weight is None:
            continue
        size = int(np.prod(weight.dims))
        shape = [d.dim_value or 1 for d in types[node.output[0]].tensor_type.shape.dim]
        places = int(np.prod(shape[2:])) if node.op_type == "Conv" else int(np.prod(shape[:-1]))
        operations += size * places * bits[node.input[1]] * bits.get(node.input[0], 32)
        weight_bits += size * bits[node.input[1]]
    return operations, weight_bits


def outputs(model: onnx.ModelProto | Path, task: Task, count: int) -> np.ndarray:
    """Returns a model's outputs, image by image, QONNX as its operators are defined."""
    proto = onnx.load(model) if isinstance(model, Path) else model
    runner = session(spell_out(proto))
    return np.concatenate([runner.run(None, {task.input: x[None]})[0] for x in task.images[:count]])


def top1(model: Path, task: Task) -> float:
    """Returns the accuracy on the test images."""
    return float((outputs(model, task, len(task.images)).argmax(1) == task.labels).mean())


def kernels(model: Path) -> str:
    """Returns how many layers run on integer kernels."""
    line = str(verify_fusion(model)).splitlines()[0]
    return line.split(": ", 1)[1].split(" Conv")[0]


def quantized(task: Task, out: Path, **options: Any) -> Path:
    """Quantizes with our defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few bits it is said that they keep little
        reader = ArrayReader([{task.input: x[None]} for x in task.calibration])
        quantize_static(task.model, out, reader, promise=False, **options)
    return out


def by_bits(task: Task, folder: Path, rounds: int) -> None:
    """Prints accuracy, cost and time by bits, beside float and stock."""
    models = {"float32": task.model, "stock, best, w8a8": _stock(task, folder)}
    for weights, activations in BITS:
        out = folder / f"w{weights}a{activations}.onnx"
        models[f"w{weights}a{activations}"] = quantized(
            task, out, format="qcdq", weight_bits=weights, activation_bits=activations
        )
    timed = _timed(models, task, rounds)
    print(f"\n{task.name}: post-training, {len(task.calibration)} calibration images, {len(task.images)} held out")
    print(f"{'':20s} {'top-1':>6s} {'bit operations':>15s} {'weight bits':>12s} {'p50, ms':>8s}  layers in integer")
    for name, path in models.items():
        costs = cost(onnx.load(path)) if name != "float32" else None
        shown = f"{costs[0]:15.3g} {costs[1]:12,d}" if costs else " " * 28
        print(f"{name:20s} {top1(path, task):6.3f} {shown} {timed[name]:8.3f}  {kernels(path)}")


def by_format(task: Task, folder: Path, rounds: int, samples: int) -> None:
    """Prints every format of one state beside the QDQ model and beside qonnx."""
    print(f"\n{task.name}: the same state in each format, {samples} images")
    print(f"{'':18s} {'size, kB':>9s} {'p50, ms':>8s}  layers in integer  {'to QCDQ':>9s} {'to qonnx':>9s}")
    for bits in (8, 4):
        options = {"weight_bits": bits, "activation_bits": bits, "tune": "off"}
        forms = [f for f in FORMATS if bits == 8 or f not in ("qdq", "qop")]
        paths = {f: quantized(task, folder / f"{f}{bits}.onnx", format=f, **options) for f in forms}
        runnable = {f: path for f, path in paths.items() if f != "qonnx"}
        timed = _timed(runnable, task, rounds)
        plain = outputs(paths["qcdq"], task, samples)
        step = float(np.ptp(plain)) / 255
        for form, path in paths.items():
            own = outputs(path, task, samples)
            package = _executed(path, task, samples) if form in ("qcdq-qonnx", "qonnx") else None
            beside = "" if package is None else f"{np.abs(own - package).max() / step:9.3f}"
            shown = f"{timed[form]:8.3f}  {kernels(path):17s}" if form in timed else f"{'-':>8s}  {'-':17s}"
            largest = np.abs(own - plain).max() / step
            print(f"{form + f' {bits} bit':18s} {path.stat().st_size / 1e3:9.1f} {shown}  {largest:9.3f} {beside}")


def of_trained(path: Path, folder: Path, rounds: int, samples: int) -> None:
    """Prints what becomes of a net that was trained with few bits."""
    model = onnx.load(path)
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    data = few_bits.digits() if shape[1] == 1 else few_bits.cifar()
    task = Task(path.stem, path, model.graph.input[0].name, data.test, data.test, data.test_labels)
    made = {to: folder / f"{path.stem}.{to}.onnx" for to in ("float", "qdq", "qop")}
    for to, out in made.items():
        convert(path, out, to)
    timed = _timed(made, task, rounds)
    operations, weight_bits = cost(onnx.load(made["qdq"]))
    package = _executed(path, task, samples)
    beside = "not installed" if package is None else f"{np.abs(outputs(path, task, samples) - package).max():.3g}"
    print(f"\n{path.name}: {operations:.3g} bit operations, {weight_bits:,} weight bits, {len(data.test)} held out")
    print(f"as trained: top-1 {top1(path, task):.3f}; largest difference to qonnx: {beside}")
    for to, out in made.items():
        print(f"  {to:6s} top-1 {top1(out, task):.3f}  {timed[to]:7.3f} ms  {kernels(out)} on integer kernels")


def _stock(task: Task, folder: Path) -> Path:
    prepared, out = folder / "prepared.onnx", folder / "stock.onnx"
    quant_pre_process(task.model, prepared)
    reader = ArrayReader([{task.input: x[None]} for x in task.calibration])
    uint8, int8 = stock.QuantType.QUInt8, stock.QuantType.QInt8
    stock.quantize_static(prepared, out, reader, activation_type=uint8, weight_type=int8, per_channel=True)
    return out


def _timed(models: Mapping[str, Path], task: Task, rounds: int) -> dict[str, float]:
    feeds = [{task.input: x[None]} for x in task.images[:8]]
    found = bench(dict(models), feeds, rounds=rounds, baseline=next(iter(models))).by_name
    return {name: found[name].p50_ms for name in models}


def _executed(path: Path, task: Task, samples: int) -> np.ndarray | None:
    """Returns the outputs by the package qonnx, None where it is not installed."""
    try:
        from qonnx.core.modelwrapper import ModelWrapper
        from qonnx.core.onnx_exec import execute_onnx
        from qonnx.transformation.infer_shapes import InferShapes
    except ImportError:
        return None
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    del model.graph.value_info[:]
    wrapped = ModelWrapper(model).transform(InferShapes())
    found = [execute_onnx(wrapped, {task.input: x[None]}) for x in task.images[:samples]]
    return np.concatenate([next(iter(outputs.values())) for outputs in found])


def _resnet(count: int) -> Task:
    """Returns ResNet-20 on CIFAR-10 from the zoo."""
    calib, test = (np.load(ZOO / f"cifar10_{part}.npz", allow_pickle=False) for part in ("calib", "test"))
    mean, deviation = (np.array(v, np.float32) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))

    def prepared(images: np.ndarray) -> np.ndarray:
        scaled = (images.astype(np.float32) / 255 - mean) / deviation
        return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))

    model = ZOO / "cifar_resnet20.onnx"
    images, labels = prepared(test["images"][:count]), test["labels"][:count]
    return Task("ResNet-20, CIFAR-10", model, "input", prepared(calib["images"][:64]), images, labels)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trained", type=Path, nargs="*", default=[], help="QONNX files of few_bits.py")
    parser.add_argument("--resnet", action="store_true", help="ResNet-20 of the zoo too")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--samples", type=int, default=4, help="images for the differences")
    parser.add_argument("--images", type=int, default=1000, help="test images of ResNet-20")
    arguments = parser.parse_args()
    digits = load_digits()
    with model_path() as path, tempfile.TemporaryDirectory() as scratch:
        shipped = Task("digits", path, "image", digits.calibration[:64], digits.images, digits.labels)
        for task in (shipped, *([_resnet(arguments.images)] if arguments.resnet else [])):
            by_bits(task, Path(scratch), arguments.rounds)
            by_format(task, Path(scratch), arguments.rounds, arguments.samples)
        for trained in arguments.trained:
            of_trained(trained, Path(scratch), arguments.rounds, arguments.samples)


if __name__ == "__main__":
    main()
