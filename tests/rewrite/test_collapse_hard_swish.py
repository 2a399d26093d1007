from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import collapse_hard_swish
from tests.rewrite.forms import Graph, assert_formed, assert_refused


def clip_gate(g, x, *, slope=1.0, shift=3.0, high=6.0, order=(), divide=True, times_x=None):
    """Clip(slope * x + shift, 0, high) / high; ``times_x`` multiplies by x before ("first") or behind ("last") it."""
    flips = iter(order)

    def both(op_type, left, right):
        return g.op(op_type, *((left, right) if next(flips, True) else (right, left)))

    line = x if slope == 1.0 else both("Mul", x, slope)
    y = g.op("Clip", both("Add", line, shift), 0.0, high)
    y = both("Mul", y, x) if times_x == "first" else y
    if high != 1.0:
        y = g.op("Div", y, high) if divide else both("Mul", y, 1.0 / high)
    return both("Mul", y, x) if times_x == "last" else y


def inputs(shape, magnitude, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * magnitude).astype(np.float32)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
ORDER = st.lists(st.booleans(), max_size=6)
MAGNITUDE = st.sampled_from([1e-3, 1.0, 5.0, 1e4, 1e30])


@settings(deadline=None)
@given(
    shape=SHAPES,
    high=st.sampled_from([1.0, 6.0, 2.5]),
    slope=st.sampled_from([1.0, 0.2, 3.0]),
    shift=st.sampled_from([3.0, 0.5]),
    order=ORDER,
    divide=st.booleans(),
    times_x=st.sampled_from([None, "first", "last"]),
    magnitude=MAGNITUDE,
    opset=st.sampled_from([13, 14, 17, 22]),
    seed=st.integers(0, 2**16),
)
def test_every_clip_computes_the_same(shape, high, slope, shift, order, divide, times_x, magnitude, opset, seed):
    g = Graph(shape, opset=opset)
    y = clip_gate(g, "x", slope=slope, shift=shift, high=high, order=order, divide=divide, times_x=times_x)
    swish = opset >= 14 and (slope / high, shift / high) == (1 / 6, 0.5)
    expected = ["HardSigmoid"] if times_x is None else ["HardSwish"] if swish else ["HardSigmoid", "Mul"]
    result = assert_formed(g.model(y), collapse_hard_swish, expected, inputs(shape, magnitude, seed))
    gate, last = result.proto.graph.node[0], result.proto.graph.node[-1]
    assert last.name == y
    assert set(result.nodes) == {n.name for n in g.nodes} - {n.name for n in result.proto.graph.node}
    if gate.op_type == "HardSigmoid":
        assert helper.get_node_attr_value(gate, "alpha") == pytest.approx(slope / high, rel=1e-6)
        assert helper.get_node_attr_value(gate, "beta") == pytest.approx(shift / high, rel=1e-6)
    assert not result.proto.graph.initializer


@settings(deadline=None)
@given(shape=SHAPES, gate_first=st.booleans(), magnitude=MAGNITUDE, opset=st.sampled_from([14, 17, 22]))
def test_every_product_with_a_hard_sigmoid_computes_the_same(shape, gate_first, magnitude, opset):
    g = Graph(shape, opset=opset)
    gate = g.op("HardSigmoid", "x", alpha=1 / 6, beta=0.5)
    y = g.op("Mul", *((gate, "x") if gate_first else ("x", gate)))
    result = assert_formed(g.model(y), collapse_hard_swish, ["HardSwish"], inputs(shape, magnitude))
    assert result.nodes == {gate: (y,)}


def test_a_product_stays_where_the_operator_set_has_no_hard_swish():
    g = Graph([2, 3], opset=13)
    proto = g.model(g.op("Mul", "x", g.op("HardSigmoid", "x", alpha=1 / 6, beta=0.5)))
    assert_refused(proto, collapse_hard_swish, None)


def test_x_may_be_scaled_arithmetic_itself():
    g = Graph([2, 3])
    x = g.op("Mul", "x", 2.0)
    y = clip_gate(g, x, times_x="last")
    assert_formed(g.model(y), collapse_hard_swish, ["Mul", "HardSwish"], inputs([2, 3], 3.0))
    g = Graph([2, 3])
    y = clip_gate(g, g.op("Mul", "x", 2.0))
    assert_formed(g.model(y), collapse_hard_swish, ["HardSigmoid"], inputs([2, 3], 3.0))


def test_a_gate_of_another_value_becomes_a_hard_sigmoid():
    g = Graph([2, 3])
    proto = g.model(g.op("Mul", g.op("Relu", "x"), clip_gate(g, "x")))
    result = assert_formed(proto, collapse_hard_swish, ["Relu", "HardSigmoid", "Mul"], inputs([2, 3], 3.0))
    assert set(result.nodes) == {"add1", "clip2"}


def test_a_gate_that_is_needed_elsewhere_too_becomes_a_hard_sigmoid():
    g = Graph([2, 3])
    gate = clip_gate(g, "x")
    proto = g.model(g.op("Mul", "x", gate), gate)
    assert_formed(proto, collapse_hard_swish, ["HardSigmoid", "Mul"], inputs([2, 3], 3.0))


def test_an_output_gate_stays_in_a_product():
    g = Graph([2, 3])
    gate = g.op("HardSigmoid", "x", alpha=1 / 6, beta=0.5)
    proto = g.model(g.op("Mul", "x", gate), gate)
    assert_refused(proto, collapse_hard_swish, f"'{gate}' is needed elsewhere")


def test_other_slopes_stay_hard_sigmoid_and_mul():
    g = Graph([2, 3])
    y = g.op("Mul", "x", g.op("HardSigmoid", "x"))
    assert_refused(g.model(y), collapse_hard_swish, "alpha 0.2 and beta 0.5 are not those of HardSwish")
