"""16-bit activations: float compute, bytes only where data is moved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

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
