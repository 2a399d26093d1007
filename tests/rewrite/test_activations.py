"""Activations written in arithmetic: rows of bounds, SiLU, GELU."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import collapse_clip, collapse_gelu, collapse_hard_swish, collapse_silu
from tests import models
from tests.graph.build import ready
from tests.rewrite.forms import Graph, assert_formed, ops, quantized_kernels

BOUND = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 6.0])
STEP = st.one_of(
    st.tuples(st.sampled_from(["Min", "Max"]), BOUND, st.booleans()),
    st.tuples(st.just("Relu")),
    st.tuples(st.just("Clip"), st.none() | BOUND, st.none() | BOUND),
)


def bound(g, x, kind, *numbers):
    if kind == "Relu":
        return g.op(kind, x)
    if kind == "Clip":
        return g.op(kind, x, *("" if number is None else number for number in numbers))
    number, swapped = numbers
    return g.op(kind, *((number, x) if swapped else (x, number)))


def disorderly(step):
    return step[0] == "Clip" and None not in step[1:] and step[1] > step[2]


@settings(deadline=None)
@given(steps=st.lists(STEP, min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_every_row_computes_the_same_to_the_bit(steps, seed):
    g = Graph([3, 40])
    y = "x"
    for step in steps:
        y = bound(g, y, *step)
    x = (np.random.default_rng(seed).normal(size=(3, 40)) * 4).astype(np.float32)
    result = assert_formed(g.model(y), collapse_clip, None, x, rtol=0).proto
    assert result.graph.node[-1].name == y
    if not any(disorderly(step) for step in steps):
        assert len(result.graph.node) == 1
        assert ops(result)[0] in ("Relu", "Clip")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([("Max", 0.0, False)], "Relu"),
        ([("Min", 6.0, False)], "Clip"),
        ([("Max", 0.0, False), ("Min", 6.0, True)], "Clip"),
        ([("Relu",), ("Relu",)], "Relu"),
        ([("Clip", -1.0, None), ("Relu",)], "Relu"),
    ],
)
def test_what_it_becomes(steps, expected):
    g = Graph([2, 8])
    y = "x"
    for step in steps:
        y = bound(g, y, *step)
    found = assert_formed(g.model(g.op("Max", y, -3.0)), collapse_clip, [expected], np.eye(2, 8, dtype=np.float32) * 9)
    assert found.notes[-1].startswith("1 rows")


@pytest.mark.parametrize("order", [("Max", "Min"), ("Min", "Max"), ("Relu", "Min"), ("Relu", "Clip")])
def test_hard_swish_with_bounds_in_a_row(order):
    g = Graph([2, 8])
    y = g.op("Add", "x", 3.0)
    for kind in order:
        y = bound(g, y, kind, *{"Max": (0.0, False), "Min": (6.0, False), "Clip": (0.0, 6.0)}.get(kind, ()))
    y = g.op("Mul", "x", g.op("Div", y, 6.0))
    assert ops(ready(g.model(y), rewrites=[collapse_clip, collapse_hard_swish]).proto) == ["HardSwish"]


QUICK = "com.microsoft.QuickGelu"


def silu(graph, x, *, alpha=None, form="mul", swap=False, gate_first=False, shape=()):
    argument = x
    if alpha is not None:
        factor = np.full(shape, alpha if form == "mul" else 1.0 / alpha)
        argument = (
            graph.op("Mul", *((factor, x) if swap else (x, factor))) if form == "mul" else graph.op("Div", x, factor)
        )
    gate = graph.op("Sigmoid", argument)
    return graph.op("Mul", *((gate, x) if gate_first else (x, gate)))


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    alpha=st.none() | st.sampled_from([1.702, 1.0, -0.5, 3.0]) | st.floats(0.01, 10),
    form=st.sampled_from(["mul", "div"]),
    swap=st.booleans(),
    gate_first=st.booleans(),
    factor_rank=st.integers(0, 1),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0, 1e4, 1e30]),
    opset=st.sampled_from([13, 17, 18, 21]),
    seed=st.integers(0, 2**16),
)
def test_every_silu_computes_the_same(shape, alpha, form, swap, gate_first, factor_rank, magnitude, opset, seed):
    graph = Graph(shape, opset=opset)
    y = silu(graph, "x", alpha=alpha, form=form, swap=swap, gate_first=gate_first, shape=(1,) * factor_rank)
    x = (np.random.default_rng(seed).normal(size=shape) * magnitude).astype(np.float32)
    result = assert_formed(graph.model(y), collapse_silu, [QUICK], x, rtol=1e-6)
    (node,) = result.proto.graph.node
    assert node.name == y
    assert onnx.helper.get_node_attr_value(node, "alpha") == pytest.approx(1.0 if alpha is None else alpha, rel=1e-6)
    assert result.nodes == {n.name: (y,) for n in graph.nodes[:-1]}
    assert not result.proto.graph.initializer


def test_it_equals_the_primitives_bit_for_bit():
    x = np.concatenate([np.linspace(-200, 200, 4001), [0.0, 1e38, -1e38]]).astype(np.float32)
    graph = Graph(x.shape)
    assert_formed(graph.model(silu(graph, "x")), collapse_silu, [QUICK], x, rtol=0)


def test_a_chain_collapses_all_along():
    graph = Graph([2, 3])
    y = "x"
    for _ in range(3):
        y = silu(graph, y)
    result = assert_formed(graph.model(y), collapse_silu, [QUICK] * 3, np.ones((2, 3), np.float32))
    assert any("3 SiLU activations" in note for note in result.notes)
    assert [e.domain for e in result.proto.opset_import] == ["", "com.microsoft"]


def test_an_output_keeps_its_name_and_symbolic_shapes_stay():
    graph = Graph(["batch", 3])
    result = assert_formed(graph.model(silu(graph, "x")), collapse_silu, [QUICK], np.ones((4, 3), np.float32))
    assert result.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


GELU, FAST = "com.microsoft.Gelu", "com.microsoft.FastGelu"
SLOPE = math.sqrt(2 / math.pi)


class Writer(Graph):
    """Writes arithmetic with operands in the orders that ``swaps`` says, constants of the given rank."""

    def __init__(self, shape, *, swaps=(), constant_rank=0, **options):
        super().__init__(shape, **options)
        self.swaps, self.constant_rank = iter(swaps), constant_rank

    def number(self, content):
        return self.const(np.full((1,) * self.constant_rank, content))

    def both(self, op_type, left, right):
        pair = (left, right) if next(self.swaps, False) else (right, left)
        return self.op(op_type, *pair)

    def times(self, left, right):
        return self.both("Mul", left, right if isinstance(right, str) else self.number(right))

    def plus(self, left, right):
        return self.both("Add", left, right if isinstance(right, str) else self.number(right))


def erf_of(g, x, form):
    if form == "div":
        return g.op("Erf", g.op("Div", x, g.number(math.sqrt(2))))
    return g.op("Erf", g.times(x, math.sqrt(0.5)))


def tanh_of(g, x, form):
    if form == "fast":  # x * b * (1 + k * x * x)
        inner = g.plus(g.times(g.times(x, 0.044715), x), 1.0)
        return g.op("Tanh", g.times(g.times(x, SLOPE), inner))
    cube = g.op("Pow", x, g.number(3.0)) if form == "pow" else g.times(x, g.times(x, x))
    if form == "spread":  # b * x + (b * k) * x^3
        return g.op("Tanh", g.plus(g.times(x, SLOPE), g.times(cube, SLOPE * 0.044715)))
    return g.op("Tanh", g.times(g.plus(x, g.times(cube, 0.044715)), SLOPE))


def around(g, x, bend, form):
    if form == "half last":
        return g.times(g.times(x, g.plus(bend, 1.0)), 0.5)
    if form == "half first":
        return g.times(g.times(x, 0.5), g.plus(bend, 1.0))
    if form == "halved gate":
        return g.times(x, g.times(g.plus(bend, 1.0), 0.5))
    if form == "divided":
        return g.op("Div", g.times(x, g.plus(bend, 1.0)), g.number(2.0))
    if form == "spread":
        return g.times(g.plus(g.times(bend, 0.5), 0.5), x)
    return g.times(g.plus(x, g.times(x, bend)), 0.5)


AROUND = ["half last", "half first", "halved gate", "divided", "spread", "product first"]


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kind=st.sampled_from([("Erf", "div"), ("Erf", "mul"), *(("Tanh", f) for f in ("pow", "mul", "fast", "spread"))]),
    form=st.sampled_from(AROUND),
    swaps=st.lists(st.booleans(), max_size=9),
    constant_rank=st.integers(0, 1),
    magnitude=st.sampled_from([1e-3, 0.5, 3.0, 30.0, 1e4, 1e20]),
    opset=st.sampled_from([13, 17, 20]),
    seed=st.integers(0, 2**16),
)
def test_every_gelu_computes_the_same(shape, kind, form, swaps, constant_rank, magnitude, opset, seed):
    g = Writer(shape, swaps=swaps, constant_rank=constant_rank, opset=opset)
    bend = (erf_of if kind[0] == "Erf" else tanh_of)(g, "x", kind[1])
    y = around(g, "x", bend, form)
    x = (np.random.default_rng(seed).normal(size=shape) * magnitude).astype(np.float32)
    x.reshape(-1)[0] = magnitude  # sets the size of the outputs: for negative x the arithmetic cancels
    expected = "Gelu" if opset >= 20 else GELU if kind[0] == "Erf" else FAST
    result = assert_formed(g.model(y), collapse_gelu, [expected], x)
    assert result.proto.graph.node[0].name == y
    assert result.nodes == {n.name: (y,) for n in g.nodes if n.name != y}
    assert not result.proto.graph.initializer


def test_x_may_be_scaled_arithmetic_itself():
    g = Writer([2, 3])
    x = g.times("x", 3.0)
    y = around(g, x, erf_of(g, x, "div"), "half last")
    assert_formed(g.model(y), collapse_gelu, ["Mul", GELU], np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3))


def test_two_in_a_row_share_their_constants():
    g = Writer([2, 3])
    shared = {content: g.number(content) for content in (3.0, 0.044715, SLOPE, 1.0, 0.5)}
    g.number = shared.__getitem__
    y = around(g, "x", tanh_of(g, "x", "pow"), "half first")
    y = around(g, y, tanh_of(g, y, "pow"), "half first")
    result = assert_formed(g.model(y), collapse_gelu, [FAST, FAST], np.ones((2, 3), np.float32))
    assert not result.proto.graph.initializer


def test_a_transformers_gelu():
    block = models.transformer_block()
    x = models.feeds(block, 1)[0]
    after = quantized_kernels(block, [x], [collapse_gelu])
    assert GELU in after
    assert "Erf" not in after
