"""What the runtime's integer kernels do not fuse goes into weights and biases; what the model computes stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from kenosis_ort.formats.integer_bias import IntegerLayer
from kenosis_ort.formats.runtime_form import to_runtime_form
from kenosis_ort.formats.tensors import quantizers_of
from kenosis_ort.interop import read_model
from kenosis_ort.targets.model import DataTypes
from kenosis_ort.verify import check_bias_alignment, verify_fusion
from tests.formats.qonnx import X86, Net, conv_net


def run(model: onnx.ModelProto, x: Any, *, optimize: bool = False) -> Any:
    options = ort.SessionOptions()
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]


def draw(shape: tuple[int, ...] = (2, 3, 6, 6), seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 2


def behind(net: Net, value: str, kind: str, channels: int, rng: np.random.Generator, shape: tuple[int, ...]) -> str:
    numbers = rng.normal(size=channels).astype(np.float32)
    if kind == "BatchNormalization":
        numbers[0] = 0.0
        others = (rng.normal(size=channels).astype(np.float32) for _ in range(2))
        spread = rng.uniform(0.5, 2, channels).astype(np.float32)
        return net.add(kind, value, *(net.constant(a) for a in (numbers, *others, spread)))
    if kind == "Sub":
        return net.add(kind, value, net.constant(np.float32(0.3)))
    return net.add(kind, value, net.constant(numbers.reshape(shape)))


@settings(deadline=None)
@given(
    layer=st.sampled_from(["Conv", "Gemm", "MatMul"]),
    kinds=st.lists(st.sampled_from(["BatchNormalization", "Mul", "Add", "Div", "Sub"]), max_size=3),
    by_channel=st.booleans(),
    biased=st.booleans(),
    narrow=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_constants_behind_a_layer_go_into_it(layer, kinds, by_channel, biased, narrow, seed):
    rng = np.random.default_rng(seed)
    shape = (2, 3, 6, 6) if layer == "Conv" else (4, 6)
    net = Net(shape)
    x = net.quant("x", 1 / 64, bits=8)
    size = {"Conv": (5, 3, 3, 3), "Gemm": (5, 6), "MatMul": (6, 5)}[layer]
    at = 1 if layer == "MatMul" else 0
    scale = rng.uniform(0.05, 0.1, 5).astype(np.float32).reshape([-1 if a == at else 1 for a in range(len(size))])
    weights = rng.normal(size=size).astype(np.float32)
    weights[(slice(None), 2) if layer == "MatMul" else 2] = 0.0
    w = net.quant(net.constant(weights), scale if by_channel else 0.1, bits=4, narrow=narrow)
    bias = [net.constant(rng.normal(size=5).astype(np.float32))] if biased and layer != "MatMul" else []
    y = net.add(layer, x, w, *bias, **({"transB": 1} if layer == "Gemm" else {}))
    for kind in kinds:
        y = behind(net, y, kind, 5, rng, (5, 1, 1) if layer == "Conv" else (5,))
    canonical = read_model(net.model(net.quant(y, 1 / 512, bits=8))).canonical
    before = run(canonical, draw(shape))
    rewritten = to_runtime_form(canonical, X86)
    after = run(rewritten, draw(shape))
    # The bias is rounded to steps of the sums, so that some outputs differ by the steps that these make.
    np.testing.assert_allclose(after, before, atol=0.06)
    assert not check_bias_alignment(rewritten)
    left = [n.op_type for n in rewritten.graph.node]
    assert "BatchNormalization" not in left
    assert left.count("Mul") + left.count("Div") + left.count("Sub") == 0


def test_a_norm_that_others_read_around_stays():
    net = Net()
    y = net.add("Conv", net.quant("x", 0.1), net.quant(net.constant(draw((4, 3, 1, 1))), 0.1))
    parameters = [net.constant(np.ones(4, np.float32)) for _ in range(4)]
    z = net.add("BatchNormalization", y, *parameters)
    model = net.model(net.add("Add", net.quant(y, 0.1), net.quant(z, 0.1)))
    canonical = read_model(model).canonical
    before = run(canonical, draw())
    rewritten = to_runtime_form(canonical, X86)
    assert "BatchNormalization" in [n.op_type for n in rewritten.graph.node]
    np.testing.assert_array_equal(run(rewritten, draw()), before)


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
def test_a_quantized_bias_of_its_own_scale_does_not_mislead_the_runtime(shape):
    """The runtime adds a Gemm's int32 bias as it is, whatever scale it has."""
    net = Net((4, 6))
    w = net.quant(net.constant(draw((5, 6))), 0.1, bits=4)
    bias = net.quant(net.constant(np.arange(-2, 3, dtype=np.float32).reshape(shape)), 0.25, bits=32)
    model = net.model(net.quant(net.add("Gemm", net.quant("x", 0.05, bits=8), w, bias, transB=1), 0.05, bits=8))
    canonical = read_model(model).canonical
    before = run(canonical, draw((4, 6)))
    rewritten = to_runtime_form(canonical, X86)
    assert not check_bias_alignment(rewritten)
    np.testing.assert_allclose(run(rewritten, draw((4, 6)), optimize=True), before, atol=0.051)


