from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import lrn_to_pool
from tests.graph.build import run
from tests.rewrite.forms import Graph, assert_formed

FRONT = ["Mul", "Unsqueeze", "AveragePool", "Squeeze", "Mul", "Add"]
POWERS = {0.25: ["Sqrt", "Sqrt"], 0.5: ["Sqrt"], 0.75: ["Sqrt", "Sqrt", "Mul"], 1.0: [], 1.3: ["Pow"]}


def by_definition(x, size, alpha, beta, bias):
    """The runtime's own operator adds and takes away squares as its window moves, and so loses digits of small ones."""
    beside = size // 2
    padded = np.pad(x.astype(np.float64) ** 2, ((0, 0), (beside, beside), (0, 0), (0, 0)))
    total = sum(padded[:, at : at + x.shape[1]] for at in range(size))
    return x / (bias + alpha / size * total) ** beta


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)),
    size=st.sampled_from([1, 3, 5, 7, 11]),
    alpha=st.sampled_from([1e-4, 1e-2, 1.5]),
    beta=st.sampled_from(list(POWERS)),
    bias=st.sampled_from([0.5, 1.0, 2.0]),
    symbolic=st.booleans(),
    magnitude=st.sampled_from([1e-2, 1.0, 1e3]),
    seed=st.integers(0, 2**16),
)
def test_every_window_computes_the_same(shape, size, alpha, beta, bias, symbolic, magnitude, seed):
    g = Graph(["n", shape[1], "h", "w"] if symbolic else shape)
    proto = g.model(g.op("LRN", "x", size=size, alpha=alpha, beta=beta, bias=bias))
    x = (np.random.default_rng(seed).normal(size=shape) * magnitude).astype(np.float32)
    result = assert_formed(proto, lrn_to_pool, [*FRONT, *POWERS[beta], "Div"], x, rtol=1e-2)
    exact = by_definition(x, size, alpha, beta, bias)
    (y,) = run(result.proto, {"x": x})
    assert np.abs(y - exact).max() <= 1e-5 * np.abs(exact).max()
    assert result.proto.graph.node[-1].name == proto.graph.node[0].name


def test_attributes_left_out_have_their_defaults():
    g = Graph([1, 8, 3, 3])
    x = np.random.default_rng(0).normal(size=(1, 8, 3, 3)).astype(np.float32)
    assert_formed(g.model(g.op("LRN", "x", size=3)), lrn_to_pool, [*FRONT, *POWERS[0.75], "Div"], x * 30)
