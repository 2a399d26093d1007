"""What stands between a kernel and its Q: activations, which vanish into it or do not, and operators that move data."""

import subprocess
import sys
from functools import partial

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.models import Net

from . import qdq
from .qdq import FLOAT_CONV, STEP, Case, QdqGraph, alone, build, compute_ops, conv_then, op_types, step

SIX = 6 / 255


def behind_conv(kernels, make, **more):
    """A Conv of a quantized input, and what stands behind it."""
    options = {name: more.pop(name) for name in ("act", "opset") if name in more}
    return Case(kernels, lambda g: make(g, g.conv(g.act_input())), options=options, **more)


def clip_q(g, value, low=0.0, high=6.0, scale=SIX, zero=0):
    return g.q(g.clip(value, low, high), scale, zero)


relu = step("Relu")
ACTIVATIONS = {
    "LeakyRelu": (step("LeakyRelu", alpha=0.1), "QLinearLeakyRelu"), "Sigmoid": (step("Sigmoid"), "QLinearSigmoid"),
    "Tanh": (step("Tanh"), "Tanh"), "HardSigmoid": (step("HardSigmoid"), "HardSigmoid"),
    "HardSwish": (step("HardSwish"), "HardSigmoid Mul"), "Elu": (step("Elu"), "Elu"), "Gelu": (step("Gelu"), "Gelu"),
    "QuickGelu": (step("QuickGelu", domain=qdq.MS, alpha=1.0), "QuickGelu"),
    "PRelu": (lambda g, v: g.op("PRelu", v, g.const(g.random(16, 1, 1))), "PRelu"),
}  # fmt: skip
"""With the kernels that they are between Q and DQ."""
DEFERRED = [
    *(make for make, _ in ACTIVATIONS.values()),
    lambda g, v: g.op("Mul", v, g.op("Sigmoid", v)),
    lambda g, v: g.op("Mul", v, g.op("HardSigmoid", v, alpha=1 / 6)),
    *map(step, ("Softplus", "Mish", "Erf", "Selu", "Celu", "Softsign", "ThresholdedRelu")),
]


def siluish(g, c, *, everywhere):
    q = g.q(c)
    gate = g.op("Sigmoid", q)
    return g.q(g.op("Mul", q, g.q(gate, 1 / 255, 0) if everywhere else gate))


def chosen(g, value):
    """An If both of whose bodies read a value."""
    bodies = {f"{name}_branch": Net(tag=name) for name in ("then", "else")}
    for body in bodies.values():
        body.output(body.op("Neg", [value]))
    return g.op("If", g.input((), TensorProto.BOOL), **{name: body.graph() for name, body in bodies.items()})


def also(of, reader):
    """A Relu and Q, and a second reader of the Conv, of the Relu, or behind DQ."""

    def made(g, c):
        r = relu(g, c)
        q = g.relu_q(r)
        return [q, reader(g, {"conv": c, "relu": r, "dq": q}[of])]

    return made


def shape(g, value):
    return g.op("Cast", g.op("Shape", value), to=TensorProto.FLOAT)


def of_any_size(kernels, make):
    return Case(kernels, lambda g: make(g, g.conv(g.act_input(("N", 16, "H", "W")))))


