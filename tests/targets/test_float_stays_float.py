"""How the runtime quantizes float weights behind the model's back, and what keeps a node float for real.

The runtime's optimizer gives a Conv, ConvTranspose or Gemm with a float weight an int8 per-tensor asymmetric one if
its input comes from DQ and its output goes to Q: directly, through Relu or Clip, or through what Q is hoisted over.
"""

import numpy as np
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from .qdq import ANY, VERSION, Case, build, compute_ops, each_case, since, step

NODES = {
    "Conv": ("QLinearConv", lambda g: g.conv(g.act_input(), weight="float")),
    "ConvTranspose": ("ConvTranspose", lambda g: g.conv(g.act_input(), weight="float", transpose=True)),
    "Gemm": ("QGemm", lambda g: g.gemm(g.act_input((4, 32)), weight="float")),
    "MatMul+Add": ("QGemm", lambda g: g.matmul(g.act_input((4, 32)), weight="float", bias="float")),
}
"""With what the runtime makes of them."""
BETWEEN = {
    "": lambda g, v: v, "Relu": step("Relu"), "Clip": lambda g, v: g.clip(v, 0.0, 6.0),
    "Clip, not absorbed": lambda g, v: g.clip(v, -1.0, 1.0), "Slice": step("Slice", [0], [12], [1]),
}  # fmt: skip
BARRIERS = [step("Max"), step("Sum"), step("LeakyRelu", alpha=1.0)]
NO_BARRIERS = [
    *(step("Identity"), step("Dropout"), step("Cast", to=1), step("Mul", np.float32(1)), step("Add", np.float32(0))),
    *(step("Reshape", [0, 0, 0, 0]), step("Clip", np.float32(-3.4e38))),
]


def conv(g):
    return NODES["Conv"][1](g)


def before_q(node, between="", barrier=BETWEEN[""]):
    return lambda g: g.q(barrier(g, BETWEEN[between](g, NODES[node][1](g))), 6 / 255, 0)


def normed(g):
    return g.relu_q(g.op("Relu", g.op("BatchNormalization", conv(g), *[g.const(g.random(16) ** 2 + 1)] * 4)))


EXAMPLES = {
    "float-weight-silently-quantized": [
        *(Case(f"{kernel} {'' if between in ('Relu', 'Clip') else between}", before_q(node, between), weights=1)
          for node, (kernel, _) in NODES.items()
          for between in ("", "Relu", "Clip", "Slice")),
        *(Case(ANY, before_q(node, "Clip, not absorbed"), weights=1) for node in NODES),
    ],
    # That the float value is a graph output too does not help: int8 weights, and a float Conv on top.
    "float-weight-silently-quantized-beside-graph-output": [Case("Conv", lambda g: [g.q(c := conv(g)), c], weights=1)],
    # The runtime folds a BatchNormalization into the float Conv first, then quantizes it.
    "float-weight-silently-quantized-behind-batch-norm": [Case("QLinearConv", normed, weights=1)],
    "float-weight-no-output-q-stays-float": [
        *(Case(ANY, make, exact=True, weights=0) for _, make in NODES.values()),
        # No DQ on the input, a second reader of the output, or another activation in front of Q.
        Case(ANY, lambda g: g.q(g.conv(g.input(), weight="float")), weights=0),
        Case(ANY, lambda g: [g.q(c := conv(g)), g.op("Neg", c)], weights=0),
        Case(ANY, lambda g: g.q(g.op("Sigmoid", conv(g))), weights=0),
        Case(ANY, lambda g: g.q(g.op("Flatten", conv(g))), weights=0),
        Case(ANY, lambda g: g.q(g.op("Add", conv(g), g.act_input())), weights=0),
    ],
    # Unless an Add of a float bias makes a Gemm of it.
    "float-matmul-weight-untouched": [
        Case("MatMul", lambda g: g.q(g.matmul(g.act_input((4, 32)), weight="float")), weights=0),
    ],
    # An operator that changes nothing, directly in front of Q: the weight stays float, the numbers the file's.
    "barrier-keeps-float": [
        *(Case(ANY, before_q(node, between, barrier), exact=True, weights=0)
          for node in NODES
          for between in BETWEEN
          for barrier in BARRIERS),
        *(Case(ANY, before_q("Conv", "", BARRIERS[0]), weights=0, options={"opset": opset}, marks=marks)
          for opset, marks in ((13, ()), (19, ()), (21, ()), (23, since("1.24")), (24, since("1.24")))),
    ],
    # What the optimizer removes or sees through is no barrier.
    "barrier-must-survive": [Case(ANY, before_q("Conv", "", step), weights=1) for step in NO_BARRIERS],
    # No integer kernel: a DQ weight is dequantized on every run.
    "conv-transpose-float": [
        Case("ConvTranspose", lambda g: g.q(g.conv(g.act_input(), transpose=True, axis=1)), weights=1),
        Case("ConvTranspose", lambda g: g.conv(g.act_input(), transpose=True, axis=1), weights=1),
    ],
}  # fmt: skip


@each_case(EXAMPLES)
def test_rule(case):
    case.check()


@pytest.mark.parametrize("between", ["", "Identity", "Relu"])
def test_rule_clip_of_input_barrier(between):
    """Where Q alone would clip, runtimes before 1.24 want to drop the Clip, and cannot. Others keep it."""

    def make(g, barrier):
        clip = g.clip(g.op(between, g.input()) if between else g.input(), 0.0, 6.0)
        return g.q(g.op("Max", clip) if barrier else clip, 6 / 255, 0)

    assert compute_ops(build(lambda g: make(g, True))) == ["Clip", "Max"]
    bare = build(lambda g: make(g, False))
    if VERSION < (1, 24):
        with pytest.raises(ort_errors.RuntimeException, match="RemoveNode"):
            compute_ops(bare)
    else:
        assert compute_ops(bare) == ["Clip"]
