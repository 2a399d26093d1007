"""Factors of Gemm in its weights, and linear layers of more dimensions as Gemm."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.rewrite import fold_gemm_factors, linear_to_gemm
from tests.models import Net, normal
from tests.rewrite.forms import check, refused

ROWS, IN, OUT = 2, 3, 4
FACTORS = st.sampled_from([0.0, 0.25, 1.0, -2.0])


@given(
    alpha=FACTORS, beta=FACTORS, trans=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    bias=st.sampled_from([None, (), (1,), (OUT,), (1, OUT), (1, 1), (ROWS, 1), (ROWS, OUT)]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_gemm_computes_the_same(alpha, beta, trans, bias, seed):
    shape = (IN, ROWS) if trans[0] else (ROWS, IN)
    g = Net.over(shape, seed=seed)
    operands = [g.rng.normal(size=(OUT, IN) if trans[1] else (IN, OUT))]
    operands += [] if bias is None else [g.rng.normal(size=bias)]
    y = g.op("Gemm", ["x", *operands], alpha=alpha, beta=beta, transA=trans[0], transB=trans[1])
    expected = "Transpose Gemm" if trans[0] else "Gemm"
    result = check(fold_gemm_factors, g.of(y), normal(shape, seed), expected)
    gemm = result.proto.graph.node[-1]
    plain = alpha == 1.0 and trans[0] == 0 and (bias is None or beta == 1.0) and np.prod(bias or (OUT,)) > 1
    if not plain:
        assert {a.name for a in gemm.attribute} <= {"transB"}
        assert len(gemm.input) == (2 if bias is None or beta == 0.0 else 3)
    if bias in ((), (1,), (1, 1)) and beta != 0.0:
        tensor = next(t for t in result.proto.graph.initializer if t.name == gemm.input[2])
        assert list(tensor.dims) == [OUT]


def test_a_computed_bias_that_counts_nothing_goes():
    g = Net.over((ROWS, IN))
    y = g.op("Gemm", ["x", np.ones((IN, OUT)), g.op("Gemm", ["x", np.ones((IN, OUT))])], beta=0.0)
    assert len(check(fold_gemm_factors, g.of(y), normal((ROWS, IN))).proto.graph.node[-1].input) == 2


FEATURES, COLUMNS = 6, 4


def layers(shape, *, bias=(COLUMNS,), swapped=False, opset=17, outs=(COLUMNS,)):
    """Linear layers that read the same value."""
    g, outputs = Net.over([*shape, FEATURES], opset=opset), []
    for at, width in enumerate(outs):
        product = g.op("MatMul", ["x", g.rng.normal(size=(FEATURES, width))], name=f"product{at}")
        outputs.append(g.op("Add", [product, g.rng.normal(size=(*bias[:-1], width))], name=f"add{at}"))
        if swapped:
            g.nodes[-1].input[:] = reversed(g.nodes[-1].input)
    return g.of(*outputs)


@given(
    lead=st.lists(st.integers(1, 4), min_size=2, max_size=3), known=st.lists(st.booleans(), min_size=3, max_size=3),
    count=st.integers(1, 3), ones=st.integers(0, 2), swapped=st.booleans(), opset=st.sampled_from([15, 17, 21]),
)  # fmt: skip
def test_every_layer_computes_the_same(lead, known, count, ones, swapped, opset):
    shape = [size if sure else f"d{at}" for at, (size, sure) in enumerate(zip(lead, known, strict=False))]
    proto = layers(shape, outs=[COLUMNS] * count, bias=(*[1] * ones, COLUMNS), swapped=swapped, opset=opset)
    unknown = sum(isinstance(dim, str) for dim in shape)
    if not unknown:
        refused(linear_to_gemm, proto, None)
        return
    expected = f"Reshape {'Shape Concat ' * (unknown > 1)}Gemm Reshape" + " Gemm Reshape" * (count - 1)
    result = check(linear_to_gemm, proto, normal((*lead, FEATURES)), expected)
    assert [n.name for n in result.proto.graph.node if n.op_type == "Gemm"] == [f"product{at}" for at in range(count)]


def test_layers_of_two_widths_share_the_rows_only():
    expected = "Reshape Shape Concat Gemm Reshape Concat Gemm Reshape Gemm Reshape"
    check(linear_to_gemm, layers(["b", "s"], outs=[4, 5, 4]), normal((2, 3, FEATURES)), expected)


def test_what_is_no_layer_stays_without_a_word():
    refused(linear_to_gemm, layers(["b", 3], opset=14), None)
    g = Net.over(["b", 3, FEATURES])
    computed = g.op("Add", [g.op("MatMul", ["x", np.ones((FEATURES, COLUMNS))]), g.input("bias", [COLUMNS])])
    refused(linear_to_gemm, g.of(computed), None)
