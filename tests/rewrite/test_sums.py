"""Sums: residuals in front of norms, the runtime's joined norms taken apart, Sum as Adds."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from kenosis_ort.rewrite import residual_to_sum, split_skip_norm, sum_to_add
from tests import models
from tests.graph.build import assert_same, model, ops, ready, session, value
from tests.planning import quantize
from tests.rewrite.forms import check
from tests.targets.qdq import kernels

JOINED, LAYER = "SkipLayerNormalization", "LayerNormalization"


def block(a=("b", "s", 16), b=None, *, outputs=("y",), operand=None, kind=onnx.TensorProto.FLOAT, more=()):
    """Two values, their sum and its norm."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    weights = {"g": np.linspace(0.5, 1.5, 16, dtype=dtype), "h": np.linspace(-1, 1, 16, dtype=dtype)}
    if operand is not None:
        weights["q"] = np.asarray(operand, dtype)
    nodes = [
        helper.make_node("Relu", ["a"], ["p"], name="p"),
        *([helper.make_node("Relu", ["b"], ["q"], name="q")] if operand is None else []),
        helper.make_node("Add", ["p", "q"], ["s"], name="residual"),
        helper.make_node(LAYER, ["s", "g", "h"], ["y"], name="norm", axis=-1),
        *more,
    ]
    inputs = [value("a", a, kind), value("b", a if b is None else b, kind)][: 2 if operand is None else 1]
    return model(nodes, inputs, [value(name, None, kind) for name in outputs], weights)


def compute(proto):
    return [k.op_type for k in kernels(proto)]


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    symbolic=st.booleans(),
    magnitude=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**16),
)
def test_the_result_is_the_same_to_the_bit(shape, symbolic, magnitude, seed):
    rng = np.random.default_rng(seed)
    proto = block(("b", "s", 16) if symbolic else (*shape, 16))
    result = ready(proto, rewrites=[residual_to_sum]).proto
    assert ops(result) == ["Relu", "Relu", "Sum", LAYER]
    feeds = {name: (rng.normal(size=(*shape, 16)) * magnitude).astype(np.float32) for name in "ab"}
    assert_same(proto, result, feeds, rtol=0)


@pytest.mark.parametrize(
    "proto", [block(), block((2, 3, 16)), block(("b", 3, 16)), block((2, 3, 16), operand=np.ones((2, 3, 16)))]
)
def test_what_the_runtime_joins_changes(proto):
    assert JOINED in compute(proto)
    result = ready(proto, rewrites=[residual_to_sum])
    assert JOINED not in compute(result.proto)
    assert {"Sum", LAYER} <= set(compute(result.proto))
    assert any("1 residuals" in note for note in result.notes)


@pytest.mark.parametrize(
    "proto",
    [
        block((3, 16)),
        block((1, 2, 3, 16)),
        block((2, 3, 16), (1, 3, 16)),
        block(operand=np.ones(16)),
        block(outputs=("y", "s")),
        block(outputs=("y", "z"), more=[helper.make_node("Neg", ["s"], ["z"], name="also")]),
    ],
    ids=["two dimensions", "four", "broadcast", "bias", "output", "second reader"],
)
def test_what_the_runtime_does_not_join_stays(proto):
    assert JOINED not in compute(proto)
    result = ready(proto, rewrites=[residual_to_sum])
    assert ops(result.proto) == ops(ready(proto).proto)
    assert result.notes == ready(proto).notes


def test_unknown_dimensions_count_as_possibly_the_same():
    assert "Sum" in ops(ready(block((None, None, 16)), rewrites=[residual_to_sum]).proto)


def encoder():
    net = models.Net()
    x = net.input("x", [1, 6, 16])
    for at in range(2):
        y = net.linear(x, 16, 16, name=f"linear{at}")
        x = net.op(LAYER, [net.op("Add", [y, x]), net.weight((16,)), net.weight((16,))], axis=-1)
    net.output(net.linear(x, 16, 4, name="head"))
    return net.model()


def test_the_kernels_after_quantization():
    proto = encoder()
    assert JOINED in compute(quantize(proto).quantized)
    found = compute(quantize(ready(proto, rewrites=[residual_to_sum]).proto).quantized)
    assert JOINED not in found
    assert [found.count(kind) for kind in ("Sum", LAYER, "QGemm")] == [2, 2, 3]


