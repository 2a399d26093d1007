"""Each integer kernel of the runtime is found under its source node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kenosis_ort.verify import Status
from tests.targets.qdq import QdqGraph
from tests.verify.expect import one, report

Build = Callable[[QdqGraph], str]
MS = "com.microsoft."


def _nchw(g: QdqGraph) -> str:
    return g.q(g.input((1, 16, 12, 12)))


def _flat(g: QdqGraph) -> str:
    return g.q(g.input((4, 32)))


SINGLE: dict[str, tuple[Build, str, str]] = {
    "conv": (lambda g: g.q(g.conv(_nchw(g))), "Conv", MS + "QLinearConv"),
    "depthwise": (lambda g: g.q(g.conv(_nchw(g), group=16)), "Conv", MS + "QLinearConv"),
    "gemm": (lambda g: g.q(g.gemm(_flat(g))), "Gemm", MS + "QGemm"),
    "gemm-float-out": (lambda g: g.gemm(_flat(g)), "Gemm", MS + "QGemm"),
    "matmul": (lambda g: g.q(g.matmul(_flat(g))), "MatMul", "QLinearMatMul"),
    "matmul-float-out": (lambda g: g.matmul(_flat(g)), "MatMul", MS + "MatMulIntegerToFloat"),
    "matmul-dynamic": (lambda g: g.q(g.op("MatMul", _flat(g), g.q(g.input((32, 8))))), "MatMul", "QLinearMatMul"),
    "add": (lambda g: g.q(g.op("Add", _nchw(g), _nchw(g))), "Add", MS + "QLinearAdd"),
    "mul": (lambda g: g.q(g.op("Mul", _nchw(g), g.dq_constant(g.random(1, 16, 1, 1)))), "Mul", MS + "QLinearMul"),
    "concat": (lambda g: g.q(g.op("Concat", _nchw(g), _nchw(g), axis=1)), "Concat", MS + "QLinearConcat"),
    "average-pool": (
        lambda g: g.q(g.op("AveragePool", _nchw(g), kernel_shape=[2, 2])),
        "AveragePool",
        MS + "QLinearAveragePool",
    ),
    "global-average-pool": (
        lambda g: g.q(g.op("GlobalAveragePool", _nchw(g))),
        "GlobalAveragePool",
        MS + "QLinearGlobalAveragePool",
    ),
    "sigmoid": (lambda g: g.q(g.op("Sigmoid", _nchw(g))), "Sigmoid", MS + "QLinearSigmoid"),
    "leaky-relu": (lambda g: g.q(g.op("LeakyRelu", _nchw(g))), "LeakyRelu", MS + "QLinearLeakyRelu"),
    "softmax": (lambda g: g.q(g.op("Softmax", _flat(g))), "Softmax", MS + "QLinearSoftmax"),
    "max-pool": (lambda g: g.q(g.op("MaxPool", _nchw(g), kernel_shape=[2, 2])), "MaxPool", "MaxPool"),
    "max-pool-nhwc": (
        lambda g: g.q(g.conv(g.q(g.op("MaxPool", g.q(g.conv(_nchw(g))), kernel_shape=[2, 2])))),
        "MaxPool",
        MS + "NhwcMaxPool",
    ),
    "resize": (
        lambda g: g.q(g.op("Resize", _nchw(g), "", g.const(np.array([1, 1, 2, 2], np.float32)), mode="nearest")),
        "Resize",
        "Resize",
    ),
    "reshape": (lambda g: g.q(g.op("Reshape", _flat(g), g.const(np.array([8, 16])))), "Reshape", "Reshape"),
    "transpose": (lambda g: g.q(g.op("Transpose", _flat(g), perm=[1, 0])), "Transpose", "Transpose"),
    "flatten": (lambda g: g.q(g.op("Flatten", _nchw(g))), "Flatten", "Flatten"),
    "slice": (
        lambda g: g.q(g.op("Slice", _flat(g), g.const(np.array([0])), g.const(np.array([2])))),
        "Slice",
        "Slice",
    ),
    "gather": (lambda g: g.q(g.op("Gather", _flat(g), g.const(np.array([1, 3])))), "Gather", "Gather"),
    "squeeze": (lambda g: g.q(g.op("Squeeze", _nchw(g), g.const(np.array([0])))), "Squeeze", "Squeeze"),
    "unsqueeze": (lambda g: g.q(g.op("Unsqueeze", _flat(g), g.const(np.array([0])))), "Unsqueeze", "Unsqueeze"),
    "depth-to-space": (
        lambda g: g.q(g.op("DepthToSpace", _nchw(g), blocksize=2)),
        "DepthToSpace",
        "DepthToSpace",
    ),
}


@pytest.mark.parametrize("case", SINGLE)
def test_kernel_of_a_single_node(case: str) -> None:
    build, op_type, kernel = SINGLE[case]
    graph = QdqGraph()
    found = report(graph.model(build(graph)))
    entries = [k for k in found.kernels if k.op_type == op_type]
    assert [k.kernel for k in entries] == [kernel] * len(entries)
    assert all(k.integer and k.status is Status.INTEGER and not k.reason for k in entries)
    assert found.float_nodes() == ()
    assert found.integer_share() == 1.0


def test_split_on_quantized_data() -> None:
    graph = QdqGraph()
    parts = graph.ops("Split", _flat(graph), graph.const(np.array([16, 16])), count=2, axis=1)
    found = report(graph.model(*[graph.q(p) for p in parts]))
    assert one(found, "Split").integer


@pytest.mark.parametrize("head", ["conv", "gemm", "matmul", "add", "concat", "average-pool"])
@pytest.mark.parametrize("clamp", ["Relu", "Clip"])
def test_absorbed_activation(head: str, clamp: str) -> None:
    graph = QdqGraph()
    producers: dict[str, Build] = {
        "conv": lambda g: g.conv(_nchw(g)),
        "gemm": lambda g: g.gemm(_flat(g)),
        "matmul": lambda g: g.matmul(_flat(g)),
        "add": lambda g: g.op("Add", _nchw(g), _nchw(g)),
        "concat": lambda g: g.op("Concat", _nchw(g), _nchw(g), axis=1),
        "average-pool": lambda g: g.op("AveragePool", _nchw(g), kernel_shape=[2, 2]),
    }
    value = producers[head](graph)
    value = graph.op("Relu", value) if clamp == "Relu" else graph.op("Clip", value, graph.const(0), graph.const(6))
    found = report(graph.model(graph.relu_q(value)))
    owner = found.kernels[0]
    assert owner.absorbed == (one(found, clamp).node,)
    assert one(found, clamp).absorbed_into == owner.node
    assert one(found, clamp).integer
    assert owner.kernel.startswith(("com.microsoft.Q", "QLinear"))


def test_matmul_with_bias_runs_as_one_integer_gemm() -> None:
    graph = QdqGraph()
    value = graph.op("Add", graph.matmul(graph.q(graph.input((2, 4, 32)))), graph.const(graph.random(16)))
    found = report(graph.model(graph.q(value)))
    assert one(found, "MatMul").kernel == MS + "QGemm"
    assert one(found, "Add").absorbed_into == one(found, "MatMul").node


def test_residual_block_between_transposes() -> None:
    graph = QdqGraph()
    x = graph.relu_q(graph.op("Relu", graph.conv(_nchw(graph))))
    y = graph.relu_q(graph.op("Relu", graph.conv(x)))
    y = graph.q(graph.conv(y))
    y = graph.relu_q(graph.op("Relu", graph.op("Add", y, x)))
    found = report(graph.model(y))
    assert [k.kernel for k in found.kernels if k.op_type == "Conv"] == [MS + "QLinearConv"] * 3
    assert one(found, "Add").kernel == MS + "QLinearAdd"
    assert [len(k.absorbed) for k in found.kernels if k.op_type in ("Conv", "Add")] == [1, 1, 0, 1]
    assert found.counts() == {"integer": 4, "float": 0, "absorbed": 3, "removed": 0, "other": 0}
    assert found.overhead["Transpose"] == 2


def test_one_value_with_several_dequantizers() -> None:
    graph = QdqGraph()
    value = graph.q(graph.conv(_nchw(graph)))
    left, right = graph.q(graph.conv(value)), graph.q(graph.op("Sigmoid", value))
    found = report(graph.model(left, right))
    assert all(k.integer for k in found.kernels)


def test_standalone_relu_is_a_requantization() -> None:
    graph = QdqGraph()
    found = report(graph.model(graph.relu_q(graph.op("Relu", _flat(graph)))))
    relu = one(found, "Relu")
    assert relu.status is Status.REMOVED
    assert "requantization" in relu.reason


def test_relu_between_float_input_and_q_is_clipped_by_the_q() -> None:
    graph = QdqGraph()
    found = report(graph.model(graph.relu_q(graph.op("Relu", graph.input((4, 8))))))
    assert one(found, "Relu").status is Status.REMOVED
    assert "clips" in one(found, "Relu").reason
