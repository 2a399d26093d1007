"""Builds nets node by node from ``onnx.helper`` alone, with random weights from a fixed seed.

Values go by name. Weights of Convs are He-initialised; a BatchNormalization starts with unit statistics and gets the
true ones of its input from `nets.statistics` once the net is complete, so that activations stay of order one to any
depth, as in a trained net.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Pads = int | Sequence[int]


class Net:
    """A graph under construction.

    Args:
        seed: Of all weights.
        opset: Operator set of the default domain; decides with the caller which form an exporter would write.
    """

    def __init__(self, *, seed: int = 0, opset: int = 17) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.channels: dict[str, int] = {}

    # -- values -------------------------------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int | str], *, dtype: int = TensorProto.FLOAT, axis: int = 1) -> str:
        """Adds a graph input; ``axis`` is where its channels stand."""
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        if len(shape) > axis and isinstance(shape[axis], int):
            self.channels[name] = int(shape[axis])
        return name

    def constant(self, values: npt.ArrayLike, dtype: Any = np.float32) -> str:
        """Stores a constant; returns its name."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def op(self, kind: str, *inputs: str, channels: int | None = None, **attributes: Any) -> str:
        """Adds a node of one output; ``channels`` where it differs from the first input's."""
        return self.ops(kind, inputs, 1, channels=channels, **attributes)[0]

    def ops(
        self, kind: str, inputs: Sequence[str], count: int, *, channels: int | None = None, **attributes: Any
    ) -> list[str]:
        """Adds a node of several outputs."""
        name = f"{kind.lower()}{len(self.nodes)}"
        outs = [name] if count == 1 else [f"{name}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(kind, list(inputs), outs, name=name, **attributes))
        known = channels if channels is not None else self.channels.get(inputs[0]) if inputs else None
        if known is not None:
            self.channels.update(dict.fromkeys(outs, known))
        return outs

    # -- layers -------------------------------------------------------------------------------------------------

    def conv(
        self, x: str, out: int, k: int = 1, stride: int = 1, *, group: int = 1, bias: bool = True, pads: Pads = -1
    ) -> str:
        """A Conv, padded by half its kernel unless ``pads`` says otherwise."""
        width = self.channels[x] // group
        inputs = [x, self.constant(self.rng.normal(0, (2 / (width * k * k)) ** 0.5, (out, width, k, k)))]
        if bias:
            inputs.append(self.constant(self.rng.normal(0, 0.1, out)))
        return self.op(
            "Conv", *inputs, channels=out, kernel_shape=[k, k], strides=[stride] * 2, pads=_four(pads, k), group=group,
            dilations=[1, 1],
        )  # fmt: skip

    def norm(self, x: str, *, gain: float = 1.0) -> str:
        """A BatchNormalization with scales around ``gain``."""
        c = self.channels[x]
        drawn = (self.rng.uniform(0.6, 1.4, c) * gain, self.rng.normal(0, 0.2, c), np.zeros(c), np.ones(c))
        return self.op("BatchNormalization", x, *(self.constant(v) for v in drawn), epsilon=1e-5)

    def conv_norm(self, x: str, out: int, k: int = 1, stride: int = 1, *, gain: float = 1.0, **options: Any) -> str:
        """A Conv without bias and its BatchNormalization."""
        return self.norm(self.conv(x, out, k, stride, bias=False, **options), gain=gain)

    def relu(self, x: str) -> str:
        return self.op("Relu", x)

    def clip(self, x: str, low: float, high: float) -> str:
        return self.op("Clip", x, self.constant(low), self.constant(high))

    def silu(self, x: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x))

    def conv_relu(self, x: str, out: int, k: int = 1, stride: int = 1, **options: Any) -> str:
        """A Conv with bias and Relu."""
        return self.relu(self.conv(x, out, k, stride, **options))

    def conv_norm_relu(self, x: str, out: int, k: int = 1, stride: int = 1, **options: Any) -> str:
        """A Conv, its BatchNormalization and Relu."""
        return self.relu(self.conv_norm(x, out, k, stride, **options))

    def max_pool(self, x: str, k: int = 3, stride: int = 2, pads: Pads = 0) -> str:
        return self.op("MaxPool", x, kernel_shape=[k, k], strides=[stride] * 2, pads=_four(pads, k))

    def average_pool(self, x: str, k: int, stride: int, pads: Pads = 0, *, count_pad: bool = False) -> str:
        return self.op(
            "AveragePool", x, kernel_shape=[k, k], strides=[stride] * 2, pads=_four(pads, k),
            count_include_pad=int(count_pad),
        )  # fmt: skip

    def concat(self, *xs: str, axis: int = 1) -> str:
        return self.op("Concat", *xs, channels=sum(self.channels[x] for x in xs), axis=axis)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        return self.op("Reshape", x, self.constant(shape, np.int64))

    def transpose(self, x: str, *perm: int) -> str:
        return self.op("Transpose", x, perm=list(perm))

    def gemm(self, x: str, out: int) -> str:
        """A linear layer of a classifier, its weight as PyTorch stores it."""
        c = self.channels[x]
        weight = self.constant(self.rng.normal(0, c**-0.5, (out, c)))
        return self.op("Gemm", x, weight, self.constant(self.rng.normal(0, 0.05, out)), channels=out, transB=1)

    def linear(self, x: str, out: int, *, gain: float = 1.0, bias: bool = True) -> str:
        """A linear layer over the last axis: MatMul, and Add of the bias as exporters write it."""
        c = self.channels[x]
        y = self.op("MatMul", x, self.constant(self.rng.normal(0, gain * c**-0.5, (c, out))), channels=out)
        return self.op("Add", self.constant(self.rng.normal(0, 0.05, out)), y, channels=out) if bias else y

    def layer_norm(self, x: str, *, epsilon: float = 1e-5) -> str:
        """LayerNormalization over the last axis: the operator from operator set 17, its primitives before."""
        c = self.channels[x]
        scale = self.constant(self.rng.uniform(0.7, 1.3, c))
        shift = self.constant(self.rng.normal(0, 0.1, c))
        if self.opset >= 17:
            return self.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=epsilon)
        centred = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
        square = self.op("Pow", centred, self.constant(2.0))
        variance = self.op("Add", self.op("ReduceMean", square, axes=[-1]), self.constant(epsilon))
        normal = self.op("Div", centred, self.op("Sqrt", variance))
        return self.op("Add", self.op("Mul", normal, scale), shift)

    def gelu(self, x: str) -> str:
        """The exact GELU in primitives, as exporters write it."""
        erf = self.op("Erf", self.op("Div", x, self.constant(2.0**0.5)))
        return self.op("Mul", self.op("Mul", x, self.op("Add", erf, self.constant(1.0))), self.constant(0.5))

    def head(self, x: str, classes: int = 1000) -> str:
        """Global pool, Flatten and the classifier."""
        return self.gemm(self.op("Flatten", self.op("GlobalAveragePool", x)), classes)

    # -- the model ----------------------------------------------------------------------------------------------

    def model(self, *outputs: str) -> onnx.ModelProto:
        """Returns the checked model; BatchNormalizations still have unit statistics."""
        graph = helper.make_graph(self.nodes, "net", self.inputs, [], self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
        shapes = {value.name: value for value in inferred.graph.value_info}
        model.graph.output.extend(shapes[name] for name in outputs)
        onnx.checker.check_model(model)
        return model


def _four(pads: Pads, k: int) -> list[int]:
    if isinstance(pads, int):
        return [k // 2 if pads < 0 else pads] * 4
    return list(pads)
