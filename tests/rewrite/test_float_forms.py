from __future__ import annotations

import time

from kenosis_ort.rewrite import FLOAT_FORMS
from tests.graph.build import ready
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
