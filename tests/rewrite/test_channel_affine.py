"""Scales and shifts by channel: folded into the layer before them, or as a Conv of their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.rewrite import batch_norm_to_conv, fold_batch_norm, fold_scale
from kenosis_ort.rewrite.channel_affine import affine_step
from tests.graph.build import assert_same, model, ops, ready, run, value
from tests.rewrite.forms import Graph, assert_formed, assert_refused, check, refused, untouched

RNG = np.random.default_rng(0)
X = {"x": RNG.normal(size=(2, 3, 4, 5)).astype(np.float32)}


def norm_weights(channels, rng=RNG, dtype=np.float32):
    return {
        "g": rng.normal(size=channels).astype(dtype),
        "b": rng.normal(size=channels).astype(dtype),
        "m": rng.normal(size=channels).astype(dtype),
        "v": rng.uniform(0.1, 4, channels).astype(dtype),
    }


def norm(*, x=("N", 3, "H", "W"), weights=None, op="BatchNormalization", **attributes):
    outputs = attributes.pop("outputs", ["y"])
    nodes = [helper.make_node(op, ["x", "g", "b", "m", "v"], outputs, name="bn", **attributes)]
    given = norm_weights(3) if weights is None else weights
    return model(nodes, [value("x", x)], [value("y", [None] * len(x or "1234"))], given)


def chain(*steps, x=("N", 3, "H", "W"), outputs=("y",)):
    """Steps of (operator, constant, whether the constant comes first); the last writes ``y``."""
    nodes, weights, at = [], {}, "x"
    for number, (op, constant, first) in enumerate(steps):
        name = f"k{number}"
        out = "y" if number == len(steps) - 1 else f"s{number}"
        nodes.append(helper.make_node(op, [name, at] if first else [at, name], [out], name=f"n{number}"))
        weights[name] = np.asarray(constant, np.float32)
        at = out
    return model(nodes, [value("x", x)], [value(name, x) for name in outputs], weights)


@settings(deadline=None)
@given(
    channels=st.integers(1, 9),
    size=st.tuples(st.integers(2, 3), st.integers(4, 5), st.integers(4, 5)),
    epsilon=st.sampled_from([None, 1e-5, 1e-3, 0.5]),
    opset=st.sampled_from([13, 15, 17]),
    seed=st.integers(0, 2**16),
)
def test_any_norm(channels, size, epsilon, opset, seed):
    rng = np.random.default_rng(seed)
    attributes = {} if epsilon is None else {"epsilon": epsilon}
    nodes = [helper.make_node("BatchNormalization", ["x", "g", "b", "m", "v"], ["y"], name="bn", **attributes)]
    shape = [size[0], channels, *size[1:]]
    proto = model(
        nodes,
        [value("x", ["N", channels, "H", "W"])],
        [value("y", ["N", channels, "H", "W"])],
        norm_weights(channels, rng),
        opset=opset,
    )
    prepared = check(batch_norm_to_conv, proto, {"x": rng.normal(size=shape).astype(np.float32)}, ["Conv"])
    (conv,) = prepared.proto.graph.node
    assert (conv.name, list(conv.output)) == ("bn", ["y"])
    assert {i.name for i in prepared.proto.graph.initializer} == {"bn_weight", "bn_bias"}


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["Mul", "Div", "Add", "Sub"]),
            st.sampled_from([(), (1,), (1, 1, 1), (3, 1, 1), (1, 3, 1, 1)]),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**16),
)
def test_any_chain(steps, seed):
    rng = np.random.default_rng(seed)
    steps = [
        (op, rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape), first and op != "Div")
        for op, shape, first in steps
    ]
    joined = any(np.size(constant) > 1 for _, constant, _ in steps)
    prepared = check(batch_norm_to_conv, chain(*steps), X, ["Conv"] if joined else [op for op, _, _ in steps])
    last = prepared.proto.graph.node[-1]
    assert (last.name, last.output[0]) == (f"n{len(steps) - 1}", "y")
    if joined:
        assert prepared.nodes == {f"n{at}": (last.name,) for at in range(len(steps) - 1)}


CHANNEL = np.array([1.5, -2, 3], np.float32).reshape(3, 1, 1)


def test_a_chain_ends_where_its_values_are_needed():
    check(
        batch_norm_to_conv,
        chain(("Mul", CHANNEL, False), ("Add", CHANNEL, False), outputs=("y", "s0")),
        X,
        ["Conv"] * 2,
    )
    proto = chain(("Mul", CHANNEL, False), ("Add", CHANNEL, False))
    check(batch_norm_to_conv, proto, X, ["Conv"] * 2, keep_values=["s0"])
    check(batch_norm_to_conv, chain(("Mul", CHANNEL, False), ("Add", np.ones((4, 5)), False)), X, ["Conv", "Add"])
    check(batch_norm_to_conv, chain(("Mul", CHANNEL, False), ("Div", CHANNEL, True)), X, ["Conv", "Div"])


def test_scalars_and_variables_are_no_candidates():
    untouched(batch_norm_to_conv, chain(("Mul", 2.0, False), ("Add", [1.0], False)))
    untouched(
        batch_norm_to_conv,
        model([helper.make_node("Mul", ["x", "x"], ["y"])], [value("x", [1, 3, 4, 4])], [value("y", [1, 3, 4, 4])]),
    )


def with_variable(proto, name):
    del proto.graph.initializer[[i.name for i in proto.graph.initializer].index(name)]
    proto.graph.input.append(value(name, [3]))
    return proto


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (with_variable(norm(), "m"), "not constant"),
        (norm(x=None), "rank of 'x' is not known"),
        (norm(weights={**norm_weights(3), "v": np.array([1, -4, 1], np.float32)}), "not finite"),
        (chain(("Mul", CHANNEL, False), x=("N", "C", 4, 4)), "channel count of 'x' is not known"),
        (chain(("Mul", np.ones((1, 1, 5)), False)), "is not one number a channel"),
        (chain(("Mul", CHANNEL, False), x=("N", 1, 4, 4)), "is not one number a channel"),
        (chain(("Div", CHANNEL, True)), "divides by its input"),
        (chain(("Div", CHANNEL * 0, False)), "not finite"),
    ],
)
def test_what_stays_and_why(proto, reason):
    refused(batch_norm_to_conv, proto, reason)


def norm_node(source="c", output="y", **attributes):
    return helper.make_node("BatchNormalization", [source, "g", "b", "m", "v"], [output], name="bn", **attributes)


def folded(proto, **options):
    return ready(proto, rewrites=[fold_batch_norm], **options)


def check_folded(proto, feeds, expected_ops, **options):
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
    nodes.append(norm_node("s" if add else "c", **attributes))
    dims = [2, c_in, *[4] * spatial]
    proto = model(nodes, [value("x", dims)], [value("y", [None] * len(dims))], weights)
    prepared = check_folded(proto, {"x": rng.normal(size=dims).astype(np.float32)}, [op])
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
    weights = {
        "w": rng.normal(size=(4, 3) if trans_b else (3, 4)).astype(np.float32),
        **norm_weights(4, rng),
    }
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
    nodes.append(norm_node("s" if add else "c"))
    proto = model(nodes, [value("x", ["N", 3])], [value("y", ["N", 4])], weights)
    check_folded(
        proto, {"x": rng.normal(size=(5, 3)).astype(np.float32)}, ["Gemm"] if op == "Gemm" else ["MatMul", "Add"]
    )


def conv_bn(extra_nodes=(), extra_outputs=(), **kwargs):
    weights = {"w": RNG.normal(size=(3, 3, 1, 1)).astype(np.float32), **norm_weights(3)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], name="conv"), norm_node(**kwargs), *extra_nodes]
    return model(nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 3, 4, 4]), *extra_outputs], weights)


PICTURE = {"x": RNG.normal(size=(1, 3, 4, 4)).astype(np.float32)}


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
    check_folded(proto, PICTURE, ["Conv"])


@pytest.mark.parametrize("opset", [7, 9, 14, 15])
def test_each_version_of_the_operator(opset):
    weights = {"w": RNG.normal(size=(3, 3, 1, 1)).astype(np.float32), **norm_weights(3)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), norm_node()]
    proto = model(nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 3, 4, 4])], weights, opset=opset)
    check_folded(proto, PICTURE, ["Conv"])


def test_parameters_that_are_inputs_keep_the_norm():
    proto = conv_bn()
    proto.graph.input.append(value("g", [3]))
    kept = [t for t in proto.graph.initializer if t.name != "g"]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    check_folded(proto, {**PICTURE, "g": np.ones(3, np.float32)}, ["Conv", "BatchNormalization"])


def test_matrix_products_of_more_than_two_axes_keep_the_norm():
    """Their channel axis is not the last one."""
    weights = {"w": RNG.normal(size=(3, 3)).astype(np.float32), **norm_weights(3)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["c"]), norm_node()]
    proto = model(nodes, [value("x", [2, 3, 3])], [value("y", [2, 3, 3])], weights)
    check_folded(proto, {"x": RNG.normal(size=(2, 3, 3)).astype(np.float32)}, ["MatMul", "BatchNormalization"])


def test_an_addend_that_is_not_one_number_a_channel_keeps_the_norm():
    weights = {"w": RNG.normal(size=(3, 3, 1, 1)).astype(np.float32), **norm_weights(3)}
    weights["a"] = RNG.normal(size=(1, 3, 4, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Add", ["c", "a"], ["s"]),
        norm_node("s"),
    ]
    proto = model(nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 3, 4, 4])], weights)
    check_folded(proto, PICTURE, ["Conv", "Add", "BatchNormalization"])


def test_weights_that_would_overflow_keep_the_norm():
    weights = {"w": np.full((3, 3, 1, 1), 3e38, np.float32), **norm_weights(3)}
    weights["g"] = np.full(3, 1e3, np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), norm_node()]
    proto = model(nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 3, 4, 4])], weights)
    assert ops(folded(proto).proto) == ["Conv", "BatchNormalization"]


def test_half_precision_weights_are_folded_in_single_precision():
    half = TensorProto.FLOAT16
    weights = {"w": RNG.normal(size=(3, 3, 1, 1)).astype(np.float16), **norm_weights(3, dtype=np.float16)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), norm_node()]
    proto = model(nodes, [value("x", [1, 3, 4, 4], half)], [value("y", [1, 3, 4, 4], half)], weights)
    prepared = folded(proto).proto
    assert ops(prepared) == ["Cast", "Conv", "Cast"]
    x = {"x": PICTURE["x"].astype(np.float16)}
    expected, actual = run(proto, x)[0].astype(float), run(prepared, x)[0].astype(float)
    assert np.abs(expected - actual).max() < 0.02 * np.abs(expected).max()


def test_a_zero_variance_channel_is_exact_in_double_arithmetic():
    proto = conv_bn(epsilon=1e-12)
    for tensor in proto.graph.initializer:
        if tensor.name == "v":
            tensor.CopyFrom(numpy_helper.from_array(np.array([1e-10, 1, 0.5], np.float32), "v"))
    check_folded(proto, PICTURE, ["Conv"])


IN, OUT = 3, 4


def layer(g, x, kind, *, bias=True, rng=RNG, **attributes):
    if kind == "Gemm":
        shape = (OUT, IN) if attributes.get("transB") else (IN, OUT)
    else:
        shape = (OUT, IN, *(3,) * (len(g.shape) - 2))
        attributes["pads"] = [1] * 2 * (len(g.shape) - 2)
    return g.op(kind, x, rng.normal(size=shape), *([rng.normal(size=OUT)] if bias else []), **attributes)


@settings(deadline=None)
@given(
    kind=st.sampled_from(["Gemm", "transB", "Conv 1", "Conv 2"]),
    bias=st.booleans(),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["Mul", "Div", "Add", "Sub"]), st.sampled_from(["one", "channel", "full"]), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**16),
)
def test_every_row_computes_the_same(kind, bias, steps, seed):
    rng = np.random.default_rng(seed)
    spatial = {"Conv 1": 1, "Conv 2": 2}.get(kind, 0)
    g = Graph((2, IN, *(5,) * spatial))
    attributes = {"transB": 1} if kind == "transB" else {}
    y = layer(g, "x", kind.split()[0] if spatial else "Gemm", bias=bias, rng=rng, **attributes)
    for op, form, swapped in steps:
        shape = {"one": (), "channel": (OUT, *(1,) * spatial), "full": (1, OUT, *(1,) * spatial)}[form]
        constant = rng.uniform(0.5, 2.0, shape) * rng.choice([-1, 1])
        y = g.op(op, *((constant, y) if swapped and op != "Div" else (y, constant)))
    x = rng.normal(size=g.shape).astype(np.float32)
    result = assert_formed(g.model(y), fold_scale, None, x)
    (node,) = result.proto.graph.node
    assert node.name == g.nodes[0].name


def test_a_quotient_that_divides_by_it_stays():
    g = Graph((2, IN))
    y = g.op("Mul", g.op("Div", 1.0, g.op("Add", layer(g, "x", "Gemm"), 20.0)), 3.0)
    assert_formed(g.model(y), fold_scale, ["Gemm", "Div", "Mul"], RNG.normal(size=(2, IN)).astype(np.float32))


def test_what_keeps_a_scale_and_why():
    g = Graph((2, IN))
    assert_refused(g.model(g.op("Mul", layer(g, "x", "Gemm", alpha=2.0), 3.0)), fold_scale, "alpha or beta is not 1")
    assert_refused(g.model(g.op("Mul", layer(g, "x", "Gemm", alpha=2.0), 0.0)), fold_scale, "alpha or beta is not 1")
    g = Graph((2, IN))
    y = g.op("Gemm", "x", np.ones((IN, OUT)), np.ones((2, OUT)))
    assert_refused(g.model(g.op("Mul", y, 3.0)), fold_scale, "is not one number a channel")


numbers = st.floats(-8, 8).filter(lambda x: abs(x) > 1e-3)
COMPUTE = {"Mul": np.multiply, "Add": np.add, "Sub": np.subtract, "Div": np.divide}


@given(st.lists(st.tuples(st.sampled_from(list(COMPUTE)), numbers, st.booleans()), max_size=6), numbers)
def test_a_row_of_steps_is_one_scale_and_shift(steps, x):
    scale, shift, want = np.ones(1), np.zeros(1), np.array([x])
    reach = 1.0 + abs(x)
    for op, number, swapped in steps:
        constant = np.array([number])
        node = helper.make_node(op, ["c", "v"] if swapped else ["v", "c"], ["y"])
        found = affine_step(node, "v", scale, shift, constant)
        if op == "Div" and swapped:
            assert found is None
            return
        assert found is not None
        scale, shift = found
        want = COMPUTE[op](constant, want) if swapped else COMPUTE[op](want, constant)
        reach = max(reach, abs(scale[0] * x), abs(shift[0]), abs(want[0]))
    np.testing.assert_allclose(scale * x + shift, want, rtol=1e-9, atol=1e-9 * reach)
