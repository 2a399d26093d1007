"""Peak memory and time of calibration: this package, stock, and a plain FP32 session over the same samples.

The net has ResNet-50's size and structure with random weights. Each measurement runs in a process of its own.

    python benchmarks/calibration_memory.py                 # ours and plain: 16, 64 and 256 samples
    python benchmarks/calibration_memory.py --stock         # with stock: about 11 GB of memory for 64 samples
    python benchmarks/calibration_memory.py --slope         # bytes a sample up to 10,000, on a small net

Columns: seconds and processor seconds of the whole call (loading, session and statistics included), peak resident
memory, and each as a multiple of the plain session's. Processor seconds are the ones to read on a busy machine.
"placed" observes the tensors that a fusion-aware placement needs (not those in front of a Relu that the runtime
absorbs), "all" every float tensor, as stock does.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 224
KINDS = ("plain", "ours-minmax-placed", "ours-minmax-all", "ours-percentile-placed", "ours-percentile-all")
STOCK_KINDS = ("stock-minmax", "stock-percentile")
STOCK_PERCENTILE_LIMIT = 64  # samples; beyond, memory grows to tens of gigabytes


def build_net(path: Path) -> None:
    """Writes a net of ResNet-50's structure with random weights."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def constant(name: str, shape: tuple[int, ...], scale: float) -> str:
        weights.append(numpy_helper.from_array((rng.standard_normal(shape) * scale).astype(np.float32), name))
        return name

    def conv(source: str, name: str, channels: tuple[int, int], kernel: int, stride: int) -> str:
        fan_in = channels[0] * kernel * kernel
        w = constant(f"{name}.w", (channels[1], channels[0], kernel, kernel), (2 / fan_in) ** 0.5)
        b = constant(f"{name}.b", (channels[1],), 0.1)
        pads, strides, shape = [kernel // 2] * 4, [stride] * 2, [kernel] * 2
        nodes.append(
            helper.make_node("Conv", [source, w, b], [name], name=name, pads=pads, strides=strides, kernel_shape=shape)
        )
        return name

    def relu(source: str) -> str:
        nodes.append(helper.make_node("Relu", [source], [f"{source}.relu"], name=f"{source}.relu"))
        return f"{source}.relu"

    x = relu(conv("input", "stem", (3, 64), 7, 2))
    nodes.append(helper.make_node("MaxPool", [x], ["pool"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    x, width = "pool", 64
    for stage, (blocks, inner) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            name = f"stage{stage}.block{block}"
            stride = 2 if stage and not block else 1
            y = relu(conv(x, f"{name}.1", (width, inner), 1, 1))
            y = relu(conv(y, f"{name}.2", (inner, inner), 3, stride))
            y = conv(y, f"{name}.3", (inner, 4 * inner), 1, 1)
            skip = x if block else conv(x, f"{name}.skip", (width, 4 * inner), 1, stride)
            nodes.append(helper.make_node("Add", [y, skip], [f"{name}.add"], name=f"{name}.add"))
            x, width = relu(f"{name}.add"), 4 * inner
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["gap"], name="gap"))
    nodes.append(helper.make_node("Flatten", ["gap"], ["flat"], name="flat"))
    w, b = constant("fc.w", (1000, 2048), 0.02), constant("fc.b", (1000,), 0.1)
    nodes.append(helper.make_node("Gemm", ["flat", w, b], ["logits"], name="fc", transB=1))
    graph = helper.make_graph(
        nodes,
        "resnet50",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, SIZE, SIZE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 1000])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)


