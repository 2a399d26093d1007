"""Operators that only move data: integer if the parameters in front and behind are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from .qdq import QdqGraph, build, compute_ops, conv_then, largest_difference, op_types, runs_on_bytes

Shape = Callable[[QdqGraph, str], str]

PASS_THROUGH: dict[str, Shape] = {
    "Reshape": lambda g, v: g.op("Reshape", v, g.ints(1, 16, -1)),
    "Transpose": lambda g, v: g.op("Transpose", v, perm=[0, 2, 3, 1]),
    "Flatten": lambda g, v: g.op("Flatten", v),
    "Slice": lambda g, v: g.op("Slice", v, g.ints(0), g.ints(8), g.ints(1)),
    "Gather": lambda g, v: g.op("Gather", v, g.ints(0, 2, 4), axis=1),
    "GatherElements": lambda g, v: g.op("GatherElements", v, g.const(np.zeros((1, 16, 12, 12), np.int64)), axis=1),
    "Squeeze": lambda g, v: g.op("Squeeze", v, g.ints(0)),
    "Unsqueeze": lambda g, v: g.op("Unsqueeze", v, g.ints(0)),
    "Expand": lambda g, v: g.op("Expand", v, g.ints(2, 16, 12, 12)),
    "Tile": lambda g, v: g.op("Tile", v, g.ints(1, 1, 2, 2)),
    "DepthToSpace": lambda g, v: g.op("DepthToSpace", v, blocksize=2),
    "DepthToSpace CRD": lambda g, v: g.op("DepthToSpace", v, blocksize=2, mode="CRD"),
}
REPAIRED = ("Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "MaxPool")
NOT_REPAIRED: dict[str, Shape] = {
    **{k: v for k, v in PASS_THROUGH.items() if k not in REPAIRED},
    "Resize": lambda g, v: g.op("Resize", v, "", g.floats(1, 1, 2, 2), mode="nearest"),
    "Pad": lambda g, v: g.op("Pad", v, g.ints(0, 0, 1, 1, 0, 0, 1, 1)),
    "Split": lambda g, v: g.ops("Split", v, count=2, axis=1)[0],
    "SpaceToDepth": lambda g, v: g.op("SpaceToDepth", v, blocksize=2),
    "Concat": lambda g, v: g.op("Concat", v, axis=1),
    "AveragePool": lambda g, v: g.op("AveragePool", v, kernel_shape=[2, 2]),
    "GlobalAveragePool": lambda g, v: g.op("GlobalAveragePool", v),
    "ReduceMax": lambda g, v: g.op("ReduceMax", v, axes=[2, 3]),
}
FLOAT_MOVES: dict[str, Shape] = {
    "SpaceToDepth": NOT_REPAIRED["SpaceToDepth"],
    "GatherND": lambda g, v: g.op("GatherND", v, g.const(np.zeros((1, 2), np.int64))),
    "Trilu": lambda g, v: g.op("Trilu", v),
    "Compress": lambda g, v: g.op("Compress", v, g.const(np.array([True, False, True])), axis=1),
}
PADS: dict[str, Shape] = {
    "default": NOT_REPAIRED["Pad"],
    "float value": lambda g, v: g.op("Pad", v, g.ints(0, 0, 1, 1, 0, 0, 1, 1), g.const(0.0)),
    "dq value": lambda g, v: g.op("Pad", v, g.ints(0, 0, 1, 1, 0, 0, 1, 1), g.dq_constant(0.0)),
    "reflect": lambda g, v: g.op("Pad", v, g.ints(0, 0, 1, 1, 0, 0, 1, 1), mode="reflect"),
    "edge": lambda g, v: g.op("Pad", v, g.ints(0, 0, 1, 1, 0, 0, 1, 1), mode="edge"),
}


@pytest.mark.parametrize("name", PASS_THROUGH)
def test_rule_pass_through_same_scale(name: str) -> None:
    """Equal parameters: the operator runs on bytes, one Q in front, one DQ behind."""
    model = build(lambda g: g.q(PASS_THROUGH[name](g, g.act_input())))
    assert runs_on_bytes(model, name.split()[0])
    assert largest_difference(model) == 0


@pytest.mark.parametrize("name", PASS_THROUGH)
def test_rule_pass_through_other_scale_float(name: str) -> None:
    """Different parameters: the operator runs in float between DQ and Q."""
    model = build(lambda g: g.q(PASS_THROUGH[name](g, g.act_input()), 6 / 255, 100))
    pair = ["DequantizeLinear", name.split()[0], "QuantizeLinear"]
    assert op_types(model) == ["QuantizeLinear", *pair, "DequantizeLinear"]


@pytest.mark.parametrize("indices", ["scalar", "vector", "input"])
def test_rule_gather_same_scale(indices: str) -> None:
    """Gather with constant or computed indices runs on bytes where the parameters are equal."""

    def make(g: QdqGraph, scale: float) -> str:
        x = g.act_input()
        rows = {
            "scalar": lambda: g.const(np.array(3, np.int64)),
            "vector": lambda: g.ints(0, 2, 4),
            "input": lambda: g.input((2,), TensorProto.INT64),
        }[indices]()
        return g.q(g.op("Gather", x, rows, axis=1), scale)

    same, other = build(lambda g: make(g, 8 / 255)), build(lambda g: make(g, 6 / 255))
    assert runs_on_bytes(same, "Gather")
    assert op_types(other) == ["QuantizeLinear", "DequantizeLinear", "Gather", "QuantizeLinear", "DequantizeLinear"]
    assert largest_difference(same) == 0


@pytest.mark.parametrize("name", FLOAT_MOVES)
def test_rule_data_movement_float(name: str) -> None:
    """Movers that the runtime does not run on bytes even with equal parameters."""
    model = build(lambda g: g.q(FLOAT_MOVES[name](g, g.act_input())))
    assert op_types(model) == ["QuantizeLinear", "DequantizeLinear", name, "QuantizeLinear", "DequantizeLinear"]


@pytest.mark.parametrize("name", REPAIRED)
def test_rule_shape_op_deferral(name: str) -> None:
    """Q only behind the operator: propagation moves it up to the Conv, which stays integer."""

    def make(g: QdqGraph, c: str) -> str:
        return g.q(g.op("MaxPool", c, kernel_shape=[2, 2]) if name == "MaxPool" else PASS_THROUGH[name](g, c))

    ops = compute_ops(conv_then(make))
    assert "QLinearConv" in ops
    assert largest_difference(conv_then(make)) <= 8 / 255 * 1.01


@pytest.mark.parametrize("name", NOT_REPAIRED)
def test_rule_shape_op_deferral_not_repaired(name: str) -> None:
    """Q only behind the operator: the Conv runs in float."""
    ops = compute_ops(conv_then(lambda g, c: g.q(NOT_REPAIRED[name](g, c))))
    assert "Conv" in ops
    assert "QLinearConv" not in ops


@pytest.mark.parametrize("op_type", ["MaxPool", "Reshape"])
def test_rule_shape_op_deferral_with_relu(op_type: str) -> None:
    """Conv -> Relu -> mover -> Q is repaired; Conv -> mover -> Relu -> Q is not."""

    def move(g: QdqGraph, v: str) -> str:
        return g.op("MaxPool", v, kernel_shape=[2, 2]) if op_type == "MaxPool" else PASS_THROUGH[op_type](g, v)

    relu_first = compute_ops(conv_then(lambda g, c: g.relu_q(move(g, g.op("Relu", c)))))
    relu_last = compute_ops(conv_then(lambda g, c: g.relu_q(g.op("Relu", move(g, c)))))
    assert "QLinearConv" in relu_first
    assert "Relu" not in relu_first
    assert "QLinearConv" not in relu_last


@pytest.mark.parametrize("everywhere", [True, False])
def test_rule_pass_through_chain(everywhere: bool) -> None:
    """A channel shuffle between two Convs runs on bytes with Q/DQ around each step and with Q/DQ in front only."""

    def make(g: QdqGraph) -> str:
        def pair(v: str) -> str:
            return g.q(v) if everywhere else v

        x = pair(g.op("Reshape", g.q(g.conv(g.act_input())), g.ints(1, 4, 4, 12, 12)))
        x = pair(g.op("Transpose", x, perm=[0, 2, 1, 3, 4]))
        x = pair(g.op("Reshape", x, g.ints(1, 16, 12, 12)))
        return g.q(g.conv(x, bias="none"))

    model = build(make)
    assert compute_ops(model) == ["QLinearConv", "QLinearConv", "Reshape", "Reshape"]
    assert op_types(model).count("QuantizeLinear") == 1


@pytest.mark.parametrize("name", ["Flatten", "Gather", "Tile", "Expand"])
def test_rule_pass_through_needs_q_behind(name: str) -> None:
    """What DQ is not pushed through needs a Q of its own behind it, or it and its reader run in float."""
    with_q = build(lambda g: g.q(g.op("Sigmoid", g.q(PASS_THROUGH[name](g, g.act_input())))))
    without = build(lambda g: g.q(g.op("Sigmoid", PASS_THROUGH[name](g, g.act_input()))))
    assert compute_ops(with_q) == sorted([name, "QLinearSigmoid"])
    assert compute_ops(without) == sorted([name, "Sigmoid"])


@pytest.mark.parametrize("name", PADS)
def test_rule_pad_float(name: str) -> None:
    same = build(lambda g: g.q(PADS[name](g, g.act_input())))
    assert compute_ops(same) == ["Pad"]
    assert "DequantizeLinear" in op_types(same)[: op_types(same).index("Pad")]


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("sizes", [False, True])
def test_rule_split_same_scale(opset: int, sizes: bool) -> None:
    """Split runs on bytes if every output has the input's parameters, in float if one has not."""

    def make(g: QdqGraph, last_scale: float) -> list[str]:
        inputs = [g.act_input()] + ([g.ints(4, 12)] if sizes else [])
        attributes: dict[str, Any] = {"num_outputs": 2} if opset >= 18 and not sizes else {}
        parts = g.ops("Split", *inputs, count=2, axis=1, **attributes)
        return [g.q(parts[0]), g.q(parts[1], last_scale)]

    same = build(lambda g: make(g, 8 / 255), opset=opset)
    other = build(lambda g: make(g, 6 / 255), opset=opset)
    assert runs_on_bytes(same, "Split")
    assert op_types(other).count("QuantizeLinear") == 3


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin"])
def test_rule_reducemax_same_scale(opset: int, op_type: str) -> None:
    def make(g: QdqGraph, scale: float) -> str:
        x = g.act_input()
        return g.q(g.op(op_type, x, axes=[2, 3]) if opset < 18 else g.op(op_type, x, g.ints(2, 3)), scale)

    same = build(lambda g: make(g, 8 / 255), opset=opset)
    other = build(lambda g: make(g, 6 / 255), opset=opset)
    assert runs_on_bytes(same, op_type)
    assert op_types(other) == ["QuantizeLinear", "DequantizeLinear", op_type, "QuantizeLinear", "DequantizeLinear"]


