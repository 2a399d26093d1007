"""Factors of Gemm in its weights, and linear layers of more dimensions as Gemm."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import fold_gemm_factors, linear_to_gemm
from tests.graph.build import model, value
from tests.planning import quantize
from tests.rewrite.forms import Graph, assert_formed, assert_refused, check, rewritten, untouched
from tests.targets.qdq import kernels as runtime_kernels

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


def test_gemms_that_stay_and_why():
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


FEATURES, COLUMNS = 6, 4


def layers(
    shape,
    *,
    count=1,
    bias=(COLUMNS,),
    swapped=False,
    opset=17,
    kind=onnx.TensorProto.FLOAT,
    computed="",
    outs=None,
):
    """Linear layers that read the same value."""
    rng = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    weights, nodes, outputs = {}, [], []
    outs = outs or [COLUMNS] * count
    for at, width in enumerate(outs):
        w, b, m, y = (f"{letter}{at}" for letter in "wbmy")
        weights |= {w: rng.normal(size=(FEATURES, width)).astype(dtype)}
        if computed != "bias":
            weights[b] = rng.normal(size=(*bias[:-1], width if bias[-1] == COLUMNS else bias[-1])).astype(dtype)
        nodes.append(helper.make_node("MatMul", ["x", w], [m], name=f"product{at}"))
        nodes.append(helper.make_node("Add", [b, m] if swapped else [m, b], [y], name=f"add{at}"))
        outputs.append(value(y, None, kind))
    inputs = [value("x", [*shape, FEATURES], kind), *([value("b0", [COLUMNS], kind)] if computed == "bias" else [])]
    return model(nodes, inputs, outputs, weights, opset=opset)


def data(*lead):
    return {"x": np.random.default_rng(1).normal(size=(*lead, FEATURES)).astype(np.float32)}


@settings(deadline=None)
@given(
    lead=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    known=st.lists(st.booleans(), min_size=3, max_size=3),
    count=st.integers(1, 3),
    ones=st.integers(0, 2),
    swapped=st.booleans(),
    opset=st.sampled_from([15, 17, 21]),
)
def test_every_layer_computes_the_same(lead, known, count, ones, swapped, opset):
    shape = [size if sure else f"d{at}" for at, (size, sure) in enumerate(zip(lead, known, strict=False))]
    proto = layers(shape, count=count, bias=(*[1] * ones, COLUMNS), swapped=swapped, opset=opset)
    unknown = sum(isinstance(dim, str) for dim in shape)
    if not unknown:
        untouched(linear_to_gemm, proto)
        return
    shared = ["Shape", "Concat"] if unknown > 1 else []
    expected = ["Reshape", *shared, "Gemm", "Reshape", *["Gemm", "Reshape"] * (count - 1)]
    result = check(linear_to_gemm, proto, data(*lead), expected)
    assert [n.name for n in result.proto.graph.node if n.op_type == "Gemm"] == [f"product{at}" for at in range(count)]
    assert {gone: by for gone, by in result.nodes.items() if gone.startswith("add")} == {
        f"add{at}": (f"product{at}",) for at in range(count)
    }


def test_layers_of_two_widths_share_the_rows_only():
    proto = layers(["b", "s"], outs=[4, 5, 4])
    expected = ["Reshape", "Shape", "Concat", "Gemm", "Reshape", "Concat", "Gemm", "Reshape", "Gemm", "Reshape"]
    check(linear_to_gemm, proto, data(2, 3), expected)


def test_what_is_no_layer_stays_without_a_word():
    untouched(linear_to_gemm, layers(["b", 3], computed="bias"))
    untouched(linear_to_gemm, layers(["b", 3], opset=14))


def test_the_runtime_runs_it_with_an_int32_bias_and_one_quantization():
    proto = layers(["b", "s"], count=3)
    before = [k.op_type for k in runtime_kernels(quantize(proto).quantized)]
    assert before.count("MatMulIntegerToFloat") == before.count("Add") == 3
    found = [k.op_type for k in runtime_kernels(quantize(rewritten(linear_to_gemm, proto).proto).quantized)]
    assert (found.count("QGemm"), found.count("QuantizeLinear")) == (3, 1)
    assert not {"Add", "DequantizeLinear", "MatMulIntegerToFloat"} & set(found)
