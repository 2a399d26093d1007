"""Comparison of outputs, and checks of scales and zero points."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from kenosis_ort.verify import check_bias_alignment
from tests.targets.qdq import QdqGraph, build


@pytest.mark.parametrize("axis", [0, None])
def test_aligned_biases_pass(axis: int | None) -> None:
    def make(g: QdqGraph) -> str:
        return g.gemm(g.q(g.op("Flatten", g.q(g.conv(g.act_input(), axis=axis)))), 16 * 144, 8, axis=axis)

    assert check_bias_alignment(build(make)) == []


@settings(max_examples=20, deadline=None)
@given(st.floats(0.5, 2.0).filter(lambda f: abs(f - 1) > 1e-5))
def test_misaligned_bias_is_found(factor: float) -> None:
    model = build(lambda g: g.gemm(g.act_input((4, 32)), bias_factor=factor))
    (problem,) = check_bias_alignment(model)
    assert problem.kind == "bias-scale"
    assert problem.node.startswith("gemm")


def test_tiny_scales_are_judged_in_steps_of_float32() -> None:
    model = build(lambda g: g.gemm(g.act_input((4, 32))))
    makers = {n.output[0]: n for n in model.graph.node}
    gemm = next(n for n in model.graph.node if n.op_type == "Gemm")
    data, weight, bias = (makers[v].input[1] for v in gemm.input)
    for name, value in ((data, np.full((), 1e-20)), (weight, np.full(16, 1.23e-20)), (bias, np.full(16, 1.23e-40))):
        _edit(model, name, value.astype(np.float32))
    assert check_bias_alignment(model) == []
    _edit(model, bias, np.full(16, 1.24e-40, np.float32))
    (problem,) = check_bias_alignment(model)
    assert "0.81 %" in problem.what


def test_a_bias_that_counts_nothing_is_not_judged() -> None:
    model = build(lambda g: g.gemm(g.act_input((4, 32)), bias_factor=2.0, beta=0.0))
    assert check_bias_alignment(model) == []


def test_shared_bias_of_disagreeing_consumers_is_found() -> None:
    model = build(lambda g: [g.gemm(g.act_input((4, 32))), g.gemm(g.act_input((4, 32), 0.05))])
    first, second = [n for n in model.graph.node if n.op_type == "Gemm"]
    first.input[2] = second.input[2]
    assert [p.node for p in check_bias_alignment(model)] == [first.name]


def _edit(model: onnx.ModelProto, name: str, change: np.ndarray) -> None:
    initializer = next(i for i in model.graph.initializer if i.name == name)
    initializer.CopyFrom(numpy_helper.from_array(change, name))


def test_a_bias_has_the_zero_point_zero() -> None:
    model = build(lambda g: g.q(g.conv(g.act_input((1, 16, 6, 6)))))
    makers = {n.output[0]: n for n in model.graph.node}
    bias = makers[next(n.input[2] for n in model.graph.node if n.op_type == "Conv")]
    _edit(model, bias.input[2], np.full(16, 1, np.int32))
    assert [p.kind for p in check_bias_alignment(model)] == ["bias-zero-point"]
