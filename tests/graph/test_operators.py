"""What the schema says of an operator is what the runtime computes."""

from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort.graph.constants import BOUNDS, OPERATORS, Is, having, what
from tests.graph.build import net, run
from tests.models import normal

CALLS = {
    "Reshape": "(x, to)", "Squeeze": "(x, first)", "Unsqueeze": "(x, first)", "Slice": "(x, one, four, two)",
    "Gather": "<axis = 1>(x, some)", "Expand": "(x, wide)", "Split": "<axis = 3, num_outputs = 2>(x)",
    "Tile": "(x, twice)", "PRelu": "(x, slope)", "Clip": "(x, low, high)", "DepthToSpace": "<blocksize = 2>(x)",
    "SpaceToDepth": "<blocksize = 2>(x)", "MaxPool": "<kernel_shape = [2, 2]>(x)",
    "AveragePool": "<kernel_shape = [2, 2]>(x)",
}  # fmt: skip
"""Calls that are more than ``(x)``."""

CONSTANTS: dict[str, Any] = {
    "to": [1, 4, -1], "first": [0], "one": [1], "two": [2], "four": [4], "some": [1, 3, 1], "wide": [2, 4, 6, 6],
    "twice": [1, 2, 1, 1], "slope": np.float32([0.3]), "low": np.float32(-1), "high": np.float32(2),
}  # fmt: skip
OWN = {"FastGelu", "QuickGelu"}
BINARY = {"Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum", "Pow"}
UNKNOWN = {"Swish"}  # younger than the operator set here
KINDS = (Is.ELEMENTWISE, Is.HOMOGENEOUS, Is.MOVE, Is.PICK)
ONE_INPUT = sorted({*BOUNDS}.union(*map(having, KINDS)) - BINARY - UNKNOWN)


def compute(op_type: str, x: np.ndarray) -> np.ndarray:
    outputs = "y, z" if op_type == "Split" else "y"
    call = ("com.microsoft." if op_type in OWN else "") + op_type + CALLS.get(op_type, "(x)")
    proto = net(f"(float[1,4,6,6] x) => (float[] y) {{ {outputs} = {call} }}", CONSTANTS, opset=20)
    assert what(proto.graph.node[0]) is OPERATORS.get(op_type, Is(0))
    return run(proto, {"x": x})[0]


@pytest.mark.parametrize("op_type", ONE_INPUT)
def test_what_the_table_says_holds(op_type: str) -> None:
    x = normal((1, 4, 6, 6), 1, 2)
    x = np.abs(x) if op_type == "Sqrt" else x
    y, is_ = compute(op_type, x), OPERATORS.get(op_type, Is(0))
    assert np.allclose(compute(op_type, 3 * x), 3 * y, rtol=1e-4, atol=1e-6) == (Is.HOMOGENEOUS in is_)
    if Is.ELEMENTWISE in is_:
        changed = x.copy()
        changed[0, 0, 0, 0] += 1
        assert (compute(op_type, changed) != y).sum() <= 1
    if Is.MOVE in is_:
        assert np.array_equal(np.sort(y, axis=None), np.sort(x, axis=None))
    if Is.FREE in is_:
        assert np.array_equal(y.ravel(), x.ravel())
    if Is.PICK in is_:
        assert x.min() <= y.min()
        assert y.max() <= x.max()
    if op_type in BOUNDS:
        low, high = BOUNDS[op_type]
        assert low <= y.min()
        assert y.max() <= high


def test_an_operator_of_another_domain_is_nothing() -> None:
    assert not what(onnx.NodeProto(op_type="Relu", domain="mine"))
    assert Is.ACTIVATION in what(onnx.NodeProto(op_type="Gelu", domain="com.microsoft"))
