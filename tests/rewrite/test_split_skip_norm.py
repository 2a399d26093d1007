from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import residual_to_sum, split_skip_norm
from tests.graph.build import assert_same, model, ops, ready, session, value
from tests.targets.qdq import kernels

LAYER, SIMPLE = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
WIDTH = 8
ARITHMETIC = ["Sum", "Pow", "ReduceMean", "Add", "Sqrt", "Div", "Mul"]


def joined(
    op=LAYER, *, opset=17, beta=True, bias=True, skip=("b", "s", WIDTH), epsilon=1e-5, outputs=("y",), computed=False
):
    rng = np.random.default_rng(0)
    weights = {name: rng.uniform(0.5, 1.5, WIDTH).astype(np.float32) for name in ("gamma", "beta", "bias")}
    inputs = ["x", "skip", "g" if computed else "gamma"]
    inputs += ["beta" if beta else ""] if op == LAYER else []
    inputs += ["bias"] if bias else []
    attributes = {} if epsilon is None else {"epsilon": epsilon}
    wanted = {"y", *outputs}
    written = [name if name in wanted else "" for name in ("y", "mean", "deviation", "sum")]
    while not written[-1]:
        written.pop()
    nodes = [helper.make_node(op, inputs, written, name="norm", domain="com.microsoft", **attributes)]
    data = [value("x", ["b", "s", WIDTH]), value("skip", skip), *([value("g", [WIDTH])] if computed else [])]
    described = [value(name, None) for name in outputs]
    used = {name: weights[name] for name in inputs if name in weights}
    return model(nodes, data, described, used, opset=opset, domains={"com.microsoft": 1})


def feeds(seed=0, skip=(2, 3, WIDTH), magnitude=1.0):
    rng = np.random.default_rng(seed)
    shapes = {"x": (2, 3, WIDTH), "skip": skip}
    return {name: (rng.normal(size=shape) * magnitude).astype(np.float32) for name, shape in shapes.items()}


@settings(deadline=None)
@given(
    op=st.sampled_from([LAYER, SIMPLE]),
    opset=st.sampled_from([17, 18, 21]),
    beta=st.booleans(),
    bias=st.booleans(),
    skip=st.sampled_from([(2, 3, WIDTH), (1, 3, WIDTH), (3, WIDTH)]),
    epsilon=st.sampled_from([None, 1e-5, 0.5]),
    total=st.booleans(),
    magnitude=st.sampled_from([0.1, 1.0, 100.0]),
    seed=st.integers(0, 2**16),
)
def test_the_parts_compute_the_same(op, opset, beta, bias, skip, epsilon, total, magnitude, seed):
    outputs = ("y", "sum") if total else ("y",)
    proto = joined(op, opset=opset, beta=beta, bias=bias, skip=skip, epsilon=epsilon, outputs=outputs)
    result = ready(proto, rewrites=[split_skip_norm]).proto
    onnx.checker.check_model(result)
    assert ops(result) == (["Sum", "LayerNormalization"] if op == LAYER else ARITHMETIC)
    assert (result.graph.node[-1].name, result.graph.node[-1].output[0]) == ("norm", "y")
    assert_same(proto, result, feeds(seed, skip, magnitude), rtol=1e-5)


@pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has the operator
def test_the_operator_for_rms_norms_is_written_where_there_is_one():
    proto = joined(SIMPLE, opset=23)
    result = ready(proto, rewrites=[split_skip_norm]).proto
    assert ops(result) == ["Sum", "RMSNormalization"]
    assert_same(proto, result, feeds(), rtol=1e-5)


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (joined(opset=16), "needs operator set 17"),
        (joined(outputs=("y", "mean")), "its statistic 'mean' is needed"),
        (joined(outputs=("y", "deviation", "sum")), "its statistic 'deviation' is needed"),
    ],
)
def test_what_stays_and_why(proto, reason):
    result = ready(proto, rewrites=[split_skip_norm])
    assert ops(result.proto) == [LAYER]
    assert any(reason in note for note in result.notes)


@pytest.mark.parametrize("op", [LAYER, SIMPLE])
def test_the_runtime_does_not_join_them_again(op):
    result = ready(joined(op), rewrites=[split_skip_norm, residual_to_sum]).proto
    expected = "LayerNormalization" if op == LAYER else "SimplifiedLayerNormalization"
    assert [k.op_type for k in kernels(result)][-2:] == ["Sum", expected]
    session(result)
