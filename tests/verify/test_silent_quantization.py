"""Float weights that the runtime quantizes at load are found, and so is what keeps a node float for real."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from kenosis_ort.verify import Status
from tests.targets.qdq import MS, QdqGraph
from tests.verify.expect import one, report

NCHWC = "com.microsoft.nchwc.Conv"


def image(g: QdqGraph) -> str:
    return g.q(g.input((1, 16, 12, 12)))


def conv(g: QdqGraph, behind: str = "", *, before: bool = False, **how: Any) -> str:
    """A Conv with float weights between DQ and Q, with operators behind it and perhaps a barrier in front of it."""
    y = g.conv(g.op("Max", image(g)) if before else image(g), weight="float", bias="float", **how)
    for op_type in behind.split():
        y = g.op(op_type, y, **({"alpha": 1.0} if op_type == "LeakyRelu" else {}))
    return g.relu_q(y)


def stored(g: QdqGraph, behind: str = "") -> str:
    """The runtime's own fused Conv as the file's operator."""
    weights = g.const(g.random(16, 16, 3, 3)), g.const(g.random(16))
    y = g.op("FusedConv", image(g), *weights, domain=MS, pads=[1, 1, 1, 1])
    return g.relu_q(g.op(behind, y) if behind else y)


SILENT = [lambda g: conv(g), lambda g: conv(g, "Relu")]
FLOAT = {
    "a barrier in front": ("Conv", NCHWC, lambda g: conv(g, before=True)),
    "and a Relu behind": ("Conv", NCHWC, lambda g: conv(g, "Relu", before=True)),
    "LeakyRelu of slope 1 is one inside the kernel": ("Conv", NCHWC, lambda g: conv(g, "LeakyRelu")),
    "the runtime's own operator": ("FusedConv", NCHWC, stored),
    "with a Relu": ("FusedConv", NCHWC, lambda g: stored(g, "Relu")),
}


@pytest.mark.parametrize("make", SILENT)
def test_conv_between_dq_and_q(make: Any) -> None:
    g = QdqGraph()
    found = one(report(g.model(make(g))), "Conv")
    assert (found.silently_quantized, found.status) == (True, Status.INTEGER)
    assert "at load" in found.reason


@pytest.mark.parametrize("name", FLOAT)
def test_what_keeps_its_weights(name: str) -> None:
    op_type, kernel, make = FLOAT[name]
    g = QdqGraph()
    found = report(g.model(make(g)))
    assert (one(found, op_type).kernel, one(found, op_type).status) == (kernel, Status.FLOAT)
    assert found.silently_quantized() == ()
    for other in found.kernels[1:]:  # the activation, but for the barrier in front
        assert other.op_type in ("Conv", "Max") or other.status in (Status.ABSORBED, Status.REMOVED)


@pytest.mark.since("1.25")  # before, Gemm and LeakyRelu stay two kernels
def test_a_gemm_with_leaky_relu_is_one_float_kernel() -> None:
    g = QdqGraph()
    y = g.gemm(g.q(g.input((4, 32))), weight="float", bias="float")
    found = report(g.model(g.q(g.op("LeakyRelu", y, alpha=1.0))))
    assert one(found, "Gemm").kernel == "com.microsoft.FusedGemm"
    assert found.silently_quantized() == ()


def test_quantized_and_then_dequantized_on_every_run() -> None:
    g = QdqGraph()
    found = report(g.model(conv(g, transpose=True)))
    node = one(found, "ConvTranspose")
    assert node.silently_quantized
    assert node.weights_per_run
    assert found.silently_quantized() == (node,)
    assert "at load" in str(found)


def test_quantized_weights_are_not_called_silent() -> None:
    g = QdqGraph()
    found = report(g.model(g.q(g.conv(image(g)))))
    assert found.silently_quantized() == ()
    assert not one(found, "Conv").weights_per_run


def test_a_constant_node_in_place_of_an_initializer_is_seen() -> None:
    g = QdqGraph()
    model = g.model(conv(g))
    reads = next(n for n in model.graph.node if n.op_type == "Conv").input[1]
    (weight,) = [i for i in model.graph.initializer if i.name == reads]
    array = numpy_helper.to_array(weight)
    model.graph.initializer.remove(weight)
    node = helper.make_node("Constant", [], [reads], name="weights", value=numpy_helper.from_array(array))
    model.graph.node.insert(0, node)
    assert one(report(model), "Conv").silently_quantized
    assert np.size(array) == 16 * 16 * 9