ABSORPTION = {
    "absorb-relu": [
        *(Case(k, lambda g, k=k: g.relu_q(relu(g, qdq.produced(g, k))), qdq.RELU_STEP) for k in qdq.PRODUCERS),
        *(behind_conv(FLOAT_CONV, lambda g, c, z=z: g.q(relu(g, c), qdq.RELU_STEP, z)) for z in (1, 3)),
        behind_conv("QLinearConv", lambda g, c: g.relu_q(relu(g, c), rank=1)),
    ],
    "absorb-clip": [
        *(Case(k, lambda g, k=k: clip_q(g, qdq.produced(g, k)), SIX) for k in qdq.PRODUCERS),
        # rint(low / s) + zp <= qmin and rint(high / s) + zp >= qmax; before 1.31 without the half step of rounding
        behind_conv("QLinearConv", partial(clip_q, scale=5.9 / 255)),
        behind_conv("QLinearConv", partial(clip_q, scale=6.01 / 255), marks=qdq.since("1.31")),
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


def test_a_relu_with_q_on_both_sides_requantizes_unless_their_parameters_are_equal():
    for inner, count in ((QdqGraph.q, 2), (QdqGraph.relu_q, 1)):
        found = op_types(qdq.conv_then(lambda g, c, q=inner: g.relu_q(relu(g, q(g, c)))))
        assert (found.count("QLinearConv"), found.count("QuantizeLinear")) == (1, count)


@pytest.mark.parametrize("quantized", [True, False])
def test_rule_pass_through_into_body_dies(quantized, tmp_path):
    """The session moves DQ over a shape operator, and the process dies if a body reads what that writes: Q it first."""

    def make(g):
        moved = g.op("Reshape", g.q(g.conv(g.act_input())), g.ints(1, -1))
        return chosen(g, g.q(moved) if quantized else moved)

    onnx.save(build(make), tmp_path / "model.onnx")
    load = "import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
    done = subprocess.run([sys.executable, "-c", load, tmp_path / "model.onnx"], capture_output=True, check=False)
    assert (done.returncode == 0) == quantized


# ---- operators that only move data: integer if the parameters in front and behind are equal --------------------------


PADS = (0, 0, 1, 1, 0, 0, 1, 1)
TWICE = np.float32([1, 1, 2, 2])
POOL = step("MaxPool", kernel_shape=[2, 2])
MOVES = {
    "Reshape": step("Reshape", (1, 16, -1)), "Transpose": step("Transpose", perm=[0, 2, 3, 1]),
    "Flatten": step("Flatten"), "Slice": step("Slice", (0,), (8,), (1,)), "Gather": step("Gather", (0, 2, 4), axis=1),
    "GatherElements": step("GatherElements", np.zeros((1, 16, 12, 12), np.int64), axis=1),
    "Squeeze": step("Squeeze", (0,)), "Unsqueeze": step("Unsqueeze", (0,)), "Expand": step("Expand", (2, 16, 12, 12)),
    "Tile": step("Tile", (1, 1, 2, 2)), "DepthToSpace": step("DepthToSpace", blocksize=2),
    "DepthToSpace CRD": step("DepthToSpace", blocksize=2, mode="CRD"),
}  # fmt: skip
REPAIRED = ("Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "MaxPool")
NOT_REPAIRED = {
    **{name: move for name, move in MOVES.items() if name not in REPAIRED},
    "Resize": step("Resize", "", TWICE, mode="nearest"), "Pad": step("Pad", PADS),
    "Split": lambda g, v: g.ops("Split", v, count=2, axis=1)[0], "SpaceToDepth": step("SpaceToDepth", blocksize=2),
    "Concat": step("Concat", axis=1), "AveragePool": step("AveragePool", kernel_shape=[2, 2]),
    "GlobalAveragePool": step("GlobalAveragePool"), "ReduceMax": step("ReduceMax", axes=[2, 3]),
}  # fmt: skip
FLOAT = {
    "SpaceToDepth": NOT_REPAIRED["SpaceToDepth"], "GatherND": step("GatherND", np.zeros((1, 2), np.int64)),
    "Trilu": step("Trilu"), "Compress": step("Compress", [True, False, True], axis=1), "Pad": NOT_REPAIRED["Pad"],
    "Pad of a value": step("Pad", PADS, np.float32(0)), "Pad by reflection": step("Pad", PADS, mode="reflect"),
    "Pad by the edge": step("Pad", PADS, mode="edge"),
}  # fmt: skip
"""Float even between equal parameters."""


ROWS = [
    step("Gather", 3, axis=1),
    step("Gather", (0, 2, 4), axis=1),
    lambda g, v: g.op("Gather", v, g.input((2,), TensorProto.INT64), axis=1),
]
DOUBLED = (("", TWICE), ("", "", (1, 16, 24, 24)), (np.float32([]), TWICE))
"""Scales, sizes, and scales with an empty roi."""
BY_SCALE = {
    "pass-through-same-scale": [(name.split()[0], move, 17) for name, move in MOVES.items()],
    "gather-same-scale": [("Gather", rows, 17) for rows in ROWS],
    "reducemax-same-scale": [
        (op_type, move, opset)
        for op_type in ("ReduceMax", "ReduceMin")
        for move, opset in ((step(op_type, axes=[2, 3]), 13), (step(op_type, (2, 3)), 18))
    ],
    "resize-nearest-same-scale": [
        ("Resize", step("Resize", *form, mode="nearest"), opset) for form in DOUBLED for opset in (13, 19)
    ],
}
"""Operators that run on bytes where the parameters are the same in and out, else in float, with the operator set."""
EXAMPLES = {
    **ABSORPTION,
    **{
        rule: [
            Case(f"{name} {kind}", alone(move, *other), most, options={"opset": opset})
            for name, move, opset in found
            for kind, other, most in ((qdq.BYTES, (), 0.0), (qdq.ISLAND, (6 / 255, 100), None))
        ]
        for rule, found in BY_SCALE.items()
    },
    "pad-float": [
        *(Case(f"{n.split()[0]} {qdq.ISLAND}", alone(m)) for n, m in FLOAT.items()),
        Case("Pad", alone(lambda g, v: g.op("Pad", v, g.ints(*PADS), g.dq_constant(0.0)))),
    ],
    "resize-linear-float": [
        Case(f"Resize {qdq.ISLAND}", alone(step("Resize", "", TWICE, mode=mode)), marks=qdq.since("1.27"))
        for mode in ("linear", "cubic")
    ],
}


@qdq.each_case(EXAMPLES)
def test_rule(case):
    case.check()


@pytest.mark.parametrize(("name", "repaired"), [*((n, True) for n in REPAIRED), *((n, False) for n in NOT_REPAIRED)])
def test_q_behind_a_mover_alone_moves_up_to_the_conv_or_leaves_it_float(name, repaired):
    move = POOL if name == "MaxPool" else {**NOT_REPAIRED, **MOVES}[name]
    model = conv_then(lambda g, c: g.q(move(g, c)))
    assert {"QLinearConv", "Conv"} & {*compute_ops(model)} == {"QLinearConv" if repaired else "Conv"}
    assert not repaired or qdq.largest_difference(model) <= 8 / 255 * 1.01


@pytest.mark.parametrize("move", [POOL, MOVES["Reshape"]])
def test_a_relu_before_the_mover_is_repaired_and_one_behind_it_is_not(move):
    first = compute_ops(conv_then(lambda g, c: g.relu_q(move(g, g.op("Relu", c)))))
    last = compute_ops(conv_then(lambda g, c: g.relu_q(g.op("Relu", move(g, c)))))
    assert ("QLinearConv" in first, "Relu" in first, "QLinearConv" in last) == (True, False, False)


SHAPES = (1, 4, 4, 12, 12), (1, 16, 12, 12)
SHUFFLE = step("Reshape", SHAPES[0]), step("Transpose", perm=[0, 2, 1, 3, 4]), step("Reshape", SHAPES[1])


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_channel_shuffle_runs_on_bytes_with_pairs_around_each_step_or_in_front_only(everywhere):
    def make(g):
        x = g.q(g.conv(g.act_input()))
        for move in SHUFFLE:
            x = g.q(move(g, x)) if everywhere else move(g, x)
        return g.q(g.conv(x, bias="none"))

    model = build(make)
    assert compute_ops(model) == ["QLinearConv", "QLinearConv", "Reshape", "Reshape"]
    assert op_types(model).count("QuantizeLinear") == 1


@pytest.mark.parametrize("name", ["Flatten", "Gather", "Tile", "Expand"])
def test_what_dq_is_not_pushed_through_needs_a_q_behind_it(name):
    """Or it and its reader run in float."""
    for q, kernel in ((QdqGraph.q, "QLinearSigmoid"), (lambda _, moved: moved, "Sigmoid")):
        found = compute_ops(build(lambda g, q=q: g.q(g.op("Sigmoid", q(g, MOVES[name](g, g.act_input()))))))
        assert found == sorted([name, kernel])


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("sizes", [False, True])
def test_rule_split_same_scale(opset, sizes):
    """Split runs on bytes if every output has the input's parameters, in float if one has not."""

    def make(g, last_scale):
        inputs = [g.act_input()] + ([g.ints(4, 12)] if sizes else [])
        attributes = {"num_outputs": 2} if opset >= 18 and not sizes else {}
        parts = g.ops("Split", *inputs, count=2, axis=1, **attributes)
        return [g.q(parts[0]), g.q(parts[1], last_scale)]

    Case(f"Split {qdq.BYTES}", partial(make, last_scale=8 / 255), options={"opset": opset}).check()
    assert op_types(build(partial(make, last_scale=6 / 255), opset=opset)).count("QuantizeLinear") == 3
