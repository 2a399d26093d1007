"""Which activations vanish into the requantization of their producer, and under what conditions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from .qdq import RELU_STEP, STEP, QdqGraph, build, compute_ops, conv_then, largest_difference, op_types

FLOAT_CONV = {"Conv", "FusedConv"}


def _absorbed(model: onnx.ModelProto, *expected: str) -> bool:
    return compute_ops(model) == sorted(expected)


def _runs_float(model: onnx.ModelProto) -> bool:
    ops = compute_ops(model)
    return "QLinearConv" not in ops and bool(FLOAT_CONV & set(ops))


PRODUCERS: dict[str, tuple[str, Callable[[QdqGraph], str]]] = {
    "Conv": ("QLinearConv", lambda g: g.conv(g.act_input())),
    "Gemm": ("QGemm", lambda g: g.gemm(g.act_input((4, 32)))),
    "MatMul": ("QLinearMatMul", lambda g: g.matmul(g.act_input((4, 32)))),
    "Add": ("QLinearAdd", lambda g: g.op("Add", g.act_input(), g.act_input())),
    "Mul": ("QLinearMul", lambda g: g.op("Mul", g.act_input(), g.act_input())),
    "Concat": ("QLinearConcat", lambda g: g.op("Concat", g.act_input(), g.act_input(), axis=1)),
    "AveragePool": ("QLinearAveragePool", lambda g: g.op("AveragePool", g.act_input(), kernel_shape=[2, 2])),
    "GlobalAveragePool": ("QLinearGlobalAveragePool", lambda g: g.op("GlobalAveragePool", g.act_input())),
    "Sigmoid": ("QLinearSigmoid", lambda g: g.op("Sigmoid", g.act_input())),
    "LeakyRelu": ("QLinearLeakyRelu", lambda g: g.op("LeakyRelu", g.act_input(), alpha=0.1)),
}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_rule_absorb_relu(producer: str) -> None:
    """A Relu vanishes when the zero point is the lowest quantized value."""
    kernel, make = PRODUCERS[producer]
    model = build(lambda g: g.relu_q(g.op("Relu", make(g))))
    assert _absorbed(model, kernel)
    assert largest_difference(model) <= RELU_STEP * 1.01


@pytest.mark.parametrize("zero_point", [1, 3])
def test_rule_absorb_relu_needs_lowest_zero_point(zero_point: int) -> None:
    assert _runs_float(conv_then(lambda g, c: g.q(g.op("Relu", c), RELU_STEP, zero_point)))


def test_rule_absorb_relu_requantizes_where_the_producer_has_its_own_q() -> None:
    """Q on both sides of a Relu costs a second DQ/Q pair, but for equal parameters, where it costs nothing."""
    other = conv_then(lambda g, c: g.relu_q(g.op("Relu", g.q(c))))
    same = conv_then(lambda g, c: g.relu_q(g.op("Relu", g.relu_q(c))))
    assert _absorbed(other, "QLinearConv")
    assert _absorbed(same, "QLinearConv")
    assert op_types(other).count("QuantizeLinear") == 2
    assert op_types(same).count("QuantizeLinear") == 1


@pytest.mark.parametrize("producer", PRODUCERS)
def test_rule_absorb_clip(producer: str) -> None:
    """A Clip vanishes when the quantization range lies inside its bounds, to half a step."""
    kernel, make = PRODUCERS[producer]
    model = build(lambda g: g.q(g.clip(make(g), 0.0, 6.0), 6 / 255, 0))
    assert _absorbed(model, kernel)
    assert largest_difference(model) <= 6 / 255 * 1.01


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero_point", "absorbed"),
    [
        (0.0, 6.0, 5.9 / 255, 0, True),
        pytest.param(0.0, 6.0, 6.01 / 255, 0, True, marks=pytest.mark.since("1.31")),
        (0.0, 6.0, 6.02 / 255, 0, False),
        (0.0, 6.0, 6.2 / 255, 0, False),
        (0.0, 6.0, 6 / 255, 1, False),
        (-1.0, 1.0, 1 / 128, 128, True),
        (-1.0, 1.0, 2 / 255, 128, False),
        (-1.0, 1.0, 1 / 127, 128, False),
    ],
)
def test_rule_absorb_clip_bounds(low: float, high: float, scale: float, zero_point: int, absorbed: bool) -> None:
    """The bounds of `absorb-clip`: rint(low/s)+zp <= qmin and rint(high/s)+zp >= qmax.

    Before 1.31 the half step of rounding was not allowed, so a range is to lie inside the bounds exactly.
    """
    model = conv_then(lambda g, c: g.q(g.clip(c, low, high), scale, zero_point))
    assert _absorbed(model, "QLinearConv") if absorbed else _runs_float(model)


@pytest.mark.parametrize("bounds", ["low", "high", "none"])
def test_rule_absorb_clip_one_sided(bounds: str) -> None:
    def make(g: QdqGraph, c: str) -> str:
        if bounds == "low":
            return g.q(g.op("Clip", c, g.const(0.0)), 6 / 255, 0)
        if bounds == "high":
            return g.q(g.op("Clip", c, "", g.const(4.0)), 4 / 128, 128)
        return g.q(g.op("Clip", c))

    assert _absorbed(conv_then(make), "QLinearConv")


def test_rule_absorb_needs_single_consumer() -> None:
    """A second reader of the Conv or of the Relu makes the Conv float; so do two Q nodes on one value."""
    reads_conv = conv_then(lambda g, c: [g.relu_q(g.op("Relu", c)), g.op("Neg", c)])

    def two_readers(g: QdqGraph, c: str) -> list[str]:
        r = g.op("Relu", c)
        return [g.relu_q(r), g.op("Neg", r)]

    def two_quantizers(g: QdqGraph, c: str) -> list[str]:
        r = g.op("Relu", c)
        return [g.relu_q(r), g.op("Neg", g.relu_q(r))]

    assert _runs_float(reads_conv)
    assert _runs_float(conv_then(two_readers))
    assert _runs_float(conv_then(two_quantizers))


def test_rule_two_q_nodes_float() -> None:
    """Two Q nodes on the output of one Conv, even of equal parameters, make it float."""
    assert _runs_float(conv_then(lambda g, c: [g.q(c), g.op("Neg", g.q(c))]))


def test_rule_shape_reader_counts_when_dynamic() -> None:
    """Shape of a static value is folded away; of a dynamic one it is a second consumer. Behind DQ it is harmless."""

    def make(g: QdqGraph, dims: tuple[int | str, ...], where: str) -> list[str]:
        c = g.conv(g.act_input(dims))
        r = g.op("Relu", c)
        q = g.relu_q(r)
        return [q, g.op("Cast", g.op("Shape", {"conv": c, "relu": r, "dq": q}[where]), to=TensorProto.FLOAT)]

    dynamic, static = ("N", 16, "H", "W"), (1, 16, 12, 12)
    assert _absorbed(build(lambda g: make(g, static, "conv")), "QLinearConv")
    assert _absorbed(build(lambda g: make(g, static, "relu")), "QLinearConv")
    assert _runs_float(build(lambda g: make(g, dynamic, "conv")))
    assert _runs_float(build(lambda g: make(g, dynamic, "relu")))
    assert "QLinearConv" in compute_ops(build(lambda g: make(g, dynamic, "dq")))


@pytest.mark.parametrize("captured", ["conv", "relu", "dq"])
def test_rule_subgraph_capture_counts_as_consumer(captured: str) -> None:
    """A value read by an If body has that body as one more consumer; reading the DQ output is harmless."""

    def body(name: str, value: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node("Neg", [value], [out.name], name=f"{name}_neg")], name, [], [out])

    def make(g: QdqGraph, c: str) -> list[str]:
        r = g.op("Relu", c)
        q = g.relu_q(r)
        value = {"conv": c, "relu": r, "dq": q}[captured]
        condition = g.input((), TensorProto.BOOL)
        return [q, g.op("If", condition, then_branch=body("t", value), else_branch=body("e", value))]

    model = conv_then(make)
    assert _absorbed(model, "QLinearConv", "If") if captured == "dq" else _runs_float(model)


@pytest.mark.parametrize("quantized", [True, False])
def test_rule_pass_through_into_body_dies(quantized: bool, tmp_path: Path) -> None:
    """The session moves DQ over a shape operator, and the process dies if a body reads what that writes: Q it first."""

    def body(name: str, value: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node("Neg", [value], [out.name], name=f"{name}_neg")], name, [], [out])

    def make(g: QdqGraph, c: str) -> str:
        moved = g.op("Reshape", g.q(c), g.ints(1, -1))
        value = g.q(moved) if quantized else moved
        return g.op("If", g.input((), TensorProto.BOOL), then_branch=body("t", value), else_branch=body("e", value))

    onnx.save(conv_then(make), tmp_path / "model.onnx")
    load = "import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
    done = subprocess.run([sys.executable, "-c", load, tmp_path / "model.onnx"], capture_output=True, check=False)
    assert (done.returncode == 0) == quantized


def test_rule_absorb_clip_needs_scalar_params() -> None:
    """Scale and zero point of shape [1] break the absorption of Clip, not that of Relu."""
    assert _runs_float(conv_then(lambda g, c: g.q(g.clip(c, 0.0, 6.0), 6 / 255, 0, rank=1)))
    assert _absorbed(conv_then(lambda g, c: g.relu_q(g.op("Relu", c), rank=1)), "QLinearConv")


@pytest.mark.parametrize(("act", "zero_point"), [(np.int8, 0), (np.uint8, 128)])
def test_rule_no_absorb_symmetric(act: type, zero_point: int) -> None:
    """Symmetric activations waste half their range on negative values, so a Relu is not redundant."""
    assert _runs_float(conv_then(lambda g, c: g.q(g.op("Relu", c), STEP, zero_point), act=act))


@pytest.mark.x86_only
def test_rule_no_absorb_symmetric_but_asymmetric_int8() -> None:
    assert _absorbed(conv_then(lambda g, c: g.relu_q(g.op("Relu", c)), act=np.int8), "QLinearConv")
