"""16-bit activations, integer and float: float compute, bytes only where data is moved."""

from __future__ import annotations

import platform
from collections.abc import Callable

import numpy as np
import pytest
from onnx import TensorProto
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph

from kenosis_ort.targets.ort_cpu.rules import is_arm

from .qdq import QdqGraph, build, compute_ops, op_types

STEP16 = 8 / 65535
Make = Callable[[QdqGraph], str]


def _x(g: QdqGraph, *shape: int) -> str:
    return g.q(g.input(shape or (1, 16, 12, 12)), STEP16)


COMPUTE: dict[str, tuple[str, Make]] = {
    "Conv": ("Conv", lambda g: g.conv(_x(g))),
    "Gemm": ("Gemm", lambda g: g.gemm(_x(g, 4, 32))),
    "MatMul": ("MatMul", lambda g: g.matmul(_x(g, 4, 32))),
    "Add": ("Add", lambda g: g.op("Add", _x(g), _x(g))),
    "Mul": ("Mul", lambda g: g.op("Mul", _x(g), _x(g))),
    "Concat": ("Concat", lambda g: g.op("Concat", _x(g), _x(g), axis=1)),
    "Sigmoid": ("Sigmoid", lambda g: g.op("Sigmoid", _x(g))),
    "Softmax": ("Softmax", lambda g: g.op("Softmax", _x(g))),
    "MaxPool": ("MaxPool", lambda g: g.op("MaxPool", _x(g), kernel_shape=[2, 2])),
}
MOVES: dict[str, Make] = {
    "Reshape": lambda g: g.op("Reshape", _x(g), g.ints(-1)),
    "Transpose": lambda g: g.op("Transpose", _x(g)),
    "Slice": lambda g: g.op("Slice", _x(g), g.ints(0), g.ints(2), g.ints(1)),
    "Gather": lambda g: g.op("Gather", _x(g), g.ints(0, 1), axis=1),
}


@pytest.mark.until("1.32")
@pytest.mark.parametrize("act", [np.uint16, np.int16])
@pytest.mark.parametrize("name", COMPUTE)
def test_rule_sixteen_bit_float(act: type, name: str) -> None:
    op_type, make = COMPUTE[name]
    assert compute_ops(build(lambda g: g.q(make(g), STEP16), opset=21, act=act)) == [op_type]


@pytest.mark.parametrize("act", [np.uint16, np.int16])
@pytest.mark.parametrize("name", MOVES)
def test_rule_sixteen_bit_pass_through(act: type, name: str) -> None:
    model = build(lambda g: g.q(MOVES[name](g), STEP16), opset=21, act=act)
    assert op_types(model) == ["QuantizeLinear", name, "DequantizeLinear"]


@pytest.mark.parametrize("side", ["input", "output"])
def test_rule_sixteen_bit_float_one_side(side: str) -> None:
    """One 16-bit side is enough to make a Conv float."""

    def make(g: QdqGraph) -> str:
        x = _x(g) if side == "input" else g.q(g.input(), act=np.uint8)
        y = g.conv(x)
        return g.q(y, STEP16) if side == "output" else g.q(y, act=np.uint8)

    assert compute_ops(build(make, opset=21, act=np.uint16)) == ["Conv"]


@pytest.mark.parametrize("op_type", ["Conv", pytest.param("MatMul", marks=pytest.mark.since("1.30"))])
def test_rule_float16_float(op_type: str) -> None:
    """Q/DQ with float16 scales never become an integer kernel; a Cast to float32 in front of Q does.

    Runtime 1.29 refuses the MatMul model; the runtime on Arm refuses both.
    """

    def make(g: QdqGraph, cast: bool) -> str:
        shape = (1, 16, 12, 12) if op_type == "Conv" else (4, 32)
        x = g.input(shape, TensorProto.FLOAT16)
        if cast:
            x = g.q(g.op("Cast", x, to=TensorProto.FLOAT))
            return g.q(g.conv(x) if op_type == "Conv" else g.matmul(x))
        scale, zero, low = g.const(np.float16(0.02)), g.const(np.array(128, np.uint8)), g.const(np.array(0, np.int8))
        x = g.op("DequantizeLinear", g.op("QuantizeLinear", x, scale, zero), scale, zero)
        weight = np.ones((16, 16, 3, 3) if op_type == "Conv" else (32, 16), np.int8)
        y = g.op(op_type, x, g.op("DequantizeLinear", g.const(weight), scale, low))
        y = g.op("DequantizeLinear", g.op("QuantizeLinear", y, scale, zero), scale, zero)
        return g.op("Cast", y, to=TensorProto.FLOAT)

    kernel = {"Conv": "QLinearConv", "MatMul": "QLinearMatMul"}[op_type]
    if is_arm(platform.machine()):
        with pytest.raises(InvalidGraph, match="INVALID_GRAPH"):  # rule arm-float16-refused
            compute_ops(build(lambda g: make(g, False), opset=19))
    else:
        assert op_type in compute_ops(build(lambda g: make(g, False), opset=19))
    assert kernel in compute_ops(build(lambda g: make(g, True), opset=19))
