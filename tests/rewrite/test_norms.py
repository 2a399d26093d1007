"""Norms written in arithmetic: as one operator, or spelled as the runtime knows them."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import collapse_affine_norm, collapse_layer_norm, residual_to_sum, spell_norm
from tests.graph.build import ready, run
from tests.models import Net, normal
from tests.rewrite.forms import RTOL, check, refused, rewritten
from tests.targets.qdq import kernels

LAYER, RMS = "LayerNormalization", "RMSNormalization"
PRECISE = tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 30)
"""The runtime's operator subtracts the mean before it squares; earlier ones lose digits over few elements."""
SIZE = 8
FORMS = {
    "square": st.sampled_from(["pow", "mul"]),
    "inverse": st.sampled_from(["div", "reciprocal", "one over"]),
    "flip": st.booleans(),
    "epsilon": st.sampled_from([1e-5, 1e-12, 0.5]),
}


def inverse_root(g, deviation, axes, square, inverse, epsilon, flip):
    """The root of the mean square, or one over it."""
    s = g.op("Pow", [deviation, 2.0]) if square == "pow" else g.op("Mul", [deviation, deviation])
    root = g.op("Sqrt", [g.both("Add", g.mean(s, axes), epsilon, flip)])
    if inverse == "div":
        return root
    return g.op("Reciprocal", [root]) if inverse == "reciprocal" else g.op("Div", [1.0, root])


def norm(
    g, x="x", *, axes=(-1,), centred=True, square="pow", inverse="div", twice=False, epsilon=1e-5, scale=None,
    shift=None, flip=False,
):  # fmt: skip
    middle = g.mean(x, axes) if centred else None
    d = g.op("Sub", [x, middle]) if centred else x
    other = g.op("Sub", [x, middle]) if centred and twice else d
    root = inverse_root(g, d, axes, square, inverse, epsilon, flip)
    y = g.op("Div", [other, root]) if inverse == "div" else g.both("Mul", other, root, flip)
    y = y if scale is None else g.both("Mul", y, scale, flip)
    return y if shift is None else g.both("Add", y, shift, flip)


def affine(rng, sizes, form):
    if form is None:
        return None
    shape = {"full": sizes, "leading": (1, *sizes), "scalar": (), "partial": (*(1 for _ in sizes[1:]), sizes[-1])}[form]
    return rng.normal(size=shape)


AFFINE = st.sampled_from([None, "full", "leading", "scalar", "partial"])
LEAD = st.lists(st.integers(1, 3), min_size=1, max_size=2)


@given(
    lead=LEAD,
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
    g = Net.over([*lead, *sizes], opset=opset, seed=seed)
    axes = range(-len(sizes), 0) if negative else range(len(lead), len(lead) + len(sizes))
    factors = {"scale": affine(g.rng, sizes, scale), "shift": affine(g.rng, sizes, shift)}
    y = norm(g, axes=axes, twice=twice, **factors, **form)
    x = normal((*lead, *sizes), seed, magnitude)
    result = check(collapse_layer_norm, g.of(y), x, LAYER, rtol=RTOL if PRECISE else 1e-3)
    (node,) = result.proto.graph.node
    assert helper.get_node_attr_value(node, "axis") == -len(sizes)
    assert len(result.proto.graph.initializer) == (2 if shift else 1)


@pytest.mark.since("1.30")  # before, the runtime's operator squares before it subtracts the mean
@pytest.mark.parametrize("shift", [0.0, 10.0, 1e3, 1e4])
def test_a_mean_far_from_zero_is_no_less_accurate(shift):
    g = Net.over((4, 64))
    proto, x = g.of(norm(g)), normal((4, 64)) + np.float32(shift)
    (before,), (after,) = run(proto, {"x": x}), run(rewritten(collapse_layer_norm, proto).proto, {"x": x})
    d = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    exact = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5)
    assert np.abs(after - exact).max() <= max(np.abs(before - exact).max(), 1e-6)


@pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has the operator
@given(
    lead=LEAD,
    size=st.integers(2, 9),
    scale=AFFINE,
    magnitude=st.sampled_from([0.1, 1.0, 1e3, 1e10]),
    seed=st.integers(0, 2**16),
    **FORMS,
)
def test_every_rms_norm_computes_the_same(lead, size, scale, magnitude, seed, **form):
    g = Net.over([*lead, size], opset=23, seed=seed)
    y = norm(g, centred=False, scale=affine(g.rng, (size,), scale), **form)
    check(collapse_layer_norm, g.of(y), normal((*lead, size), seed, magnitude), RMS)


@pytest.mark.parametrize(
    ("rule", "opset", "make"),
    [
        (collapse_layer_norm, 22, lambda g: norm(g, centred=False, scale=np.ones(SIZE))),
        (collapse_layer_norm, 16, lambda g: norm(g, scale=np.ones(SIZE))),
        (collapse_affine_norm, 16, lambda g: affine_norm(g)),
    ],
)
def test_a_norm_stays_before_its_operator_set(rule, opset, make):
    g = Net.over([2, SIZE], opset=opset)
    refused(rule, g.of(make(g)), None)


def test_symbolic_leading_dimensions_stay_symbolic():
    g = Net.over(["batch", "tokens", SIZE])
    y = norm(g, scale=np.ones(SIZE), shift=np.zeros(SIZE))
    result = check(collapse_layer_norm, g.of(y), normal((2, 5, SIZE)), LAYER)
    assert [d.dim_param for d in result.proto.graph.output[0].type.tensor_type.shape.dim] == ["batch", "tokens", ""]


