"""Gemm and MatMul: integer kernels with quantized and with float output, and the traps around their bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from .qdq import RELU_STEP, STEP, QdqGraph, build, compute_ops, largest_difference, snr_db

RANKS: list[Sequence[int]] = [(4, 32), (2, 4, 32), (2, 3, 4, 32)]
ROUNDING_ONLY_DB = 100.0  # float outputs that differ by float rounding only


@pytest.mark.parametrize(("transposed", "axis"), [(True, 0), (False, 1), (True, None)])
@pytest.mark.parametrize("bias", ["int32", "float", "none"])
def test_rule_gemm_integer(transposed: bool, axis: int | None, bias: str) -> None:
    model = build(lambda g: g.q(g.gemm(g.act_input((4, 32)), transposed=transposed, axis=axis, bias=bias)))
    assert compute_ops(model) == ["QGemm"]
    assert largest_difference(model) <= STEP * 1.01


def test_rule_gemm_integer_uint8_weights() -> None:
    assert compute_ops(build(lambda g: g.q(g.gemm(g.act_input((4, 32)))), weight=np.uint8)) == ["QGemm"]


@pytest.mark.parametrize(("bias", "kernel"), [("int32", "QGemm"), ("none", "QGemm"), ("float", "Gemm")])
def test_rule_gemm_float_output(bias: str, kernel: str) -> None:
    """Without an output Q the Gemm stays integer if its bias is int32 or absent; a float bias makes it float."""
    model = build(lambda g: g.gemm(g.act_input((4, 32)), bias=bias))
    assert compute_ops(model) == [kernel]
    assert snr_db(model) > ROUNDING_ONLY_DB


@pytest.mark.parametrize("output_q", [True, False])
def test_rule_gemm_float_bias_needs_output_q(output_q: bool) -> None:
    def make(g: QdqGraph) -> str:
        y = g.gemm(g.act_input((4, 32)), bias="float")
        return g.q(y) if output_q else y

    assert compute_ops(build(make)) == ["QGemm" if output_q else "Gemm"]


def test_rule_gemm_float_output_activation() -> None:
    model = build(lambda g: g.op("Relu", g.gemm(g.act_input((4, 32)))))
    assert compute_ops(model) == ["QGemm", "Relu"]


@pytest.mark.parametrize("kind", ["gemm", "matmul"])
@pytest.mark.parametrize("act", ["Relu", "Clip"])
def test_rule_activation_hides_float_output(kind: str, act: str) -> None:
    """Behind a Relu or Clip that one float node reads there has to be a Q; two readers or a graph output are fine."""

    def make(g: QdqGraph, behind: str) -> str | list[str]:
        x = g.act_input((4, 32))
        y = g.gemm(x) if kind == "gemm" else g.matmul(x)
        y = g.op("Relu", y) if act == "Relu" else g.clip(y, 0.0, 6.0)
        if behind == "output":
            return y
        read = g.q(y, 4 / 255, 0) if behind == "q" else y
        return [g.op("Tanh", read), g.op("Neg", read)] if behind == "two" else g.op("Tanh", read)

    kernels = {
        behind: set(compute_ops(build(lambda g, b=behind: make(g, b)))) for behind in ("one", "q", "two", "output")
    }
    integer = {"QGemm", "QLinearMatMul", "MatMulIntegerToFloat"}
    assert {behind for behind, found in kernels.items() if not found & integer} == {"one"}


@pytest.mark.parametrize("attribute", [pytest.param("alpha", marks=pytest.mark.since("1.28")), "beta"])
@pytest.mark.parametrize("value", [0.5, 2.0])
@pytest.mark.parametrize("output_q", [True, False])
def test_rule_gemm_alpha_float(attribute: str, value: float, output_q: bool) -> None:
    """alpha or beta other than 1 makes a Gemm with a bias float; without a bias both are fine."""
    factor: dict[str, Any] = {attribute: value}

    def make(g: QdqGraph, bias: str) -> str:
        y = g.gemm(g.act_input((4, 32)), bias=bias, **factor)
        return g.q(y) if output_q else y

    with_bias, without = build(lambda g: make(g, "int32")), build(lambda g: make(g, "none"))
    assert compute_ops(with_bias) == ["Gemm"]
    assert compute_ops(without) == ["QGemm"]
    assert snr_db(without) > 30


@pytest.mark.parametrize("output_q", [True, False])
def test_rule_bias_scale_mismatch_gemm_wrong(output_q: bool) -> None:
    """The runtime does not check the scale of a Gemm's int32 bias: the result is silently wrong."""

    def make(g: QdqGraph, factor: float) -> str:
        y = g.gemm(g.act_input((4, 32)), bias_factor=factor)
        return g.q(y) if output_q else y

    wrong = build(lambda g: make(g, 4.0))
    right = build(lambda g: make(g, 1.0))
    assert compute_ops(wrong) == ["QGemm"]
    assert snr_db(wrong) < 20 < 40 < snr_db(right)


