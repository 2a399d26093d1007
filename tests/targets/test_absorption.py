"""Activations behind an integer kernel: which vanish into its requantization, and what those do that do not."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.models import Net

from . import qdq
from .qdq import FLOAT_CONV, PRODUCERS, RELU_STEP, STEP, Case, QdqGraph, Step, build, each_case, op_types, since, step

SIX = 6 / 255


def behind_conv(kernels: str, make: Callable[[QdqGraph, str], str | list[str]], **more: Any) -> Case:
    """A Conv of a quantized input, and what stands behind it."""
    options = {name: more.pop(name) for name in ("act", "opset") if name in more}
    return Case(kernels, lambda g: make(g, g.conv(g.act_input())), options=options, **more)


def clip_q(g: QdqGraph, value: str, low: float = 0.0, high: float = 6.0, scale: float = SIX, zero: int = 0) -> str:
    return g.q(g.clip(value, low, high), scale, zero)


relu = step("Relu")


def product(g: QdqGraph, x: str, gate: str) -> str:
    return g.op("Mul", x, gate)


ACTIVATIONS: dict[str, tuple[Step, str]] = {
    "LeakyRelu": (step("LeakyRelu", alpha=0.1), "QLinearLeakyRelu"),
    "Sigmoid": (step("Sigmoid"), "QLinearSigmoid"),
    "Tanh": (step("Tanh"), "Tanh"),
    "HardSigmoid": (step("HardSigmoid"), "HardSigmoid"),
    "HardSwish": (step("HardSwish"), "HardSigmoid Mul"),
    "Elu": (step("Elu"), "Elu"),
    "Gelu": (step("Gelu"), "Gelu"),
    "QuickGelu": (step("QuickGelu", domain=qdq.MS, alpha=1.0), "QuickGelu"),
    "PRelu": (lambda g, v: g.op("PRelu", v, g.const(g.random(16, 1, 1))), "PRelu"),
}
"""With the kernels that they are between Q and DQ."""
DEFERRED: list[Step] = [
    *(make for make, _ in ACTIVATIONS.values()),
    lambda g, v: product(g, v, g.op("Sigmoid", v)),
    lambda g, v: product(g, v, g.op("HardSigmoid", v, alpha=1 / 6)),
    *map(step, ("Softplus", "Mish", "Erf", "Selu", "Celu", "Softsign", "ThresholdedRelu")),
]


def siluish(g: QdqGraph, c: str, *, everywhere: bool) -> str:
    q = g.q(c)
    gate = g.op("Sigmoid", q)
    return g.q(product(g, q, g.q(gate, 1 / 255, 0) if everywhere else gate))


def chosen(g: QdqGraph, value: str) -> str:
    """An If both of whose bodies read a value."""
    bodies = {f"{name}_branch": Net(tag=name) for name in ("then", "else")}
    for body in bodies.values():
        body.output(body.op("Neg", [value]))
    return g.op("If", g.input((), TensorProto.BOOL), **{name: body.graph() for name, body in bodies.items()})


def also(of: str, reader: Step) -> Callable[[QdqGraph, str], list[str]]:
    """A Relu and Q, and a second reader of the Conv, of the Relu, or behind DQ."""

    def made(g: QdqGraph, c: str) -> list[str]:
        r = relu(g, c)
        q = g.relu_q(r)
        return [q, reader(g, {"conv": c, "relu": r, "dq": q}[of])]

    return made


def shape(g: QdqGraph, value: str) -> str:
    return g.op("Cast", g.op("Shape", value), to=TensorProto.FLOAT)


def of_any_size(kernels: str, make: Callable[[QdqGraph, str], list[str]]) -> Case:
    return Case(kernels, lambda g: make(g, g.conv(g.act_input(("N", 16, "H", "W")))))


EXAMPLES: dict[str, list[Case]] = {
    "absorb-relu": [
        *(Case(k, lambda g, k=k: g.relu_q(relu(g, qdq.produced(g, k))), RELU_STEP) for k in PRODUCERS),
        *(behind_conv(FLOAT_CONV, lambda g, c, z=z: g.q(relu(g, c), RELU_STEP, z)) for z in (1, 3)),
        behind_conv("QLinearConv", lambda g, c: g.relu_q(relu(g, c), rank=1)),
    ],
    "absorb-clip": [
        *(Case(k, lambda g, k=k: clip_q(g, qdq.produced(g, k)), SIX) for k in PRODUCERS),
        # rint(low / s) + zp <= qmin and rint(high / s) + zp >= qmax; before 1.31 without the half step of rounding
        behind_conv("QLinearConv", partial(clip_q, scale=5.9 / 255)),
        behind_conv("QLinearConv", partial(clip_q, scale=6.01 / 255), marks=since("1.31")),
        behind_conv("QLinearConv", partial(clip_q, low=-1.0, high=1.0, scale=1 / 128, zero=128)),
        *(behind_conv(FLOAT_CONV, partial(clip_q, scale=s)) for s in (6.02 / 255, 6.2 / 255)),
        behind_conv(FLOAT_CONV, partial(clip_q, zero=1)),
        *(behind_conv(FLOAT_CONV, partial(clip_q, low=-1.0, high=1.0, scale=s, zero=128)) for s in (2 / 255, 1 / 127)),
        # One bound, the other, none.
        behind_conv("QLinearConv", lambda g, c: g.q(g.op("Clip", c, g.const(0.0)), SIX, 0)),
        behind_conv("QLinearConv", lambda g, c: g.q(g.op("Clip", c, "", g.const(4.0)), 4 / 128, 128)),
        behind_conv("QLinearConv", lambda g, c: g.q(g.op("Clip", c))),
    ],
    "absorb-clip-needs-scalar-params": [behind_conv(FLOAT_CONV, lambda g, c: g.q(g.clip(c, 0.0, 6.0), SIX, 0, rank=1))],
    "absorb-needs-single-consumer": [
        *(behind_conv(FLOAT_CONV, also(of, step("Neg"))) for of in ("conv", "relu")),
        behind_conv(FLOAT_CONV, also("relu", lambda g, v: g.op("Neg", g.relu_q(v)))),
        behind_conv(FLOAT_CONV, lambda g, c: [g.q(c), g.op("Neg", g.q(c))]),
        # Shape of a static value is folded; of a dynamic one it is a second consumer; behind DQ it is harmless.
        *(behind_conv("QLinearConv", also(of, shape)) for of in ("conv", "relu")),
        *(of_any_size(FLOAT_CONV, also(of, shape)) for of in ("conv", "relu")),
        of_any_size("Cast QLinearConv Shape", also("dq", shape)),
    ],
    "subgraph-capture-counts-as-consumer": [
        *(behind_conv(FLOAT_CONV, also(of, chosen)) for of in ("conv", "relu")),
        behind_conv("If QLinearConv", also("dq", chosen)),
    ],
    "no-absorb-symmetric": [
        behind_conv(FLOAT_CONV, lambda g, c: g.q(relu(g, c), STEP, 0), act=np.int8),
        behind_conv(FLOAT_CONV, lambda g, c: g.q(relu(g, c), STEP, 128)),
        behind_conv("QLinearConv", lambda g, c: g.relu_q(relu(g, c)), act=np.int8, marks=(pytest.mark.x86_only,)),
    ],
    "activation-q-on-both-sides": [
        *(behind_conv(f"QLinearConv {kernels}", lambda g, c, m=make: g.q(m(g, g.q(c))), step=STEP, opset=20)
          for make, kernels in ACTIVATIONS.values()),
        behind_conv("QLinearConv QLinearMul QLinearSigmoid", partial(siluish, everywhere=True)),
        behind_conv("Mul QLinearConv Sigmoid", partial(siluish, everywhere=False)),
        *(behind_conv(FLOAT_CONV, lambda g, c, m=make: g.q(m(g, c)), opset=20) for make in DEFERRED),
    ],
}  # fmt: skip


@each_case(EXAMPLES)
def test_rule(case: Case) -> None:
    case.check()


def test_a_relu_with_q_on_both_sides_requantizes_unless_their_parameters_are_equal() -> None:
    for inner, count in ((QdqGraph.q, 2), (QdqGraph.relu_q, 1)):
        model = qdq.conv_then(lambda g, c, q=inner: g.relu_q(relu(g, q(g, c))))
        assert op_types(model).count("QLinearConv") == 1
        assert op_types(model).count("QuantizeLinear") == count


@pytest.mark.parametrize("quantized", [True, False])
def test_rule_pass_through_into_body_dies(quantized: bool, tmp_path: Path) -> None:
    """The session moves DQ over a shape operator, and the process dies if a body reads what that writes: Q it first."""

    def make(g: QdqGraph) -> str:
        moved = g.op("Reshape", g.q(g.conv(g.act_input())), g.ints(1, -1))
        return chosen(g, g.q(moved) if quantized else moved)

    onnx.save(build(make), tmp_path / "model.onnx")
    load = "import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
    done = subprocess.run([sys.executable, "-c", load, tmp_path / "model.onnx"], capture_output=True, check=False)
    assert (done.returncode == 0) == quantized
