"""What integer kernels take in, and what becomes of it; `tests.targets.qdq` holds the graph of every rule so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kenosis_ort.verify import FusionReport, Status
from tests.targets.qdq import QdqGraph
from tests.targets.test_absorption import PRODUCERS
from tests.verify.expect import one, report

MS = "com.microsoft."


def of(make: Callable[[QdqGraph], str | list[str]]) -> FusionReport:
    graph = QdqGraph()
    made = make(graph)
    return report(graph.model(*([made] if isinstance(made, str) else made)))


def image(g: QdqGraph) -> str:
    return g.q(g.input((1, 16, 12, 12)))


@pytest.mark.parametrize("head", PRODUCERS)
@pytest.mark.parametrize("clamp", ["Relu", "Clip"])
def test_absorbed_activation(head: str, clamp: str) -> None:
    def make(g: QdqGraph) -> str:
        y = PRODUCERS[head](g)
        return g.relu_q(g.op("Relu", y) if clamp == "Relu" else g.clip(y, 0.0, 6.0))

    found = of(make)
    owner, taken = found.kernels[0], one(found, clamp)
    assert owner.absorbed == (taken.node,)
    assert (taken.absorbed_into, taken.integer) == (owner.node, True)
    assert found.integer_share() == 1.0


def test_matmul_with_bias_runs_as_one_integer_gemm() -> None:
    found = of(lambda g: g.q(g.op("Add", g.matmul(g.q(g.input((2, 4, 32)))), g.const(g.random(16)))))
    assert one(found, "MatMul").kernel == MS + "QGemm"
    assert one(found, "Add").absorbed_into == one(found, "MatMul").node


def test_residual_block_between_transposes() -> None:
    def make(g: QdqGraph) -> str:
        x = g.relu_q(g.op("Relu", g.conv(image(g))))
        y = g.q(g.conv(g.relu_q(g.op("Relu", g.conv(x)))))
        return g.relu_q(g.op("Relu", g.op("Add", y, x)))

    found = of(make)
    assert [k.kernel for k in found.kernels if k.op_type == "Conv"] == [MS + "QLinearConv"] * 3
    assert one(found, "Add").kernel == MS + "QLinearAdd"
    assert [len(k.absorbed) for k in found.kernels if k.op_type in ("Conv", "Add")] == [1, 1, 0, 1]
    assert found.counts() == {"integer": 4, "float": 0, "absorbed": 3, "removed": 0, "other": 0}
    assert found.overhead["Transpose"] == 2


def test_one_value_with_several_dequantizers() -> None:
    def make(g: QdqGraph) -> list[str]:
        value = g.q(g.conv(image(g)))
        return [g.q(g.conv(value)), g.q(g.op("Sigmoid", value))]

    assert all(k.integer for k in of(make).kernels)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda g: g.relu_q(g.op("Relu", g.q(g.input((4, 32))))), "requantization"),
        (lambda g: g.relu_q(g.op("Relu", g.input((4, 8)))), "clips"),
    ],
)
def test_a_relu_that_the_q_behind_it_does_as_well_is_removed(make: Callable[[QdqGraph], str], words: str) -> None:
    relu = one(of(make), "Relu")
    assert relu.status is Status.REMOVED
    assert words in relu.reason
