"""Norms written in arithmetic: as one operator, or spelled as the runtime knows them."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import collapse_affine_norm, collapse_layer_norm, residual_to_sum, spell_norm
from tests import models
from tests.graph.build import ready, run
from tests.rewrite.forms import RTOL, Graph, assert_formed, assert_refused, formed, quantized_kernels
from tests.targets.qdq import kernels

LAYER, RMS = "LayerNormalization", "RMSNormalization"
PRECISE = tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 30)
"""The runtime's operator subtracts the mean before it squares; earlier ones lose digits over few elements."""


def mean(g, x, axes, **attributes):
    if g.opset >= 18:
        return g.op("ReduceMean", x, g.const(axes, np.int64), **attributes)
    return g.op("ReduceMean", x, axes=list(axes), **attributes)


def norm(
    g, x, *, axes=(-1,), centred=True, square="pow", inverse="div", twice=False, epsilon=1e-5, scale=None, shift=None,
    flip=False,
):  # fmt: skip
    def both(op_type, left, right):
        return g.op(op_type, *((right, left) if flip else (left, right)))

    middle = mean(g, x, axes) if centred else None
    d = g.op("Sub", x, middle) if centred else x
    other = g.op("Sub", x, middle) if centred and twice else d
    s = g.op("Pow", d, 2.0) if square == "pow" else g.op("Mul", d, d)
    root = g.op("Sqrt", both("Add", mean(g, s, axes), epsilon))
    if inverse == "div":
        y = g.op("Div", other, root)
    else:
        y = both("Mul", other, g.op("Reciprocal", root) if inverse == "reciprocal" else g.op("Div", 1.0, root))
    y = y if scale is None else both("Mul", y, scale)
    return y if shift is None else both("Add", y, shift)


def affine(rng, sizes, form):
    if form is None:
        return None
    shape = {"full": sizes, "leading": (1, *sizes), "scalar": (), "partial": (*(1 for _ in sizes[1:]), sizes[-1])}[form]
    return rng.normal(size=shape)


AFFINE = st.sampled_from([None, "full", "leading", "scalar", "partial"])
FORMS = {
    "square": st.sampled_from(["pow", "mul"]),
    "inverse": st.sampled_from(["div", "reciprocal", "one over"]),
    "flip": st.booleans(),
    "epsilon": st.sampled_from([1e-5, 1e-12, 0.5]),
}


@settings(deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    sizes=st.lists(st.integers(2 if PRECISE else 7, 9), min_size=1, max_size=2).map(tuple),
    negative=st.booleans(),
    twice=st.booleans(),
    scale=AFFINE,
    shift=AFFINE,
    magnitude=st.sampled_from([0.1, 1.0, 1e3, 1e10]),
    opset=st.sampled_from([17, 18, 21]),
    seed=st.integers(0, 2**16),
    **FORMS,
)
def test_every_layer_norm_computes_the_same(lead, sizes, negative, twice, scale, shift, magnitude, opset, seed, **form):
    rng = np.random.default_rng(seed)
    g = Graph([*lead, *sizes], opset=opset)
    axes = list(range(-len(sizes), 0)) if negative else list(range(len(lead), len(lead) + len(sizes)))
    y = norm(g, "x", axes=axes, twice=twice, scale=affine(rng, sizes, scale), shift=affine(rng, sizes, shift), **form)
    x = (rng.normal(size=(*lead, *sizes)) * magnitude).astype(np.float32)
    proto = g.model(y)
    result = assert_formed(proto, collapse_layer_norm, [LAYER], x, rtol=RTOL if PRECISE else 1e-3)
    (node,) = result.proto.graph.node
    assert node.name == y
    assert helper.get_node_attr_value(node, "axis") == -len(sizes)
    assert set(result.nodes) == {n.name for n in g.nodes} - {y}
    assert len(result.proto.graph.initializer) == (2 if shift else 1)


def reference(x, count, epsilon):
    axes = tuple(range(x.ndim - count, x.ndim))
    x = x.astype(np.float64)
    d = x - x.mean(axes, keepdims=True)
    return d / np.sqrt((d * d).mean(axes, keepdims=True) + epsilon)


@pytest.mark.since("1.30")  # before, the runtime's operator squares before it subtracts the mean
@pytest.mark.parametrize("shift", [0.0, 10.0, 1e3, 1e4])
def test_a_mean_far_from_zero_is_no_less_accurate(shift):
    x = (np.random.default_rng(0).normal(size=(4, 64)) + shift).astype(np.float32)
    g = Graph(x.shape)
    proto = g.model(norm(g, "x"))
    (before,), (after,) = run(proto, {"x": x}), run(formed(proto, collapse_layer_norm).proto, {"x": x})
    exact = reference(x, 1, 1e-5)
    assert np.abs(after - exact).max() <= max(np.abs(before - exact).max(), 1e-6)


@pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has the operator
@settings(deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    size=st.integers(2, 9),
    scale=AFFINE,
    magnitude=st.sampled_from([0.1, 1.0, 1e3, 1e10]),
    seed=st.integers(0, 2**16),
    **FORMS,
)
def test_every_rms_norm_computes_the_same(lead, size, scale, magnitude, seed, **form):
    rng = np.random.default_rng(seed)
    g = Graph([*lead, size], opset=23)
    y = norm(g, "x", centred=False, scale=affine(rng, (size,), scale), **form)
    x = (rng.normal(size=(*lead, size)) * magnitude).astype(np.float32)
    result = assert_formed(g.model(y), collapse_layer_norm, [RMS], x)
    assert result.proto.graph.node[0].name == y


def test_an_rms_norm_stays_before_its_operator_set():
    g = Graph([2, 8], opset=22)
    assert_refused(g.model(norm(g, "x", centred=False, scale=np.ones(8))), collapse_layer_norm, None)


def test_a_layer_norm_stays_before_its_operator_set():
    g = Graph([2, 8], opset=16)
    assert_refused(g.model(norm(g, "x", scale=np.ones(8))), collapse_layer_norm, None)


def test_symbolic_leading_dimensions_stay_symbolic():
    g = Graph(["batch", "tokens", 8])
    y = norm(g, "x", scale=np.ones(8), shift=np.zeros(8))
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    result = assert_formed(g.model(y), collapse_layer_norm, [LAYER], x)
    assert [d.dim_param for d in result.proto.graph.output[0].type.tensor_type.shape.dim] == ["batch", "tokens", ""]


def test_a_scale_that_is_no_vector_stays_behind():
    x = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    for scale in (np.ones((2, 8)), np.ones((2, 1))):
        g = Graph([2, 8])
        assert_formed(g.model(norm(g, "x", scale=scale)), collapse_layer_norm, [LAYER, "Mul"], x)
    g = Graph([2, 8])
    y = norm(g, "x")
    assert_formed(g.model(g.op("Mul", y, g.op("Relu", "x"))), collapse_layer_norm, [LAYER, "Relu", "Mul"], x)
    g = Graph([2, 8])
    y = norm(g, "x")
    g.op("Mul", y, np.ones(8))
    assert_formed(g.model(g.nodes[-1].output[0], y), collapse_layer_norm, [LAYER, "Mul"], x)
    g = Graph([2])
    y = norm(g, "x", scale=np.ones((1, 2)))
    assert_formed(g.model(y), collapse_layer_norm, [LAYER, "Mul"], np.ones(2, np.float32))


def test_the_kernel_after_quantization():
    net = models.Net()
    y = net.linear(net.input("x", [1, 6, 16]), 16, 16, name="first")
    d = net.op("Sub", [y, net.op("ReduceMean", [y], axes=[-1])])
    spread = net.op("ReduceMean", [net.op("Pow", [d, net.const(2.0)])], axes=[-1])
    y = net.op("Div", [d, net.op("Sqrt", [net.op("Add", [spread, net.const(1e-5)])])])
    y = net.op("Add", [net.op("Mul", [y, net.weight((16,))]), net.weight((16,))])
    net.output(net.linear(y, 16, 8, name="second"))
    proto = net.model()
    after = quantized_kernels(proto, models.feeds(proto, 2), [collapse_layer_norm])
    assert after.count(LAYER) == 1
    assert not {"ReduceMean", "Sub", "Pow", "Sqrt", "Div"} & set(after)
    assert after.count("com.microsoft.QGemm") == 2


SIZE = 8


def affine_norm(
    g,
    x="x",
    *,
    axis=-1,
    square="mul",
    inverse="reciprocal",
    flip=False,
    epsilon=1e-3,
    scale=None,
    shift=None,
    turned=False,
):
    def both(op_type, left, right):
        return g.op(op_type, *((right, left) if flip else (left, right)))

    middle = mean(g, x, [axis])
    d = g.op("Sub", middle, x) if turned else g.op("Sub", x, middle)
    spread = mean(g, g.op("Mul", d, d) if square == "mul" else g.op("Pow", d, 2.0), [axis])
    root = g.op("Sqrt", both("Add", spread, epsilon))
    inverted = g.op("Reciprocal", root) if inverse == "reciprocal" else g.op("Div", 1.0, root)
    factor = both("Mul", inverted, np.linspace(0.5, 1.5, SIZE) if scale is None else scale)
    rest = g.op("Sub", np.linspace(-1, 1, SIZE) if shift is None else shift, both("Mul", middle, factor))
    return both("Add", both("Mul", x, factor), rest)


def data(shape=(2, 3, SIZE), seed=0, magnitude=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * magnitude).astype(np.float32)


