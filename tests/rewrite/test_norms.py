"""Norms written in arithmetic, as one operator or spelled as the runtime knows them; sums before them, Sum as Adds."""

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort import rewrite
from tests.models import Net, normal
from tests.rewrite.forms import RTOL, check, parse, refused, rewritten
from tests.targets.qdq import kernels

LAYER, RMS = "LayerNormalization", "RMSNormalization"
VERSION = tuple(int(part) for part in ort.__version__.split(".")[:2])
PRECISE = VERSION >= (1, 30)
"""The runtime's operator subtracts the mean before it squares; earlier ones lose digits over few elements."""
SIZE = 8
FORMS = {
    "square": st.sampled_from(["pow", "mul"]),
    "inverse": st.sampled_from(["div", "reciprocal", "one over"]),
    "flip": st.booleans(), "epsilon": st.sampled_from([1e-5, 1e-12, 0.5]),
}  # fmt: skip


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


def compute(proto):
    return [k.op_type for k in kernels(proto)]


def affine(rng, sizes, form):
    if form is None:
        return None
    shape = {"full": sizes, "leading": (1, *sizes), "scalar": (), "partial": (*(1 for _ in sizes[1:]), sizes[-1])}[form]
    return rng.normal(size=shape)


AFFINE = st.sampled_from([None, "full", "leading", "scalar", "partial"])
LEAD = st.lists(st.integers(1, 3), min_size=1, max_size=2)


@given(
    lead=LEAD, sizes=st.lists(st.integers(2 if PRECISE else 7, 9), min_size=1, max_size=2).map(tuple),
    negative=st.booleans(), known=st.booleans(), twice=st.booleans(), scale=AFFINE, shift=AFFINE,
    magnitude=st.sampled_from([0.1, 1.0, 1e3, 1e10]), opset=st.sampled_from([17, 18, 21]), seed=st.integers(0, 2**16),
    **FORMS,
)  # fmt: skip
def test_every_layer_norm_computes_the_same(lead, sizes, negative, known, scale, shift, magnitude, opset, seed, **form):
    g = Net.over([*(lead if known else ["n", "s"][: len(lead)]), *sizes], opset=opset, seed=seed)
    axes = range(-len(sizes), 0) if negative else range(len(lead), len(lead) + len(sizes))
    factors = {"scale": affine(g.rng, sizes, scale), "shift": affine(g.rng, sizes, shift)}
    y = norm(g, axes=axes, **factors, **form)
    x = normal((*lead, *sizes), seed, magnitude)
    result = check(rewrite.collapse_layer_norm, g.of(y), x, LAYER, rtol=RTOL if PRECISE else 1e-3)
    (node,) = result.proto.graph.node
    assert helper.get_node_attr_value(node, "axis") == -len(sizes)
    assert len(result.proto.graph.initializer) == (2 if shift else 1)


@pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has the operator
@given(
    lead=LEAD, size=st.integers(2, 9), scale=AFFINE, magnitude=st.sampled_from([0.1, 1.0, 1e3, 1e10]),
    seed=st.integers(0, 2**16), **FORMS,
)  # fmt: skip
def test_every_rms_norm_computes_the_same(lead, size, scale, magnitude, seed, **form):
    g = Net.over([*lead, size], opset=23, seed=seed)
    y = norm(g, centred=False, scale=affine(g.rng, (size,), scale), **form)
    check(rewrite.collapse_layer_norm, g.of(y), normal((*lead, size), seed, magnitude), RMS)


@pytest.mark.parametrize(("rule", "opset", "make"), [
    (rewrite.collapse_layer_norm, 22, lambda g: norm(g, centred=False, scale=np.ones(SIZE))),
    (rewrite.collapse_layer_norm, 16, lambda g: norm(g, scale=np.ones(SIZE))),
    (rewrite.collapse_affine_norm, 16, lambda g: affine_norm(g)),
])  # fmt: skip
def test_a_norm_stays_before_its_operator_set(rule, opset, make):
    g = Net.over([2, SIZE], opset=opset)
    refused(rule, g.of(make(g)), None)


