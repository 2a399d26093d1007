"""Operators that only move data: integer if the parameters in front and behind are equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from . import qdq
from .qdq import BYTES, ISLAND, Case, QdqGraph, Step, build, compute_ops, conv_then, each_case, op_types


def op(op_type: str, **attributes: Any) -> Step:
    return lambda g, v: g.op(op_type, v, **attributes)


def by_ints(op_type: str, *inputs: tuple[int, ...], **attributes: Any) -> Step:
    return lambda g, v: g.op(op_type, v, *(g.ints(*each) for each in inputs), **attributes)


PADS = (0, 0, 1, 1, 0, 0, 1, 1)
POOL = op("MaxPool", kernel_shape=[2, 2])
MOVES: dict[str, Step] = {
    "Reshape": by_ints("Reshape", (1, 16, -1)),
    "Transpose": op("Transpose", perm=[0, 2, 3, 1]),
    "Flatten": op("Flatten"),
    "Slice": by_ints("Slice", (0,), (8,), (1,)),
    "Gather": by_ints("Gather", (0, 2, 4), axis=1),
    "GatherElements": lambda g, v: g.op("GatherElements", v, g.const(np.zeros((1, 16, 12, 12), np.int64)), axis=1),
    "Squeeze": by_ints("Squeeze", (0,)),
    "Unsqueeze": by_ints("Unsqueeze", (0,)),
    "Expand": by_ints("Expand", (2, 16, 12, 12)),
    "Tile": by_ints("Tile", (1, 1, 2, 2)),
    "DepthToSpace": op("DepthToSpace", blocksize=2),
    "DepthToSpace CRD": op("DepthToSpace", blocksize=2, mode="CRD"),
}
REPAIRED = ("Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "MaxPool")
NOT_REPAIRED: dict[str, Step] = {
    **{name: move for name, move in MOVES.items() if name not in REPAIRED},
    "Resize": lambda g, v: g.op("Resize", v, "", g.floats(1, 1, 2, 2), mode="nearest"),
    "Pad": by_ints("Pad", PADS),
    "Split": lambda g, v: g.ops("Split", v, count=2, axis=1)[0],
    "SpaceToDepth": op("SpaceToDepth", blocksize=2),
    "Concat": op("Concat", axis=1),
    "AveragePool": op("AveragePool", kernel_shape=[2, 2]),
    "GlobalAveragePool": op("GlobalAveragePool"),
    "ReduceMax": op("ReduceMax", axes=[2, 3]),
}
FLOAT: dict[str, Step] = {
    "SpaceToDepth": NOT_REPAIRED["SpaceToDepth"],
    "GatherND": lambda g, v: g.op("GatherND", v, g.const(np.zeros((1, 2), np.int64))),
    "Trilu": op("Trilu"),
    "Compress": lambda g, v: g.op("Compress", v, g.const(np.array([True, False, True])), axis=1),
    "Pad": NOT_REPAIRED["Pad"],
    "Pad of a value": lambda g, v: g.op("Pad", v, g.ints(*PADS), g.const(0.0)),
    "Pad by reflection": by_ints("Pad", PADS, mode="reflect"),
    "Pad by the edge": by_ints("Pad", PADS, mode="edge"),
}
"""Float even between equal parameters."""


def gather(g: QdqGraph, v: str, rows: str) -> str:
    indices: dict[str, Callable[[], str]] = {
        "scalar": lambda: g.const(np.array(3, np.int64)),
        "vector": lambda: g.ints(0, 2, 4),
        "input": lambda: g.input((2,), TensorProto.INT64),
    }
    return g.op("Gather", v, indices[rows](), axis=1)


def reduce(g: QdqGraph, v: str, op_type: str, opset: int) -> str:
    return g.op(op_type, v, axes=[2, 3]) if opset < 18 else g.op(op_type, v, g.ints(2, 3))


def resize(g: QdqGraph, v: str, form: str) -> str:
    roi = g.floats() if form == "empty roi" else ""
    sizes = ["", g.ints(1, 16, 24, 24)] if form == "sizes" else [g.floats(1, 1, 2, 2)]
    return g.op("Resize", v, roi, *sizes, mode="nearest")


BY_SCALE: dict[str, list[tuple[str, Step, int]]] = {
    "pass-through-same-scale": [(name.split()[0], move, 17) for name, move in MOVES.items()],
    "gather-same-scale": [("Gather", partial(gather, rows=rows), 17) for rows in ("scalar", "vector", "input")],
    "reducemax-same-scale": [
        (op_type, partial(reduce, op_type=op_type, opset=opset), opset)
        for op_type in ("ReduceMax", "ReduceMin")
        for opset in (13, 18)
    ],
    "resize-nearest-same-scale": [
        ("Resize", partial(resize, form=form), opset) for form in ("scales", "sizes", "empty roi") for opset in (13, 19)
    ],
}
"""Operators that run on bytes where the parameters are the same in and out, else in float, with the operator set."""
EXAMPLES: dict[str, list[Case]] = {
    **{
        rule: [
            Case(
                f"{name} {kind}",
                lambda g, m=move, o=other: g.q(m(g, g.act_input()), *o),
                step,
                options={"opset": opset},
            )
            for name, move, opset in found
            for kind, other, step in ((BYTES, (), 0.0), (ISLAND, (6 / 255, 100), None))
        ]
        for rule, found in BY_SCALE.items()
    },
    "pad-float": [
        *(Case(f"{n.split()[0]} {ISLAND}", lambda g, m=m: g.q(m(g, g.act_input()))) for n, m in FLOAT.items()),
        Case("Pad", lambda g: g.q(g.op("Pad", g.act_input(), g.ints(*PADS), g.dq_constant(0.0)))),
    ],
    "resize-linear-float": [
        Case(
            f"Resize {ISLAND}",
            lambda g, m=mode: g.q(g.op("Resize", g.act_input(), "", g.floats(1, 1, 2, 2), mode=m)),
            marks=qdq.since("1.27"),
        )
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


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_channel_shuffle_runs_on_bytes_with_pairs_around_each_step_or_in_front_only(everywhere: bool) -> None:
    def make(g: QdqGraph) -> str:
        x = g.q(g.conv(g.act_input()))
        for step in (by_ints("Reshape", (1, 4, 4, 12, 12)), op("Transpose", perm=[0, 2, 1, 3, 4]),
                     by_ints("Reshape", (1, 16, 12, 12))):  # fmt: skip
            x = g.q(step(g, x)) if everywhere else step(g, x)
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
