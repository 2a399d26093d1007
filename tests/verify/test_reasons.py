"""Each cause of a float node, proved on the installed runtime by a graph that shows it."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from kenosis_ort.graph.qdq import SourceGraph
from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
from kenosis_ort.targets.ort_cpu.reasons import why_float
from kenosis_ort.verify import Cause, Status, verify_fusion
from tests.targets.qdq import QdqGraph
from tests.targets.test_precisions import _conv_int4_weight
from tests.verify.expect import one, report

Build = Callable[[QdqGraph], list[str]]


def _nchw(g: QdqGraph) -> str:
    return g.act_input()


def _flat(g: QdqGraph) -> str:
    return g.q(g.input((4, 32)))


def _conv(g: QdqGraph) -> str:
    return g.conv(_nchw(g))


def _resized(g: QdqGraph) -> str:
    return g.op("Resize", _nchw(g), "", g.floats(1, 1, 2, 2), mode="linear")


CASES: dict[str, tuple[Build, str, Cause, str]] = {
    "float-input": (lambda g: [g.q(g.conv(g.input((1, 16, 12, 12))))], "Conv", Cause.FLOAT_INPUT, "graph input"),
    "float-input-node": (lambda g: [g.q(g.conv(g.op("Exp", _nchw(g))))], "Conv", Cause.FLOAT_INPUT, "Exp"),
    "float-output": (lambda g: [g.q(g.op("Tanh", _conv(g)))], "Conv", Cause.FLOAT_OUTPUT, "Tanh"),
    "graph-output": (lambda g: [_conv(g)], "Conv", Cause.GRAPH_OUTPUT, "graph output"),
    "relu-graph-output": (lambda g: [g.op("Relu", _conv(g))], "Conv", Cause.GRAPH_OUTPUT, "Relu"),
    "second-consumer": (lambda g: [g.q(y := _conv(g)), g.op("Exp", y)], "Conv", Cause.SECOND_CONSUMER, "Exp"),
    "two-quantizers": (lambda g: [g.q(y := _conv(g)), g.q(y, 0.05)], "Conv", Cause.SECOND_CONSUMER, "2 different Q"),
    "relu-zero-point": (lambda g: [g.q(g.op("Relu", _conv(g)))], "Conv", Cause.ACTIVATION, "128"),
    "clip-range": (lambda g: [g.relu_q(g.clip(_conv(g), 0, 6), 6.2 / 255)], "Conv", Cause.ACTIVATION, "beyond"),
    "clip-rank": (lambda g: [g.q(g.clip(_conv(g), 0, 6), 6 / 255, 0, rank=1)], "Conv", Cause.ACTIVATION, "shape [1]"),
    "bias-scale": (lambda g: [g.q(g.conv(_nchw(g), bias_factor=1.5))], "Conv", Cause.BIAS_SCALE, "bias"),
    "gemm-float-bias": (lambda g: [g.gemm(_flat(g), bias="float")], "Gemm", Cause.BIAS_TYPE, "float"),
    "matmul-float-bias": (lambda g: [g.matmul(_flat(g), bias="float")], "MatMul", Cause.BIAS_TYPE, "float bias"),
    "gemm-alpha": (lambda g: [g.q(g.gemm(_flat(g), alpha=0.5))], "Gemm", Cause.UNSUPPORTED_ATTRIBUTE, "alpha"),
    "float-weight": (lambda g: [g.conv(_nchw(g), weight="float", bias="float")], "Conv", Cause.FLOAT_WEIGHT, "float"),
    "16-bit-input": (lambda g: [g.q(g.conv(g.q(g.input((1, 16, 12, 12)), act=np.uint16)))],
                     "Conv", Cause.SIXTEEN_BIT, "16 bit"),
    "16-bit-output": (lambda g: [g.q(_conv(g), act=np.uint16)], "Conv", Cause.SIXTEEN_BIT, "16 bit"),
    "4-bit-weight": (lambda g: [_conv_int4_weight(g, np.uint8)], "Conv", Cause.WEIGHT_TYPE, "4 bit"),
    "scale-mismatch": (lambda g: [g.q(g.op("MaxPool", _nchw(g), kernel_shape=[2, 2]), 0.05)],
                       "MaxPool", Cause.SCALE_MISMATCH, "differs"),
    "float-constant": (lambda g: [g.q(g.op("Mul", _nchw(g), g.const(g.random(1, 16, 1, 1))))],
                       "Mul", Cause.FLOAT_INPUT, "constant"),
    "signed-constant": (lambda g: [g.q(g.op("Mul", _nchw(g), g.dq_constant(g.random(1, 16, 1, 1), dtype=np.int8)))],
                        "Mul", Cause.TYPE_MISMATCH, "int8"),
    "linear-resize": (lambda g: [g.q(_resized(g))], "Resize", Cause.UNSUPPORTED_ATTRIBUTE, "linear"),
    "unsupported": (lambda g: [g.q(g.op("Tanh", _flat(g)))], "Tanh", Cause.UNSUPPORTED_OP, "Tanh"),
    "conv-transpose": (lambda g: [g.q(g.conv(_nchw(g), transpose=True, axis=None))],
                       "ConvTranspose", Cause.UNSUPPORTED_OP, "ConvTranspose"),
    "clip-alone": (lambda g: [g.q(g.clip(_flat(g), -1, 1))], "Clip", Cause.ACTIVATION, "beyond"),
    "relu-without-q": (lambda g: [g.op("Relu", _flat(g))], "Relu", Cause.FLOAT_OUTPUT, "no Q"),
}  # fmt: skip


SINCE = {"bias-scale": "1.27", "gemm-alpha": "1.28", "linear-resize": "1.27"}  # integer before


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.since(SINCE[c])) if c in SINCE else c for c in CASES]
)
def test_cause(case: str) -> None:
    build, op_type, cause, words = CASES[case]
    graph = QdqGraph(opset=21)
    entry = one(report(graph.model(*build(graph))), op_type)
    assert entry.status is Status.FLOAT, entry
    assert entry.cause is cause, entry.reason
    assert words in entry.reason


@pytest.mark.parametrize("moved", [False, True])
def test_signed_activation_with_a_branch(moved: bool) -> None:
    """Behind an operator that moves data the Conv may be integer all the same; if not, the branch is why."""
    graph = QdqGraph(act=np.int8)
    x = graph.q(_conv(graph))
    x = graph.q(graph.op("Transpose", x, perm=[0, 2, 3, 1])) if moved else x
    model = graph.model(graph.q(graph.op("Mul", x, graph.q(graph.op("Sigmoid", x)))))
    source = SourceGraph(onnx.shape_inference.infer_shapes(model))
    assert [why_float(n, source, None)[1] for n in source.nodes if n.op_type == "Conv"] == [Cause.SIGNED_BRANCH]
    found = report(model)
    conv = one(found, "Conv")
    assert conv.integer if moved and conv.integer else conv.cause is Cause.SIGNED_BRANCH
    assert moved or {k.cause for k in found.float_nodes()} == {Cause.SIGNED_BRANCH}
    assert moved or conv.weights_per_run


def test_opset_too_old_for_an_integer_max_pool() -> None:
    graph = QdqGraph(opset=11)
    value = graph.q(graph.op("MaxPool", _nchw(graph), kernel_shape=[2, 2]))
    entry = one(report(graph.model(value)), "MaxPool")
    assert entry.cause is Cause.OPSET
    assert "12" in entry.reason


def test_the_plan_s_reason_comes_first() -> None:
    graph = QdqGraph()
    model = graph.model(graph.op("Relu", graph.conv(graph.input())))
    name = next(n.name for n in model.graph.node if n.op_type == "Conv")
    decision = NodeDecision(name, "Conv", Kind.FLOAT, "user-excluded", "you excluded it by name")
    entry = one(verify_fusion(model, plan=PlacementPlan("ort-cpu", nodes=(decision,))), "Conv")
    assert entry.cause is Cause.PROTECTED
    assert "user-excluded" in entry.reason
    assert "by name" in entry.reason


def test_avoidable_lists_what_the_plan_calls_integer() -> None:
    graph = QdqGraph()
    model = graph.model(graph.q(graph.op("Tanh", graph.conv(graph.q(_conv(graph))))))
    first, second = (n.name for n in model.graph.node if n.op_type == "Conv")
    found = verify_fusion(model)
    for planned, avoidable in (((first, second), [second]), ((first,), []), ((), [])):
        nodes = tuple(NodeDecision(n, "Conv", Kind.INTEGER, "conv", "") for n in planned)
        assert [k.node for k in found.avoidable(PlacementPlan("ort-cpu", nodes=nodes))] == avoidable