@pytest.mark.parametrize(("shape", "behind", "expected"), [
    ((2, 8), lambda g, y: [g.op("Mul", [y, np.ones((2, 8))])], "Mul"),
    ((2, 8), lambda g, y: [g.op("Mul", [y, np.ones((2, 1))])], "Mul"),
    ((2, 8), lambda g, y: [g.op("Mul", [y, g.op("Relu", ["x"])])], "Relu Mul"),
    ((2, 8), lambda g, y: [g.op("Mul", [y, np.ones(8)]), y], "Mul"),
    ((2,), lambda g, y: [g.op("Mul", [y, np.ones((1, 2))])], "Mul"),
])  # fmt: skip
def test_a_scale_that_is_no_vector_of_it_alone_stays_behind(shape, behind, expected):
    g = Net.over(shape)
    x = normal(shape) if len(shape) > 1 else np.ones(shape, np.float32)
    check(rewrite.collapse_layer_norm, g.of(*behind(g, norm(g))), x, f"{LAYER} {expected}")


def affine_norm(g, *, square="mul", inverse="reciprocal", flip=False, epsilon=1e-3, turned=False):
    middle = g.mean("x", [-1])
    d = g.op("Sub", [middle, "x"] if turned else ["x", middle])
    inverted = inverse_root(g, d, [-1], square, inverse, epsilon, flip)
    factor = g.both("Mul", inverted, np.linspace(0.5, 1.5, SIZE), flip)
    rest = g.op("Sub", [np.linspace(-1, 1, SIZE), g.both("Mul", middle, factor, flip)])
    return g.both("Add", g.both("Mul", "x", factor, flip), rest, flip)


