import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import example, given, strategies as st

import kenosis_ort
from kenosis_ort.cli.main import main
from kenosis_ort.rewrite import fuse_attention
from tests.contracts import rules
from tests.graph.build import assert_same, run
from tests.models import Net, feeds, normal
from tests.rewrite.forms import check, ops, parse, rewritten

pytestmark = pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has the operator

LEAST = float(np.finfo(np.float32).min)
ZERO_ROWS = tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 28)


class Heads(Net):
    def turned(self, x, *perm):
        return self.op("Transpose", [x], perm=perm or (0, 1, 3, 2))

    def project(self, x, inputs, *shape):
        """Heads [B, T, N, H] of a linear layer over ``x``."""
        flat = self.op("MatMul", [x, self.rng.normal(size=(inputs, shape[-2] * shape[-1])) / inputs**0.5])
        return self.op("Reshape", [flat, shape])

    def scores(self, q="x", k="x"):
        return self.op("MatMul", [q, self.turned(k)])

    def attend(self, scores, v="x", guard=False):
        p = self.op("Softmax", [scores], axis=-1)
        return self.op("MatMul", [self.op("Where", [self.op("IsNaN", [p]), 0.0, p]) if guard else p, v])

    def joined(self, y, *shape):
        return self.op("Reshape", [self.turned(y, 0, 2, 1, 3), shape])


def transposed_keys(g, k, how, sizes):
    """Returns K^T [B, N, H, T] of split keys [B, T, N, H]."""
    b, t, n, h = sizes
    if how == "0231":
        return g.turned(k, 0, 2, 3, 1)
    heads = g.turned(k, 0, 2, 1, 3)
    if how == "0132":
        return g.turned(heads)
    return g.op("Reshape", [g.turned(g.op("Reshape", [heads, [b * n, t, h]]), 0, 2, 1), [b, n, h, t]])


def masked(g, s, how, shape, filler):
    """Returns masked scores; ``shape`` is that of what is added or chosen by."""
    if how is None:
        return s
    drop = g.rng.random(shape) < 0.4
    drop[..., 0] = False  # of every row something stays
    if how == "add":
        m = np.where(drop, np.float32(filler), g.rng.normal(size=shape).astype(np.float32))
        return g.both("Add", s, m, g.rng.random() < 0.5)
    return g.op("Where", [~drop, s, filler] if how == "keep" else [drop, filler, s])


def fused(g, y, x):
    result = check(fuse_attention, g.of(y), x, rtol=2e-5).proto
    assert (ops(result).count("Attention"), ops(result).count("Softmax")) == (1, 0)
    return result


