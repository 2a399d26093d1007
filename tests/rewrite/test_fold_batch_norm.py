from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.rewrite import fold_batch_norm
from tests.graph.build import assert_same, model, ops, ready, run, value

RNG = np.random.default_rng(0)


def norm_weights(channels, rng=RNG, dtype=np.float32):
    return {
        "g": rng.normal(size=channels).astype(dtype),
        "b": rng.normal(size=channels).astype(dtype),
        "m": rng.normal(size=channels).astype(dtype),
        "v": rng.uniform(0.01, 4, channels).astype(dtype),
    }


def norm(source="c", output="y", **attributes):
    return helper.make_node("BatchNormalization", [source, "g", "b", "m", "v"], [output], name="bn", **attributes)


def folded(proto, **options):
    return ready(proto, rewrites=[fold_batch_norm], **options)


def check(proto, feeds, expected_ops, **options):
    prepared = folded(proto, **options)
    assert ops(prepared.proto) == expected_ops
    assert_same(proto, prepared.proto, feeds)
    return prepared


@settings(deadline=None)
@given(
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    out_per_group=st.integers(1, 3),
    spatial=st.integers(1, 3),
    bias=st.booleans(),
    add=st.sampled_from([None, "scalar", "channel", "first"]),
    transposed=st.booleans(),
    epsilon=st.sampled_from([None, 1e-5, 1e-3, 0.5]),
    seed=st.integers(0, 2**16),
)
def test_convolutions_of_every_form(groups, per_group, out_per_group, spatial, bias, add, transposed, epsilon, seed):
    rng = np.random.default_rng(seed)
    c_in, c_out = groups * per_group, groups * out_per_group
    kernel = [2] * spatial
    shape = [c_in, out_per_group, *kernel] if transposed else [c_out, per_group, *kernel]
    weights = {"w": rng.normal(size=shape).astype(np.float32), **norm_weights(c_out, rng)}
    inputs = ["x", "w"]
    if bias:
        weights["d"] = rng.normal(size=c_out).astype(np.float32)
        inputs.append("d")
    op = "ConvTranspose" if transposed else "Conv"
    nodes = [helper.make_node(op, inputs, ["c"], name="conv", group=groups)]
    if add:
        shapes = {"scalar": (), "channel": (c_out, *[1] * spatial), "first": (1, c_out, *[1] * spatial)}
        weights["a"] = rng.normal(size=shapes[add]).astype(np.float32)
        nodes.append(helper.make_node("Add", ["a", "c"] if seed % 2 else ["c", "a"], ["s"], name="add"))
    attributes = {} if epsilon is None else {"epsilon": epsilon}
    nodes.append(norm("s" if add else "c", **attributes))
    dims = [2, c_in, *[4] * spatial]
    proto = model(nodes, [value("x", dims)], [value("y", [None] * len(dims))], weights)
    prepared = check(proto, {"x": rng.normal(size=dims).astype(np.float32)}, [op])
    assert prepared.nodes["bn"] == ("conv",)
    assert ("add" in prepared.nodes) is bool(add)
    assert {t.name for t in prepared.proto.graph.initializer} <= {"w", "d", "w_bias"}


@settings(deadline=None)
@given(
    op=st.sampled_from(["Gemm", "MatMul"]),
    trans_b=st.booleans(),
    alpha=st.sampled_from([1.0, 0.5]),
    beta=st.sampled_from([0.0, 1.0, 2.0]),
    bias=st.sampled_from([None, (), (1,), (4,), (1, 4), (1, 1)]),
    add=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_matrix_products_of_every_form(op, trans_b, alpha, beta, bias, add, seed):
    rng = np.random.default_rng(seed)
    trans_b = trans_b and op == "Gemm"
    weights = {"w": rng.normal(size=(4, 3) if trans_b else (3, 4)).astype(np.float32), **norm_weights(4, rng)}
    inputs, attributes = ["x", "w"], {}
    if op == "Gemm":
        attributes = {"alpha": alpha, "beta": beta, "transB": int(trans_b)}
        if bias is not None:
            weights["d"] = rng.normal(size=bias).astype(np.float32)
            inputs.append("d")
    nodes = [helper.make_node(op, inputs, ["c"], name="product", **attributes)]
    if add:
        weights["a"] = rng.normal(size=4).astype(np.float32)
        nodes.append(helper.make_node("Add", ["c", "a"], ["s"], name="add"))
    nodes.append(norm("s" if add else "c"))
    proto = model(nodes, [value("x", ["N", 3])], [value("y", ["N", 4])], weights)
    check(proto, {"x": rng.normal(size=(5, 3)).astype(np.float32)}, ["Gemm"] if op == "Gemm" else ["MatMul", "Add"])


def conv_bn(extra_nodes=(), extra_outputs=(), **kwargs):
    weights = {"w": RNG.normal(size=(3, 3, 1, 1)).astype(np.float32), **norm_weights(3)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], name="conv"), norm(**kwargs), *extra_nodes]
    return model(nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 3, 4, 4]), *extra_outputs], weights)


