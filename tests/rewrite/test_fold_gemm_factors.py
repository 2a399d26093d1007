from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import fold_gemm_factors
from tests.rewrite.forms import Graph, assert_formed, assert_refused

ROWS, IN, OUT = 2, 3, 4
FACTORS = st.sampled_from([0.0, 0.25, 1.0, -2.0])


@settings(deadline=None)
@given(
    alpha=FACTORS,
    beta=FACTORS,
    trans=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    bias=st.sampled_from([None, (), (1,), (OUT,), (1, OUT), (1, 1), (ROWS, 1), (ROWS, OUT)]),
    seed=st.integers(0, 2**16),
)
def test_every_gemm_computes_the_same(alpha, beta, trans, bias, seed):
    rng = np.random.default_rng(seed)
    g = Graph((IN, ROWS) if trans[0] else (ROWS, IN))
    operands = [rng.normal(size=(OUT, IN) if trans[1] else (IN, OUT))]
    operands += [] if bias is None else [rng.normal(size=bias)]
    y = g.op("Gemm", "x", *operands, alpha=alpha, beta=beta, transA=trans[0], transB=trans[1])
    expected = ["Transpose", "Gemm"] if trans[0] else ["Gemm"]
    result = assert_formed(g.model(y), fold_gemm_factors, expected, rng.normal(size=g.shape).astype(np.float32))
    gemm = result.proto.graph.node[-1]
    plain = alpha == 1.0 and trans[0] == 0 and (bias is None or beta == 1.0) and np.prod(bias or (OUT,)) > 1
    if not plain:
        assert {a.name for a in gemm.attribute} <= {"transB"}
        assert len(gemm.input) == (2 if bias is None or beta == 0.0 else 3)
    if bias in ((), (1,), (1, 1)) and beta != 0.0:
        tensor = next(t for t in result.proto.graph.initializer if t.name == gemm.input[2])
        assert list(tensor.dims) == [OUT]


def test_what_stays_and_why():
    g = Graph((ROWS, IN))
    y = g.op("Gemm", "x", np.ones((IN, OUT)), g.op("Gemm", "x", np.ones((IN, OUT))), beta=0.5)
    assert_refused(g.model(y), fold_gemm_factors, "not a constant")
    g = Graph((ROWS, IN))
    assert_refused(g.model(g.op("Gemm", "x", np.full((IN, OUT), 1e38), alpha=1e3)), fold_gemm_factors, "finite")
    g = Graph((IN, IN))
    assert_refused(g.model(g.op("Gemm", "x", "x", alpha=2.0)), fold_gemm_factors, None)


def test_a_computed_bias_that_counts_nothing_goes():
    g = Graph((ROWS, IN))
    y = g.op("Gemm", "x", np.ones((IN, OUT)), g.op("Gemm", "x", np.ones((IN, OUT))), beta=0.0)
    result = assert_formed(g.model(y), fold_gemm_factors, None, np.ones((ROWS, IN), np.float32))
    assert len(result.proto.graph.node[-1].input) == 2