@given(
    b=st.integers(1, 2), s=st.integers(1, 4), n=st.integers(1, 3), h=st.integers(1, 5), t=st.integers(1, 5),
    v=st.integers(1, 4), keys=st.sampled_from(["0132", "0231", "folded"]),
    scale=st.sampled_from(["scores", "q", "both", "computed", None]),
    how=st.sampled_from([None, "add", "keep", "drop"]),
    shape=st.sampled_from(["full", "batch", "head", "row", "matrix", "rank 3"]),
    filler=st.sampled_from([-np.inf, LEAST, -1e30, -1e9]), guard=st.booleans(), split=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@example(
    b=2, s=3, n=2, h=4, t=5, v=3, keys="folded", scale="both", how="add", shape="batch", filler=LEAST, guard=True,
    split=True, seed=0,
)  # fmt: skip
def test_every_spelling_becomes_one_node(b, s, t, n, h, v, keys, scale, how, shape, filler, guard, split, seed):
    g = Heads.over([b, max(s, t), 5], seed=seed)

    def projected(length, width):
        return g.project(g.op("Slice", ["x", [0], [length], [1]]), 5, b, length, n, width)

    q = g.turned(projected(s, h), 0, 2, 1, 3)
    kt = transposed_keys(g, projected(t, h), keys, (b, t, n, h))
    w = g.turned(projected(t, v), 0, 2, 1, 3)
    factor = h**-0.5
    if scale == "q":
        q = g.op("Mul", [factor, q])
    elif scale == "both":
        q, kt = g.op("Mul", [q, factor**0.5]), g.op("Mul", [kt, factor**0.5])
    elif scale == "computed":
        root = g.op("Sqrt", [g.op("ReduceMax", [g.op("Abs", ["x"])], keepdims=0)])
        q, kt = g.op("Mul", [q, root]), g.op("Mul", [root, kt])
    scores = g.op("MatMul", [q, kt])
    if scale == "scores":
        scores = g.op("Div", [scores, 1 / factor])
    sizes = {
        "full": (b, n, s, t), "batch": (b, 1, 1, t), "head": (1, n, s, t), "row": (1, t), "matrix": (s, t),
        "rank 3": (n, s, t),
    }  # fmt: skip
    y = g.attend(masked(g, scores, how, sizes[shape], filler), w, guard)
    y = g.joined(y, b, s, n * v) if split else y
    found = ops(fused(g, y, normal((b, max(s, t), 5), seed)))
    if split and scale != "computed" and keys != "folded":
        assert "Transpose" not in found  # heads stay side by side


@pytest.mark.parametrize("how", ["add", "keep"])
@pytest.mark.parametrize(("filler", "guard"), [
    *((filler, guard) for filler in (LEAST, -1e30, -1e9) for guard in (True, False)), (-np.inf, True)
])  # fmt: skip
def test_a_row_masked_by_finite_numbers_is_an_average_and_a_guarded_one_by_infinity_zero(filler, guard, how):
    """Everything in the second row is masked."""
    g, x = Heads.over([1, 2, 3, 4]), normal((1, 2, 3, 4))
    keep = np.ones((3, 3), np.float32)
    keep[1] = keep[2, 0] = 0
    computed = g.op("Cast", [g.op("Mul", [keep, 1.0])], to=onnx.TensorProto.BOOL)  # not constant
    if how == "add":
        s = g.op("Add", [g.scores(), g.op("Where", [computed, 0.0, filler])])
    else:
        s = g.op("Where", [computed, g.scores(), filler])
    result = fused(g, g.attend(s, guard=guard), x)
    if np.isinf(filler):
        assert not run(result, {"x": x})[0][0, 0, 1].any()
        assert ("IsNaN" in ops(result)) is not ZERO_ROWS


def test_heads_folded_into_the_batch():
    g = Heads.over([6, 3, 4])
    s = g.op("Add", [g.op("MatMul", ["x", g.turned("x", 0, 2, 1)]), g.rng.normal(size=(6, 1, 3))])
    fused(g, g.attend(s), normal((6, 3, 4)))


@given(b=st.integers(1, 2), s=st.integers(1, 4), n=st.integers(1, 3), h=st.integers(1, 4), seed=st.integers(0, 9))
def test_a_packed_layer_is_taken_apart_without_transposes(b, s, n, h, seed):
    g = Heads.over([b, s, 5], seed=seed)
    packed = g.op("MatMul", ["x", g.rng.normal(size=(5, 3 * n * h))])
    turned = g.turned(g.op("Reshape", [packed, [b, s, 3, n, h]]), 2, 0, 3, 1, 4)
    q, k, v = (g.op("Gather", [turned, i], axis=0) for i in range(3))
    y = g.attend(g.scores(g.op("Mul", [q, h**-0.5]), k), v)
    assert "Transpose" not in ops(fused(g, g.joined(y, b, s, n * h), normal((b, s, 5), seed)))


def test_a_packed_layer_that_is_cut_along_another_axis_is_no_such_layer():
    g = Heads.over([3, 2, 5])
    packed = g.op("Reshape", [g.op("MatMul", ["x", g.rng.normal(size=(5, 24))]), [3, 2, 3, 2, 4]])
    q, k, v = (g.op("Gather", [g.turned(packed, 2, 0, 3, 1, 4), i], axis=1) for i in range(3))
    y = g.joined(g.attend(g.scores(q, k), v), 3, 2, 8)
    check(fuse_attention, g.of(y), normal((3, 2, 5)), rtol=2e-5)


def test_the_runtimes_own_product_is_one_too():
    text = """(float[1,2,3,4] x) => (float[1,2,3,4] y) {
    s = com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(x, x) p = Softmax<axis = -1>(s) y = MatMul(p, x) }"""
    check(fuse_attention, parse(text), normal((1, 2, 3, 4)), "Attention")


def test_a_mask_expanded_to_the_shape_of_the_scores_asks_others_for_it():
    g = Heads.over(["b", 2, "s", 4])
    s = g.scores()
    drop = g.op("Greater", [g.op("ReduceSum", ["x", [1, 2, 3]], keepdims=1), 1e9])
    wide = g.op("Expand", [drop, g.op("Shape", [s])])
    fused(g, g.attend(g.op("Where", [wide, -np.inf, s])), normal((2, 2, 3, 4)))


def test_layers_that_share_a_mask_expand_it_once():
    g = Heads.over(["b", 2, "s", 4])
    drop = g.op("Greater", [g.op("ReduceSum", ["x", [1, 3]], keepdims=1), 1e9])
    mask = g.op("Cast", [g.op("Unsqueeze", [g.op("Squeeze", [drop, [3]]), [2]])], to=1)
    y = g.attend(g.op("Add", [g.scores(), mask]))
    y = g.attend(g.op("Add", [g.scores(y, y), mask]), y)
    kinds = ops(check(fuse_attention, g.of(y), normal((2, 2, 3, 4))).proto)
    assert (kinds.count("Attention"), kinds.count("Max"), kinds.count("Expand") <= 2) == (2, 1, True)


@given(b=st.integers(1, 2), s=st.integers(1, 4), groups=st.integers(1, 2), each=st.integers(2, 3), h=st.integers(1, 4))
def test_repeated_heads_are_read_once(b, s, groups, each, h):
    g = Heads.over([b, s, 5])

    def repeated():
        heads = g.turned(g.project("x", 5, b, s, groups, h), 0, 2, 1, 3)
        heads = g.op("Mul", [heads, heads])  # as rotary embeddings do: heads are not split just before
        wide = g.op("Expand", [g.op("Unsqueeze", [heads, [2]]), [b, groups, each, s, h]])
        return g.op("Reshape", [wide, [b, groups * each, s, h]])

    q = g.turned(g.project("x", 5, b, s, groups * each, h), 0, 2, 1, 3)
    assert "Expand" not in ops(fused(g, g.attend(g.scores(q, repeated()), repeated()), normal((b, s, 5))))


def test_heads_repeated_over_the_batch_too_are_no_repeated_heads():
    g = Heads.over([2, 3, 5])
    alone = g.op("Slice", [g.turned(g.project("x", 5, 2, 3, 2, 4), 0, 2, 1, 3), [0], [1], [0]])
    wide = g.op("Expand", [g.op("Unsqueeze", [alone, [2]]), [2, 2, 2, 3, 4]])
    kv = g.op("Reshape", [wide, [2, 4, 3, 4]])
    q = g.turned(g.project("x", 5, 2, 3, 4, 4), 0, 2, 1, 3)
    check(fuse_attention, g.of(g.attend(g.scores(q, kv), kv)), normal((2, 3, 5)), rtol=2e-5)


@given(
    pictures=st.integers(1, 2), windows=st.integers(1, 3), n=st.integers(1, 2), s=st.integers(1, 3),
    constant=st.booleans(), flip=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_masks_by_window(pictures, windows, n, s, constant, flip, seed):
    b = pictures * windows
    g = Heads.over([b, n, s, 4], seed=seed)
    biased = g.op("Add", [g.scores(), g.rng.normal(size=(1, n, s, s))])
    mask = g.const(np.where(g.rng.random((1, windows, 1, s, s)) < 0.5, -100.0, 0.0))
    if not constant:
        mask = g.op("Add", [mask, g.op("ReduceMax", [g.op("Sub", ["x", "x"])], keepdims=0)])
    cut = g.both("Add", g.op("Reshape", [biased, [pictures, windows, n, s, s]]), mask, flip)
    fused(g, g.attend(g.op("Reshape", [cut, [b, n, s, s]])), normal((b, n, s, 4), seed))


def windowed(counted_by):
    """Scores cut into as many windows as a value tells, and masked by a mask of a number of windows that is open."""
    text = f"""(float[batch,2,3,4] x, float[1,windows,1,3,3] mask, float[1,others] other) => (float[batch,2,3,4] y)
    <int64[1] rest, int64[3] tail, int64[4] whole> {{
    turned = Transpose<perm = [0,1,3,2]>(x) scores = MatMul(x, turned) count = Shape<start = 1, end = 2>({counted_by})
    inside = Concat<axis = 0>(rest, count, tail) cut = Reshape(scores, inside) masked = Add(cut, mask)
    joined = Reshape(masked, whole) p = Softmax<axis = -1>(joined) y = MatMul(p, x) }}"""
    return parse(text, {"rest": [-1], "tail": [2, 3, 3], "whole": [-1, 2, 3, 3]}, opset=23)


@pytest.mark.parametrize("pictures", [1, 3])
def test_the_number_of_windows_may_be_a_symbol(pictures):
    hidden = np.where(np.random.default_rng(0).random((1, 2, 1, 3, 3)) < 0.4, -100.0, 0.0).astype(np.float32)
    feed = {"x": normal((2 * pictures, 2, 3, 4)), "mask": hidden, "other": np.zeros((1, 2), np.float32)}
    assert ops(check(fuse_attention, windowed("mask"), feed).proto).count("Attention") == 1
    assert "Attention" not in ops(rewritten(fuse_attention, windowed("other")).proto)


def test_what_was_known_of_a_value_is_forgotten_where_it_has_other_dimensions():
    """Behind a value of unknown length ONNX says nothing better, and what follows would be inferred from it."""
    g, y = Heads.over([1, "s", 8]), "x"
    for _ in range(2):
        q, k, v = (g.turned(g.project(y, 8, 0, 0, 2, 4), 0, 2, 1, 3) for _ in range(3))
        y = g.op("Gelu", [g.joined(g.attend(g.scores(q, k), v), 0, 0, 8)], domain="com.microsoft")
    g.output(y, [1, "s", 8])
    result = rewritten(fuse_attention, g.of()).proto
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in result.graph.value_info}
    assert [ranks.get(node.output[0], 3) for node in result.graph.node if node.op_type == "Attention"] == [3, 3]


# ---- `fuse`: attention as one operator in a float model -----------------------------------------------------------


@pytest.fixture
def layer():
    """An attention in parts."""
    return rules.net(rules.EXAMPLES["fuse_attention"][1])


def test_the_file_holds_the_layer_and_what_is_in_memory_stays(layer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = layer.SerializeToString(deterministic=True)
    assert (len(kenosis_ort.fuse(layer).attentions), layer.SerializeToString(deterministic=True)) == (1, before)
    assert not list(tmp_path.iterdir())
    source, out = Path("float.onnx"), Path("fused.onnx")
    source.write_bytes(before)
    assert main(["fuse", str(source), str(out), "--json"]) == 0
    assert (len(json.loads(capsys.readouterr().out)["attentions"]), source.read_bytes()) == (1, before)
    assert_same(layer, onnx.load(out), feeds(layer, 1)[0])
    assert len(kenosis_ort.fuse(source, source).attentions) == 1  # in place
    assert ops(onnx.load(source)) == ops(onnx.load(out)) == ["Attention"]


def test_half_precision_stays_what_it_is_and_is_told(layer):
    for value in (*layer.graph.input, *layer.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    found = kenosis_ort.fuse(layer)
    assert (len(found.attentions), any("float32" in note for note in found.notes)) == (0, True)
    assert found.model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16


@pytest.mark.parametrize("wrong", [3, None, b"model"])
def test_what_is_no_model_is_told(wrong):
    with pytest.raises(kenosis_ort.ArgumentTypeError, match="model"):
        kenosis_ort.fuse(wrong)
