from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import collapse_clip, collapse_hard_swish
from tests.graph.build import ready
from tests.rewrite.forms import Graph, assert_formed, ops

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
