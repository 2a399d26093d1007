from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import collapse_silu
from tests.rewrite.forms import Graph, assert_formed

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
def test_every_form_computes_the_same(shape, alpha, form, swap, gate_first, factor_rank, magnitude, opset, seed):
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
