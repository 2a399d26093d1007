from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import residual_to_sum, sum_to_add
from tests import models
from tests.graph.build import assert_same, model, ops, ready, value
from tests.planning import quantize
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
