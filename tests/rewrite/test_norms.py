"""Norms written in arithmetic, as one operator or as the runtime knows them; sums, padding, pools, means and LRN."""

import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import assume, given, strategies as st

from kenosis_ort import rewrite
from kenosis_ort.rewrite import average_pool_to_conv, fold_padding, lrn_to_pool, pool_from_mean
from tests.graph.build import run
from tests.models import Net, normal
from tests.rewrite.forms import RTOL, check, ops, parse, refused, rewritten, spelled
from tests.targets.qdq import kernels

LAYER, RMS = "LayerNormalization", "RMSNormalization"
VERSION = tuple(int(part) for part in ort.__version__.split(".")[:2])
PRECISE = VERSION >= (1, 30)
"""The runtime's operator subtracts the mean before it squares; earlier ones lose digits over few elements."""
SIZE = 8
SQUARES = {"pow": "s = Pow({0}, two)", "mul": "s = Mul({0}, {0})"}
INVERSES = {"div": "q = Div({0}, r)", "reciprocal": "i = Reciprocal(r) q = Mul({0}, i)",
            "one over": "i = Div(one, r) q = Mul({0}, i)"}  # fmt: skip
NUMBERS = {
    "one": 1.0, "two": 2.0, "epsilon": 1e-5, "gamma": np.linspace(0.5, 1.5, SIZE), "beta": np.linspace(-1, 1, SIZE)
}  # fmt: skip
FORMS = {
    "square": st.sampled_from([*SQUARES]), "inverse": st.sampled_from([*INVERSES]),
    "epsilon": st.sampled_from([1e-5, 1e-12, 0.5]),
}  # fmt: skip


def norm(*, centred=True, twice=False, square="pow", inverse="div", scaled=True, shifted=False):
    """The text of a norm of ``x`` in arithmetic, as `spelled` takes it."""
    front, d, o = ("m = Mean(x) d = Sub(x, m)", "d", "d") if centred else ("", "x", "x")
    front, o = (f"{front} o = Sub(x, m)", "o") if centred and twice else (front, o)
    root = f"{SQUARES[square].format(d)} v = Mean(s) a = Add(v, epsilon) r = Sqrt(a)"
    factors = [*["w = Mul(q, gamma)"] * scaled, *[f"y = Add({'w' if scaled else 'q'}, beta)"] * shifted]
    return " ".join([front, root, INVERSES[inverse].format(o), *factors])


def affine_norm(*, square="mul", inverse="reciprocal", turned=False):
    """The text of a norm as x * k + (beta - mean * k)."""
    inverted = "i = Reciprocal(r)" if inverse == "reciprocal" else "i = Div(one, r)"
    return f"""m = Mean(x) d = Sub({"m, x" if turned else "x, m"}) {SQUARES[square].format("d")} v = Mean(s)
        a = Add(v, epsilon) r = Sqrt(a) {inverted} k = Mul(i, gamma) n = Mul(m, k) t = Sub(beta, n) o = Mul(x, k)
        y = Add(o, t)"""


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
def test_every_layer_norm(lead, sizes, negative, known, scale, shift, magnitude, opset, seed, epsilon, **form):
    axes = [*(range(-len(sizes), 0) if negative else range(len(lead), len(lead) + len(sizes)))]
    rng, body = np.random.default_rng(seed), norm(scaled=bool(scale), shifted=bool(shift), **form)
    numbers = NUMBERS | {"gamma": affine(rng, sizes, scale), "beta": affine(rng, sizes, shift), "epsilon": epsilon}
    shape = [*(lead if known else ["n", "s"][: len(lead)]), *sizes]
    proto = spelled(body, shape, seed=seed, opset=opset, axes=axes, **numbers)
    x = normal((*lead, *sizes), seed, magnitude)
    result = check(rewrite.collapse_layer_norm, proto, x, LAYER, rtol=RTOL if PRECISE else 1e-3)
    (node,) = result.proto.graph.node
    assert onnx.helper.get_node_attr_value(node, "axis") == -len(sizes)
    assert len(result.proto.graph.initializer) == (2 if shift else 1)


@pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has the operator
@given(
    lead=LEAD, size=st.integers(2, 9), scale=AFFINE, magnitude=st.sampled_from([0.1, 1.0, 1e3, 1e10]),
    seed=st.integers(0, 2**16), **FORMS,
)  # fmt: skip
def test_every_rms_norm_computes_the_same(lead, size, scale, magnitude, seed, epsilon, **form):
    numbers = NUMBERS | {"gamma": affine(np.random.default_rng(seed), (size,), scale), "epsilon": epsilon}
    body = norm(centred=False, scaled=bool(scale), **form)
    proto = spelled(body, [*lead, size], seed=seed, opset=23, axes=[-1], **numbers)
    check(rewrite.collapse_layer_norm, proto, normal((*lead, size), seed, magnitude), RMS)


