from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import linear_to_gemm
from tests.graph.build import model, value
from tests.planning import quantize
from tests.rewrite.forms import check, refused, rewritten, untouched
from tests.targets.qdq import kernels as runtime_kernels

IN, OUT = 6, 4


def layers(
    shape,
    *,
    count=1,
    bias=(OUT,),
    swapped=False,
    keep="",
    opset=17,
    kind=onnx.TensorProto.FLOAT,
    computed="",
    outs=None,
):
    """Linear layers that read the same value."""
    rng = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    weights, nodes, outputs = {}, [], []
    outs = outs or [OUT] * count
    for at, width in enumerate(outs):
        w, b, m, y = (f"{letter}{at}" for letter in "wbmy")
        weights |= {w: rng.normal(size=(IN, width)).astype(dtype)}
        if computed != "bias":
            weights[b] = rng.normal(size=(*bias[:-1], width if bias[-1] == OUT else bias[-1])).astype(dtype)
        nodes.append(helper.make_node("MatMul", ["x", w], [m], name=f"product{at}"))
        nodes.append(helper.make_node("Add", [b, m] if swapped else [m, b], [y], name=f"add{at}"))
        outputs.append(value(y, None, kind))
    inputs = [value("x", [*shape, IN], kind), *([value("b0", [OUT], kind)] if computed == "bias" else [])]
    outputs += [value(keep, None, kind)] if keep else []
    return model(nodes, inputs, outputs, weights, opset=opset)


def data(*lead):
    return {"x": np.random.default_rng(1).normal(size=(*lead, IN)).astype(np.float32)}


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
    proto = layers(shape, count=count, bias=(*[1] * ones, OUT), swapped=swapped, opset=opset)
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


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (layers(["b", 3], keep="m0"), "'m0' is needed elsewhere"),
    ],
)
def test_what_stays_and_why(proto, reason):
    refused(linear_to_gemm, proto, reason)


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