@pytest.mark.parametrize("shape", RANKS)
@pytest.mark.parametrize("axis", [1, None])
def test_rule_matmul_integer(shape: Sequence[int], axis: int | None) -> None:
    model = build(lambda g: g.q(g.matmul(g.act_input(shape), axis=axis)))
    assert compute_ops(model) == ["QLinearMatMul"]
    assert largest_difference(model) <= STEP * 1.01


@pytest.mark.parametrize("shape", RANKS)
def test_rule_matmul_float_output(shape: Sequence[int]) -> None:
    model = build(lambda g: g.matmul(g.act_input(shape)))
    assert compute_ops(model) == ["MatMulIntegerToFloat"]
    assert snr_db(model) > ROUNDING_ONLY_DB


@pytest.mark.parametrize("shape", [*RANKS, ("N", 32)])
@pytest.mark.parametrize("behind", ["", "Relu", "Sigmoid", "Q", "Relu Q", "Sigmoid Q", "Reshape"])
def test_rule_matmul_add_int32_bias(shape: Sequence[int | str], behind: str) -> None:
    """MatMul + Add of an int32 DQ bias becomes a QGemm, whatever stands behind it and with or without Q."""

    def make(g: QdqGraph) -> str:
        y = g.matmul(g.act_input(shape), bias="int32")
        for step in behind.split():
            if step == "Q":
                y = g.relu_q(y)
            elif step == "Reshape":
                y = g.op("Reshape", y, g.ints(-1, 2, 8))
            else:
                y = g.op(step, y)
        return y

    model = build(make)
    assert set(compute_ops(model)) - {"Reshape", "Relu", "Sigmoid"} == {"QGemm"}
    assert largest_difference(model) <= RELU_STEP * 1.01


@pytest.mark.parametrize("bias", ["int32", "float"])
def test_rule_matmul_add_symbolic_batch_integer(bias: str) -> None:
    """With three axes and a symbolic one MatMul and Add are not merged: integer MatMul, float Add, any bias."""
    model = build(lambda g: g.q(g.matmul(g.act_input(("N", 4, 32)), bias=bias)))
    assert compute_ops(model) == ["Add", "MatMulIntegerToFloat"]


@pytest.mark.parametrize("shape", RANKS)
def test_rule_matmul_add_float_bias_trap(shape: Sequence[int]) -> None:
    """MatMul + Add of a float bias without Q behind it becomes a float Gemm."""
    ops = compute_ops(build(lambda g: g.matmul(g.act_input(shape), bias="float")))
    assert [o for o in ops if o != "Reshape"] == ["Gemm"]


def test_rule_matmul_add_float_bias_trap_relu() -> None:
    """With a Q directly behind it is a QGemm; with a Relu between, only where the input has two axes."""
    for shape, behind, integer in [
        ((4, 32), "", True),
        ((2, 4, 32), "", True),
        ((4, 32), "Relu", True),
        ((2, 4, 32), "Relu", False),
        ((4, 32), "Sigmoid", False),
        ((2, 4, 32), "Sigmoid", False),
    ]:

        def make(g: QdqGraph, s: Sequence[int] = shape, b: str = behind) -> str:
            y = g.matmul(g.act_input(s), bias="float")
            return g.relu_q(g.op(b, y) if b else y)

        assert ("QGemm" in compute_ops(build(make))) is integer, (shape, behind)


