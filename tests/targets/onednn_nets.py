"""Hand-written graphs of one quantized Conv and what stands around it, as oneDNN's document wants them or nearly so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import helper

from tests.models import Net

UNARY = (
    "Abs", "Clip", "Elu", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish", "Relu", "Round",
    "Sigmoid", "Softplus", "Sqrt", "Tanh",
)  # fmt: skip
BINARY = ("Add", "Sub", "Max", "Min", "Mul", "Div")
SHAPE = (1, 4, 6, 6)


class Quantized(Net):
    """Builds one quantized Conv with variations."""

    def scalar(self, dtype: type = np.uint8) -> tuple[str, str]:
        zero = np.full((), 128 if dtype is np.uint8 else 0).astype(dtype)
        return self.const(np.float32(0.05)), self.const(zero, dtype=dtype)

    def q(self, value: str, dtype: type = np.uint8) -> str:
        return self.op("QuantizeLinear", [value, *self.scalar(dtype)])

    def dq(self, value: str, dtype: type = np.uint8) -> str:
        return self.op("DequantizeLinear", [value, *self.scalar(dtype)])

    def pair(self, value: str, dtype: type = np.uint8) -> str:
        return self.dq(self.q(value, dtype), dtype)

    def int8_weight(self, dtype: type = np.int8) -> str:
        return self.const(self.rng.integers(0, 100, (4, 4, 3, 3)), dtype=dtype)

    def finished(self, y: str) -> onnx.ModelProto:
        self.output(y)
        graph = helper.make_graph(self.nodes, "net", self.inputs, self.outputs, self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)


def conv(
    epilogue: Callable[[Quantized, str], str] = lambda net, y: y,
    *,
    src: Callable[[Quantized, str], str] = lambda net, x: net.pair(x),
    weight: Callable[[Quantized], str] = lambda net: net.dq(net.int8_weight(), np.int8),
    bias: Callable[[Quantized], str] | None = lambda net: net.const(np.zeros(4, np.float32)),
    dst: Callable[[Quantized, str], str] = lambda net, y: net.pair(y),
) -> onnx.ModelProto:
    """Returns a model of one Conv, quantized as the document wants it but for what is given."""
    net = Quantized(opset=20)
    x = src(net, net.input("x", SHAPE))
    inputs = [x, weight(net), *([bias(net)] if bias is not None else [])]
    y = net.op("Conv", inputs, name="conv", pads=[1, 1, 1, 1])
    return net.finished(dst(net, epilogue(net, y)))


def chain(*ops: str) -> Callable[[Quantized, str], str]:
    """Returns an epilogue of operations, one behind the other."""

    def build(net: Quantized, y: str) -> str:
        for op in ops:
            operands = [y, net.const(np.full((1, 1, 1, 1), 0.5, np.float32))] if op in BINARY else [y]
            y = net.op(op, operands)
        return y

    return build


def silu(net: Quantized, y: str) -> str:
    return net.op("Mul", [y, net.op("Sigmoid", [y])])
