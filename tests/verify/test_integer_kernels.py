"""What integer kernels take in, and what becomes of it; `tests.targets.qdq` holds the graph of every rule so."""

from __future__ import annotations

import pytest

from kenosis_ort.verify import Status
from tests.targets.qdq import QdqGraph
from tests.targets.test_absorption import PRODUCERS
from tests.verify.expect import one, report

MS = "com.microsoft."


def _nchw(g: QdqGraph) -> str:
    return g.q(g.input((1, 16, 12, 12)))


def _flat(g: QdqGraph) -> str:
    return g.q(g.input((4, 32)))


@pytest.mark.parametrize("head", PRODUCERS)
@pytest.mark.parametrize("clamp", ["Relu", "Clip"])
def test_absorbed_activation(head: str, clamp: str) -> None:
    graph = QdqGraph()
    value = PRODUCERS[head][1](graph)
    value = graph.op("Relu", value) if clamp == "Relu" else graph.clip(value, 0.0, 6.0)
    found = report(graph.model(graph.relu_q(value)))
    owner = found.kernels[0]
    assert owner.absorbed == (one(found, clamp).node,)
    assert one(found, clamp).absorbed_into == owner.node
    assert one(found, clamp).integer
    assert found.integer_share() == 1.0


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
