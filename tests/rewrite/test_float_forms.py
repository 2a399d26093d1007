from __future__ import annotations

import time

import numpy as np
import pytest

from kenosis_ort.rewrite import FLOAT_FORMS, PREPARATION
from tests import models
from tests.graph.build import assert_same, ready
from tests.rewrite.forms import Graph, ops


def small_activations(graph, y):
    """SiLU, GELU, hard swish, layer norm, one behind the other."""
    y = graph.op("Mul", y, graph.op("Sigmoid", y))
    bend = graph.op("Erf", graph.op("Div", y, 2.0**0.5))
    y = graph.op("Mul", graph.op("Mul", y, graph.op("Add", bend, 1.0)), 0.5)
    y = graph.op("Mul", y, graph.op("Div", graph.op("Clip", graph.op("Add", y, 3.0), 0.0, 6.0), 6.0))
    d = graph.op("Sub", y, graph.op("ReduceMean", y, axes=[-1]))
    spread = graph.op("ReduceMean", graph.op("Pow", d, 2.0), axes=[-1])
    return graph.op("Div", d, graph.op("Sqrt", graph.op("Add", spread, 1e-5)))


FORMS = ["com.microsoft.QuickGelu", "com.microsoft.Gelu", "HardSwish", "LayerNormalization"]


def test_all_of_them_work_one_behind_the_other():
    graph = Graph([1, 2, 4, 6])
    y = small_activations(graph, small_activations(graph, "x"))
    proto = graph.model(graph.op("ReduceMean", graph.op("Relu", y), axes=[2, 3], keepdims=0))
    result = ready(proto, rewrites=[*PREPARATION, *FLOAT_FORMS])
    assert ops(result.proto) == [*FORMS, *FORMS, "Relu", "GlobalAveragePool", "Flatten"]
    x = np.random.default_rng(0).normal(size=(1, 2, 4, 6)).astype(np.float32)
    assert_same(proto, result.proto, {"x": x}, rtol=1e-5)
    names = {node.name for node in result.proto.graph.node}
    assert all(by in names for gone in result.nodes.values() for by in gone)
    again = ready(result.proto, rewrites=[*PREPARATION, *FLOAT_FORMS])
    assert ops(again.proto) == ops(result.proto)
    assert again.nodes == {}


@pytest.mark.parametrize("build", models.ALL.values(), ids=models.ALL)
def test_the_shared_models_compute_the_same(build):
    proto = build()
    result = ready(proto, rewrites=[*PREPARATION, *FLOAT_FORMS]).proto
    for feed in models.feeds(proto, 2):
        assert_same(proto, result, feed, rtol=1e-5)


def test_time_grows_with_the_number_of_nodes():
    def seconds(blocks):
        graph = Graph([2, 8])
        y = "x"
        for _ in range(blocks):
            y = small_activations(graph, y)
        proto = ready(graph.model(y)).proto
        start = time.process_time()
        for rewrite in FLOAT_FORMS:
            rewrite(proto, keep_values=())
        assert ops(proto) == FORMS * blocks
        return time.process_time() - start

    short, long = min(seconds(25) for _ in range(3)), min(seconds(200) for _ in range(2))
    assert long < 3 * 8 * short
