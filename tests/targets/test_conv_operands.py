"""Which operands of Conv the integer kernel takes."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.processor import LARGEST_WEIGHT

from .qdq import STEP, QdqGraph, build, compute_ops, conv_then, kernels, largest_difference


@pytest.mark.parametrize(("axis", "bias"), [(0, "int32"), (None, "int32"), (0, "none"), (0, "float")])
@pytest.mark.parametrize("opset", [13, 17, 21, pytest.param(23, marks=pytest.mark.since("1.24"))])
def test_rule_conv_integer(axis: int | None, bias: str, opset: int) -> None:
    """u8 activations, s8 weights per tensor or per channel; bias int32 DQ, none, or float (then quantized)."""
    model = build(lambda g: g.q(g.conv(g.act_input(), axis=axis, bias=bias)), opset=opset)
    assert compute_ops(model) == ["QLinearConv"]
    assert [k.domain for k in kernels(model) if k.op_type == "QLinearConv"] == ["com.microsoft"]
    assert largest_difference(model) <= STEP * 1.01


@pytest.mark.parametrize("shape", [(1, 16, 20), (1, 16, 6, 6, 6)])
def test_rule_conv_integer_1d_3d(shape: tuple[int, ...]) -> None:
    kernel = [3] * (len(shape) - 2)

    def make(g: QdqGraph) -> str:
        weight = g.dq_weight(g.random(16, 16, *kernel, spread=0.1))
        return g.q(g.op("Conv", g.act_input(shape), weight, kernel_shape=kernel))

    assert compute_ops(build(make)) == ["QLinearConv"]


@pytest.mark.parametrize("shape", [("N", 16, 12, 12), ("N", 16, "H", "W")])
def test_rule_conv_integer_dynamic_shapes(shape: tuple[int | str, ...]) -> None:
    assert compute_ops(build(lambda g: g.q(g.conv(g.act_input(shape))))) == ["QLinearConv"]


@pytest.mark.parametrize("group", [4, 16])
def test_rule_depthwise_conv_integer(group: int) -> None:
    model = build(lambda g: g.q(g.conv(g.act_input(), group=group)))
    assert compute_ops(model) == ["QLinearConv"]
    assert largest_difference(model) <= STEP * 1.01


def test_rule_conv_needs_output_q() -> None:
    """Without a Q on its output a Conv runs in float and dequantizes its weights on every run."""
    model = conv_then(lambda g, c: c)
    assert compute_ops(model) == ["Conv"]
    assert [k.op_type for k in kernels(model)].count("DequantizeLinear") == 3  # activation, weight, bias


def test_rule_conv_needs_output_q_only() -> None:
    """A Conv whose float output is also a graph output runs in float, the Q beside it notwithstanding."""
    assert compute_ops(conv_then(lambda g, c: [g.q(c), c])) == ["Conv"]


def test_rule_shared_weight_integer() -> None:
    """Two Convs may read one DequantizeLinear of a weight: both stay integer."""

    def make(g: QdqGraph) -> list[str]:
        weight = g.dq_weight(g.random(16, 16, 3, 3, spread=0.1))
        return [g.q(g.op("Conv", g.act_input(), weight)), g.q(g.op("Conv", g.act_input(scale=0.02), weight))]

    assert compute_ops(build(make)) == ["QLinearConv", "QLinearConv"]


def test_rule_uint8_weights_integer() -> None:
    assert compute_ops(build(lambda g: g.q(g.conv(g.act_input())), weight=np.uint8)) == ["QLinearConv"]


def test_rule_asymmetric_weights_integer() -> None:
    model = build(lambda g: g.q(g.conv(g.act_input(), zero_point=5)))
    assert compute_ops(model) == ["QLinearConv"]
    assert largest_difference(model) <= STEP * 1.01


@pytest.mark.since("1.27")
@pytest.mark.parametrize("factor", [0.5, 1.03, 1.05, 2.0, 4.0])
def test_rule_bias_scale_mismatch_conv_float(factor: float) -> None:
    """An int32 bias whose scale is not input_scale * weight_scale leaves the Conv float: slow, but right.

    Before 1.27 the Conv was integer, and silently wrong.
    """
    model = build(lambda g: g.q(g.conv(g.act_input(), bias_factor=factor)))
    assert compute_ops(model) == ["Conv"]
    assert largest_difference(model) <= STEP * 1.01


@pytest.mark.since("1.27")
def test_rule_bias_scale_mismatch_conv_float_shape() -> None:
    """One scale for a bias whose weight has one per channel is a mismatch too, even where the bias is zero."""

    def make(g: QdqGraph) -> str:
        weight = g.dq_weight(g.random(16, 16, 3, 3, spread=0.1))
        zero = g.const(np.array(0, np.int32))
        bias = g.op("DequantizeLinear", g.const(np.zeros(16, np.int32)), g.const(1e-4), zero)
        return g.q(g.op("Conv", g.act_input(), weight, bias))

    assert compute_ops(build(make)) == ["Conv"]


@pytest.mark.parametrize("op_type", ["Mul", "Add"])
def test_rule_conv_affine_unfolded_float(op_type: str) -> None:
    """A constant Mul or Add between Conv and Q is not folded into a Conv with a DQ weight: the Conv is float."""
    ops = compute_ops(conv_then(lambda g, c: g.q(g.op(op_type, c, g.const(g.random(16, 1, 1))))))
    assert ops == sorted(["Conv", op_type])


@pytest.mark.parametrize("factor", [1.005, 1.015])
def test_rule_bias_scale_mismatch_conv_tolerance(factor: float) -> None:
    """The runtime lets a small mismatch pass and computes with the product of the scales."""
    model = build(lambda g: g.q(g.conv(g.act_input(), bias_factor=factor)))
    assert compute_ops(model) == ["QLinearConv"]


@pytest.mark.since("1.27")
def test_rule_shared_bias_serves_one_conv() -> None:
    """One int32 bias for two Convs of different input scales fits one of them; the other runs float."""

    def make(g: QdqGraph) -> list[str]:
        x, y = g.act_input(), g.act_input(scale=STEP / 2)
        weight = g.dq_weight(g.random(16, 16, 3, 3, spread=0.1))
        bias = g.dq_bias(g.random(16), x, weight)
        return [g.q(g.op("Conv", x, weight, bias)), g.q(g.op("Conv", y, weight, bias))]

    assert compute_ops(build(make)) == ["Conv", "QLinearConv"]


@settings(deadline=None)
@given(data=st.data())
def test_rule_conv_matrix_product(data: st.DataObject) -> None:
    """Weights stored one lower with zero point -1: another kernel of the runtime, the same bits."""

    def draw(*values: int) -> int:
        return data.draw(st.sampled_from(values))

    window, stride, dilation, pad = draw(1, 2, 3, 5), draw(1, 2), draw(1, 2), draw(0, 1, 2)
    inputs, outputs, zero_point = draw(1, 3, 4, 16, 20, 64), draw(1, 5, 16, 33, 64), draw(0, 3, 128, 255)
    per_channel, biased, size = data.draw(st.booleans()), data.draw(st.booleans()), draw(9, 12)
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    weight = rng.integers(-LARGEST_WEIGHT, LARGEST_WEIGHT + 1, (outputs, inputs, window, window))
    scale = rng.uniform(1e-4, 1e-2, outputs if per_channel else ()).astype(np.float32)
    held = {
        "s": np.float32(0.02),
        "z": np.uint8(zero_point),
        "ws": scale,
        "os": np.float32(0.02 * float(np.mean(scale)) * 90 * np.sqrt(weight[0].size)),
        "oz": np.uint8(draw(0, 120, 255)),
        "b": rng.integers(-9999, 9999, outputs).astype(np.int32),
    }
    node = helper.make_node(
        "QLinearConv",
        ["x", "s", "z", "w", "ws", "wz", "os", "oz", *(["b"] if biased else [])],
        ["y"],
        pads=[pad] * 4,
        strides=[stride] * 2,
        dilations=[dilation] * 2,
    )
    feed = {"x": rng.integers(0, 256, (1, inputs, size, size)).astype(np.uint8)}
    results = []
    for shift in (0, -1):
        stored = {"w": (weight + shift).astype(np.int8), "wz": np.full(scale.shape, shift, np.int8)}
        graph = helper.make_graph(
            [node],
            "conv",
            [helper.make_tensor_value_info("x", TensorProto.UINT8, feed["x"].shape)],
            [helper.make_tensor_value_info("y", TensorProto.UINT8, None)],
            [numpy_helper.from_array(np.asarray(v), k) for k, v in {**held, **stored}.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        results.append(
            ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
        )
    assert np.array_equal(results[0][0], results[1][0])


@pytest.mark.parametrize("axis", [0, None])
def test_rule_conv_matrix_product_fuses(axis: int | None) -> None:
    def make(g: QdqGraph) -> str:
        weight = g.dq_weight(g.random(16, 16, 3, 3, spread=0.1), axis=axis, zero_point=-1)
        return g.q(g.op("Conv", g.act_input(), weight, kernel_shape=[3, 3]))

    assert compute_ops(build(make)) == ["QLinearConv"]
