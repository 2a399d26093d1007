"""int8 activations on x86-64: rewritten to uint8 where the quantized value has one reader, float where it has more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .qdq import QdqGraph, build, compute_ops, kernels, largest_difference, op_types

pytestmark = pytest.mark.x86_only
Make = Callable[[QdqGraph, str], str]

OPS: dict[str, tuple[str, tuple[int, ...], Make]] = {
    "Conv": ("QLinearConv", (1, 16, 12, 12), lambda g, x: g.conv(x)),
    "Gemm": ("QGemm", (4, 32), lambda g, x: g.gemm(x)),
    "MatMul": ("QLinearMatMul", (4, 32), lambda g, x: g.matmul(x)),
    "Add": ("QLinearAdd", (4, 32), lambda g, x: g.op("Add", x, g.act_input((4, 32)))),
    "Mul": ("QLinearMul", (4, 32), lambda g, x: g.op("Mul", x, g.act_input((4, 32)))),
    "Concat": ("QLinearConcat", (4, 32), lambda g, x: g.op("Concat", x, g.act_input((4, 32)), axis=1)),
    "Sigmoid": ("QLinearSigmoid", (4, 32), lambda g, x: g.op("Sigmoid", x)),
    "LeakyRelu": ("QLinearLeakyRelu", (4, 32), lambda g, x: g.op("LeakyRelu", x)),
    "Softmax": ("QLinearSoftmax", (4, 32), lambda g, x: g.op("Softmax", x)),
    "AveragePool": (
        "QLinearAveragePool",
        (1, 16, 12, 12),
        lambda g, x: g.op("AveragePool", x, kernel_shape=[2, 2]),
    ),
    "GlobalAveragePool": (
        "QLinearGlobalAveragePool",
        (1, 16, 12, 12),
        lambda g, x: g.op("GlobalAveragePool", x),
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_rule_int8_activation_single_consumer(name: str) -> None:
    kernel, shape, make = OPS[name]
    model = build(lambda g: g.q(make(g, g.act_input(shape))), act=np.int8)
    assert compute_ops(model) == [kernel]
    assert largest_difference(model) <= 8 / 255 * 1.01


def test_rule_int8_activation_single_consumer_uint8_weights() -> None:
    model = build(lambda g: g.q(g.conv(g.act_input())), act=np.int8, weight=np.uint8)
    assert compute_ops(model) == ["QLinearConv"]


@pytest.mark.parametrize("name", OPS)
def test_rule_int8_activation_branch_float(name: str) -> None:
    """A second reader of the quantized input makes the operator float; with uint8 it would not."""
    kernel, shape, make = OPS[name]

    def branch(g: QdqGraph) -> list[str]:
        x = g.act_input(shape)
        return [g.q(make(g, x)), g.q(g.op("Neg", x))]

    assert kernel not in compute_ops(build(branch, act=np.int8))
    assert kernel in compute_ops(build(branch, act=np.uint8))


def test_rule_int8_activation_branch_float_producer() -> None:
    """The Conv that makes the branching value goes float, and so do the Convs that read it."""

    def fork(g: QdqGraph) -> list[str]:
        x = g.q(g.conv(g.act_input()))
        return [g.q(g.conv(x)), g.q(g.conv(x))]

    assert compute_ops(build(fork, act=np.int8)) == ["Conv"] * 3
    assert compute_ops(build(fork, act=np.uint8)) == ["QLinearConv"] * 3


def test_rule_int8_activation_branch_float_graph_output() -> None:
    """A quantized value that is a graph output too counts as branching."""

    def tapped(g: QdqGraph) -> list[str]:
        x = g.q(g.conv(g.act_input()))
        return [g.q(g.conv(x)), x]

    assert compute_ops(build(tapped, act=np.int8)) == ["Conv"] * 2
    assert compute_ops(build(tapped, act=np.uint8)) == ["QLinearConv"] * 2


def test_rule_int8_branches_behind_barrier() -> None:
    """Equal pairs are merged again, and without the barrier the Conv before them is float; the axis says nothing."""

    def fork(g: QdqGraph, *, told_apart: bool, barrier: bool) -> list[str]:
        x = g.q(g.conv(g.act_input()))
        x = g.op("Max", x) if barrier else x
        scale, zero_point = g.const(np.float32(0.03)), g.const(np.int8(0))
        outputs = []
        for axis in range(3):
            said = {"axis": axis} if told_apart else {}
            integers = g.op("QuantizeLinear", x, scale, zero_point, **said)
            real = g.op("DequantizeLinear", integers, scale, zero_point, **said)
            outputs.append(g.q(g.op("Add", real, g.act_input())))
        return outputs

    kernels_of = {
        (told_apart, barrier): compute_ops(
            build(lambda g, a=told_apart, b=barrier: fork(g, told_apart=a, barrier=b), act=np.int8)
        )
        for told_apart in (True, False)
        for barrier in (True, False)
    }
    assert sorted(kernels_of.pop((True, True))) == ["Max", *["QLinearAdd"] * 3, "QLinearConv"]
    assert all({"Conv", "Add"} & set(found) for found in kernels_of.values())


def test_rule_int8_activation_constant_operand_float() -> None:
    """A constant operand in int8 is not rewritten, so the operator stays float."""
    model = build(lambda g: g.q(g.op("Add", g.act_input(), g.dq_constant(g.random(16, 1, 1)))), act=np.int8)
    assert compute_ops(model) == ["Add"]


def test_rule_int8_mixed_with_uint8() -> None:
    """int8 and uint8 values of one operator are fine together as long as the int8 ones have one reader."""
    model = build(lambda g: g.q(g.op("Add", g.q(g.input(), act=np.int8), g.act_input())))
    assert compute_ops(model) == ["QLinearAdd"]
    assert op_types(model).count("QuantizeLinear") == 2
    assert all(k.op_type != "Add" for k in kernels(model))