X = {"x": RNG.normal(size=(1, 3, 4, 4)).astype(np.float32)}


def test_the_folded_node_keeps_its_name_and_its_weights_name():
    prepared = folded(conv_bn())
    node = prepared.proto.graph.node[0]
    assert node.name == "conv"
    assert list(node.input) == ["x", "w", "w_bias"]
    assert list(node.output) == ["y"]
    assert prepared.notes[-1].startswith("1 BatchNormalization")


def test_two_norms_behind_one_conv():
    nodes = [helper.make_node("BatchNormalization", ["y", "g", "b", "m", "v"], ["z"], name="second")]
    proto = conv_bn(nodes)
    proto.graph.output[0].name = "z"
    check(proto, X, ["Conv"])


@pytest.mark.parametrize("opset", [7, 9, 14, 15])
def test_each_version_of_the_operator(opset):
    weights = {"w": RNG.normal(size=(3, 3, 1, 1)).astype(np.float32), **norm_weights(3)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), norm()]
    proto = model(nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 3, 4, 4])], weights, opset=opset)
    check(proto, X, ["Conv"])


def test_parameters_that_are_inputs_keep_the_norm():
    proto = conv_bn()
    proto.graph.input.append(value("g", [3]))
    kept = [t for t in proto.graph.initializer if t.name != "g"]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    check(proto, {**X, "g": np.ones(3, np.float32)}, ["Conv", "BatchNormalization"])


def test_matrix_products_of_more_than_two_axes_keep_the_norm():
    """Their channel axis is not the last one."""
    weights = {"w": RNG.normal(size=(3, 3)).astype(np.float32), **norm_weights(3)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["c"]), norm()]
    proto = model(nodes, [value("x", [2, 3, 3])], [value("y", [2, 3, 3])], weights)
    check(proto, {"x": RNG.normal(size=(2, 3, 3)).astype(np.float32)}, ["MatMul", "BatchNormalization"])


def test_an_addend_that_is_not_one_number_a_channel_keeps_the_norm():
    weights = {"w": RNG.normal(size=(3, 3, 1, 1)).astype(np.float32), **norm_weights(3)}
    weights["a"] = RNG.normal(size=(1, 3, 4, 4)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Add", ["c", "a"], ["s"]), norm("s")]
    proto = model(nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 3, 4, 4])], weights)
    check(proto, X, ["Conv", "Add", "BatchNormalization"])


def test_weights_that_would_overflow_keep_the_norm():
    weights = {"w": np.full((3, 3, 1, 1), 3e38, np.float32), **norm_weights(3)}
    weights["g"] = np.full(3, 1e3, np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), norm()]
    proto = model(nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 3, 4, 4])], weights)
    assert ops(folded(proto).proto) == ["Conv", "BatchNormalization"]


def test_half_precision_weights_are_folded_in_single_precision():
    half = TensorProto.FLOAT16
    weights = {"w": RNG.normal(size=(3, 3, 1, 1)).astype(np.float16), **norm_weights(3, dtype=np.float16)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), norm()]
    proto = model(nodes, [value("x", [1, 3, 4, 4], half)], [value("y", [1, 3, 4, 4], half)], weights)
    prepared = folded(proto).proto
    assert ops(prepared) == ["Cast", "Conv", "Cast"]
    x = {"x": X["x"].astype(np.float16)}
    expected, actual = run(proto, x)[0].astype(float), run(prepared, x)[0].astype(float)
    assert np.abs(expected - actual).max() < 0.02 * np.abs(expected).max()


def test_a_zero_variance_channel_is_exact_in_double_arithmetic():
    proto = conv_bn(epsilon=1e-12)
    for tensor in proto.graph.initializer:
        if tensor.name == "v":
            tensor.CopyFrom(numpy_helper.from_array(np.array([1e-10, 1, 0.5], np.float32), "v"))
    check(proto, X, ["Conv"])
