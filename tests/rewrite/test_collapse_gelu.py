from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import collapse_gelu
from tests import models
from tests.rewrite.forms import Graph, assert_formed, quantized_kernels

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
def test_every_form_computes_the_same(shape, kind, form, swaps, constant_rank, magnitude, opset, seed):
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
