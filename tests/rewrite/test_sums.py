"""Sums: residuals in front of norms, the runtime's joined norms taken apart, Sum as Adds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.rewrite import residual_to_sum, split_skip_norm, sum_to_add
from tests.graph.build import ready
from tests.models import Net, normal, session
from tests.rewrite.forms import check, ops, parse, refused, rewritten
from tests.targets.qdq import kernels

JOINED, LAYER = "SkipLayerNormalization", "LayerNormalization"


def block(a="b,s,16", b="", *, outputs="float y", constant="", more=""):
    """Two values, their sum and its norm."""
    inputs = f"float[{a}] a" if constant else f"float[{a}] a, float[{b or a}] b"
    second = "" if constant else "q = Relu(b)"
    declared = f"<float[16] g, float[16] h{f', float[{constant}] q' if constant else ''}>"
    return parse(
        f"""({inputs}) => ({outputs}) {declared}
        {{ p = Relu(a) {second} s = Add(p, q) y = LayerNormalization<axis = -1>(s, g, h) {more} }}"""
    )


def compute(proto):
    return [k.op_type for k in kernels(proto)]


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    symbolic=st.booleans(),
    magnitude=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**16),
)
def test_the_result_is_the_same_to_the_bit(shape, symbolic, magnitude, seed):
    proto = block("b,s,16" if symbolic else f"{shape[0]},{shape[1]},16")
    feeds = {name: normal((*shape, 16), seed + at, magnitude) for at, name in enumerate("ab")}
    check(residual_to_sum, proto, feeds, f"Relu Relu Sum {LAYER}", rtol=0)


@pytest.mark.parametrize("proto", [block(), block("2,3,16"), block("b,3,16"), block("2,3,16", constant="2,3,16")])
def test_what_the_runtime_joins_changes(proto):
    assert JOINED in compute(proto)
    result = rewritten(residual_to_sum, proto)
    assert JOINED not in compute(result.proto)
    assert {"Sum", LAYER} <= set(compute(result.proto))
    assert any("1 residuals" in note for note in result.notes)


@pytest.mark.parametrize(
    "proto",
    [
        block("3,16"),
        block("1,2,3,16"),
        block("2,3,16", "1,3,16"),
        block(constant="16"),
        block(outputs="float y, float s"),
        block(outputs="float y, float z", more="z = Neg(s)"),
    ],
    ids=["two dimensions", "four", "broadcast", "bias", "output", "second reader"],
)
def test_what_the_runtime_does_not_join_stays(proto):
    assert JOINED not in compute(proto)
    refused(residual_to_sum, proto, None)


def test_unknown_dimensions_count_as_possibly_the_same():
    assert "Sum" in ops(rewritten(residual_to_sum, block("b,s,16", "c,t,16", outputs="float[u,v,16] y")).proto)


def test_a_norm_that_is_still_arithmetic():
    """Before operator set 17; the runtime makes a norm of it at load, and joins that with the sum."""
    text = """(float[1,6,16] x) => (float y) <float small> { r = Relu(x) t = Add(r, x) m = ReduceMean<axes = [-1]>(t)
    d = Sub(t, m) p = Mul(d, d) v = ReduceMean<axes = [-1]>(p) a = Add(v, small) s = Sqrt(a) y = Div(d, s) }"""
    proto = parse(text, {"small": 1e-5}, opset=13)
    found = [op for op in ops(rewritten(residual_to_sum, proto).proto) if op in ("Add", "Sum")]
    assert found == ["Sum", "Add"]


SIMPLE = "SkipSimplifiedLayerNormalization"
WIDTH = 8


def joined(op=JOINED, *, opset=17, beta=True, bias=True, skip=("b", "s", WIDTH), epsilon=None, total=False):
    g = Net.over(["b", "s", WIDTH], opset=opset)
    g.input("skip", skip)
    gamma, offset, shift = g.rng.uniform(0.5, 1.5, (3, WIDTH))
    operands = ["x", "skip", gamma, *([offset if beta else ""] if op == JOINED else []), *([shift] if bias else [])]
    attributes = {} if epsilon is None else {"epsilon": epsilon}
    y = g.op(op, operands, name="norm", domain="com.microsoft", **attributes)
    if total:
        g.nodes[-1].output.extend(["", "", "sum"])
    for name in (y, *(["sum"] if total else [])):
        g.output(name, ["b", "s", WIDTH])
    return g.of()


@given(
    op=st.sampled_from([JOINED, SIMPLE]),
    opset=st.sampled_from([17, 18, 21]),
    beta=st.booleans(),
    bias=st.booleans(),
    skip=st.sampled_from([(2, 3, WIDTH), (1, 3, WIDTH), (3, WIDTH)]),
    epsilon=st.sampled_from([None, 1e-5, 0.5]),
    total=st.booleans(),
    magnitude=st.sampled_from([0.1, 1.0, 100.0]),
    seed=st.integers(0, 2**16),
)
def test_the_parts_compute_the_same(op, opset, beta, bias, skip, epsilon, total, magnitude, seed):
    proto = joined(op, opset=opset, beta=beta, bias=bias, skip=skip, epsilon=epsilon, total=total)
    feeds = {"x": normal((2, 3, WIDTH), seed, magnitude), "skip": normal(skip, seed + 1, magnitude)}
    expected = "Sum LayerNormalization" if op == JOINED else "Sum Pow ReduceMean Add Sqrt Div Mul"
    check(split_skip_norm, proto, feeds, expected)


@pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has the operator
def test_the_operator_for_rms_norms_is_written_where_there_is_one():
    feeds = {"x": normal((2, 3, WIDTH)), "skip": normal((2, 3, WIDTH), 1)}
    check(split_skip_norm, joined(SIMPLE, opset=23), feeds, "Sum RMSNormalization")


def test_a_layer_norm_needs_its_operator_set():
    refused(split_skip_norm, joined(opset=16), "needs operator set 17")


@pytest.mark.parametrize("op", [JOINED, SIMPLE])
def test_the_runtime_does_not_join_them_again(op):
    result = ready(joined(op), rewrites=[split_skip_norm, residual_to_sum]).proto
    expected = "LayerNormalization" if op == JOINED else "SimplifiedLayerNormalization"
    assert [k.op_type for k in kernels(result)][-2:] == ["Sum", expected]
    session(result)


SHAPES = [(2, 3, 4), (1, 3, 4), (3, 1), (4,), ()]


@given(shapes=st.lists(st.sampled_from(SHAPES), min_size=2, max_size=5), seed=st.integers(0, 2**16))
def test_any_sum_is_the_same_to_the_bit(shapes, seed):
    g = Net.over(shapes[0])
    others = [g.input(f"x{at}", shape) for at, shape in enumerate(shapes[1:])]
    proto = g.of(g.op("Sum", ["x", *others], name="sum"))
    feeds = {
        name: normal(shape, seed + at) for at, (name, shape) in enumerate(zip(["x", *others], shapes, strict=True))
    }
    check(sum_to_add, proto, feeds, ["Add"] * len(others), rtol=0)


def test_one_value_twice():
    check(sum_to_add, parse("(float[2] x) => (float y) { y = Sum(x, x) }"), np.ones(2, np.float32), "Add")
