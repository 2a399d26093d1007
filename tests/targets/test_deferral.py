"""What Q behind an activation, without a Q between Conv and activation, does to the Conv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .qdq import MS, STEP, QdqGraph, compute_ops, conv_then, largest_difference

Activation = Callable[[QdqGraph, str], str]


def _op(op_type: str, **attributes: Any) -> Activation:
    return lambda g, v: g.op(op_type, v, **attributes)


def _float_when_deferred(activation: Activation, opset: int = 20) -> bool:
    ops = compute_ops(conv_then(lambda g, c: g.q(activation(g, c)), opset=opset))
    return "QLinearConv" not in ops and bool({"Conv", "FusedConv"} & set(ops))


def test_rule_no_deferral_leakyrelu() -> None:
    assert _float_when_deferred(_op("LeakyRelu", alpha=0.1))


def test_rule_no_deferral_silu() -> None:
    assert _float_when_deferred(lambda g, v: g.op("Mul", v, g.op("Sigmoid", v)))
    assert _float_when_deferred(lambda g, v: g.op("QuickGelu", v, domain=MS, alpha=1.0))


def test_rule_no_deferral_hardswish() -> None:
    assert _float_when_deferred(_op("HardSwish"))
    assert _float_when_deferred(lambda g, v: g.op("Mul", v, g.op("HardSigmoid", v, alpha=1 / 6)))


def test_rule_no_deferral_prelu() -> None:
    assert _float_when_deferred(lambda g, v: g.op("PRelu", v, g.const(g.random(16, 1, 1))))


def test_rule_no_deferral_sigmoid() -> None:
    assert _float_when_deferred(_op("Sigmoid"))


def test_rule_no_deferral_tanh() -> None:
    assert _float_when_deferred(_op("Tanh"))


@pytest.mark.parametrize(
    "op_type", ["HardSigmoid", "Elu", "Softplus", "Mish", "Gelu", "Erf", "Selu", "Celu", "Softsign", "ThresholdedRelu"]
)
def test_rule_no_deferral_other(op_type: str) -> None:
    assert _float_when_deferred(_op(op_type))


BOTH_SIDES: dict[str, tuple[Activation, list[str]]] = {
    "LeakyRelu": (_op("LeakyRelu", alpha=0.1), ["QLinearLeakyRelu"]),
    "Sigmoid": (_op("Sigmoid"), ["QLinearSigmoid"]),
    "Tanh": (_op("Tanh"), ["Tanh"]),
    "HardSigmoid": (_op("HardSigmoid"), ["HardSigmoid"]),
    "HardSwish": (_op("HardSwish"), ["HardSigmoid", "Mul"]),
    "Elu": (_op("Elu"), ["Elu"]),
    "Gelu": (_op("Gelu"), ["Gelu"]),
    "QuickGelu": (lambda g, v: g.op("QuickGelu", v, domain=MS, alpha=1.0), ["QuickGelu"]),
    "PRelu": (lambda g, v: g.op("PRelu", v, g.const(g.random(16, 1, 1))), ["PRelu"]),
}


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_rule_activation_q_on_both_sides(name: str) -> None:
    """With a Q on the Conv output too the Conv is integer, whatever the activation becomes."""
    activation, expected = BOTH_SIDES[name]
    model = conv_then(lambda g, c: g.q(activation(g, g.q(c))), opset=20)
    assert compute_ops(model) == sorted(["QLinearConv", *expected])
    assert largest_difference(model) <= STEP * 1.01


def test_rule_activation_q_on_both_sides_silu() -> None:
    """SiLU of one quantized value: all integer with a Q behind the Sigmoid, a float island without."""

    def everywhere(g: QdqGraph, c: str) -> str:
        q = g.q(c)
        return g.q(g.op("Mul", q, g.q(g.op("Sigmoid", q), 1 / 255, 0)))

    def island(g: QdqGraph, c: str) -> str:
        q = g.q(c)
        return g.q(g.op("Mul", q, g.op("Sigmoid", q)))

    assert compute_ops(conv_then(everywhere)) == ["QLinearConv", "QLinearMul", "QLinearSigmoid"]
    assert compute_ops(conv_then(island)) == ["Mul", "QLinearConv", "Sigmoid"]