@given(
    lead=LEAD, symbolic=st.booleans(), square=FORMS["square"], inverse=st.sampled_from(["reciprocal", "one over"]),
    flip=st.booleans(), turned=st.booleans(), epsilon=st.sampled_from([1e-3, 1e-5, 0.5]),
    magnitude=st.sampled_from([0.1, 1.0, 100.0]), opset=st.sampled_from([17, 18, 21]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_affine_form_computes_the_same(lead, symbolic, magnitude, opset, seed, **form):
    g = Net.over([*(["n", "s"][: len(lead)] if symbolic else lead), SIZE], opset=opset)
    proto = g.of(affine_norm(g, **form))
    result = check(rewrite.collapse_affine_norm, proto, normal((*lead, SIZE), seed, magnitude), LAYER).proto
    assert [LAYER in compute(each) for each in (proto, result)] == [False, True], "the runtime knows the result only"


OPERATORS = {True: LAYER, False: "SimplifiedLayerNormalization"}


def scaled(opset, centred, **form):
    g = Net.over((2, 3, SIZE), opset=opset)
    shift = np.linspace(-1, 1, SIZE) if centred else None
    return g.of(norm(g, g.op("Abs", ["x"]), centred=centred, scale=np.linspace(0.5, 1.5, SIZE), shift=shift, **form))


@given(
    form=st.sampled_from([(13, True), (16, True), (13, False), (17, False), (18, False), (21, False)]),
    magnitude=st.sampled_from([0.1, 1.0, 1e3]), seed=st.integers(0, 2**16), **FORMS,
)  # fmt: skip
def test_every_spelling_computes_the_same_and_becomes_the_runtimes_operator(form, magnitude, seed, **spelling):
    result = check(rewrite.spell_norm, scaled(*form, **spelling), normal((2, 3, SIZE), seed, magnitude))
    assert OPERATORS[form[1]] in compute(result.proto)
    told = any("spelled as the runtime knows them" in note for note in result.notes)
    assert told == ((spelling["square"], spelling["inverse"]) not in (("pow", "div"), ("pow", "one over")))


@pytest.mark.parametrize(("opset", "centred"), [(17, True), pytest.param(23, False, marks=pytest.mark.since("1.24"))])
def test_norms_that_have_an_operator_are_left_to_it(opset, centred):
    refused(rewrite.spell_norm, scaled(opset, centred, square="mul", inverse="reciprocal"), None)


# ---- sums: residuals in front of norms, the runtime's joined norms taken apart, Sum as Adds --------------------------


JOINED = "SkipLayerNormalization"


def block(a="b,s,16", b="", *, outputs="float y", constant="", more=""):
    """Two values, their sum and its norm."""
    second = f"float[{constant}] q, " if constant else ""
    return parse(f"""(float[{a}] a, float[{b or a}] b) => ({outputs}) <{second}float[16] g, float[16] h>
        {{ p = Relu(a) {"" if constant else "q = Relu(b)"} s = Add(p, q)
        y = LayerNormalization<axis = -1>(s, g, h) {more} }}""")


@pytest.mark.parametrize("proto", [
    block(), block("2,3,16"), block("b,3,16"), block("2,3,16", constant="2,3,16"),
    block("b,s,16", "c,t,16", outputs="float[u,v,16] y"),
], ids=["open", "known", "open batch", "constant", "possibly the same"])  # fmt: skip
def test_what_the_runtime_may_join_changes(proto):
    result = rewritten(rewrite.residual_to_sum, proto)
    assert JOINED not in compute(result.proto)
    assert {"Sum", LAYER} <= set(compute(result.proto))
    assert any("1 residuals" in note for note in result.notes)
    assert JOINED in compute(proto) or proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "u"


@pytest.mark.parametrize("proto", [
    block("3,16"), block("1,2,3,16"), block("2,3,16", "1,3,16"), block(constant="16"),
    block(outputs="float y, float s"), block(outputs="float y, float z", more="z = Neg(s)"),
], ids=["two dimensions", "four", "broadcast", "bias", "output", "second reader"])  # fmt: skip
def test_what_the_runtime_does_not_join_stays(proto):
    assert JOINED not in compute(proto)
    refused(rewrite.residual_to_sum, proto, None)


SIMPLE = "SkipSimplifiedLayerNormalization"


def joined(op=JOINED, *, opset=17, beta=True, bias=True, skip=("b", "s", SIZE), epsilon=None, total=False):
    g = Net.over(["b", "s", SIZE], opset=opset)
    g.input("skip", skip)
    gamma, offset, shift = g.rng.uniform(0.5, 1.5, (3, SIZE))
    operands = ["x", "skip", gamma, *([offset if beta else ""] if op == JOINED else []), *([shift] if bias else [])]
    attributes = {} if epsilon is None else {"epsilon": epsilon}
    y = g.op(op, operands, name="norm", domain="com.microsoft", **attributes)
    if total:
        g.nodes[-1].output.extend(["", "", "sum"])
    for name in (y, *(["sum"] if total else [])):
        g.output(name, ["b", "s", SIZE])
    return g.of()


@given(
    op=st.sampled_from([JOINED, SIMPLE]), beta=st.booleans(), bias=st.booleans(),
    opset=st.sampled_from([17, 18, 21, *[23] * (VERSION >= (1, 24))]),  # the runtime quantizes none of 23 before
    skip=st.sampled_from([(2, 3, SIZE), (1, 3, SIZE), (3, SIZE)]), epsilon=st.sampled_from([None, 1e-5, 0.5]),
    total=st.booleans(), magnitude=st.sampled_from([0.1, 1.0, 100.0]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_the_parts_compute_the_same(op, opset, beta, bias, skip, epsilon, total, magnitude, seed):
    proto = joined(op, opset=opset, beta=beta, bias=bias, skip=skip, epsilon=epsilon, total=total)
    feeds = {"x": normal((2, 3, SIZE), seed, magnitude), "skip": normal(skip, seed + 1, magnitude)}
    expected = LAYER if op == JOINED else RMS if opset == 23 else "Pow ReduceMean Add Sqrt Div Mul"
    check(rewrite.split_skip_norm, proto, feeds, f"Sum {expected}")


def test_a_layer_norm_needs_its_operator_set():
    refused(rewrite.split_skip_norm, joined(opset=16), "needs operator set 17")