@pytest.mark.parametrize(
    ("shape", "behind", "expected"),
    [
        ((2, 8), lambda g, y: [g.op("Mul", [y, np.ones((2, 8))])], "Mul"),
        ((2, 8), lambda g, y: [g.op("Mul", [y, np.ones((2, 1))])], "Mul"),
        ((2, 8), lambda g, y: [g.op("Mul", [y, g.op("Relu", ["x"])])], "Relu Mul"),
        ((2, 8), lambda g, y: [g.op("Mul", [y, np.ones(8)]), y], "Mul"),
        ((2,), lambda g, y: [g.op("Mul", [y, np.ones((1, 2))])], "Mul"),
    ],
)
def test_a_scale_that_is_no_vector_of_it_alone_stays_behind(shape, behind, expected):
    g = Net.over(shape)
    x = normal(shape) if len(shape) > 1 else np.ones(shape, np.float32)
    check(collapse_layer_norm, g.of(*behind(g, norm(g))), x, f"{LAYER} {expected}")


def affine_norm(g, *, square="mul", inverse="reciprocal", flip=False, epsilon=1e-3, turned=False):
    middle = g.mean("x", [-1])
    d = g.op("Sub", [middle, "x"] if turned else ["x", middle])
    inverted = inverse_root(g, d, [-1], square, inverse, epsilon, flip)
    factor = g.both("Mul", inverted, np.linspace(0.5, 1.5, SIZE), flip)
    rest = g.op("Sub", [np.linspace(-1, 1, SIZE), g.both("Mul", middle, factor, flip)])
    return g.both("Add", g.both("Mul", "x", factor, flip), rest, flip)


@given(
    lead=LEAD,
    symbolic=st.booleans(),
    square=FORMS["square"],
    inverse=st.sampled_from(["reciprocal", "one over"]),
    flip=st.booleans(),
    turned=st.booleans(),
    epsilon=st.sampled_from([1e-3, 1e-5, 0.5]),
    magnitude=st.sampled_from([0.1, 1.0, 100.0]),
    opset=st.sampled_from([17, 18, 21]),
    seed=st.integers(0, 2**16),
)
def test_every_affine_form_computes_the_same(lead, symbolic, magnitude, opset, seed, **form):
    g = Net.over([*(["n", "s"][: len(lead)] if symbolic else lead), SIZE], opset=opset)
    check(collapse_affine_norm, g.of(affine_norm(g, **form)), normal((*lead, SIZE), seed, magnitude), LAYER)


def test_the_runtime_knows_the_result_only():
    g = Net.over((2, 3, SIZE))
    proto = g.of(affine_norm(g))
    assert LAYER not in {k.op_type for k in kernels(proto)}
    assert [k.op_type for k in kernels(rewritten(collapse_affine_norm, proto).proto)] == [LAYER]


OPERATORS = {True: LAYER, False: "SimplifiedLayerNormalization"}


def scaled(opset, centred, **form):
    g = Net.over((2, 3, SIZE), opset=opset)
    shift = np.linspace(-1, 1, SIZE) if centred else None
    return g.of(norm(g, g.op("Abs", ["x"]), centred=centred, scale=np.linspace(0.5, 1.5, SIZE), shift=shift, **form))


@given(
    form=st.sampled_from([(13, True), (16, True), (13, False), (17, False), (18, False), (21, False)]),
    magnitude=st.sampled_from([0.1, 1.0, 1e3]),
    seed=st.integers(0, 2**16),
    **FORMS,
)
def test_every_spelling_computes_the_same_and_becomes_the_runtimes_operator(form, magnitude, seed, **spelling):
    result = check(spell_norm, scaled(*form, **spelling), normal((2, 3, SIZE), seed, magnitude))
    assert OPERATORS[form[1]] in [k.op_type for k in kernels(result.proto)]
    told = any("spelled as the runtime knows them" in note for note in result.notes)
    assert told == ((spelling["square"], spelling["inverse"]) not in (("pow", "div"), ("pow", "one over")))


@pytest.mark.parametrize(("opset", "centred"), [(17, True), pytest.param(23, False, marks=pytest.mark.since("1.24"))])
def test_norms_that_have_an_operator_are_left_to_it(opset, centred):
    refused(spell_norm, scaled(opset, centred, square="mul", inverse="reciprocal"), None)


@pytest.mark.parametrize("inverse", ["div", "reciprocal"])
def test_a_residual_in_front_of_a_norm_in_arithmetic_is_added_by_sum(inverse):
    g = Net.over((2, 3, SIZE), opset=13)
    x = g.op("Add", [g.op("Relu", ["x"]), g.op("Neg", ["x"])])
    proto = g.of(norm(g, x, inverse=inverse, scale=np.ones(SIZE), shift=np.zeros(SIZE)))
    joined = "SkipLayerNormalization"
    assert joined in [k.op_type for k in kernels(ready(proto, rewrites=[spell_norm]).proto)]
    found = [k.op_type for k in kernels(ready(proto, rewrites=[spell_norm, residual_to_sum]).proto)]
    assert joined not in found
    assert {"Sum", LAYER} <= set(found)