def feeds(samples: int, batch: int) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yields random images."""
    rng = np.random.default_rng(1)
    for _ in range(samples // batch):
        yield {"input": rng.standard_normal((batch, 3, SIZE, SIZE), np.float32)}


def peak_bytes() -> int:
    """Returns the peak resident memory of this process."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_plain(path: Path, samples: int, batch: int, threads: int) -> None:
    """Runs the net in a session of its own."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for feed in feeds(samples, batch):
        session.run(None, feed)


def run_ours(path: Path, samples: int, batch: int, threads: int, method: str, selection: str) -> None:
    """Collects with this package."""
    import onnx

    from kenosis_ort.calibration import CalibrationConfig, Points, collect

    model = onnx.load(path)
    tensors = ["input"]
    consumers: dict[str, list[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node.op_type)
    produced = [node.output[0] for node in model.graph.node]
    tensors += [name for name in produced if selection == "all" or consumers.get(name) != ["Relu"]]
    config = CalibrationConfig(method=method)
    table = collect(model, feeds(samples, batch), Points(tensors, config=config, threads=threads))
    table.to_tensors_data()


def run_stock(path: Path, samples: int, batch: int, method: str) -> None:
    """Collects with onnxruntime.quantization."""
    from onnxruntime.quantization.calibrate import CalibrationDataReader, CalibrationMethod, create_calibrator

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._feeds = feeds(samples, batch)

        def get_next(self) -> Any:
            return next(self._feeds, None)

    names = {"minmax": CalibrationMethod.MinMax, "percentile": CalibrationMethod.Percentile}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        calibrator = create_calibrator(path, None, str(Path(folder) / "augmented.onnx"), names[method])
        calibrator.collect_data(Reader())
        calibrator.compute_data()


def run_slope(samples: int) -> None:
    """Prints how memory grows with the samples of `kenosis_ort.calibrate`, samples that it keeps included."""
    import kenosis_ort
    from tests import models

    model = models.conv_relu_chain(3)
    name = model.graph.input[0].name
    shape = models.feeds(model, 1)[0][name].shape
    rng = np.random.default_rng(0)
    marks: dict[int, int] = {}

    def counted(done: int, _: int | None) -> None:
        if done in (samples // 4, samples // 2, samples):
            marks[done] = resident_bytes()

    feeds = ({name: rng.standard_normal(shape, np.float32)} for _ in range(samples))
    kenosis_ort.calibrate(model, feeds, progress=counted)
    for done, held in marks.items():
        print(f"{done:7} samples {held / 2**20:8.1f} MB")
    (first, before), *_, (last, after) = marks.items()
    print(f"{(after - before) / (last - first):.0f} bytes a sample, of {4 * int(np.prod(shape))} that it holds")


def resident_bytes() -> int:
    """Returns the resident memory of this process as it is."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def child(args: argparse.Namespace) -> None:
    """Runs one measurement and prints it as JSON."""
    path = Path(args.model)
    maker, *rest = args.child.split("-")
    # imports are not part of the time
    importlib.import_module("onnxruntime" if maker == "plain" else "onnxruntime.quantization")
    start, start_cpu = time.perf_counter(), time.process_time()
    if maker == "plain":
        run_plain(path, args.samples[0], args.batch, args.threads)
    elif maker == "ours":
        run_ours(path, args.samples[0], args.batch, args.threads, rest[0], rest[1])
    else:
        run_stock(path, args.samples[0], args.batch, rest[0])
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    print(json.dumps({"seconds": seconds, "cpu": cpu, "bytes": peak_bytes()}))


def measure(args: argparse.Namespace, kind: str, samples: int, model: Path) -> dict[str, float]:
    """Measures in a fresh process, the best time of several."""
    command = [sys.executable, __file__, "--child", kind, "--model", str(model), "--samples", str(samples)]
    command += ["--batch", str(args.batch), "--threads", str(args.threads)]
    found = []
    for _ in range(args.repeat):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{kind} with {samples} samples failed:\n{done.stderr[-2000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    best = {key: min(f[key] for f in found) for key in ("seconds", "cpu")}
    return {**best, "bytes": max(f["bytes"] for f in found)}


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--batch", type=int, default=1, help="samples a feed")
    parser.add_argument("--threads", type=int, default=0, help="0 leaves it to the runtime")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=[*KINDS, *STOCK_KINDS])
    parser.add_argument("--stock", action="store_true", help="measure stock too")
    parser.add_argument(
        "--slope", type=int, nargs="?", const=10_000, metavar="N", help="bytes a sample, up to N samples"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    if args.slope:
        run_slope(args.slope)
        return
    kinds = list(dict.fromkeys(["plain", *args.kinds, *(STOCK_KINDS if args.stock else ())]))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "resnet50.onnx"
        build_net(model)
        print(f"{'':24} {'samples':>7}" + "".join(f" {c:>8}" for c in ("wall s", "x", "cpu s", "x", "peak MB", "x")))
        for samples in args.samples:
            plain: dict[str, float] = {}
            for kind in kinds:
                if kind == "stock-percentile" and samples > STOCK_PERCENTILE_LIMIT:
                    continue
                found = measure(args, kind, samples, model)
                plain = plain or found
                times = {key: found[key] / plain[key] for key in found}
                print(
                    f"{kind:24} {samples:7} {found['seconds']:8.2f} {times['seconds']:8.2f} {found['cpu']:8.2f} "
                    f"{times['cpu']:8.2f} {found['bytes'] / 2**20:8.0f} {times['bytes']:8.2f}",
                    flush=True,
                )
                rows.append({"kind": kind, "samples": samples, **found, "times_plain": times})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
