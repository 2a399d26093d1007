"""Float kernels: NCHWc and fused ones, patterns of many nodes, folded and merged nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from kenosis_ort import quantize_static
from kenosis_ort.verify import Cause, FusionReport, Status, verify_fusion
from tests.models import FeedReader, Net, feeds
from tests.targets.qdq import QdqGraph
from tests.verify.expect import one, report


def _conv(g: QdqGraph, value: str, **options: int) -> str:
    return g.conv(value, weight="float", bias="float", **options)


def _image(g: QdqGraph) -> str:
    return g.input((1, 16, 12, 12))


def test_nchwc_conv_with_everything_folded_in() -> None:
    g = QdqGraph()
    y = _conv(g, _image(g))
    y = g.op("BatchNormalization", y, *[g.const(np.abs(g.random(16)) + 0.1) for _ in range(4)])
    y = g.op("Clip", g.op("Add", y, g.const(g.random(1, 16, 1, 1))), g.const(0), g.const(6))
    found = report(g.model(y))
    conv = one(found, "Conv")
    assert conv.kernel == "com.microsoft.nchwc.Conv"
    assert {found.by_node[n].op_type for n in conv.absorbed} == {"BatchNormalization", "Add", "Clip"}
    assert conv.cause is Cause.FLOAT_INPUT


def test_conv_sum_goes_to_the_conv_that_adds_it() -> None:
    g = QdqGraph()
    x = _image(g)
    first, second = _conv(g, x), _conv(g, x)
    found = report(g.model(g.op("Relu", g.op("Add", first, second))))
    convs = [k for k in found.kernels if k.op_type == "Conv"]
    assert [k.kernel for k in convs] == ["com.microsoft.nchwc.Conv"] * 2
    assert sorted(len(k.absorbed) for k in convs) == [0, 2]


def test_a_residual_chain_without_layout_changes_in_between() -> None:
    g = QdqGraph()
    x = g.op("Relu", _conv(g, _image(g)))
    for _ in range(3):
        x = g.op("Relu", g.op("Add", _conv(g, g.op("Relu", _conv(g, x))), x))
    found = report(g.model(_conv(g, x)))
    assert all(k.kernel == "com.microsoft.nchwc.Conv" for k in found.kernels)
    assert found.counts()["absorbed"] == 4 + 3 + 3
    assert found.overhead == {"com.microsoft.nchwc.ReorderInput": 1, "com.microsoft.nchwc.ReorderOutput": 1}


def test_fused_conv_with_a_deferred_activation_dequantizes_its_weights_every_run() -> None:
    g = QdqGraph()
    found = report(g.model(g.q(g.op("LeakyRelu", g.conv(g.q(_image(g)))))))
    conv = one(found, "Conv")
    assert conv.kernel == "com.microsoft.FusedConv"
    assert conv.weights_per_run
    assert conv.cause is Cause.FLOAT_OUTPUT
    assert one(found, "LeakyRelu").absorbed_into == conv.node
    assert not one(found, "LeakyRelu").integer


def test_layer_norm_gelu_and_scaled_matmul() -> None:
    g = QdqGraph()
    x = g.input((4, 8, 16))
    d = g.op("Sub", x, g.op("ReduceMean", x, axes=[-1]))
    v = g.op("ReduceMean", g.op("Pow", d, g.const(2.0)), axes=[-1])
    n = g.op("Div", d, g.op("Sqrt", g.op("Add", v, g.const(1e-5))))
    n = g.op("Add", g.op("Mul", n, g.const(g.random(16))), g.const(g.random(16)))
    y = g.op("Add", g.matmul(n, 16, 16, weight="float"), g.const(g.random(16)))
    e = g.op("Add", g.op("Erf", g.op("Div", y, g.const(1.4142135))), g.const(1.0))
    y = g.op("Mul", g.op("Mul", y, e), g.const(0.5))
    z = g.op("Mul", g.op("MatMul", y, g.op("Transpose", x, perm=[0, 2, 1])), g.const(0.3))
    found = report(g.model(z))
    kernels = {k.kernel for k in found.kernels if k.kernel}
    assert kernels == {"LayerNormalization", "Gemm", "com.microsoft.Gelu", "com.microsoft.FusedMatMul"}
    for kernel in ("LayerNormalization", "com.microsoft.Gelu"):
        owner = next(k for k in found.kernels if k.kernel == kernel and k.absorbed_into is None)
        assert owner.cause is Cause.UNSUPPORTED_OP
        assert len(owner.absorbed) >= 4
    assert one(found, "Transpose").status is Status.REMOVED


def test_function_operator_keeps_all_kernels_of_its_body() -> None:
    g = QdqGraph()
    found = report(g.model(g.op("HardSwish", g.op("HardSwish", g.input((2, 8))))))
    assert [k.kernel for k in found.kernels] == ["HardSigmoid + Mul"] * 2
    assert found.overhead == {}


def test_pad_merged_into_conv() -> None:
    g = QdqGraph()
    pads = g.const(np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    found = report(g.model(_conv(g, g.op("Pad", _image(g), pads))))
    assert one(found, "Pad").absorbed_into == one(found, "Conv").node


def test_identical_nodes_are_computed_once() -> None:
    g = QdqGraph()
    x = g.input((2, 8))
    found = report(g.model(g.op("Add", g.op("Exp", x), g.op("Abs", g.op("Exp", x)))))
    first, second = [k for k in found.kernels if k.op_type == "Exp"]
    assert {first.status, second.status} == {Status.FLOAT, Status.ABSORBED}
    assert "identical" in (first.reason + second.reason)


def test_chains_of_identical_nodes_with_constants_of_other_names() -> None:
    g = QdqGraph()
    x = g.input((2, 8))
    left = g.op("Div", g.op("Exp", x), g.const(2.0))
    right = g.op("Div", g.op("Exp", x), g.const(2.0))
    found = report(g.model(g.op("Sub", left, g.op("Abs", right))))
    for op_type in ("Exp", "Div"):
        notes = [k.reason for k in found.kernels if k.op_type == op_type]
        assert any("identical" in note for note in notes), notes


def test_scaling_in_front_of_a_matmul() -> None:
    g = QdqGraph()
    q, k = g.op("Mul", g.input((2, 4, 8)), g.const(0.5)), g.op("Transpose", g.input((2, 4, 8)), perm=[0, 2, 1])
    found = report(g.model(g.op("MatMul", q, k)))
    assert one(found, "MatMul").kernel == "com.microsoft.FusedMatMul"
    assert one(found, "Mul").absorbed_into == one(found, "MatMul").node


def test_local_function() -> None:
    g = QdqGraph()
    x = g.input((2, 8))
    model = g.model(g.op("Twice", g.op("Exp", x), domain="local"))
    body = [helper.make_node("Exp", ["a"], ["b"], name="inner"), helper.make_node("Exp", ["b"], ["c"], name="outer")]
    model.functions.append(helper.make_function("local", "Twice", ["a"], ["c"], body, [helper.make_opsetid("", 17)]))
    model.opset_import.append(helper.make_opsetid("local", 1))
    found = report(model)
    assert [k.kernel for k in found.kernels] == ["Exp", "Exp + Exp"]
    assert found.overhead == {}


def test_constant_nodes_are_removed() -> None:
    g = QdqGraph()
    weights = g.op("Mul", g.const(g.random(8)), g.const(2.0))
    found = report(g.model(g.op("Sub", g.input((2, 8)), g.op("Neg", weights))))
    assert [k.status for k in found.kernels] == [Status.REMOVED, Status.REMOVED, Status.FLOAT]
    assert "computed once" in found.kernels[0].reason


def test_shape_arithmetic_is_not_float() -> None:
    g = QdqGraph()
    x = g.input(("n", 8))
    rows = g.op("Gather", g.op("Shape", x), g.const(np.array([0])))
    shape = g.op("Concat", rows, g.const(np.array([2, 4])), axis=0)
    found = report(g.model(g.op("Reshape", g.op("Exp", x), shape)))
    assert [k.status for k in found.kernels if k.op_type in ("Shape", "Gather", "Concat")] == [Status.OTHER] * 3


def test_bodies_are_reported_with_their_path() -> None:
    g = QdqGraph()
    x = g.q(g.input((4, 32)))
    flag = g.input((), TensorProto.BOOL)
    then = helper.make_graph(
        [helper.make_node("Exp", [x], ["then_y"], name="same_name")], "then", [], [_float("then_y")]
    )
    other = helper.make_graph(
        [helper.make_node("Abs", [x], ["other_y"], name="same_name")], "else", [], [_float("other_y")]
    )
    found = verify_fusion(g.model(g.op("If", flag, then_branch=then, else_branch=other), g.q(g.gemm(x))))
    owner = one(found, "If")
    assert owner.status is Status.OTHER
    assert found.by_node[f"{owner.node}.then_branch/same_name"].kernel == "Exp"
    assert found.by_node[f"{owner.node}.else_branch/same_name"].kernel == "Abs"
    assert one(found, "Gemm").integer


def test_quantized_body_of_a_loop() -> None:
    g = QdqGraph()
    x = g.input((4, 16))
    body = QdqGraph(seed=1)
    count, condition = body.input((), TensorProto.INT64), body.input((), TensorProto.BOOL)
    state = body.input((4, 16))
    result = body.q(body.gemm(body.q(state), 16, 16))
    keep = body.op("Identity", condition)
    inner = body.model(keep, result).graph
    inner.output[0].type.tensor_type.elem_type = TensorProto.BOOL
    assert [i.name for i in inner.input] == [count, condition, state]
    inner.name = "body"
    steps, go = g.const(np.array(3)), g.const(np.array(True))
    found = verify_fusion(g.model(g.op("Loop", steps, go, x, body=inner)))
    gemm = one(found, "Gemm")
    assert gemm.graph.endswith(".body")
    assert gemm.kernel == "com.microsoft.QGemm"


def _float(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


@pytest.mark.parametrize("op_type", ["HardSwish", "Mish"])
def test_a_function_operator_between_integer_convs_is_float(op_type: str, tmp_path: Path) -> None:
    """The session writes out its body without names, up to the Q: that is no part of the Conv before it."""
    net = Net(opset=18)
    x = net.conv(net.input("x", [1, 4, 8, 8]), 4, 4, name="conv0")
    net.output(net.conv(net.op(op_type, [x], name="act"), 4, 4, name="conv1"), [1, 4, 8, 8])
    model = net.model()
    report = quantize_static(model, tmp_path / "out.onnx", FeedReader(feeds(model)), rewrites=False).fusion
    assert isinstance(report, FusionReport)
    act = report.by_node["act"]
    assert (act.integer, act.status) == (False, Status.FLOAT)
    assert report.by_node["conv0"].absorbed == ()