def test_the_integer_rule_for_sums_leaves_it():
    proto = ready(encoder(), rewrites=[residual_to_sum]).proto
    outcome = quantize(proto)
    sums = [node.name for node in proto.graph.node if node.op_type == "Sum"]
    assert all(d.kind.value == "float" for d in outcome.plan.nodes if d.node in sums)
    assert ops(ready(proto, rewrites=[lambda m, keep_values: sum_to_add(m, nodes=())]).proto) == ops(proto)


def test_a_norm_that_is_still_arithmetic():
    """Before operator set 17; the runtime makes a norm of it at load, and joins that with the sum."""
    net = models.Net(opset=13)
    x = net.input("x", [1, 6, 16])
    total = net.op("Add", [net.op("Relu", [x]), x])
    centred = net.op("Sub", [total, net.op("ReduceMean", [total], axes=[-1])])
    square = net.op("ReduceMean", [net.op("Mul", [centred, centred])], axes=[-1])
    deviation = net.op("Sqrt", [net.op("Add", [square, net.const(np.float32(1e-5))])])
    net.output(net.op("Div", [centred, deviation]))
    found = [op for op in ops(ready(net.model(), rewrites=[residual_to_sum]).proto) if op in ("Add", "Sum")]
    assert found == ["Sum", "Add"]


SIMPLE = "SkipSimplifiedLayerNormalization"
WIDTH = 8
ARITHMETIC = ["Sum", "Pow", "ReduceMean", "Add", "Sqrt", "Div", "Mul"]


def joined(
    op=JOINED,
    *,
    opset=17,
    beta=True,
    bias=True,
    skip=("b", "s", WIDTH),
    epsilon=1e-5,
    outputs=("y",),
    computed=False,
):
    rng = np.random.default_rng(0)
    weights = {name: rng.uniform(0.5, 1.5, WIDTH).astype(np.float32) for name in ("gamma", "beta", "bias")}
    inputs = ["x", "skip", "g" if computed else "gamma"]
    inputs += ["beta" if beta else ""] if op == JOINED else []
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
    op=st.sampled_from([JOINED, SIMPLE]),
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
    assert ops(result) == (["Sum", "LayerNormalization"] if op == JOINED else ARITHMETIC)
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
    assert ops(result.proto) == [JOINED]
    assert any(reason in note for note in result.notes)


@pytest.mark.parametrize("op", [JOINED, SIMPLE])
def test_the_runtime_does_not_join_them_again(op):
    result = ready(joined(op), rewrites=[split_skip_norm, residual_to_sum]).proto
    expected = "LayerNormalization" if op == JOINED else "SimplifiedLayerNormalization"
    assert [k.op_type for k in kernels(result)][-2:] == ["Sum", expected]
    session(result)


SHAPES = [(2, 3, 4), (1, 3, 4), (3, 1), (4,), ()]


def total(shapes, kind=TensorProto.FLOAT):
    names = [f"x{at}" for at in range(len(shapes))]
    nodes = [helper.make_node("Sum", names, ["y"], name="sum")]
    inputs = [value(name, shape, kind) for name, shape in zip(names, shapes, strict=True)]
    return model(nodes, inputs, [value("y", np.broadcast_shapes(*shapes), kind)])


@settings(deadline=None)
@given(shapes=st.lists(st.sampled_from(SHAPES), min_size=2, max_size=5), seed=st.integers(0, 2**16))
def test_any_sum_is_the_same_to_the_bit(shapes, seed):
    rng = np.random.default_rng(seed)
    proto = total(shapes)
    feeds = {f"x{at}": rng.normal(size=shape).astype(np.float32) for at, shape in enumerate(shapes)}
    prepared = check(sum_to_add, proto, feeds, ["Add"] * (len(shapes) - 1))
    assert_same(proto, prepared.proto, feeds, rtol=0)
    last = prepared.proto.graph.node[-1]
    assert (last.name, last.output[0]) == ("sum", "y")
    assert len({node.name for node in prepared.proto.graph.node}) == len(shapes) - 1


def test_one_value_twice():
    proto = model([helper.make_node("Sum", ["x", "x"], ["y"], name="sum")], [value("x", [2])], [value("y", [2])])
    check(sum_to_add, proto, {"x": np.ones(2, np.float32)}, ["Add"])
