"""QOperator format: the same kernels and results as the QDQ model's, with the runtime's optimizations off too."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings

from kenosis_ort.formats.tensors import quantizers_of
from kenosis_ort.formats.to_qop import to_qop
from kenosis_ort.verify import verify_fusion
from tests import models, planning
from tests.flow.support import changed
from tests.formats.qonnx import operators, run
from tests.formats.test_model import model_of
from tests.quantizer.random_nets import nets


def check_same(qdq: onnx.ModelProto, qop: onnx.ModelProto, feeds: Sequence[models.Feed]) -> None:
    """The runtime fuses the QDQ model to what the other one says, whether or not it optimizes that."""
    step = max((float(t.quantizer.scale.max()) for t in quantizers_of(qdq) if t.constant is None), default=0.0)
    for feed in feeds:
        expected = run(qdq, feed, optimize=True)
        for found in (run(qop, feed, optimize=True), run(qop, feed)):
            for a, b in zip(expected, found, strict=True):
                assert np.abs(a.astype(np.float64) - b).max(initial=0.0) <= 1.01 * step


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(nets())
def test_any_net_computes_the_same(model: onnx.ModelProto) -> None:
    done = planning.quantize(model, protect_outputs="int8")
    qop = to_qop(done.quantized)
    check_same(done.quantized, qop, done.feeds[:1])
    floating = [k for k in verify_fusion(done.quantized).kernels if k.op_type == "Conv" and not k.integer]
    assert floating or "Conv" not in operators(qop)


def test_every_operator_of_a_net_is_one_of_integers() -> None:
    text = """(float[1,3,8,8] x) => (y) <float[8,3,3,3] w, float[8] b, float[8,8,1,1] u> {
        c = Conv (x, w, b) r = Relu (c) p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r) d = Conv (p, u)
        a = Add (d, p) s = Sigmoid (a) g = GlobalAveragePool (s) h = Conv (g, u) y = Relu (h) }"""
    done = planning.quantize(text, protect_outputs="int8")
    qop = to_qop(done.quantized)
    expected = dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "MaxPool", "QLinearAdd", "QLinearSigmoid"), 1)
    assert operators(qop) == {**expected, "QLinearGlobalAveragePool": 1, "QLinearConv": 3}
    onnx.checker.check_model(qop)
    check_same(done.quantized, qop, done.feeds)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
def test_products_with_quantized_and_float_output(rank: int, bias: bool) -> None:
    net = models.Net.over([4, 16] if rank == 2 else [1, 4, 16], seed=3)
    hidden = net.op("Relu", [net.linear("x", 16, 16, bias=bias)])
    done = planning.quantize(net.of(net.linear(hidden, 16, 8, bias=bias)))
    qop = to_qop(done.quantized)
    check_same(done.quantized, qop, done.feeds)
    found = operators(qop)
    if rank == 2 and bias:
        assert found["QGemm"] == 2
    elif not bias:
        assert (found["QLinearMatMul"], found["MatMulIntegerToFloat"]) == (1, 1)


def test_a_clip_of_integers_follows_the_operator() -> None:
    assert operators(to_qop(model_of(0, 15), clip=True))["Clip"] == 1


def test_a_relu_that_the_integers_do_not_keep_stays_with_its_conv() -> None:
    text = """(float[1,3,6,6] x) => (y) <float[4,3,1,1] w, float[4] b, float[2,4,1,1] v>
        { c = Conv (x, w, b) relu = Relu (c) y = Conv (relu, v) }"""
    done = planning.quantize(text, protect_outputs="int8")
    grid = next(t.quantize for t in quantizers_of(done.quantized) if t.real == "relu")
    quantized = changed(done.quantized, **{grid.input[2]: lambda _: 7})
    qop = to_qop(quantized)
    assert (operators(qop)["Relu"], operators(qop)["Conv"]) == (1, 1)
    check_same(quantized, qop, done.feeds)


@pytest.mark.parametrize("behind", [10, 20])
def test_integers_are_moved_only_where_scale_and_zero_point_stay(behind: int) -> None:
    text = """(float[1,1,4,4] x) => (float[1,1,3,3] y) { q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z)
        p = MaxPool <kernel_shape = [2,2]> (d) r = QuantizeLinear (p, s, v) y = DequantizeLinear (r, s, v) }"""
    qdq = planning.parse(text, {"s": np.float32(0.1), "z": np.uint8(10), "v": np.uint8(behind)})
    qop = to_qop(qdq)
    assert operators(qop)["QuantizeLinear"] == (1 if behind == 10 else 2)
    check_same(qdq, qop, models.feeds(qdq, 2))
