"""Scales and shifts by channel, folded into the layer before them or as a Conv of their own; linear layers as Gemm."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kenosis_ort.rewrite import batch_norm_to_conv, fold_scale, linear_to_gemm
from kenosis_ort.rewrite.affine import fold_batch_norm, fold_gemm_factors
from tests.models import Net, normal
from tests.rewrite.forms import check, ops, parse, refused, rewritten

RNG = np.random.default_rng(0)
STEPS = st.sampled_from(["Mul", "Div", "Add", "Sub"])
NORM = "BatchNormalization"


def norm_weights(channels, rng=RNG):
    signed = rng.normal(size=(3, channels))
    return [*signed.astype(np.float32), rng.uniform(0.1, 4, channels).astype(np.float32)]


def chain(*steps, x=("N", 3, "H", "W"), outputs=()):
    """Steps of (operator, constant, whether the constant comes first)."""
    g, y = Net.over(x), "x"
    for op, constant, first in steps:
        y = g.both(op, y, constant, first)
    return g.of(y, *outputs)


X = normal((2, 3, 4, 5))


@given(
    steps=st.lists(
        st.tuples(STEPS, st.sampled_from([(), (1,), (1, 1, 1), (3, 1, 1), (1, 3, 1, 1)]), st.booleans()),
        min_size=1, max_size=4,
    ), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_chain(steps, seed):
    rng = np.random.default_rng(seed)
    proto = chain(*((op, rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape), first and op != "Div")
                    for op, shape, first in steps))  # fmt: skip
    joined = any(np.prod(shape) > 1 for _, shape, _ in steps)
    check(batch_norm_to_conv, proto, X, "Conv" if joined else ops(proto))


CHANNEL = np.array([1.5, -2, 3], np.float32).reshape(3, 1, 1)
SCALE = ("Mul", CHANNEL, False)


@pytest.mark.parametrize(("step", "outputs", "keep", "expected"), [
    (("Add", CHANNEL, False), ["mul_0"], [], "Conv Conv"), (("Add", CHANNEL, False), [], ["mul_0"], "Conv Conv"),
    (("Add", np.ones((4, 5)), False), [], [], "Conv Add"), (("Div", CHANNEL, True), [], [], "Conv Div"),
])  # fmt: skip
def test_a_chain_ends_where_its_values_are_needed(step, outputs, keep, expected):
    check(batch_norm_to_conv, chain(SCALE, step, outputs=outputs), X, expected, keep_values=keep)


@pytest.mark.parametrize(("proto", "reason"), [
    (chain(("Mul", 2.0, False), ("Add", [1.0], False)), None),
    (chain(SCALE, x=("N", "C", 4, 4)), "channel count of 'x' is not known"),
    (chain(("Mul", np.ones((1, 1, 5)), False)), "is not one number a channel"),
    (chain(SCALE, x=("N", 1, 4, 4)), "is not one number a channel"),
    (chain(("Div", CHANNEL, True)), "divides by its input"), (chain(("Div", CHANNEL * 0, False)), "not finite"),
])  # fmt: skip
def test_chains_that_stay_and_why(proto, reason):
    refused(batch_norm_to_conv, proto, reason)


@given(
    groups=st.integers(1, 3), per_group=st.integers(1, 3), out_per_group=st.integers(1, 3), spatial=st.integers(1, 3),
    bias=st.booleans(), add=st.sampled_from([None, "scalar", "channel", "first"]), transposed=st.booleans(),
    epsilon=st.sampled_from([{}, *({"epsilon": e} for e in (1e-5, 1e-3, 0.5))]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_convolutions_of_every_form(groups, per_group, out_per_group, spatial, bias, add, transposed, epsilon, seed):
    rng = np.random.default_rng(seed)
    c_in, c_out, rest = groups * per_group, groups * out_per_group, [1] * spatial
    shape = [c_in, out_per_group] if transposed else [c_out, per_group]
    op = "ConvTranspose" if transposed else "Conv"
    g = Net.over([2, c_in, *[4] * spatial])
    weights = [g.const(rng.normal(size=(*shape, *[2] * spatial)), "w")]
    weights += [g.const(rng.normal(size=c_out), "d")] if bias else []
    y = g.op(op, ["x", *weights], name="conv", group=groups)
    if add:
        addend = rng.normal(size={"scalar": (), "channel": (c_out, *rest), "first": (1, c_out, *rest)}[add])
        y = g.both("Add", y, addend, seed % 2)
    proto = g.of(g.op(NORM, [y, *norm_weights(c_out, rng)], name="bn", **epsilon))
    prepared = check(fold_batch_norm, proto, normal((2, c_in, *[4] * spatial), seed), [op], rtol=1e-4)
    assert {t.name for t in prepared.proto.graph.initializer} <= {"w", "d", "w_bias"}


@given(
    op=st.sampled_from(["Gemm", "MatMul"]), trans_b=st.booleans(), alpha=st.sampled_from([1.0, 0.5]),
    beta=st.sampled_from([0.0, 1.0, 2.0]), bias=st.sampled_from([None, (), (1,), (4,), (1, 4), (1, 1)]),
    add=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_matrix_products_of_every_form(op, trans_b, alpha, beta, bias, add, seed):
    rng, g = np.random.default_rng(seed), Net.over(["N", 3])
    if op == "Gemm":
        operands = [rng.normal(size=(4, 3) if trans_b else (3, 4)), *([] if bias is None else [rng.normal(size=bias)])]
        y = g.op(op, ["x", *operands], alpha=alpha, beta=beta, transB=int(trans_b))
    else:
        y = g.op(op, ["x", rng.normal(size=(3, 4))])
    y = g.op("Add", [y, rng.normal(size=4)]) if add else y
    proto = g.of(g.op(NORM, [y, *norm_weights(4, rng)]))
    check(fold_batch_norm, proto, normal((5, 3), seed), "Gemm" if op == "Gemm" else "MatMul Add", rtol=1e-4)


PAIR = "c = Conv(x, w) y = BatchNormalization(c, g, b, m, v)"


def conv_bn(text=PAIR, kind="float", opset=17, **weights):
    declared = f"<{kind}[3,3,1,1] w, {kind}[3] g, {kind}[3] b, {kind}[3] m, {kind}[3] v>"
    weights = dict(zip("gbmv", norm_weights(3), strict=True)) | weights
    return parse(f"({kind}[1,3,4,4] x) => ({kind}[1,3,4,4] y) {declared} {{ {text} }}", weights, opset=opset)


@pytest.mark.parametrize(("text", "opset", "variance"), [
    *((PAIR, opset, {}) for opset in (7, 9, 14, 15, 17)),
    (PAIR.replace("y = ", "n = ") + " y = BatchNormalization(n, g, b, m, v)", 17, {}),
    (PAIR.replace("ion(c", "ion<epsilon = 1e-12>(c"), 17, {"v": [1e-10, 1, 1]}),
], ids=["7", "9", "14", "15", "17", "two", "next to constant"])  # fmt: skip
def test_what_is_folded_keeps_its_name_and_its_weights_name(text, opset, variance):
    prepared = check(fold_batch_norm, conv_bn(text, opset=opset, **variance), normal((1, 3, 4, 4)), "Conv", rtol=1e-4)
    assert ([*prepared.proto.graph.node[0].input], prepared.nodes["y"]) == (["x", "w", "w_bias"], ("c",))
    assert "BatchNormalization" in prepared.notes[-1]


def test_weights_that_would_overflow_keep_the_norm():
    proto = conv_bn(w=np.full((3, 3, 1, 1), 3e38), g=np.full(3, 1e3))
    assert ops(rewritten(fold_batch_norm, proto).proto) == ["Conv", NORM]


@given(
    kind=st.sampled_from(["Gemm", "transB", "Conv 1", "Conv 2"]), bias=st.booleans(), seed=st.integers(0, 2**16),
    steps=st.lists(
        st.tuples(STEPS, st.sampled_from(["one", "channel", "full"]), st.booleans()), min_size=1, max_size=4),
)  # fmt: skip
def test_every_row_computes_the_same(kind, bias, steps, seed):
    rng, count = np.random.default_rng(seed), 4
    spatial = int(kind[-1]) if kind[-1].isdigit() else 0
    data = normal((2, 3, *(5,) * spatial), seed)
    g, rest = Net.over(data.shape), (1,) * spatial
    weight = rng.normal(size=(3, count) if kind == "Gemm" else (count, 3, *(3,) * spatial))
    attributes = {"pads": [1] * 2 * spatial} if spatial else {"transB": int(kind == "transB")}
    y = g.op("Conv" if spatial else "Gemm", ["x", weight, *([rng.normal(size=count)] if bias else [])], **attributes)
    for op, form, swapped in steps:
        shape = {"one": (), "channel": (count, *rest), "full": (1, count, *rest)}[form]
        y = g.both(op, y, rng.uniform(0.5, 2.0, shape) * rng.choice([-1, 1]), swapped and op != "Div")
    check(fold_scale, g.of(y), data, [g.nodes[0].op_type])


# ---- factors of Gemm in its weights, and linear layers of more dimensions --------------------------------------------


ROWS, IN, OUT = 2, 3, 4
FACTORS = st.sampled_from([0.0, 0.25, 1.0, -2.0])


@given(
    alpha=FACTORS, beta=FACTORS, trans=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    bias=st.sampled_from([None, (), (1,), (OUT,), (1, OUT), (1, 1), (ROWS, 1), (ROWS, OUT)]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_gemm_computes_the_same(alpha, beta, trans, bias, seed):
    shape = (IN, ROWS) if trans[0] else (ROWS, IN)
    g = Net.over(shape, seed=seed)
    operands = [g.rng.normal(size=(OUT, IN) if trans[1] else (IN, OUT))]
    operands += [] if bias is None else [g.rng.normal(size=bias)]
    y = g.op("Gemm", ["x", *operands], alpha=alpha, beta=beta, transA=trans[0], transB=trans[1])
    result = check(fold_gemm_factors, g.of(y), normal(shape, seed), "Transpose Gemm" if trans[0] else "Gemm")
    gemm = result.proto.graph.node[-1]
    plain = alpha == 1.0 and trans[0] == 0 and (bias is None or beta == 1.0) and np.prod(bias or (OUT,)) > 1
    if not plain:
        assert {a.name for a in gemm.attribute} <= {"transB"}
        assert len(gemm.input) == (2 if bias is None or beta == 0.0 else 3)
    if bias in ((), (1,), (1, 1)) and beta != 0.0:
        assert [[*t.dims] for t in result.proto.graph.initializer if t.name == gemm.input[2]] == [[OUT]]


def test_a_computed_bias_that_counts_nothing_goes():
    g = Net.over((ROWS, IN))
    y = g.op("Gemm", ["x", np.ones((IN, OUT)), g.op("Gemm", ["x", np.ones((IN, OUT))])], beta=0.0)
    assert len(check(fold_gemm_factors, g.of(y), normal((ROWS, IN))).proto.graph.node[-1].input) == 2


FEATURES, COLUMNS = 6, 4


def layers(shape, *, bias=(COLUMNS,), swapped=False, opset=17, outs=(COLUMNS,)):
    """Linear layers that read the same value."""
    g, outputs = Net.over([*shape, FEATURES], opset=opset), []
    for at, width in enumerate(outs):
        product = g.op("MatMul", ["x", g.rng.normal(size=(FEATURES, width))], name=f"product{at}")
        outputs.append(g.op("Add", [product, g.rng.normal(size=(*bias[:-1], width))], name=f"add{at}"))
        if swapped:
            g.nodes[-1].input[:] = reversed(g.nodes[-1].input)
    return g.of(*outputs)


@given(
    lead=st.lists(st.integers(1, 4), min_size=2, max_size=3), known=st.lists(st.booleans(), min_size=3, max_size=3),
    count=st.integers(1, 3), ones=st.integers(0, 2), swapped=st.booleans(), opset=st.sampled_from([15, 17, 21]),
)  # fmt: skip
def test_every_layer_computes_the_same(lead, known, count, ones, swapped, opset):
    shape = [size if sure else f"d{at}" for at, (size, sure) in enumerate(zip(lead, known, strict=False))]
    proto = layers(shape, outs=[COLUMNS] * count, bias=(*[1] * ones, COLUMNS), swapped=swapped, opset=opset)
    unknown = sum(isinstance(dim, str) for dim in shape)
    if not unknown:
        refused(linear_to_gemm, proto, None)
        return
    expected = f"Reshape {'Shape Concat ' * (unknown > 1)}Gemm Reshape" + " Gemm Reshape" * (count - 1)
    result = check(linear_to_gemm, proto, normal((*lead, FEATURES)), expected)
    assert [n.name for n in result.proto.graph.node if n.op_type == "Gemm"] == [f"product{at}" for at in range(count)]


def test_layers_of_two_widths_share_the_rows_only():
    expected = "Reshape Shape Concat Gemm Reshape Concat Gemm Reshape Gemm Reshape"
    check(linear_to_gemm, layers(["b", "s"], outs=[4, 5, 4]), normal((2, 3, FEATURES)), expected)


def test_what_is_no_layer_stays_without_a_word():
    refused(linear_to_gemm, layers(["b", 3], opset=14), None)
    g = Net.over(["b", 3, FEATURES])
    computed = g.op("Add", [g.op("MatMul", ["x", np.ones((FEATURES, COLUMNS))]), g.input("bias", [COLUMNS])])
    refused(linear_to_gemm, g.of(computed), None)
