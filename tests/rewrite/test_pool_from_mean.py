from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import pool_from_mean
from tests.rewrite.forms import Graph, assert_formed, assert_refused


def mean(graph, x, axes, **attributes):
    if axes is None:
        return graph.op("ReduceMean", x, **attributes)
    if graph.opset >= 18:
        return graph.op("ReduceMean", x, graph.const(axes, np.int64), **attributes)
    return graph.op("ReduceMean", x, axes=list(axes), **attributes)


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    axes=st.permutations([2, 3]),
    negative=st.tuples(st.booleans(), st.booleans()),
    keepdims=st.sampled_from([None, 0, 1]),
    opset=st.sampled_from([13, 17, 18, 21]),
    magnitude=st.sampled_from([1e-3, 1.0, 1e5, 1e30]),
    seed=st.integers(0, 2**16),
)
def test_every_form_computes_the_same(shape, axes, negative, keepdims, opset, magnitude, seed):
    graph = Graph(shape, opset=opset)
    axes = [axis - 4 if flip else axis for axis, flip in zip(axes, negative, strict=True)]
    y = mean(graph, "x", axes, **({} if keepdims is None else {"keepdims": keepdims}))
    x = (np.random.default_rng(seed).uniform(0.1, 1, shape) * magnitude).astype(np.float32)
    expected = ["GlobalAveragePool"] if keepdims != 0 else ["GlobalAveragePool", "Flatten"]
    result = assert_formed(graph.model(y), pool_from_mean, expected, x)
    assert result.proto.graph.node[0].name == y
    assert result.nodes == {}
    assert not result.proto.graph.initializer


def test_a_symbolic_batch_stays_symbolic_and_names_stay_unique():
    graph = Graph(["batch", 3, "h", 7])
    first = mean(graph, "x", [2, 3], keepdims=0)
    graph.nodes.append(onnx.helper.make_node("Relu", [first], ["after"], name=f"{first}_Flatten"))
    expected = ["GlobalAveragePool", "Flatten", "Relu"]
    result = assert_formed(graph.model("after", first), pool_from_mean, expected, np.ones((2, 3, 4, 7), np.float32))
    assert [node.name for node in result.proto.graph.node] == [first, f"{first}_Flatten_1", f"{first}_Flatten"]
    assert result.proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_an_unknown_rank_stays():
    graph = Graph([None], opset=17)
    proto = graph.model(mean(graph, "x", [-1, -2]))
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert_refused(proto, pool_from_mean, "the rank of 'x' is not known")


def test_computed_axes_stay():
    graph = Graph([1, 2, 4, 4], opset=18)
    axes = graph.op("Cast", graph.op("ReduceMax", "x", keepdims=0), to=onnx.TensorProto.INT64)
    axes = graph.op("Unsqueeze", axes, graph.const([0], np.int64))
    assert_refused(graph.model(graph.op("ReduceMean", "x", axes)), pool_from_mean, "are computed")
