"""Pairs on both sides of operators that move values: the same values, and integer kernels around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kenosis_ort.formats.integer_bias import carry_pairs
from kenosis_ort.formats.runtime_form import to_runtime_form
from kenosis_ort.interop import read_model
from kenosis_ort.verify import verify_fusion
from tests.formats.qonnx import X86, Net
from tests.formats.test_runtime_form import draw, run

MOVES: dict[str, dict[str, Any]] = {
    "MaxPool": {"kernel_shape": [2, 2], "strides": [2, 2]},
    "DepthToSpace": {"blocksize": 2},
    "Transpose": {"perm": [0, 2, 3, 1]},
    "Flatten": {},
}


def convolution(net: Net, x: str, channels: int) -> str:
    rng = np.random.default_rng(channels)
    w = net.constant(rng.normal(size=(8, channels, 3, 3)).astype(np.float32) * 0.3)
    bias = net.constant(rng.normal(size=8).astype(np.float32))
    return net.add("Conv", x, net.quant(w, 0.1, bits=4, narrow=1), bias, kernel_shape=[3, 3], pads=[1, 1, 1, 1])


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("op_type", MOVES)
def test_a_quantizer_behind_moved_values_also_stands_in_front(op_type, relu):
    net = Net()
    y = net.add(op_type, convolution(net, net.quant("x", 0.1, bits=8), 3), **MOVES[op_type])
    y = net.add("Relu", y) if relu else y
    canonical = read_model(net.model(net.quant(y, 0.2, bits=4, signed=not relu))).canonical
    before = run(canonical, draw())
    rewritten = to_runtime_form(canonical, X86)
    np.testing.assert_array_equal(run(rewritten, draw()), before)
    np.testing.assert_array_equal(run(rewritten, draw(), optimize=True), before)
    fusion = verify_fusion(rewritten)
    assert fusion.integer_share() == 1.0, str(fusion)
    assert not fusion.float_nodes(), str(fusion)


def test_a_layer_behind_moved_values_reads_integers():
    net = Net()
    y = net.quant(net.add("Relu", convolution(net, net.quant("x", 0.1, bits=8), 3)), 0.2, bits=4, signed=0)
    y = net.add("Flatten", net.add("MaxPool", y, **MOVES["MaxPool"]))
    w = net.quant(net.constant(draw((72, 5))), 0.3, bits=4)
    canonical = read_model(net.model(net.quant(net.add("MatMul", y, w), 0.5, bits=8))).canonical
    before = run(canonical, draw())
    rewritten = to_runtime_form(canonical, X86)
    np.testing.assert_array_equal(run(rewritten, draw(), optimize=True), before)
    fusion = verify_fusion(rewritten)
    assert not fusion.float_nodes(), str(fusion)


def test_a_relu_whose_quantizer_reaches_below_zero_stays():
    net = Net()
    y = net.add("Relu", net.add("Flatten", convolution(net, net.quant("x", 0.1, bits=8), 3)))
    canonical = read_model(net.model(net.quant(y, 0.2, bits=4, signed=1))).canonical
    before = run(canonical, draw())
    carried = carry_pairs(canonical)
    assert [n.op_type for n in carried.graph.node].count("Relu") == 1
    np.testing.assert_array_equal(run(carried, draw()), before)
