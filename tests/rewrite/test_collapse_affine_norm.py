from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import collapse_affine_norm
from tests.rewrite.forms import Graph, assert_formed, assert_refused
from tests.rewrite.test_collapse_layer_norm import mean
from tests.targets.qdq import kernels

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


def test_other_operator_sets_and_types_stay():
    g = Graph((2, 3, SIZE), opset=16)
    assert_refused(g.model(affine_norm(g)), collapse_affine_norm, None)
    g = Graph((2, 3, SIZE), elem_type=onnx.TensorProto.DOUBLE)
    assert_refused(g.model(affine_norm(g)), collapse_affine_norm, "not known to be float32")