@settings(deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    symbolic=st.booleans(),
    square=st.sampled_from(["mul", "pow"]),
    inverse=st.sampled_from(["reciprocal", "one over"]),
    flip=st.booleans(),
    turned=st.booleans(),
    epsilon=st.sampled_from([1e-3, 1e-5, 0.5]),
    magnitude=st.sampled_from([0.1, 1.0, 100.0]),
    opset=st.sampled_from([17, 18, 21]),
    seed=st.integers(0, 2**16),
)
def test_every_form_computes_the_same(
    lead, symbolic, square, inverse, flip, turned, epsilon, magnitude, opset, seed
):  # fmt: skip
    g = Graph([*(["n", "s"][: len(lead)] if symbolic else lead), SIZE], opset=opset)
    y = affine_norm(g, square=square, inverse=inverse, flip=flip, turned=turned, epsilon=epsilon)
    x = data((*lead, SIZE), seed, magnitude)
    result = assert_formed(g.model(y), collapse_affine_norm, ["LayerNormalization"], x)
    assert result.proto.graph.node[0].name == y


def test_the_runtime_knows_the_result_only():
    g = Graph((2, 3, SIZE))
    proto = g.model(affine_norm(g))
    assert "LayerNormalization" not in {k.op_type for k in kernels(proto)}
    result = assert_formed(proto, collapse_affine_norm, None, data()).proto
    assert [k.op_type for k in kernels(result)] == ["LayerNormalization"]


def test_an_affine_norm_stays_before_its_operator_set():
    g = Graph((2, 3, SIZE), opset=16)
    assert_refused(g.model(affine_norm(g)), collapse_affine_norm, None)


OPERATORS = {True: "LayerNormalization", False: "SimplifiedLayerNormalization"}


def scaled(*, opset, centred, square, inverse, flip=False, epsilon=1e-5, shape=(2, 3, SIZE), first="Abs", **more):
    g = Graph(shape, opset=opset, **more)
    shift = np.linspace(-1, 1, SIZE) if centred else None
    x = g.op(first, "x")
    y = norm(
        g, x, centred=centred, square=square, inverse=inverse, flip=flip, epsilon=epsilon,
        scale=np.linspace(0.5, 1.5, SIZE), shift=shift,
    )  # fmt: skip
    return g, y


def spelled_norm_data(seed=0, magnitude=1.0, shape=(2, 3, SIZE)):
    return (np.random.default_rng(seed).normal(size=shape) * magnitude).astype(np.float32)


@settings(deadline=None)
@given(
    form=st.sampled_from([(13, True), (16, True), (13, False), (17, False), (18, False), (21, False)]),
    square=st.sampled_from(["pow", "mul"]),
    inverse=st.sampled_from(["div", "reciprocal", "one over"]),
    flip=st.booleans(),
    epsilon=st.sampled_from([1e-5, 1e-12, 0.5]),
    magnitude=st.sampled_from([0.1, 1.0, 1e3]),
    seed=st.integers(0, 2**16),
)
def test_every_spelling_computes_the_same_and_becomes_the_runtimes_operator(
    form, square, inverse, flip, epsilon, magnitude, seed
):
    opset, centred = form
    g, y = scaled(opset=opset, centred=centred, square=square, inverse=inverse, flip=flip, epsilon=epsilon)
    result = assert_formed(g.model(y), spell_norm, None, spelled_norm_data(seed, magnitude))
    assert OPERATORS[centred] in [k.op_type for k in kernels(result.proto)]
    said = any("spelled as the runtime knows them" in note for note in result.notes)
    assert said == ((square, inverse) not in (("pow", "div"), ("pow", "one over")))


@pytest.mark.parametrize(("opset", "centred"), [(17, True), pytest.param(23, False, marks=pytest.mark.since("1.24"))])
def test_norms_that_have_an_operator_are_left_to_it(opset, centred):
    g, y = scaled(opset=opset, centred=centred, square="mul", inverse="reciprocal")
    assert_refused(g.model(y), spell_norm, None)


@pytest.mark.parametrize("inverse", ["div", "reciprocal"])
def test_a_residual_in_front_of_a_norm_in_arithmetic_is_added_by_sum(inverse):
    g = Graph((2, 3, SIZE), opset=13)
    x = g.op("Add", g.op("Relu", "x"), g.op("Neg", "x"))
    y = norm(g, x, inverse=inverse, scale=np.ones(SIZE), shift=np.zeros(SIZE))
    proto = g.model(y)
    joined = "SkipLayerNormalization"
    assert joined in [k.op_type for k in kernels(ready(proto, rewrites=[spell_norm]).proto)]
    result = ready(proto, rewrites=[spell_norm, residual_to_sum]).proto
    found = [k.op_type for k in kernels(result)]
    assert joined not in found
    assert {"Sum", "LayerNormalization"} <= set(found)
