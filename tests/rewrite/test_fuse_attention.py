from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import drop_identity, fuse_attention
from tests.graph.build import model, run, value
from tests.rewrite.forms import Graph, assert_formed, assert_refused, formed, quantized_kernels

LEAST = float(np.finfo(np.float32).min)
ZERO_ROWS = tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 28)


def ints(*numbers):
    return np.array(numbers, np.int64)


def transposed_keys(g, k, how, sizes):
    """Returns K^T [B, N, H, T] of split keys [B, T, N, H]."""
    b, t, n, h = sizes
    if how == "0231":
        return g.op("Transpose", k, perm=[0, 2, 3, 1])
    heads = g.op("Transpose", k, perm=[0, 2, 1, 3])
    if how == "0132":
        return g.op("Transpose", heads, perm=[0, 1, 3, 2])
    folded = g.op("Transpose", g.op("Reshape", heads, g.const([b * n, t, h], np.int64)), perm=[0, 2, 1])
    return g.op("Reshape", folded, g.const([b, n, h, t], np.int64))


def masked(g, s, mask, rng, sizes):
    """Returns masked scores; ``mask`` is how, and the shape of what is added or chosen by."""
    if mask is None:
        return s
    how, shape, filler = mask
    drop = rng.random(shape) < 0.4
    drop[..., 0] = False  # of every row something stays
    if how == "add":
        m = np.where(drop, np.float32(filler), rng.normal(size=shape).astype(np.float32))
        return g.op("Add", s, g.const(m)) if rng.random() < 0.5 else g.op("Add", g.const(m), s)
    if how == "keep":
        return g.op("Where", g.const(~drop, np.bool_), s, g.const(filler))
    return g.op("Where", g.const(drop, np.bool_), g.const(filler), s)


def attention(
    *, b=1, s=3, t=3, n=2, h=4, v=4, keys="0132", scale="scores", mask=None, guard=False, split=True, seed=0, outputs=()
):
    """Returns a model of one attention over projections of ``x``, and its input."""
    rng = np.random.default_rng(seed)
    d = 5
    g = Graph([b, max(s, t), d])

    def projected(length, width):
        rows = g.op("Slice", "x", g.const([0], np.int64), g.const([length], np.int64), g.const([1], np.int64))
        flat = g.op("MatMul", rows, g.const(rng.normal(size=(d, n * width))))
        return g.op("Reshape", flat, g.const([b, length, n, width], np.int64))

    q = g.op("Transpose", projected(s, h), perm=[0, 2, 1, 3])
    kt = transposed_keys(g, projected(t, h), keys, (b, t, n, h))
    w = g.op("Transpose", projected(t, v), perm=[0, 2, 1, 3])
    factor = h**-0.5
    if scale == "q":
        q = g.op("Mul", g.const(factor), q)
    elif scale == "both":
        q, kt = g.op("Mul", q, g.const(factor**0.5)), g.op("Mul", kt, g.const(factor**0.5))
    elif scale == "computed":
        root = g.op("Sqrt", g.op("ReduceMax", g.op("Abs", "x"), keepdims=0))
        q, kt = g.op("Mul", q, root), g.op("Mul", root, kt)
    scores = g.op("MatMul", q, kt)
    if scale == "scores":
        scores = g.op("Div", scores, g.const(1 / factor))
    p = g.op("Softmax", masked(g, scores, mask, rng, (b, n, s, t)), axis=-1)
    if guard:
        p = g.op("Where", g.op("IsNaN", p), g.const(0.0), p)
    y = g.op("MatMul", p, w)
    if split:
        y = g.op("Reshape", g.op("Transpose", y, perm=[0, 2, 1, 3]), g.const([b, s, n * v], np.int64))
    return g, y, rng.normal(size=(b, max(s, t), d)).astype(np.float32)


def fused(g, y, x, **options):
    result = assert_formed(g.model(y), fuse_attention, None, x, rtol=2e-5, **options)
    kinds = [node.op_type for node in result.proto.graph.node]
    assert kinds.count("Attention") == 1
    assert "Softmax" not in kinds
    return result