@pytest.mark.parametrize("opset", [13, 19])
@pytest.mark.parametrize("form", ["scales", "sizes", "empty roi"])
def test_rule_resize_nearest_same_scale(opset: int, form: str) -> None:
    def make(g: QdqGraph, scale: float) -> str:
        roi = g.floats() if form == "empty roi" else ""
        inputs = ["", g.ints(1, 16, 24, 24)] if form == "sizes" else [g.floats(1, 1, 2, 2)]
        return g.q(g.op("Resize", g.act_input(), roi, *inputs, mode="nearest"), scale)

    same = build(lambda g: make(g, 8 / 255), opset=opset)
    other = build(lambda g: make(g, 6 / 255), opset=opset)
    assert runs_on_bytes(same, "Resize")
    assert op_types(other) == ["QuantizeLinear", "DequantizeLinear", "Resize", "QuantizeLinear", "DequantizeLinear"]


@pytest.mark.since("1.27")
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_rule_resize_linear_float(mode: str) -> None:
    model = build(lambda g: g.q(g.op("Resize", g.act_input(), "", g.floats(1, 1, 2, 2), mode=mode)))
    assert op_types(model) == ["QuantizeLinear", "DequantizeLinear", "Resize", "QuantizeLinear", "DequantizeLinear"]
