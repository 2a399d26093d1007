"""What the float rewrites are worth: speed and fidelity with them, without them, and beside stock.

The nets are built here: common architectures at their real widths and resolutions with random weights, some shortened
in depth. Each is quantized three times from the same calibration data:

- ``stock best``: stock ONNX Runtime, ``quant_pre_process``, uint8 activations and int8 weights per channel;
- ``no rewrites``: ``kenosis_ort.quantize_static(..., rewrites=False)``, the same data types;
- ``rewrites``: the same with ``rewrites=True``.

Speed is against FP32, the median over rounds of fresh sessions in random order, one pinned thread. The
signal-to-quantization-noise ratio is over samples that were not calibrated on. With random weights it compares the
variants with each other; it does not say what a trained net would lose.

    python benchmarks/rewrites.py                                      # all nets
    python benchmarks/rewrites.py --nets squeezenet mobilenetv3 --rounds 3 --json rewrites.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from _session import outputs, sqnr_by_output
from _timing import interleaved
from _zoo import OneShotReader, ort_best, quiet_folder
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType

import kenosis_ort

VARIANTS = ("stock best", "no rewrites", "rewrites")
SIZE = 224


class Net:
    """Builds an image classifier node by node; values go by name and ``channels`` knows their widths."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.channels = {"x": 3}

    def constant(self, values: npt.ArrayLike) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, np.float32), name))
        return name

    def op(self, kind: str, *inputs: str, channels: int | None = None, **attributes: Any) -> str:
        out = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=out, **attributes))
        self.channels[out] = self.channels[inputs[0]] if channels is None else channels
        return out

    def conv(self, x: str, out: int, k: int = 1, stride: int = 1, *, group: int = 1, bias: bool = True) -> str:
        """Padded by half a kernel."""
        width = self.channels[x] // group
        inputs = [x, self.constant(self.rng.normal(0, (2 / (width * k * k)) ** 0.5, (out, width, k, k)))]
        if bias:
            inputs.append(self.constant(self.rng.normal(0, 0.1, out)))
        pads = [k // 2] * 4
        return self.op("Conv", *inputs, channels=out, kernel_shape=[k, k], strides=[stride] * 2, pads=pads, group=group)

    def relu(self, x: str) -> str:
        return self.op("Relu", x)

    def conv_relu(self, x: str, out: int, k: int = 1, stride: int = 1) -> str:
        return self.relu(self.conv(x, out, k, stride))

    def norm_relu(self, x: str) -> str:
        """BatchNormalization and Relu."""
        c = self.channels[x]
        lows, highs = (0.5, -0.3, -0.3, 0.5), (1.5, 0.3, 0.3, 2.0)  # scale, shift, mean, variance
        drawn = [self.constant(self.rng.uniform(low, high, c)) for low, high in zip(lows, highs, strict=True)]
        return self.relu(self.op("BatchNormalization", x, *drawn))

    def max_pool(self, x: str, pad: int = 0) -> str:
        return self.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[pad] * 4)

    def average_pool(self, x: str, k: int, stride: int, pad: int) -> str:
        return self.op("AveragePool", x, kernel_shape=[k, k], strides=[stride] * 2, pads=[pad] * 4)

    def concat(self, *xs: str) -> str:
        return self.op("Concat", *xs, channels=sum(self.channels[x] for x in xs), axis=1)

    def head(self, x: str, classes: int = 1000) -> str:
        c = self.channels[x]
        flat = self.op("Flatten", self.op("GlobalAveragePool", x))
        weight = self.constant(self.rng.normal(0, c**-0.5, (classes, c)))
        return self.op("Gemm", flat, weight, self.constant(np.zeros(classes)), channels=classes, transB=1)

    def model(self, y: str) -> onnx.ModelProto:
        """Returns the checked model with ``y`` as its output."""
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, SIZE, SIZE])
        out = helper.make_tensor_value_info(y, TensorProto.FLOAT, [1, self.channels[y]])
        graph = helper.make_graph(self.nodes, "net", [x], [out], self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
        onnx.checker.check_model(model)
        return model


def squeezenet() -> onnx.ModelProto:
    """SqueezeNet 1.1: a strided 3x3 stem, fire modules."""
    n = Net()
    x = n.max_pool(n.conv_relu("x", 64, 3, 2))
    for squeeze, expand, pooled in (
        (16, 64, False), (16, 64, True), (32, 128, False), (32, 128, True),
        (48, 192, False), (48, 192, False), (64, 256, False), (64, 256, False),
    ):  # fmt: skip
        s = n.conv_relu(x, squeeze)
        x = n.concat(n.conv_relu(s, expand), n.conv_relu(s, expand, 3))
        x = n.max_pool(x) if pooled else x
    return n.model(n.op("Flatten", n.op("GlobalAveragePool", n.conv_relu(x, 1000))))


def densenet(blocks: Sequence[int] = (6, 12), growth: int = 32) -> onnx.ModelProto:
    """The stem and first two dense blocks of DenseNet-121: BatchNormalization behind Concat."""
    n = Net()
    x = n.max_pool(n.conv_relu("x", 64, 7, 2), 1)
    for layers in blocks:
        for _ in range(layers):
            y = n.conv(n.norm_relu(x), 4 * growth, bias=False)
            x = n.concat(x, n.conv(n.norm_relu(y), growth, 3, bias=False))
        x = n.average_pool(n.conv(n.norm_relu(x), n.channels[x] // 2, bias=False), 2, 2, 0)
    return n.model(n.head(n.norm_relu(x)))


def preact_resnet(blocks: Sequence[int] = (2, 2, 2, 2)) -> onnx.ModelProto:
    """Pre-activation ResNet with bottlenecks, 26 layers: BatchNormalization behind Add."""
    n = Net()
    x = n.max_pool(n.conv("x", 64, 7, 2), 1)
    for stage, layers in enumerate(blocks):
        width = 64 << stage
        for layer in range(layers):
            stride = 2 if stage and not layer else 1
            a = n.norm_relu(x)
            shortcut = x if layer else n.conv(a, 4 * width, 1, stride, bias=False)
            y = n.norm_relu(n.conv(a, width, bias=False))
            y = n.norm_relu(n.conv(y, width, 3, stride, bias=False))
            x = n.op("Add", n.conv(y, 4 * width, bias=False), shortcut)
    return n.model(n.head(n.norm_relu(x)))


def sum_resnet(blocks: Sequence[int] = (2, 2, 2, 2)) -> onnx.ModelProto:
    """ResNet-18 whose shortcuts are joined by Sum, as some exporters write them."""
    n = Net()
    x = n.max_pool(n.conv_relu("x", 64, 7, 2), 1)
    for stage, layers in enumerate(blocks):
        width = 64 << stage
        for layer in range(layers):
            stride = 2 if stage and not layer else 1
            shortcut = n.conv(x, width, 1, stride) if stride == 2 else x
            y = n.conv(n.conv_relu(x, width, 3, stride), width, 3)
            x = n.relu(n.op("Sum", y, shortcut))
    return n.model(n.head(x))


def inception(modules: int = 4) -> onnx.ModelProto:
    """Inception modules at 28x28, each with an AveragePool branch."""
    n = Net()
    x = n.max_pool(n.conv_relu("x", 64, 7, 2), 1)
    x = n.max_pool(n.conv_relu(n.conv_relu(x, 64), 192, 3), 1)
    for _ in range(modules):
        double = n.conv_relu(n.conv_relu(n.conv_relu(x, 64), 96, 3), 96, 3)
        single = n.conv_relu(n.conv_relu(x, 64), 64, 3)
        x = n.concat(n.conv_relu(x, 64), single, double, n.conv_relu(n.average_pool(x, 3, 1, 1), 32))
    return n.model(n.head(x))


def inverted(n: Net, x: str, k: int, mid: int, out: int, stride: int, gate: bool, act: Callable[[str], str]) -> str:
    """An inverted residual block: expand, depthwise, optionally squeeze-and-excite, project."""
    y = x if mid == n.channels[x] else act(n.conv(x, mid))
    y = act(n.conv(y, mid, k, stride, group=mid))
    if gate:
        g = n.conv_relu(n.op("GlobalAveragePool", y), mid // 4)
        y = n.op("Mul", y, n.op("HardSigmoid", n.conv(g, mid), alpha=1 / 6, beta=0.5))
    y = n.conv(y, out)
    return n.op("Add", y, x) if stride == 1 and n.channels[x] == out else y


def mobilenetv3() -> onnx.ModelProto:
    """MobileNetV3-Large: depthwise convolutions of 72, 120, 184, 200 channels, no multiples of 16."""
    n = Net()

    def hard_swish(x: str) -> str:
        return n.op("HardSwish", x)

    x = hard_swish(n.conv("x", 16, 3, 2))
    for k, expanded, out, gate, swish, stride in (
        (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2), (5, 120, 40, 1, 0, 1),
        (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1),
        (3, 184, 80, 0, 1, 1), (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2),
        (5, 960, 160, 1, 1, 1), (5, 960, 160, 1, 1, 1),
    ):  # fmt: skip
        x = inverted(n, x, k, expanded, out, stride, bool(gate), hard_swish if swish else n.relu)
    return n.model(n.head(hard_swish(n.conv(x, 960))))


def silu_net() -> onnx.ModelProto:
    """EfficientNet-like: SiLU written as Sigmoid and Mul, which ``rewrites=True`` leaves alone."""
    n = Net()

    def silu(x: str) -> str:
        return n.op("Mul", x, n.op("Sigmoid", x))

    x = silu(n.conv("x", 32, 3, 2))
    for k, expanded, out, stride in (
        (3, 32, 16, 1), (3, 96, 24, 2), (3, 144, 24, 1), (5, 144, 40, 2), (5, 240, 40, 1),
        (3, 240, 80, 2), (3, 480, 80, 1), (5, 480, 112, 1), (5, 672, 192, 2), (3, 1152, 320, 1),
    ):  # fmt: skip
        x = inverted(n, x, k, expanded, out, stride, False, silu)
    return n.model(n.head(silu(n.conv(x, 1280))))


NETS: dict[str, Callable[[], onnx.ModelProto]] = {
    f.__name__: f for f in (squeezenet, densenet, preact_resnet, sum_resnet, inception, mobilenetv3, silu_net)
}


def images(count: int, seed: int) -> list[dict[str, Any]]:
    """Noise at two scales, so that samples differ after global pooling too."""
    rng = np.random.default_rng(seed)
    coarse = np.repeat(np.repeat(rng.normal(0, 1, (count, 3, 7, 7)), SIZE // 7, axis=2), SIZE // 7, axis=3)
    data = (coarse + rng.normal(0, 0.5, (count, 3, SIZE, SIZE))).astype(np.float32)
    return [{"x": data[i : i + 1]} for i in range(count)]


def measure(model: onnx.ModelProto, folder: Path, samples: int, timing: dict[str, Any]) -> dict[str, Any]:
    """Returns a row per variant, and the notes that only the run with rewrites made."""
    source = folder / "fp32.onnx"
    onnx.save(model, str(source))
    calibration, evaluation = images(samples, 1), images(samples, 2)
    files = {"FP32": source, **{v: folder / f"{v.replace(' ', '_')}.onnx" for v in VARIANTS}}
    changed = ort_best(str(source), files["stock best"], calibration)
    notes: list[tuple[str, ...]] = [
        kenosis_ort.quantize_static(
            str(source), str(files[name]), OneShotReader(calibration), rewrites=name == "rewrites", per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        ).notes
        for name in VARIANTS[1:]
    ]  # fmt: skip
    reference = outputs(source, evaluation)
    found = {v: outputs(files[v], evaluation) for v in VARIANTS}
    rows: dict[str, Any] = {v: {"sqnr_db": sqnr_by_output(reference, found[v])[0]} for v in VARIANTS}
    for name, t in interleaved(files, evaluation[0], baseline="FP32", **timing).items():
        rows.setdefault(name, {}).update(milliseconds=t.milliseconds, speed=t.speed, spread=t.spread)
    return {"rows": rows, "notes": [n for n in notes[1] if n not in notes[0]], "stock_changed": changed}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table per net and the geometric means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--nets", nargs="+", choices=list(NETS), default=list(NETS), metavar="NET", help=", ".join(NETS)
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of fresh sessions (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.2, help="length of one block (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="samples to calibrate and to evaluate (%(default)s)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args(argv)
    target = args.json.resolve() if args.json else None
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    table: dict[str, Any] = {}
    for name in args.nets:
        with quiet_folder() as folder:
            result = measure(NETS[name](), folder, args.samples, {"rounds": args.rounds, "seconds": args.seconds})
        table[name] = result
        print(f"{name}  FP32 {result['rows']['FP32']['milliseconds']:.2f} ms")
        for v in VARIANTS:
            r = result["rows"][v]
            print(
                f"  {v:12s} {r['milliseconds']:8.2f} ms {r['speed']:5.2f}x +-{r['spread']:.2f} {r['sqnr_db']:6.1f} dB"
            )
        print("".join(f"    {note}\n" for note in result["notes"] or ["no rewrite applied"]), end="", flush=True)
        if result["stock_changed"]:
            print(f"    stock: {result['stock_changed']}")
    means = {v: float(np.exp(np.mean([np.log(t["rows"][v]["speed"]) for t in table.values()]))) for v in VARIANTS}
    print("geometric mean  " + "  ".join(f"{v} {m:.2f}x" for v, m in means.items())
          + f"  rewrites over none {means['rewrites'] / means['no rewrites']:.3f}x")  # fmt: skip
    if target:
        target.write_text(json.dumps({"nets": table, "geometric_means": means}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