SIZES = {"b": st.integers(1, 2), "s": st.integers(1, 4), "n": st.integers(1, 3), "h": st.integers(1, 5)}
SHAPES = st.sampled_from(["full", "batch", "head", "row", "matrix", "rank 3"])


def shape_of(name, b, n, s, t):
    return {
        "full": (b, n, s, t), "batch": (b, 1, 1, t), "head": (1, n, s, t), "row": (1, t), "matrix": (s, t),
        "rank 3": (n, s, t),
    }[name]  # fmt: skip


@settings(deadline=None)
@given(
    **SIZES,
    t=st.integers(1, 5),
    v=st.integers(1, 4),
    keys=st.sampled_from(["0132", "0231", "folded"]),
    scale=st.sampled_from(["scores", "q", "both", "computed", None]),
    how=st.sampled_from([None, "add", "keep", "drop"]),
    shape=SHAPES,
    filler=st.sampled_from([-np.inf, LEAST, -1e30, -1e9]),
    guard=st.booleans(),
    split=st.booleans(),
    seed=st.integers(0, 99),
)
@example(
    b=2, s=3, n=2, h=4, t=5, v=3, keys="folded", scale="both", how="add", shape="batch", filler=LEAST, guard=True,
    split=True, seed=0,
)  # fmt: skip
def test_every_spelling_becomes_one_node(b, s, t, n, h, v, keys, scale, how, shape, filler, guard, split, seed):
    mask = None if how is None else (how, shape_of(shape, b, n, s, t), filler)
    g, y, x = attention(
        b=b, s=s, t=t, n=n, h=h, v=v, keys=keys, scale=scale, mask=mask, guard=guard, split=split, seed=seed
    )
    result = fused(g, y, x)
    kinds = [node.op_type for node in result.proto.graph.node]
    if split and scale != "computed" and keys != "folded":
        assert "Transpose" not in kinds  # heads stay side by side


def rows_masked(filler, *, guard, how="add"):
    """Returns an attention of which everything in the second row is masked."""
    g = Graph([1, 2, 3, 4])
    mask = np.zeros((3, 3), np.float32)
    mask[1] = filler
    mask[2, 0] = filler
    s = g.op("MatMul", "x", g.op("Transpose", "x", perm=[0, 1, 3, 2]))
    computed = g.op("Mul", g.const(mask == 0, np.float32), g.const(1.0))  # what a mask is made of is not constant
    if how == "add":
        s = g.op(
            "Add", s, g.op("Where", g.op("Cast", computed, to=onnx.TensorProto.BOOL), g.const(0.0), g.const(filler))
        )
    else:
        s = g.op("Where", g.op("Cast", computed, to=onnx.TensorProto.BOOL), s, g.const(filler))
    p = g.op("Softmax", s, axis=-1)
    if guard:
        p = g.op("Where", g.op("IsNaN", p), g.const(0.0), p)
    return g, g.op("MatMul", p, "x")


@pytest.mark.parametrize("how", ["add", "keep"])
@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("filler", [LEAST, -1e30, -1e9])
def test_a_row_masked_by_finite_numbers_is_an_average(filler, guard, how):
    g, y = rows_masked(filler, guard=guard, how=how)
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 4)).astype(np.float32)
    fused(g, y, x)


@pytest.mark.parametrize("how", ["add", "keep"])
def test_a_guarded_row_masked_by_infinity_is_zero(how):
    g, y = rows_masked(-np.inf, guard=True, how=how)
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 4)).astype(np.float32)
    result = fused(g, y, x)
    assert not run(result.proto, {"x": x})[0][0, 0, 1].any()
    assert ("IsNaN" in [node.op_type for node in result.proto.graph.node]) is not ZERO_ROWS


def test_heads_folded_into_the_batch():
    rng = np.random.default_rng(0)
    g = Graph([6, 3, 4])
    s = g.op("Add", g.op("MatMul", "x", g.op("Transpose", "x", perm=[0, 2, 1])), g.const(rng.normal(size=(6, 1, 3))))
    y = g.op("MatMul", g.op("Softmax", s, axis=-1), "x")
    fused(g, y, rng.normal(size=(6, 3, 4)).astype(np.float32))