@pytest.mark.parametrize(("rule", "opset", "body"), [
    (rewrite.collapse_layer_norm, 22, norm(centred=False)), (rewrite.collapse_layer_norm, 16, norm()),
    (rewrite.collapse_affine_norm, 16, affine_norm()),
])  # fmt: skip
def test_a_norm_stays_before_its_operator_set(rule, opset, body):
    refused(rule, spelled(body, [2, SIZE], seed=0, opset=opset, axes=[-1], **NUMBERS), None)


@pytest.mark.parametrize(("shape", "gamma", "behind", "also"), [
    ((2, 8), (2, 8), "y = Mul(q, gamma)", []), ((2, 8), (2, 1), "y = Mul(q, gamma)", []),
    ((2, 8), (), "l = Relu(x) y = Mul(q, l)", []), ((2, 8), (8,), "y = Mul(q, gamma)", ["q"]),
    ((2,), (1, 2), "y = Mul(q, gamma)", []),
])  # fmt: skip
def test_a_scale_that_is_no_vector_of_it_alone_stays_behind(shape, gamma, behind, also):
    numbers = NUMBERS | {"gamma": np.ones(gamma)}
    proto = spelled(f"{norm(scaled=False)} {behind}", shape, seed=0, axes=[-1], **numbers)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name, type=proto.graph.input[0].type) for name in also)
    x = normal(shape) if len(shape) > 1 else np.ones(shape, np.float32)
    check(rewrite.collapse_layer_norm, proto, x, f"{LAYER} {'Relu ' * ('Relu' in behind)}Mul")


