"""Float weights that the runtime quantizes at load are found, and so is what keeps a node float for real."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kenosis_ort.verify import Status
from tests.targets.qdq import MS, QdqGraph
from tests.verify.expect import one, report

Barrier = Callable[[QdqGraph, str], str]


def _silent_conv(g: QdqGraph, barrier: Barrier, *, relu: bool) -> str:
    y = g.conv(g.q(g.input((1, 16, 12, 12))), weight="float", bias="float")
    y = g.op("Relu", y) if relu else y
    return g.relu_q(barrier(g, y))


@pytest.mark.parametrize("relu", [False, True])
def test_conv_between_dq_and_q(relu: bool) -> None:
    g = QdqGraph()
    conv = one(report(g.model(_silent_conv(g, lambda _, v: v, relu=relu))), "Conv")
    assert conv.silently_quantized
    assert conv.status is Status.INTEGER
    assert "at load" in conv.reason


def test_quantized_and_then_dequantized_on_every_run() -> None:
    g = QdqGraph()
    y = g.conv(g.q(g.input((1, 16, 12, 12))), weight="float", bias="float", transpose=True)
    found = report(g.model(g.q(y)))
    assert one(found, "ConvTranspose").silently_quantized
    assert one(found, "ConvTranspose").weights_per_run
    assert found.silently_quantized() == (one(found, "ConvTranspose"),)
    assert "at load" in str(found)


def test_quantized_weights_are_not_called_silent() -> None:
    g = QdqGraph()
    found = report(g.model(g.q(g.conv(g.q(g.input((1, 16, 12, 12)))))))
    assert found.silently_quantized() == ()
    assert not one(found, "Conv").weights_per_run


@pytest.mark.parametrize("relu", [False, True])
def test_barrier_in_front_of_the_node(relu: bool) -> None:
    g = QdqGraph()
    y = g.conv(g.op("Max", g.q(g.input((1, 16, 12, 12)))), weight="float", bias="float")
    found = report(g.model(g.relu_q(g.op("Relu", y) if relu else y)))
    assert one(found, "Conv").kernel == "com.microsoft.nchwc.Conv"
    assert found.silently_quantized() == ()


def test_leaky_relu_of_slope_one_is_a_barrier_inside_the_kernel() -> None:
    g = QdqGraph()
    found = report(g.model(_silent_conv(g, lambda b, v: b.op("LeakyRelu", v, alpha=1.0), relu=False)))
    conv = one(found, "Conv")
    assert conv.kernel == "com.microsoft.nchwc.Conv"
    assert not conv.silently_quantized
    assert one(found, "LeakyRelu").absorbed_into == conv.node


@pytest.mark.parametrize("relu", [False, True])
def test_the_runtime_s_own_fused_conv_is_never_quantized(relu: bool) -> None:
    g = QdqGraph()
    weight, bias = g.const(g.random(16, 16, 3, 3)), g.const(g.random(16))
    y = g.op("FusedConv", g.q(g.input((1, 16, 12, 12))), weight, bias, domain=MS, pads=[1, 1, 1, 1])
    found = report(g.model(g.relu_q(g.op("Relu", y) if relu else y)))
    conv = one(found, "FusedConv")
    assert conv.kernel == "com.microsoft.nchwc.Conv"
    assert conv.status is Status.FLOAT
    assert not conv.silently_quantized
    if relu:
        assert one(found, "Relu").status in (Status.ABSORBED, Status.REMOVED)


@pytest.mark.since("1.25")  # before, Gemm and LeakyRelu stay two kernels
def test_barrier_for_gemm_inside_the_kernel() -> None:
    g = QdqGraph()
    y = g.gemm(g.q(g.input((4, 32))), weight="float", bias="float")
    found = report(g.model(g.q(g.op("LeakyRelu", y, alpha=1.0))))
    assert one(found, "Gemm").kernel == "com.microsoft.FusedGemm"
    assert found.silently_quantized() == ()


def test_constant_in_place_of_weight_initializer_is_seen() -> None:
    g = QdqGraph()
    model = g.model(_silent_conv(g, lambda _, v: v, relu=False))
    conv = next(n for n in model.graph.node if n.op_type == "Conv")
    weight = next(i for i in model.graph.initializer if i.name == conv.input[1])
    node = model.graph.node.add(op_type="Constant", output=[weight.name], name="weights")
    attribute = node.attribute.add(name="value", type=4)
    attribute.t.CopyFrom(weight)
    model.graph.initializer.remove(weight)
    nodes = [model.graph.node[-1], *model.graph.node[:-1]]
    ordered = [type(n).FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(ordered)
    assert one(report(model), "Conv").silently_quantized
    assert np.prod(weight.dims) == 16 * 16 * 9