@settings(max_examples=20, deadline=None)
@given(b=st.integers(1, 2), s=st.integers(1, 4), n=st.integers(1, 3), h=st.integers(1, 4), seed=st.integers(0, 9))
def test_a_packed_layer_is_taken_apart_without_transposes(b, s, n, h, seed):
    rng = np.random.default_rng(seed)
    g = Graph([b, s, 5])
    packed = g.op("MatMul", "x", g.const(rng.normal(size=(5, 3 * n * h))))
    turned = g.op("Transpose", g.op("Reshape", packed, g.const([b, s, 3, n, h], np.int64)), perm=[2, 0, 3, 1, 4])
    q, k, v = (g.op("Gather", turned, g.const(i, np.int64), axis=0) for i in range(3))
    scores = g.op("MatMul", g.op("Mul", q, g.const(h**-0.5)), g.op("Transpose", k, perm=[0, 1, 3, 2]))
    y = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    y = g.op("Reshape", y, g.const([b, s, n * h], np.int64))
    result = fused(g, y, rng.normal(size=(b, s, 5)).astype(np.float32))
    assert "Transpose" not in [node.op_type for node in result.proto.graph.node]


def test_the_runtimes_own_product_is_one_too():
    nodes = [
        helper.make_node("FusedMatMul", ["x", "x"], ["s"], name="s", domain="com.microsoft", transB=1, alpha=0.5),
        helper.make_node("Softmax", ["s"], ["p"], name="p", axis=-1),
        helper.make_node("MatMul", ["p", "x"], ["y"], name="y"),
    ]
    proto = model(nodes, [value("x", [1, 2, 3, 4])], [value("y", None)], {}, opset=17)
    proto.opset_import.add(domain="com.microsoft", version=1)
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 4)).astype(np.float32)
    result = formed(proto, fuse_attention)
    assert [node.op_type for node in result.proto.graph.node] == ["Attention"]
    np.testing.assert_allclose(run(proto, {"x": x})[0], run(result.proto, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_a_mask_expanded_to_the_shape_of_the_scores_asks_others_for_it():
    g = Graph(["b", 2, "s", 4])
    s = g.op("MatMul", "x", g.op("Transpose", "x", perm=[0, 1, 3, 2]))
    drop = g.op("Greater", g.op("ReduceSum", "x", g.const([1, 2, 3], np.int64), keepdims=1), g.const(1e9))
    wide = g.op("Expand", drop, g.op("Shape", s))
    y = g.op("MatMul", g.op("Softmax", g.op("Where", wide, g.const(-np.inf), s), axis=-1), "x")
    fused(g, y, np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32))


def test_layers_that_share_a_mask_expand_it_once():
    g = Graph(["b", 2, "s", 4])
    drop = g.op("Greater", g.op("ReduceSum", "x", g.const([1, 3], np.int64), keepdims=1), g.const(1e9))
    mask = g.op("Cast", g.op("Unsqueeze", g.op("Squeeze", drop, g.const([3], np.int64)), g.const([2], np.int64)), to=1)
    y = "x"
    for _ in range(2):
        s = g.op("Add", g.op("MatMul", y, g.op("Transpose", y, perm=[0, 1, 3, 2])), mask)
        y = g.op("MatMul", g.op("Softmax", s, axis=-1), y)
    x = np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32)
    kinds = [node.op_type for node in assert_formed(g.model(y), fuse_attention, None, x).proto.graph.node]
    assert (kinds.count("Attention"), kinds.count("Max")) == (2, 1)
    assert kinds.count("Expand") <= 2


def test_an_idle_cast_does_not_hide_the_attention():
    g = Graph([1, 2, 3, 4])
    s = g.op("MatMul", "x", g.op("Transpose", "x", perm=[0, 1, 3, 2]))
    p = g.op("Cast", g.op("Softmax", s, axis=-1), to=onnx.TensorProto.FLOAT)
    proto = g.model(g.op("MatMul", p, "x"))
    assert [n.op_type for n in formed(proto, drop_identity).proto.graph.node].count("Cast") == 0


