"""Binary and unary elementwise operators, Where, Softmax, ArgMax: integer kernels and float islands."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from .qdq import STEP, QdqGraph, build, compute_ops, largest_difference, op_types

OUT = 6 / 255  # a step other than the operands'


@pytest.mark.parametrize("other", [(1, 16, 12, 12), (1, 16, 1, 1), (12,)])
def test_rule_mul_integer(other: tuple[int, ...]) -> None:
    model = build(lambda g: g.q(g.op("Mul", g.act_input(), g.act_input(other)), OUT, 100))
    assert compute_ops(model) == ["QLinearMul"]
    assert largest_difference(model) <= OUT * 1.01


@pytest.mark.parametrize("op_type", ["Add", "Mul"])
def test_rule_elementwise_constant_operand(op_type: str) -> None:
    """A constant operand must be quantized to the activations' type and stand behind DequantizeLinear."""

    def ops(kind: str) -> list[str]:
        def make(g: QdqGraph) -> str:
            values = np.abs(g.random(16, 1, 1)) + 0.5
            constant = {
                "dq": lambda: g.dq_constant(values),
                "dq scalar": lambda: g.dq_constant(1.5),
                "dq int8": lambda: g.dq_constant(values, dtype=np.int8),
                "float": lambda: g.const(values),
                "float scalar": lambda: g.const(1.5),
            }[kind]()
            return g.q(g.op(op_type, g.act_input(), constant), OUT, 100)

        return compute_ops(build(make))

    assert ops("dq") == ops("dq scalar") == [f"QLinear{op_type}"]
    assert ops("dq int8") == ops("float") == ops("float scalar") == [op_type]


@pytest.mark.parametrize("op_type", ["Add", "Mul"])
def test_rule_elementwise_float_operand(op_type: str) -> None:
    """One float operand, or no Q on the output, leaves the operator float."""
    assert compute_ops(build(lambda g: g.q(g.op(op_type, g.act_input(), g.input())))) == [op_type]
    assert compute_ops(build(lambda g: g.op(op_type, g.act_input(), g.act_input()))) == [op_type]


@pytest.mark.parametrize("op_type", ["Sub", "Div", "Pow", "Min", "Max", "Sum", "Mean", "PRelu"])
def test_rule_sub_div_float(op_type: str) -> None:
    """Float between DQ and Q, whatever the scales."""
    same = build(lambda g: g.q(g.op(op_type, g.act_input(), g.act_input())))
    other = build(lambda g: g.q(g.op(op_type, g.act_input(), g.act_input()), OUT, 100))
    assert compute_ops(same) == compute_ops(other) == [op_type]


ACTIVATIONS = ["Tanh", "Softplus", "HardSigmoid", "Elu", "Gelu", "Erf", "LogSoftmax", "Hardmax"]
FUNCTIONS = ["Exp", "Sqrt", "Abs", "Neg", "Log", "Reciprocal", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos"]


@pytest.mark.parametrize("op_type", [*ACTIVATIONS, *FUNCTIONS])
def test_rule_unary_float(op_type: str) -> None:
    same = build(lambda g: g.q(g.op(op_type, g.act_input())), opset=20)
    other = build(lambda g: g.q(g.op(op_type, g.act_input()), OUT, 100), opset=20)
    assert compute_ops(same) == compute_ops(other) == [op_type]


def test_rule_sigmoid_lut() -> None:
    model = build(lambda g: g.q(g.op("Sigmoid", g.act_input()), 1 / 256, 0))
    assert compute_ops(model) == ["QLinearSigmoid"]
    assert largest_difference(model) <= 1 / 256 * 1.01
    assert compute_ops(build(lambda g: g.op("Sigmoid", g.act_input()))) == ["Sigmoid"]


def test_rule_leakyrelu_lut() -> None:
    model = build(lambda g: g.q(g.op("LeakyRelu", g.act_input(), alpha=0.1), OUT, 100))
    assert compute_ops(model) == ["QLinearLeakyRelu"]
    assert largest_difference(model) <= OUT * 1.01
    assert compute_ops(build(lambda g: g.op("LeakyRelu", g.act_input()))) == ["LeakyRelu"]


@pytest.mark.parametrize(("shape", "axis"), [((4, 10), -1), ((4, 10), 0), ((1, 16, 12, 12), 1)])
def test_rule_softmax_lut(shape: tuple[int, ...], axis: int) -> None:
    model = build(lambda g: g.q(g.op("Softmax", g.act_input(shape), axis=axis), 1 / 256, 0))
    assert compute_ops(model) == ["QLinearSoftmax"]
    assert largest_difference(model) <= 1 / 256 * 1.01
    assert compute_ops(build(lambda g: g.op("Softmax", g.act_input(shape), axis=axis))) == ["Softmax"]


@pytest.mark.parametrize(
    "branch", ["activation", "dq scalar", pytest.param("float scalar", marks=pytest.mark.since("1.24"))]
)
def test_rule_where_integer(branch: str) -> None:
    """A scalar constant branch may even be float: the runtime quantizes it."""

    def make(g: QdqGraph) -> str:
        condition = g.input((1, 16, 12, 12), TensorProto.BOOL)
        other = {
            "activation": lambda: g.act_input(),
            "dq scalar": lambda: g.dq_constant(1.0),
            "float scalar": lambda: g.const(1.0),
        }[branch]()
        return g.q(g.op("Where", condition, g.act_input(), other), OUT, 100)

    model = build(make)
    assert compute_ops(model) == ["QLinearWhere"]
    assert largest_difference(model) <= OUT * 1.01


@pytest.mark.parametrize("op_type", ["ArgMax", "ArgMin"])
def test_rule_argmax_integer(op_type: str) -> None:
    """ArgMax reads the quantized value: the DQ disappears. ArgMin does not."""
    model = build(lambda g: g.op("Cast", g.op(op_type, g.act_input(), axis=1), to=TensorProto.FLOAT))
    assert compute_ops(model) == sorted([op_type, "Cast"])
    assert ("DequantizeLinear" in op_types(model)) is (op_type == "ArgMin")


def test_rule_relu_clip_standalone() -> None:
    """A Relu or Clip behind a DQ is removed if the output range makes it redundant, float otherwise."""
    redundant = build(lambda g: g.relu_q(g.op("Relu", g.act_input())))
    needed = build(lambda g: g.q(g.op("Relu", g.act_input())))
    inside = build(lambda g: g.q(g.clip(g.act_input(), -4.1, 4.1)))
    outside = build(lambda g: g.q(g.clip(g.act_input(), -1.0, 1.0)))
    assert compute_ops(redundant) == compute_ops(inside) == []
    assert compute_ops(needed) == ["Relu"]
    assert compute_ops(outside) == ["Clip"]


def test_rule_back_to_back_pairs_collapse() -> None:
    """Two Q/DQ pairs in a row are merged into one: the second step alone does not requantize."""
    model = build(lambda g: g.q(g.q(g.input()), OUT, 100))
    assert op_types(model) == ["QuantizeLinear", "DequantizeLinear"]
    assert largest_difference(model) > OUT / 10
    assert STEP != OUT
