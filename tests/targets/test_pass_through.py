"""Operators that only move data: integer if the parameters in front and behind are equal."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from . import qdq
from .qdq import BYTES, ISLAND, Case, QdqGraph, Step, alone, build, compute_ops, conv_then, each_case, op_types, step

PADS = (0, 0, 1, 1, 0, 0, 1, 1)
TWICE = np.float32([1, 1, 2, 2])
POOL = step("MaxPool", kernel_shape=[2, 2])
MOVES: dict[str, Step] = {
    "Reshape": step("Reshape", (1, 16, -1)),
    "Transpose": step("Transpose", perm=[0, 2, 3, 1]),
    "Flatten": step("Flatten"),
    "Slice": step("Slice", (0,), (8,), (1,)),
    "Gather": step("Gather", (0, 2, 4), axis=1),
    "GatherElements": step("GatherElements", np.zeros((1, 16, 12, 12), np.int64), axis=1),
    "Squeeze": step("Squeeze", (0,)),
    "Unsqueeze": step("Unsqueeze", (0,)),
    "Expand": step("Expand", (2, 16, 12, 12)),
    "Tile": step("Tile", (1, 1, 2, 2)),
    "DepthToSpace": step("DepthToSpace", blocksize=2),
    "DepthToSpace CRD": step("DepthToSpace", blocksize=2, mode="CRD"),
}
REPAIRED = ("Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "MaxPool")
NOT_REPAIRED: dict[str, Step] = {
    **{name: move for name, move in MOVES.items() if name not in REPAIRED},
    "Resize": step("Resize", "", TWICE, mode="nearest"),
    "Pad": step("Pad", PADS),
    "Split": lambda g, v: g.ops("Split", v, count=2, axis=1)[0],
    "SpaceToDepth": step("SpaceToDepth", blocksize=2),
    "Concat": step("Concat", axis=1),
    "AveragePool": step("AveragePool", kernel_shape=[2, 2]),
    "GlobalAveragePool": step("GlobalAveragePool"),
    "ReduceMax": step("ReduceMax", axes=[2, 3]),
}
FLOAT: dict[str, Step] = {
    "SpaceToDepth": NOT_REPAIRED["SpaceToDepth"],
    "GatherND": step("GatherND", np.zeros((1, 2), np.int64)),
    "Trilu": step("Trilu"),
    "Compress": step("Compress", [True, False, True], axis=1),
    "Pad": NOT_REPAIRED["Pad"],
    "Pad of a value": step("Pad", PADS, np.float32(0)),
    "Pad by reflection": step("Pad", PADS, mode="reflect"),
    "Pad by the edge": step("Pad", PADS, mode="edge"),
}
"""Float even between equal parameters."""


ROWS: list[Step] = [
    step("Gather", 3, axis=1),
    step("Gather", (0, 2, 4), axis=1),
    lambda g, v: g.op("Gather", v, g.input((2,), TensorProto.INT64), axis=1),
]
DOUBLED = (("", TWICE), ("", "", (1, 16, 24, 24)), (np.float32([]), TWICE))
"""Scales, sizes, and scales with an empty roi."""
BY_SCALE: dict[str, list[tuple[str, Step, int]]] = {
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
EXAMPLES: dict[str, list[Case]] = {
    **{
        rule: [
            Case(f"{name} {kind}", alone(move, *other), most, options={"opset": opset})
            for name, move, opset in found
            for kind, other, most in ((BYTES, (), 0.0), (ISLAND, (6 / 255, 100), None))
        ]
        for rule, found in BY_SCALE.items()
    },
    "pad-float": [
        *(Case(f"{n.split()[0]} {ISLAND}", alone(m)) for n, m in FLOAT.items()),
        Case("Pad", alone(lambda g, v: g.op("Pad", v, g.ints(*PADS), g.dq_constant(0.0)))),
    ],
    "resize-linear-float": [
        Case(f"Resize {ISLAND}", alone(step("Resize", "", TWICE, mode=mode)), marks=qdq.since("1.27"))
        for mode in ("linear", "cubic")
    ],
}


@each_case(EXAMPLES)
def test_rule(case: Case) -> None:
    case.check()


@pytest.mark.parametrize(("name", "repaired"), [*((n, True) for n in REPAIRED), *((n, False) for n in NOT_REPAIRED)])
def test_q_behind_a_mover_alone_moves_up_to_the_conv_or_leaves_it_float(name: str, repaired: bool) -> None:
    move = POOL if name == "MaxPool" else {**NOT_REPAIRED, **MOVES}[name]
    model = conv_then(lambda g, c: g.q(move(g, c)))
    assert ("QLinearConv" in compute_ops(model)) is repaired
    assert ("Conv" in compute_ops(model)) is not repaired
    assert not repaired or qdq.largest_difference(model) <= 8 / 255 * 1.01


@pytest.mark.parametrize("move", [POOL, MOVES["Reshape"]])
def test_a_relu_before_the_mover_is_repaired_and_one_behind_it_is_not(move: Step) -> None:
    first = compute_ops(conv_then(lambda g, c: g.relu_q(move(g, g.op("Relu", c)))))
    last = compute_ops(conv_then(lambda g, c: g.relu_q(g.op("Relu", move(g, c)))))
    assert "QLinearConv" in first
    assert "Relu" not in first
    assert "QLinearConv" not in last


SHUFFLE = (
    step("Reshape", (1, 4, 4, 12, 12)), step("Transpose", perm=[0, 2, 1, 3, 4]), step("Reshape", (1, 16, 12, 12))
)  # fmt: skip


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_channel_shuffle_runs_on_bytes_with_pairs_around_each_step_or_in_front_only(everywhere: bool) -> None:
    def make(g: QdqGraph) -> str:
        x = g.q(g.conv(g.act_input()))
        for move in SHUFFLE:
            x = g.q(move(g, x)) if everywhere else move(g, x)
        return g.q(g.conv(x, bias="none"))

    model = build(make)
    assert compute_ops(model) == ["QLinearConv", "QLinearConv", "Reshape", "Reshape"]
    assert op_types(model).count("QuantizeLinear") == 1


@pytest.mark.parametrize("name", ["Flatten", "Gather", "Tile", "Expand"])
def test_what_dq_is_not_pushed_through_needs_a_q_behind_it(name: str) -> None:
    """Or it and its reader run in float."""
    with_q = build(lambda g: g.q(g.op("Sigmoid", g.q(MOVES[name](g, g.act_input())))))
    without = build(lambda g: g.q(g.op("Sigmoid", MOVES[name](g, g.act_input()))))
    assert compute_ops(with_q) == sorted([name, "QLinearSigmoid"])
    assert compute_ops(without) == sorted([name, "Sigmoid"])


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("sizes", [False, True])
def test_rule_split_same_scale(opset: int, sizes: bool) -> None:
    """Split runs on bytes if every output has the input's parameters, in float if one has not."""

    def make(g: QdqGraph, last_scale: float) -> list[str]:
        inputs = [g.act_input()] + ([g.ints(4, 12)] if sizes else [])
        attributes: dict[str, Any] = {"num_outputs": 2} if opset >= 18 and not sizes else {}
        parts = g.ops("Split", *inputs, count=2, axis=1, **attributes)
        return [g.q(parts[0]), g.q(parts[1], last_scale)]

    Case(f"Split {BYTES}", partial(make, last_scale=8 / 255), options={"opset": opset}).check()
    assert op_types(build(partial(make, last_scale=6 / 255), opset=opset)).count("QuantizeLinear") == 3
