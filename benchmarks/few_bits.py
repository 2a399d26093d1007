"""Trains nets of few bits and writes them as QONNX, as Brevitas does: a TFC of 2 bits on digits, a CNV of 4 on CIFAR.

    python benchmarks/few_bits.py OUT.onnx --net tfc            # needs torch; seconds
    python benchmarks/few_bits.py OUT.onnx --net cnv            # a few minutes on a CPU

Scales are learned with the weights (Esser et al., "Learned Step Size Quantization", ICLR 2020), one a channel for
weights and one for each activation, which is unsigned behind its Relu. Inputs have 8 bits. The nets have the form of
those of the QONNX paper, section VI, at a size that trains here. It prints the accuracy on held-out images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import cifar10_data

from kenosis_ort.demo import load_digits

DOMAIN = "qonnx.custom_op.general"
CNV = (16, 16, "pool", 32, 32, "pool", 64, "pool")
TFC = (64, 64, 64)


@dataclass(frozen=True)
class Data:
    """Images (N, C, H, W) from 0 to 1 with labels, split."""

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray


def digits() -> Data:
    """Returns the images that ship with the package: 400 to train on, 200 held out."""
    found = load_digits()
    return Data(found.images[:400], found.labels[:400], found.images[400:], found.labels[400:])


def cifar(arguments: Any = None) -> Data:
    """Returns what `examples/cifar10_data.py` finds."""
    parser = argparse.ArgumentParser()
    cifar10_data.add_arguments(parser)
    images = cifar10_data.load(arguments or parser.parse_args([]))
    train, test = (part.transpose(0, 3, 1, 2).astype(np.float32) / 255 for part in (images.train, images.test))
    return Data(train, images.train_labels, test, images.test_labels)


def _layer_class(weight_bits: int, activation_bits: int) -> Any:
    """Returns the class of a Conv or Linear with quantized weights, and of what stands behind all but the last."""
    import torch
    from torch import nn
    from torch.nn import functional

    top, highest = 2 ** (weight_bits - 1) - 1, 2**activation_bits - 1

    class Layer(nn.Module):  # type: ignore[misc]
        """Behind all layers but the last stand BatchNorm, Relu and a quantizer."""

        def __init__(self, layer: Any, channels: int, *, last: bool = False) -> None:
            super().__init__()
            self.layer, self.last = layer, last
            magnitude = layer.weight.detach().abs().flatten(1).mean(1)
            self.weight_scale = nn.Parameter(2 * magnitude / max(top, 1) ** 0.5)
            norm = nn.BatchNorm2d if layer.weight.ndim == 4 else nn.BatchNorm1d
            self.norm = None if last else norm(channels)
            self.scale = nn.Parameter(torch.tensor(1.6 / highest**0.5))

        def forward(self, x: Any) -> Any:
            layer = self.layer
            scale = self.weight_scale.abs().reshape([-1] + [1] * (layer.weight.ndim - 1)) + 1e-8
            weight = fake(layer.weight, scale, -top, top)
            conv = layer.weight.ndim == 4
            x = functional.conv2d(x, weight, padding=1) if conv else functional.linear(x, weight, layer.bias)
            return x if self.last else fake(functional.relu(self.norm(x)), self.scale.abs() + 1e-8, 0, highest)

    return Layer


def fake(x: Any, scale: Any, low: int, high: int) -> Any:
    """Returns what a quantizer makes of a value; the gradient passes the rounding as if it were not there."""
    steps = (x / scale).clamp(low, high)
    return ((steps.round() - steps).detach() + steps) * scale


def _net(name: str, data: Data, layer: Any) -> Any:
    """Returns the untrained net as a list of steps."""
    from torch import nn

    size, channels = data.train.shape[-1], data.train.shape[1]
    steps = nn.ModuleList()
    for width in CNV if name == "cnv" else ():
        if isinstance(width, int):
            steps.append(layer(nn.Conv2d(channels, width, 3, padding=1, bias=False), width))
            channels = width
        else:
            steps.append(nn.MaxPool2d(2))
            size //= 2
    steps.append(nn.Flatten())
    width = channels * size * size
    for out in TFC if name == "tfc" else (64,):
        steps.append(layer(nn.Linear(width, out, bias=False), out))
        width = out
    steps.append(layer(nn.Linear(width, 10), 10, last=True))
    return steps


def train(name: str, data: Data, *, weight_bits: int, activation_bits: int, epochs: int, seed: int = 0) -> Any:
    """Returns the trained steps of the net and its accuracy on the held-out images."""
    import torch
    from torch.nn import functional

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    steps = _net(name, data, _layer_class(weight_bits, activation_bits))

    def run(x: Any) -> Any:
        x = fake(x, torch.tensor(1 / 255), 0, 255)
        for step in steps:
            x = step(x)
        return x

    optimizer = torch.optim.Adam(steps.parameters(), 2e-3)
    images, labels = torch.tensor(data.train), torch.tensor(data.train_labels)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - epoch / epochs)
        for batch in torch.randperm(len(images)).split(64):
            mirrored = name == "cnv" and epoch % 2 == 1
            x = images[batch].flip(-1) if mirrored else images[batch]
            loss = functional.cross_entropy(run(x), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    steps.eval()
    with torch.no_grad():
        told = run(torch.tensor(data.test)).argmax(1).numpy()
    return steps, float((told == data.test_labels).mean())


def export(steps: Any, data: Data, *, weight_bits: int, activation_bits: int) -> onnx.ModelProto:
    """Returns the trained net as QONNX: BatchNormalization unfolded, weights float in front of their Quant."""
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def const(value: Any) -> str:
        array = np.asarray(value.detach().numpy() if hasattr(value, "detach") else value, np.float32)
        constants.append(numpy_helper.from_array(array, f"c{len(constants)}"))
        return constants[-1].name

    def add(op_type: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        out = f"v{len(nodes)}"
        nodes.append(helper.make_node(op_type, inputs, [out], f"{op_type}_{len(nodes)}", domain=domain, **attributes))
        return out

    def quant(x: str, scale: Any, bits: int, *, signed: bool) -> str:
        inputs = [x, const(scale), const(0.0), const(bits)]
        return add("Quant", inputs, DOMAIN, signed=int(signed), narrow=int(signed), rounding_mode="ROUND")

    value = quant("image", 1 / 255, 8, signed=False)
    for step in steps:
        kind = type(step).__name__
        if kind == "MaxPool2d":
            value = add("MaxPool", [value], kernel_shape=[2, 2], strides=[2, 2])
        elif kind == "Flatten":
            value = add("Flatten", [value])
        else:
            weight = step.layer.weight.detach().numpy()
            scale = step.weight_scale.abs().detach().numpy() + 1e-8
            scale = scale.reshape([-1] + [1] * (weight.ndim - 1))
            quantized = quant(const(weight), scale, weight_bits, signed=True)
            if weight.ndim == 4:
                value = add("Conv", [value, quantized], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
            else:
                bias = [] if step.layer.bias is None else [const(step.layer.bias)]
                value = add("Gemm", [value, quantized, *bias], transB=1)
            if not step.last:
                norm = step.norm
                parts = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
                value = add("BatchNormalization", [value, *map(const, parts)], epsilon=norm.eps)
                value = quant(add("Relu", [value]), step.scale.abs() + 1e-8, activation_bits, signed=False)
    nodes[-1].output[0] = "logits"
    graph = helper.make_graph(
        nodes,
        "few_bits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, *data.train.shape[1:]])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 10])],
        constants,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


NETS = {"tfc": (digits, 2, 2, 40), "cnv": (cifar, 4, 4, 8)}
"""By name: images, bits of weights and activations, epochs."""


def main() -> None:
    """Trains one net and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--net", choices=NETS, default="tfc")
    parser.add_argument("--weight-bits", type=int)
    parser.add_argument("--activation-bits", type=int)
    parser.add_argument("--epochs", type=int)
    arguments = parser.parse_args()
    load, weights, activations, epochs = NETS[arguments.net]
    bits = {
        "weight_bits": arguments.weight_bits or weights,
        "activation_bits": arguments.activation_bits or activations,
    }
    data = load()
    steps, accuracy = train(arguments.net, data, epochs=arguments.epochs or epochs, **bits)
    onnx.save(export(steps, data, **bits), arguments.out)
    print(f"{arguments.out}: {arguments.net} {bits}, top-1 {accuracy:.3f} on {len(data.test)} held-out images")


if __name__ == "__main__":
    main()
