"""How the runtime quantizes float weights behind the model's back, and what keeps a node float for real.

The runtime's optimizer gives a Conv, ConvTranspose or Gemm with a float weight an int8 per-tensor asymmetric one if
its input comes from DQ and its output goes to Q: directly, through Relu or Clip, or through what Q is hoisted over.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from .qdq import VERSION, QdqGraph, build, compute_ops, quantized_weights, snr_db

Step = Callable[[QdqGraph, str], str]
FLOAT_ONLY_DB = 100.0

NODES: dict[str, tuple[str, Callable[[QdqGraph], str]]] = {
    "Conv": ("QLinearConv", lambda g: g.conv(g.act_input(), weight="float")),
    "ConvTranspose": ("ConvTranspose", lambda g: g.conv(g.act_input(), weight="float", transpose=True)),
    "Gemm": ("QGemm", lambda g: g.gemm(g.act_input((4, 32)), weight="float")),
    "MatMul+Add": ("QGemm", lambda g: g.matmul(g.act_input((4, 32)), weight="float", bias="float")),
}
BETWEEN: dict[str, Step] = {
    "nothing": lambda g, v: v,
    "Relu": lambda g, v: g.op("Relu", v),
    "Clip": lambda g, v: g.clip(v, 0.0, 6.0),
    "Clip, not absorbed": lambda g, v: g.clip(v, -1.0, 1.0),
    "Slice": lambda g, v: g.op("Slice", v, g.ints(0), g.ints(12), g.ints(1)),
}


def _model(node: str, between: str, barrier: Step = lambda g, v: v) -> onnx.ModelProto:
    return build(lambda g: g.q(barrier(g, BETWEEN[between](g, NODES[node][1](g))), 6 / 255, 0))


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("between", BETWEEN)
def test_rule_float_weight_silently_quantized(node: str, between: str) -> None:
    """The weight of the optimized graph is int8; the result is no longer the file's."""
    model = _model(node, between)
    assert quantized_weights(model) == 1
    assert snr_db(model) < 60
    if between != "Clip, not absorbed":
        assert NODES[node][0] in compute_ops(model)


def test_rule_float_weight_silently_quantized_beside_graph_output() -> None:
    """That the float value is a graph output too does not help: int8 weights, and a float Conv on top."""
    model = build(lambda g: [g.q(c := g.conv(g.act_input(), weight="float")), c])
    assert quantized_weights(model) == 1
    assert compute_ops(model) == ["Conv"]


def test_rule_float_weight_silently_quantized_behind_batch_norm() -> None:
    """The runtime folds a BatchNormalization into the float Conv first, then quantizes it."""

    def make(g: QdqGraph) -> str:
        conv = g.conv(g.act_input(), weight="float")
        return g.relu_q(g.op("Relu", g.op("BatchNormalization", conv, *[g.const(g.random(16) ** 2 + 1)] * 4)))

    assert compute_ops(build(make)) == ["QLinearConv"]


@pytest.mark.parametrize("node", NODES)
def test_rule_float_weight_no_output_q_stays_float(node: str) -> None:
    model = build(NODES[node][1])
    assert quantized_weights(model) == 0
    assert snr_db(model) > FLOAT_ONLY_DB


def test_rule_float_weight_no_output_q_stays_float_sides() -> None:
    """No DQ on the input, a second reader of the output, or another activation in front of Q: float as well."""
    no_dq = build(lambda g: g.q(g.conv(g.input(), weight="float")))
    second_reader = build(lambda g: [g.q(c := g.conv(g.act_input(), weight="float")), g.op("Neg", c)])
    activation = build(lambda g: g.q(g.op("Sigmoid", g.conv(g.act_input(), weight="float"))))
    flatten = build(lambda g: g.q(g.op("Flatten", g.conv(g.act_input(), weight="float"))))
    add = build(lambda g: g.q(g.op("Add", g.conv(g.act_input(), weight="float"), g.act_input())))
    for model in (no_dq, second_reader, activation, flatten, add):
        assert quantized_weights(model) == 0