def test_the_factors_of_a_gemm_go_into_weights_and_bias():
    """The runtime quantizes a float bias and forgets what it is multiplied by."""
    net = Net((4, 6))
    w = net.quant(net.constant(draw((5, 6))), 0.1, bits=4)
    bias = net.constant(np.arange(-2, 3, dtype=np.float32))
    y = net.add("Gemm", net.quant("x", 0.05, bits=8), w, bias, transB=1, alpha=-0.7, beta=0.5)
    canonical = read_model(net.model(net.quant(y, 0.05, bits=8))).canonical
    before = run(canonical, draw((4, 6)))
    rewritten = to_runtime_form(canonical, X86)
    assert verify_fusion(rewritten).integer_share() == 1.0
    np.testing.assert_allclose(run(rewritten, draw((4, 6)), optimize=True), before, atol=0.051)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_signed_branches_run_in_integer(bits):
    canonical = read_model(conv_net(bits, signed=True)).canonical
    before = run(canonical, draw())
    rewritten = to_runtime_form(canonical, X86)
    assert all(t.elem_type == TensorProto.UINT8 for t in quantizers_of(rewritten) if t.constant is None)
    assert np.mean(run(rewritten, draw()) == before) > 0.85
    fusion = verify_fusion(rewritten)
    assert fusion.integer_share() == 1.0, str(fusion)
    assert all(k.integer for k in fusion.kernels if k.op_type == "Add"), str(fusion)


def test_signed_activations_stay_where_kernels_take_them():
    rewritten = to_runtime_form(read_model(conv_net(4, signed=True)).canonical, DataTypes())
    assert TensorProto.INT8 in {t.elem_type for t in quantizers_of(rewritten) if t.constant is None}


@pytest.mark.parametrize(("largest_pair", "largest"), [(2**15 - 1, 32), (2**31 - 1, 64), (0, 1)])
def test_few_bits_take_no_more_of_int8_than_sums_of_two_products_hold(largest_pair, largest):
    ones = np.ones(2)
    layer = IntegerLayer(
        integers=np.ones((2, 3), np.int8),
        axis=0,
        centred=np.ones((2, 3), np.int64),
        zero=np.zeros(2, np.int64),
        scale=ones,
        factor=ones,
        bias=ones,
        data_scale=1.0,
        data_reach=255,
    )
    assert layer.headroom(np.full(2, 765), largest_pair) == largest


def test_batch_normalized_nets_run_in_integer():
    rewritten = to_runtime_form(read_model(conv_net(norm=True)).canonical, X86)
    fusion = verify_fusion(rewritten)
    assert fusion.integer_share() == 1.0, str(fusion)
