"""CIFAR10Net: layers in plain numpy, and the ONNX file of trained weights.

The architecture is the running example of a walk-through of ONNX deployment: five 3x3 convolutions, three
BatchNormalizations, three pools, two linear layers with Dropout between. Weights go by the names that PyTorch gives
them (``conv1.weight``, ``bn1.running_mean``, ...), so that either trainer of `cifar10_train.py` can supply them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import train_digits as nn
from cifar10_data import CLASSES
from onnx import TensorProto, helper, numpy_helper

Array = nn.Array
BLOCKS: Sequence[Sequence[tuple[int, int]]] = (((3, 32), (32, 32)), ((32, 64), (64, 64)), ((64, 128),))
HIDDEN = 256


class Conv(nn.Conv):
    """3x3 convolution, padding 1, with bias."""

    def __init__(self, channels_in: int, channels_out: int, rng: np.random.Generator) -> None:
        super().__init__(channels_in, channels_out, rng)
        self.bias = nn.Parameter(np.zeros(channels_out))

    def forward(self, x: Array, *, training: bool) -> Array:
        return super().forward(x, training=training) + self.bias.value

    def backward(self, grad: Array) -> Array:
        self.bias.grad = grad.sum((0, 1, 2))
        return super().backward(grad)

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from super().parameters()
        yield self.bias


class Linear(nn.Linear):
    """Linear layer whose output keeps two spatial axes of size 1, so that another can follow."""

    def forward(self, x: Array, *, training: bool) -> Array:
        return super().forward(x, training=training)[:, None, None, :]

    def backward(self, grad: Array) -> Array:
        return super().backward(grad.reshape(len(grad), -1))


class Dropout:
    """Half of the values to zero in training, the others doubled."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def forward(self, x: Array, *, training: bool) -> Array:
        self.mask = 2 * (self.rng.random(x.shape) < 0.5).astype(np.float32) if training else np.ones_like(x)
        return x * self.mask

    def backward(self, grad: Array) -> Array:
        return grad * self.mask

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from ()


def build(rng: np.random.Generator) -> dict[str, nn.Layer]:
    """Returns the untrained layers by name, in order: input (N, 32, 32, 3), output (N, 10)."""
    named: dict[str, nn.Layer] = {}
    number = 0
    for block, convs in enumerate(BLOCKS, 1):
        for channels_in, channels_out in convs:
            if (channels_in, channels_out) != convs[0]:
                named[f"relu{block}"] = nn.Relu()
            number += 1
            named[f"conv{number}"] = Conv(channels_in, channels_out, rng)
        named |= {f"bn{block}": nn.BatchNorm(convs[-1][1]), f"relu{block}b": nn.Relu(), f"pool{block}": nn.MaxPool()}
    named |= {"fc1": Linear(BLOCKS[-1][-1][1] * 4 * 4, HIDDEN, rng), "relu_fc": nn.Relu(), "drop": Dropout(rng)}
    return {**named, "fc2": nn.Linear(HIDDEN, CLASSES, rng)}


def state(layers: Mapping[str, nn.Layer]) -> dict[str, Array]:
    """Returns the weights by PyTorch's names, in PyTorch's layout."""
    return {f"{name}.{key}": value for name, layer in layers.items() for key, value in _arrays(layer)}


def _arrays(layer: nn.Layer) -> Iterator[tuple[str, Array]]:
    if isinstance(layer, Conv):
        fan_in, channels_out = layer.weight.value.shape
        yield "weight", layer.weight.value.reshape(3, 3, fan_in // 9, channels_out).transpose(3, 2, 0, 1)
        yield "bias", layer.bias.value
    elif isinstance(layer, nn.Linear):
        yield "weight", layer.weight.value.T
        yield "bias", layer.bias.value
    elif isinstance(layer, nn.BatchNorm):
        yield from (("weight", layer.gain.value), ("bias", layer.shift.value))
        yield from (("running_mean", layer.mean), ("running_var", layer.variance))


def export(weights: Mapping[str, Array]) -> onnx.ModelProto:
    """Returns CIFAR10Net with these weights as ONNX."""
    nodes: list[onnx.NodeProto] = []
    value = "image"

    def emit(op: str, name: str, keys: str = "", **attributes: Any) -> None:
        nonlocal value
        inputs = [value, *(f"{name}.{key}" for key in keys.split())]
        value = "logits" if name == "fc2" else f"/{name}/{op}_out"
        nodes.append(helper.make_node(op, inputs, [value], f"/{name}/{op}", **attributes))

    for block, convs in enumerate(BLOCKS, 1):
        for i in range(1, len(convs) + 1):
            if i > 1:
                emit("Relu", f"relu{block}")
            emit("Conv", f"conv{2 * block - 2 + i}", "weight bias", kernel_shape=[3, 3], pads=[1] * 4)
        emit("BatchNormalization", f"bn{block}", "weight bias running_mean running_var", epsilon=1e-5)
        emit("Relu", f"relu{block}b")
        emit("MaxPool", f"pool{block}", kernel_shape=[2, 2], strides=[2, 2])
    emit("Flatten", "flatten", axis=1)
    emit("Gemm", "fc1", "weight bias", transB=1)
    emit("Relu", "relu_fc")
    emit("Gemm", "fc2", "weight bias", transB=1)
    initializers = [numpy_helper.from_array(np.ascontiguousarray(v, np.float32), k) for k, v in weights.items()]
    graph = helper.make_graph(
        nodes,
        "CIFAR10Net",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="cifar10_train")
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model