def test_rule_matmul_residual_float_gemm() -> None:
    """A 2-D MatMul whose float output meets an activation in an Add becomes a float Gemm; a Q between prevents it."""

    def make(g: QdqGraph, shape: Sequence[int], quantized: bool) -> str:
        y = g.matmul(g.act_input(shape))
        skip = g.act_input((*shape[:-1], 16))
        return g.q(g.op("Add", g.q(y) if quantized else y, skip))

    assert compute_ops(build(lambda g: make(g, (4, 32), False))) == ["Gemm"]
    assert compute_ops(build(lambda g: make(g, (4, 32), True))) == ["QLinearAdd", "QLinearMatMul"]
    assert compute_ops(build(lambda g: make(g, (2, 4, 32), False))) == ["Add", "MatMulIntegerToFloat"]


@pytest.mark.parametrize("kind", ["float", "int32"])
def test_rule_matmul_add_bias_shape(kind: str) -> None:
    """A bias of shape [1, n] is merged for two axes only, one of [1, 1, n] never; [1, n] in float is a trap there."""

    def make(g: QdqGraph, shape: Sequence[int], lead: tuple[int, ...]) -> str:
        x = g.act_input(shape)
        product = g.matmul(x, axis=None)
        values = g.random(*lead, 16, spread=50)
        scale, zero = g.const(np.float32(1e-3)), g.const(np.array(0, np.int32))
        integers = g.op("DequantizeLinear", g.const(np.rint(values).astype(np.int32)), scale, zero)
        return g.q(g.op("Add", product, integers if kind == "int32" else g.const(values)))

    def ops(shape: Sequence[int], lead: tuple[int, ...]) -> list[str]:
        return compute_ops(build(lambda g: make(g, shape, lead)))

    assert ops((4, 32), (1,)) == (["QGemm"] if kind == "int32" else ["Gemm"])
    assert ops((2, 4, 32), (1,)) == ops((2, 4, 32), (1, 1)) == ["Add", "MatMulIntegerToFloat"]


@pytest.mark.parametrize("axis", [pytest.param(0, marks=pytest.mark.since("1.31")), None])
def test_rule_matmul_transposed_weight(axis: int | None) -> None:
    """A weight behind DQ and Transpose: integer per tensor, float per channel. Transpose the constant instead.

    Before 1.31 the per-channel form aborted the process while the model was loaded.
    """

    def make(g: QdqGraph) -> str:
        weight = g.op("Transpose", g.dq_weight(g.random(16, 32), axis=axis))
        return g.q(g.op("MatMul", g.act_input((4, 32)), weight))

    assert compute_ops(build(make)) == (["QLinearMatMul"] if axis is None else ["FusedMatMul"])


def test_rule_matmul_activations() -> None:
    """MatMul of two activations is integer with and without Q behind it, also through a Transpose."""
    left, right = (2, 4, 32), (2, 32, 4)
    quantized = build(lambda g: g.q(g.op("MatMul", g.act_input(left), g.act_input(right))))
    floating = build(lambda g: g.op("MatMul", g.act_input(left), g.act_input(right)))
    transposed = build(
        lambda g: g.op("MatMul", g.act_input(left), g.op("Transpose", g.act_input(left), perm=[0, 2, 1]))
    )
    assert compute_ops(quantized) == ["QLinearMatMul"]
    assert compute_ops(floating) == ["MatMulIntegerToFloat"]
    assert compute_ops(transposed) == ["MatMulIntegerToFloat"]
    assert largest_difference(quantized) <= STEP * 1.01
    assert snr_db(floating) > ROUNDING_ONLY_DB


@pytest.mark.since("1.25")
@pytest.mark.parametrize("axis", [1, None])
def test_rule_int8_weight_only_matmul(axis: int | None) -> None:
    """A float activation and an int8 weight: MatMulNBits, if no Q stands behind."""

    def product(g: QdqGraph) -> str:
        return g.matmul(g.input((4, 32)), axis=axis)

    assert compute_ops(build(product)) == ["MatMulNBits"]
    assert compute_ops(build(lambda g: g.q(product(g)))) == ["MatMul"]


@pytest.mark.since("1.25")
def test_rule_int8_weight_only_gemm() -> None:
    """A Gemm with an int8 weight and a float activation needs the weight untransposed for MatMulNBits."""
    plain = build(lambda g: g.gemm(g.input((4, 32)), transposed=False, axis=1))
    transposed = build(lambda g: g.gemm(g.input((4, 32))))
    assert compute_ops(plain) == ["MatMulNBits"]
    assert compute_ops(transposed) == ["Gemm"]