def simple(g, *, filler=None, q="x", k="x", axis=-1):
    s = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    if filler is not None:
        s = g.op("Where", g.const([[True, False, True]], np.bool_), s, g.const(filler))
    p = g.op("Softmax", s, axis=axis)
    return s, p, g.op("MatMul", p, "x")


def test_scores_masked_by_a_number_that_does_not_vanish_stay():
    g = Graph([1, 2, 3, 4])
    assert_refused(g.model(simple(g, filler=-100.0)[2]), fuse_attention, "small enough")


def test_a_scale_of_zero_stays():
    g = Graph([1, 2, 3, 4])
    s = g.op("Mul", g.op("MatMul", "x", g.op("Transpose", "x", perm=[0, 1, 3, 2])), g.const(0.0))
    y = g.op("MatMul", g.op("Softmax", s, axis=-1), "x")
    assert_refused(g.model(y), fuse_attention, "scale")


def test_a_softmax_of_a_classifier_is_no_attention():
    g = Graph([1, 4])
    y = g.op("Softmax", g.op("MatMul", "x", g.const(np.ones((4, 4)))), axis=-1)
    assert_refused(g.model(y), fuse_attention, None)


def test_linear_layers_around_it_are_integer():
    rng = np.random.default_rng(0)
    b, s, n, h = 1, 8, 2, 16
    g = Graph([b, s, n * h])

    def heads(x):
        flat = g.op("MatMul", x, g.const(rng.normal(size=(n * h, n * h)) / (n * h) ** 0.5))
        return g.op("Transpose", g.op("Reshape", flat, g.const([b, s, n, h], np.int64)), perm=[0, 2, 1, 3])

    q, k, v = heads("x"), heads("x"), heads("x")
    p = g.op("Softmax", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    y = g.op("Transpose", g.op("MatMul", p, v), perm=[0, 2, 1, 3])
    y = g.op("Reshape", y, g.const([b, s, n * h], np.int64))
    y = g.op("MatMul", y, g.const(rng.normal(size=(n * h, n * h))))
    feeds = [{"x": rng.normal(size=(b, s, n * h)).astype(np.float32)} for _ in range(4)]
    found = quantized_kernels(g.model(y), feeds, [fuse_attention])
    assert found.count("Attention") == 1
    assert "MatMul" not in found
    assert sum("MatMulIntegerToFloat" in kind or "QGemm" in kind or "QLinearMatMul" in kind for kind in found) == 4


@settings(max_examples=20, deadline=None)
@given(b=st.integers(1, 2), s=st.integers(1, 4), groups=st.integers(1, 2), each=st.integers(2, 3), h=st.integers(1, 4))
def test_repeated_heads_are_read_once(b, s, groups, each, h):
    rng = np.random.default_rng(0)
    g = Graph([b, s, 5])

    def heads(n):
        flat = g.op("MatMul", "x", g.const(rng.normal(size=(5, n * h))))
        return g.op("Transpose", g.op("Reshape", flat, g.const([b, s, n, h], np.int64)), perm=[0, 2, 1, 3])

    def repeated(value):
        value = g.op("Mul", value, value)  # as rotary embeddings do: heads are not split just before
        wide = g.op("Unsqueeze", value, g.const([2], np.int64))
        wide = g.op("Expand", wide, g.const([b, groups, each, s, h], np.int64))
        return g.op("Reshape", wide, g.const([b, groups * each, s, h], np.int64))

    q, k, v = heads(groups * each), repeated(heads(groups)), repeated(heads(groups))
    p = g.op("Softmax", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    result = fused(g, g.op("MatMul", p, v), rng.normal(size=(b, s, 5)).astype(np.float32))
    assert "Expand" not in [node.op_type for node in result.proto.graph.node]


@settings(max_examples=20, deadline=None)
@given(
    pictures=st.integers(1, 2), windows=st.integers(1, 3), n=st.integers(1, 2), s=st.integers(1, 3),
    constant=st.booleans(), flip=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_masks_by_window(pictures, windows, n, s, constant, flip, seed):
    rng = np.random.default_rng(seed)
    b = pictures * windows
    g = Graph([b, n, s, 4])
    scores = g.op("MatMul", "x", g.op("Transpose", "x", perm=[0, 1, 3, 2]))
    bias = g.const(rng.normal(size=(1, n, s, s)))
    cut = g.op("Reshape", g.op("Add", scores, bias), g.const([pictures, windows, n, s, s], np.int64))
    mask = g.const(np.where(rng.random((1, windows, 1, s, s)) < 0.5, -100.0, 0.0))
    if not constant:
        mask = g.op("Add", mask, g.op("ReduceMax", g.op("Sub", "x", "x"), keepdims=0))
    cut = g.op("Add", *((mask, cut) if flip else (cut, mask)))
    p = g.op("Softmax", g.op("Reshape", cut, g.const([b, n, s, s], np.int64)), axis=-1)
    fused(g, g.op("MatMul", p, "x"), rng.normal(size=(b, n, s, 4)).astype(np.float32))


def windowed(counted_by: str) -> onnx.ModelProto:
    """Scores cut into as many windows as a value tells, and masked by a mask of a number of windows that is open."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["x", "turned"], ["scores"]),
        helper.make_node("Shape", [counted_by], ["windows"], start=1, end=2),
        helper.make_node("Concat", ["rest", "windows", "tail"], ["inside"], axis=0),
        helper.make_node("Reshape", ["scores", "inside"], ["cut"]),
        helper.make_node("Add", ["cut", "mask"], ["masked"]),
        helper.make_node("Reshape", ["masked", "whole"], ["joined"]),
        helper.make_node("Softmax", ["joined"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "x"], ["y"]),
    ]
    constants = {"rest": ints(-1), "tail": ints(2, 3, 3), "whole": ints(-1, 2, 3, 3)}
    inputs = [value("x", ["batch", 2, 3, 4]), value("mask", [1, "windows", 1, 3, 3]), value("other", [1, "others"])]
    return model(nodes, inputs, [value("y", ["batch", 2, 3, 4])], constants, opset=23, ir=10)


@pytest.mark.parametrize("pictures", [1, 3])
def test_the_number_of_windows_may_be_a_symbol(pictures):
    proto, rng = windowed("mask"), np.random.default_rng(0)
    result = formed(proto, fuse_attention)
    assert [node.op_type for node in result.proto.graph.node].count("Attention") == 1
    feed = {
        "x": rng.normal(size=(2 * pictures, 2, 3, 4)).astype(np.float32),
        "mask": np.where(rng.random((1, 2, 1, 3, 3)) < 0.4, -100.0, 0.0).astype(np.float32),
        "other": np.zeros((1, 2), np.float32),
    }
    (want,), (got,) = run(proto, feed), run(result.proto, feed)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    other = formed(windowed("other"), fuse_attention)
    assert "Attention" not in [node.op_type for node in other.proto.graph.node]


def test_what_was_known_of_a_value_is_forgotten_where_it_has_other_dimensions():
    """Behind a value of unknown length ONNX says nothing better, and what follows would be inferred from it."""
    rng = np.random.default_rng(0)
    g = Graph([1, "s", 8])
    y = "x"
    for _ in range(2):
        q, k, v = (
            g.op("Transpose", g.op("Reshape", g.op("MatMul", y, g.const(w)), g.const([0, 0, 2, 4], np.int64)), perm=p)
            for w, p in zip(rng.normal(size=(3, 8, 8)), ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        mixed = g.op("MatMul", g.op("Softmax", g.op("MatMul", q, k), axis=-1), v)
        y = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.const([0, 0, 8], np.int64))
        y = g.op("Gelu", y, domain="com.microsoft")
    proto = g.model(y)
    proto.opset_import.add(domain="com.microsoft", version=1)
    result = formed(proto, fuse_attention)
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in result.proto.graph.value_info}
    attentions = [node for node in result.proto.graph.node if node.op_type == "Attention"]
    assert len(attentions) == 2
    assert [ranks.get(node.output[0], 3) for node in attentions] == [3, 3]