@given(
    lead=LEAD, symbolic=st.booleans(), square=FORMS["square"], inverse=st.sampled_from(["reciprocal", "one over"]),
    turned=st.booleans(), epsilon=st.sampled_from([1e-3, 1e-5, 0.5]), magnitude=st.sampled_from([0.1, 1.0, 100.0]),
    opset=st.sampled_from([17, 18, 21]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_affine_form_computes_the_same(lead, symbolic, epsilon, magnitude, opset, seed, **form):
    shape, numbers = [*(["n", "s"][: len(lead)] if symbolic else lead), SIZE], NUMBERS | {"epsilon": epsilon}
    proto = spelled(affine_norm(**form), shape, seed=seed, opset=opset, axes=[-1], **numbers)
    result = check(rewrite.collapse_affine_norm, proto, normal((*lead, SIZE), seed, magnitude), LAYER).proto
    assert [LAYER in compute(each) for each in (proto, result)] == [False, True], "the runtime knows the result only"


OPERATORS = {True: LAYER, False: "SimplifiedLayerNormalization"}


def scaled(opset, centred, *, seed=0, epsilon=1e-5, **form):
    body = "p = Abs(x) " + re.sub(r"\bx\b", "p", norm(centred=centred, shifted=centred, **form))
    return spelled(body, (2, 3, SIZE), seed=seed, opset=opset, axes=[-1], **NUMBERS | {"epsilon": epsilon})


@given(
    form=st.sampled_from([(13, True), (16, True), (13, False), (17, False), (18, False), (21, False)]),
    magnitude=st.sampled_from([0.1, 1.0, 1e3]), seed=st.integers(0, 2**16), **FORMS,
)  # fmt: skip
def test_every_spelling_computes_the_same_and_becomes_the_runtimes_operator(form, magnitude, seed, **spelling):
    result = check(rewrite.spell_norm, scaled(*form, seed=seed, **spelling), normal((2, 3, SIZE), seed, magnitude))
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
    assert {"Sum", LAYER, JOINED} & set(compute(result.proto)) == {"Sum", LAYER}
    assert any("1 residuals" in note for note in result.notes)
    assert JOINED in compute(proto) or proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "u"


@pytest.mark.parametrize("proto", [
    block("3,16"), block("1,2,3,16"), block("2,3,16", "1,3,16"), block(constant="16"),
    block(outputs="float y, float s"), block(outputs="float y, float z", more="z = Neg(s)"),
], ids=["two dimensions", "four", "broadcast", "bias", "output", "second reader"])  # fmt: skip
def test_what_the_runtime_does_not_join_stays(proto):
    assert JOINED not in compute(proto)
    refused(rewrite.residual_to_sum, proto, None)


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
    op=st.sampled_from([JOINED, "SkipSimplifiedLayerNormalization"]), beta=st.booleans(), bias=st.booleans(),
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


# ---- padding of windows, pools as Convs, means as pools, LRN as a pool -----------------------------------------------


MISCOUNTS = VERSION < (1, 25)  # the runtime's AveragePool of operator set 19 takes a wrong divisor where padding counts


def pool(kernel, size, *, channels=3, opset=17, **attributes):
    g = Net.over(["N", channels, *size], opset=opset)
    return g.of(g.op("AveragePool", ["x"], name="pool", kernel_shape=kernel, **attributes))


@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)), strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)), pads=st.tuples(*[st.integers(0, 3)] * 4),
    mode=st.sampled_from(["NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]),
    size=st.tuples(st.integers(2, 9), st.integers(2, 9)), counted=st.booleans(), channels=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_pool(kernel, strides, dilations, pads, mode, size, counted, channels, seed):
    opset, padded = 18 if counted and MISCOUNTS else 19, mode == "NOTSET"
    dilations = dilations if padded and opset >= 19 else (1, 1)
    pads = tuple(min(pad, kernel[at % 2] - 1) for at, pad in enumerate(pads)) if padded else (0,) * 4
    reach = [(kernel[a] - 1) * dilations[a] + 1 for a in range(2)]
    counts = [(size[a] + pads[a] + pads[a + 2] - reach[a]) // strides[a] + 1 for a in range(2)]
    if mode.startswith("SAME"):
        counts = [-(-size[a] // strides[a]) for a in range(2)]
        assume(all((counts[a] - 1) * strides[a] + kernel[a] >= size[a] for a in range(2)))
    assume(min(counts) > 0 and max(counts) > 1)
    form = {"pads": pads, **({"dilations": dilations} if opset >= 19 else {})} if padded else {"auto_pad": mode}
    proto = pool(kernel, size, channels=channels, opset=opset, strides=strides, count_include_pad=int(counted), **form)
    x = normal((2, channels, *size), seed)
    if not np.isfinite(run(proto, {"x": x})[0]).all():
        refused(average_pool_to_conv, proto, "a window holds padding only")
        return
    prepared = rewritten(average_pool_to_conv, proto)
    if any("holds padding only" in note for note in prepared.notes):
        assert ops(prepared.proto) == ["AveragePool"]
        return
    found = ops(prepared.proto)
    assert found == ["Conv"] or (found == ["Conv", "Mul"] and not counted and (any(pads) or mode.startswith("SAME")))
    check(average_pool_to_conv, proto, x, found)


@given(
    operator=st.sampled_from(["Conv", "MaxPool"]), size=st.lists(st.integers(3, 7), min_size=1, max_size=3),
    zeros=st.tuples(*[st.integers(0, 2)] * 6), own=st.tuples(*[st.integers(0, 1)] * 6), kernel=st.integers(1, 4),
    stride=st.integers(1, 2), dilation=st.integers(1, 2), front=st.sampled_from(["Relu", "Clip", "Identity"]),
    form=st.sampled_from(["all axes", "some axes", "a number"]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_pad_of_zeros(operator, size, zeros, own, kernel, stride, dilation, front, form, seed):
    rank, is_pool = len(size), operator == "MaxPool"
    dilation = 1 if is_pool else dilation
    before, behind, own = zeros[:rank], zeros[3 : 3 + rank], [min(pad, kernel - 1) for pad in own[: 2 * rank]]
    assume((np.add(size, before) + behind + own[:rank] + own[rank:] > (kernel - 1) * dilation).all())
    g = Net.over(["N", 2, *size], opset=18, seed=seed)
    x = g.op(front, ["x", g.const(np.float32(0.0))] if front == "Clip" else ["x"])
    listed = form == "some axes"
    amounts = [*before, *behind] if listed else [0, 0, *before, 0, 0, *behind]
    more = [g.const(np.float32(0.0))] if form == "a number" else []
    more = ["", g.const(np.arange(-rank, 0))] if listed else more
    y = g.op("Pad", [x, g.const(np.array(amounts)), *more])
    inputs = [y] if is_pool else [y, g.weight((3, 2, *[kernel] * rank))]
    form = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank, "dilations": [dilation] * rank, "pads": own}
    model = g.of(g.op(operator, inputs, **form))
    total = [p + q for p, q in zip(own, (*before, *behind), strict=True)]
    if is_pool and (front == "Identity" or max(total) >= kernel):
        refused(fold_padding, model, "may be negative" if front == "Identity" else "padding alone")
        return
    found = check(fold_padding, model, normal((2, 2, *size), seed), f"{front} {operator}").proto
    assert next(list(a.ints) for a in found.graph.node[-1].attribute if a.name == "pads") == total


@pytest.mark.parametrize("proto", [
    pool((2, 2), ("H", "W"), strides=[2, 2]),  # without a border nothing has to be known of the picture
    pool((3, 3), ("H", "W"), pads=[1] * 4, count_include_pad=1),
    pool((3, 3), (7, 7), strides=[2, 2], ceil_mode=1),  # adds no window
    pool((3, 3), ("H", "W"), ceil_mode=1),
])  # fmt: skip
def test_pools_that_need_no_map(proto):
    check(average_pool_to_conv, proto, normal((2, 3, 7, 7)), "Conv")


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    axes=st.permutations([2, 3]), negative=st.tuples(st.booleans(), st.booleans()),
    keepdims=st.sampled_from([None, 0, 1]), opset=st.sampled_from([13, 17, 18, 21]),
    magnitude=st.sampled_from([1e-3, 1.0, 1e5, 1e30]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_mean_computes_the_same(shape, axes, negative, keepdims, opset, magnitude, seed):
    g = Net.over(shape, opset=opset)
    axes = [axis - 4 if flip else axis for axis, flip in zip(axes, negative, strict=True)]
    y = g.mean("x", axes, **({} if keepdims is None else {"keepdims": keepdims}))
    x = (np.random.default_rng(seed).uniform(0.1, 1, shape) * magnitude).astype(np.float32)
    assert check(pool_from_mean, g.of(y), x, "GlobalAveragePool" + " Flatten" * (keepdims == 0)).nodes == {}


def test_names_stay_unique():
    g = Net.over(["batch", 3, "h", 7])
    first = g.mean("x", [2, 3], keepdims=0)
    proto = g.of(g.op("Relu", [first], name=f"{first}_Flatten"), first)
    result = check(pool_from_mean, proto, np.ones((2, 3, 4, 7), np.float32), "GlobalAveragePool Flatten Relu").proto
    assert [node.name for node in result.graph.node] == [first, f"{first}_Flatten_1", f"{first}_Flatten"]


def test_computed_axes_stay():
    g = Net.over([1, 2, 4, 4], opset=18)
    axes = g.op("Cast", [g.op("ReduceMax", ["x"], keepdims=0)], to=onnx.TensorProto.INT64)
    g.output(g.op("ReduceMean", ["x", g.op("Unsqueeze", [axes, [0]])]), [1, "c", "h", "w"])
    refused(pool_from_mean, g.of(), "are computed")


POWERS = {0.25: " Sqrt Sqrt", 0.5: " Sqrt", 0.75: " Sqrt Sqrt Mul", 1.0: "", 1.3: " Pow"}


def by_definition(x, size, alpha, beta, bias):
    """The runtime's own operator adds and takes away squares as its window moves, and so loses digits of small ones."""
    beside = size // 2
    padded = np.pad(x.astype(np.float64) ** 2, ((0, 0), (beside, beside), (0, 0), (0, 0)))
    total = sum(padded[:, at : at + x.shape[1]] for at in range(size))
    return x / (bias + alpha / size * total) ** beta


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)),
    size=st.sampled_from([1, 3, 5, 7, 11]), alpha=st.sampled_from([1e-4, 1e-2, 1.5]),
    beta=st.sampled_from(list(POWERS)), bias=st.sampled_from([0.5, 1.0, 2.0]), symbolic=st.booleans(),
    magnitude=st.sampled_from([1e-2, 1.0, 1e3]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_window_computes_the_same(shape, size, alpha, beta, bias, symbolic, magnitude, seed):
    g = Net.over(["n", shape[1], "h", "w"] if symbolic else shape)
    given, left_out = {"alpha": alpha, "beta": beta, "bias": bias}, {"alpha": 1e-4, "beta": 0.75, "bias": 1.0}
    proto = g.of(g.op("LRN", ["x"], size=size, **dict(given.items() - left_out.items())))
    x = normal(shape, seed, magnitude)
    result = check(lrn_to_pool, proto, x, f"Mul Unsqueeze AveragePool Squeeze Mul Add{POWERS[beta]} Div", rtol=1e-2)
    exact = by_definition(x, size, alpha, beta, bias)
    assert np.abs(run(result.proto, {"x": x})[0] - exact).max() <= 1e-5 * np.abs(exact).max()