def test_rule_float_matmul_weight_untouched() -> None:
    """A MatMul with a float weight stays float, unless an Add of a float bias makes a Gemm of it."""
    model = build(lambda g: g.q(g.matmul(g.act_input((4, 32)), weight="float")))
    assert compute_ops(model) == ["MatMul"]
    assert quantized_weights(model) == 0
    assert quantized_weights(_model("MatMul+Add", "nothing")) == 1


BARRIERS: dict[str, Step] = {
    "Max": lambda g, v: g.op("Max", v),
    "Sum": lambda g, v: g.op("Sum", v),
    "LeakyRelu alpha=1": lambda g, v: g.op("LeakyRelu", v, alpha=1.0),
}


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("barrier", BARRIERS)
def test_rule_barrier_keeps_float(node: str, between: str, barrier: str) -> None:
    """An operator that changes nothing, directly in front of Q: the weight stays float, the numbers the file's."""
    model = _model(node, between, BARRIERS[barrier])
    assert quantized_weights(model) == 0
    assert snr_db(model) > FLOAT_ONLY_DB


NEW = pytest.mark.since("1.24")


@pytest.mark.parametrize("opset", [13, 19, 21, pytest.param(23, marks=NEW), pytest.param(24, marks=NEW)])
def test_rule_barrier_keeps_float_opsets(opset: int) -> None:
    model = build(lambda g: g.q(g.op("Max", g.conv(g.act_input(), weight="float"))), opset=opset)
    assert quantized_weights(model) == 0


NO_BARRIERS: dict[str, Step] = {
    "Identity": lambda g, v: g.op("Identity", v),
    "Dropout": lambda g, v: g.op("Dropout", v),
    "Cast": lambda g, v: g.op("Cast", v, to=1),
    "Mul by 1": lambda g, v: g.op("Mul", v, g.const(1.0)),
    "Add of 0": lambda g, v: g.op("Add", v, g.const(0.0)),
    "Reshape": lambda g, v: g.op("Reshape", v, g.ints(0, 0, 0, 0)),
    "open Clip": lambda g, v: g.op("Clip", v, g.const(-3.4e38)),
}


@pytest.mark.parametrize("name", NO_BARRIERS)
def test_rule_barrier_must_survive(name: str) -> None:
    """What the optimizer removes or sees through is no barrier."""
    assert quantized_weights(_model("Conv", "nothing", NO_BARRIERS[name])) == 1


@pytest.mark.parametrize("q_out", [True, False])
def test_rule_conv_transpose_float(q_out: bool) -> None:
    """ConvTranspose has no integer kernel: a DQ weight is dequantized on every run."""

    def make(g: QdqGraph) -> str:
        y = g.conv(g.act_input(), transpose=True, axis=1)
        return g.q(y) if q_out else y

    model = build(make)
    assert compute_ops(model) == ["ConvTranspose"]
    assert quantized_weights(model) == 1


@pytest.mark.parametrize("between", ["nothing", "Identity", "Relu"])
def test_rule_clip_of_input_barrier(between: str) -> None:
    """Where Q alone would clip, runtimes before 1.24 want to drop the Clip, and cannot. Others keep it."""

    def make(g: QdqGraph, barrier: bool) -> str:
        value = g.input() if between == "nothing" else g.op(between, g.input())
        clip = g.clip(value, 0.0, 6.0)
        return g.q(g.op("Max", clip) if barrier else clip, 6 / 255, 0)

    assert compute_ops(build(lambda g: make(g, True))) == ["Clip", "Max"]
    bare = build(lambda g: make(g, False))
    if VERSION < (1, 24):
        with pytest.raises(ort_errors.RuntimeException, match="RemoveNode"):
            compute_ops(bare)
    else:
        assert compute_ops(bare) == ["Clip"]
