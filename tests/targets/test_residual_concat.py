"""Residual blocks and Concat: where their Q nodes belong."""

from __future__ import annotations

import numpy as np
import pytest

from .qdq import RELU_STEP, STEP, QdqGraph, build, compute_ops, largest_difference, op_types


def _block(g: QdqGraph, *, q_on_conv: bool, q_on_add: bool = True) -> str:
    x = g.act_input()
    y = g.conv(g.relu_q(g.op("Relu", g.conv(x))))
    total = g.op("Relu", g.op("Add", g.q(y) if q_on_conv else y, x))
    return g.relu_q(total) if q_on_add else total


def test_rule_residual_add() -> None:
    """Q on the second Conv and only behind the Relu of the Add: all integer, both Relus absorbed."""
    model = build(lambda g: _block(g, q_on_conv=True))
    assert compute_ops(model) == ["QLinearAdd", "QLinearConv", "QLinearConv"]
    assert op_types(model).count("DequantizeLinear") == 1
    assert largest_difference(model) <= RELU_STEP * 1.01


def test_rule_residual_needs_q_on_conv() -> None:
    """Without Q between Conv and Add the Conv runs in float (and swallows the Add)."""
    ops = compute_ops(build(lambda g: _block(g, q_on_conv=False)))
    assert ops == ["FusedConv", "QLinearConv"]


def test_rule_residual_float_output() -> None:
    """Without a Q behind it the Add runs in float; the Convs do not suffer."""
    ops = compute_ops(build(lambda g: _block(g, q_on_conv=True, q_on_add=False)))
    assert ops == ["Add", "QLinearConv", "QLinearConv", "Relu"]


@pytest.mark.x86_only
def test_rule_residual_int8_activations_float() -> None:
    """int8 activations on x86-64: the branching value stays int8, so its Conv and the Add run in float."""
    ops = compute_ops(build(lambda g: _block(g, q_on_conv=True), act=np.int8))
    assert ops == ["Add", "Conv", "QLinearConv"]


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_rule_concat_shared(axis: int) -> None:
    """Producers that share the output's parameters: bytes are only copied."""

    def make(g: QdqGraph) -> str:
        parts = [g.q(g.conv(g.act_input())) for _ in range(2)]
        return g.q(g.op("Concat", *parts, axis=axis))

    model = build(make)
    assert compute_ops(model) == ["QLinearConcat", "QLinearConv", "QLinearConv"]
    assert largest_difference(model) <= STEP * 1.01


def test_rule_concat_own_scales() -> None:
    """Producers with parameters of their own: still one integer kernel, which requantizes."""

    def make(g: QdqGraph) -> str:
        parts = [g.q(g.conv(g.act_input()), 5 / 255), g.q(g.conv(g.act_input()), 3 / 255, 7)]
        return g.q(g.op("Concat", *parts, axis=1), 6 / 255, 100)

    model = build(make)
    assert compute_ops(model) == ["QLinearConcat", "QLinearConv", "QLinearConv"]
    assert largest_difference(model) <= 6 / 255 * 1.01


def test_rule_concat_own_scales_constant() -> None:
    """A constant part must be quantized; a float one, or a float activation, makes the Concat float."""
    shape = (1, 16, 12, 12)
    quantized = build(lambda g: g.q(g.op("Concat", g.act_input(), g.dq_constant(g.random(*shape)), axis=1)))
    constant = build(lambda g: g.q(g.op("Concat", g.act_input(), g.const(g.random(*shape)), axis=1)))
    activation = build(lambda g: g.q(g.op("Concat", g.act_input(), g.input(), axis=1)))
    assert compute_ops(quantized) == ["QLinearConcat"]
    assert compute_ops(constant) == compute_ops(activation) == ["Concat"]


@pytest.mark.parametrize("deferred", [1, 2])
def test_rule_concat_no_deferral(deferred: int) -> None:
    """A producer without a Q of its own runs in float, and so does the Concat."""

    def make(g: QdqGraph) -> str:
        convs = [g.conv(g.act_input()) for _ in range(2)]
        parts = [c if i < deferred else g.q(c) for i, c in enumerate(convs)]
        return g.q(g.op("Concat", *parts, axis=1))

    assert compute_ops(build(make)) == sorted(["Concat"] + ["Conv"] * deferred + ["QLinearConv"] * (2 - deferred))


def test_rule_concat_float_output() -> None:
    assert compute_ops(build(lambda g: g.op("Concat", g.act_input(), g.act_input(), axis=1))) == ["Concat"]
