from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import fold_scale
from kenosis_ort.rewrite.channel_affine import affine_step
from tests.rewrite.forms import Graph, assert_formed, assert_refused

IN, OUT = 3, 4
RNG = np.random.default_rng(0)


def layer(g, x, kind, *, bias=True, rng=RNG, **attributes):
    if kind == "Gemm":
        shape = (OUT, IN) if attributes.get("transB") else (IN, OUT)
    else:
        shape = (OUT, IN, *(3,) * (len(g.shape) - 2))
        attributes["pads"] = [1] * 2 * (len(g.shape) - 2)
    return g.op(kind, x, rng.normal(size=shape), *([rng.normal(size=OUT)] if bias else []), **attributes)


@settings(deadline=None)
@given(
    kind=st.sampled_from(["Gemm", "transB", "Conv 1", "Conv 2"]),
    bias=st.booleans(),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["Mul", "Div", "Add", "Sub"]), st.sampled_from(["one", "channel", "full"]), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**16),
)
def test_every_row_computes_the_same(kind, bias, steps, seed):
    rng = np.random.default_rng(seed)
    spatial = {"Conv 1": 1, "Conv 2": 2}.get(kind, 0)
    g = Graph((2, IN, *(5,) * spatial))
    attributes = {"transB": 1} if kind == "transB" else {}
    y = layer(g, "x", kind.split()[0] if spatial else "Gemm", bias=bias, rng=rng, **attributes)
    for op, form, swapped in steps:
        shape = {"one": (), "channel": (OUT, *(1,) * spatial), "full": (1, OUT, *(1,) * spatial)}[form]
        constant = rng.uniform(0.5, 2.0, shape) * rng.choice([-1, 1])
        y = g.op(op, *((constant, y) if swapped and op != "Div" else (y, constant)))
    x = rng.normal(size=g.shape).astype(np.float32)
    result = assert_formed(g.model(y), fold_scale, None, x)
    (node,) = result.proto.graph.node
    assert node.name == g.nodes[0].name


def test_a_quotient_that_divides_by_it_stays():
    g = Graph((2, IN))
    y = g.op("Mul", g.op("Div", 1.0, g.op("Add", layer(g, "x", "Gemm"), 20.0)), 3.0)
    assert_formed(g.model(y), fold_scale, ["Gemm", "Div", "Mul"], RNG.normal(size=(2, IN)).astype(np.float32))


def test_what_stays_and_why():
    g = Graph((2, IN))
    assert_refused(g.model(g.op("Mul", layer(g, "x", "Gemm", alpha=2.0), 3.0)), fold_scale, "alpha or beta is not 1")
    assert_refused(g.model(g.op("Mul", layer(g, "x", "Gemm", alpha=2.0), 0.0)), fold_scale, "alpha or beta is not 1")
    g = Graph((2, IN))
    y = g.op("Gemm", "x", np.ones((IN, OUT)), np.ones((2, OUT)))
    assert_refused(g.model(g.op("Mul", y, 3.0)), fold_scale, "is not one number a channel")
    g = Graph((2, IN))
    assert_refused(g.model(g.op("Div", layer(g, "x", "Gemm"), 0.0)), fold_scale, "not be finite")


numbers = st.floats(-8, 8).filter(lambda x: abs(x) > 1e-3)
COMPUTE = {"Mul": np.multiply, "Add": np.add, "Sub": np.subtract, "Div": np.divide}


@given(st.lists(st.tuples(st.sampled_from(list(COMPUTE)), numbers, st.booleans()), max_size=6), numbers)
def test_a_row_of_steps_is_one_scale_and_shift(steps, x):
    scale, shift, want = np.ones(1), np.zeros(1), np.array([x])
    reach = 1.0 + abs(x)
    for op, number, swapped in steps:
        constant = np.array([number])
        node = helper.make_node(op, ["c", "v"] if swapped else ["v", "c"], ["y"])
        found = affine_step(node, "v", scale, shift, constant)
        if op == "Div" and swapped:
            assert found is None
            return
        assert found is not None
        scale, shift = found
        want = COMPUTE[op](constant, want) if swapped else COMPUTE[op](want, constant)
        reach = max(reach, abs(scale[0] * x), abs(shift[0]), abs(want[0]))
    np.testing.assert_allclose(scale * x + shift, want, rtol=1e-9, atol=1e-9 * reach)
