"""What the schema says of an operator is what the runtime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.constants import BOUNDS, HEAVY, LAYERS, OPERATORS, Is, having, what
from tests.graph.build import run

_CONSTANTS: dict[str, list[Any]] = {
    "Reshape": [np.array([1, 4, -1])],
    "Squeeze": [np.array([0])],
    "Unsqueeze": [np.array([0])],
    "Slice": [np.array([1]), np.array([4]), np.array([2])],
    "Gather": [np.array([1, 3, 1])],
    "Expand": [np.array([2, 4, 6, 6])],
    "Split": [np.array([1, 1])],
    "Tile": [np.array([1, 2, 1, 1])],
    "PRelu": [np.float32([0.3])],
    "Clip": [np.float32(-1), np.float32(2)],
}
_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "DepthToSpace": {"blocksize": 2},
    "SpaceToDepth": {"blocksize": 2},
    "MaxPool": {"kernel_shape": [2, 2]},
    "AveragePool": {"kernel_shape": [2, 2]},
    "Slice": {},
    "Gather": {"axis": 1},
    "Split": {"axis": 3, "num_outputs": 2},
}
_OWN = {"FastGelu", "QuickGelu"}
_BINARY = {"Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum", "Pow"}
_UNKNOWN = {"Swish"}  # younger than the operator set here
ONE_INPUT = sorted(
    (having(Is.ELEMENTWISE) | having(Is.HOMOGENEOUS) | having(Is.MOVE) | having(Is.PICK) | BOUNDS.keys())
    - _BINARY
    - _UNKNOWN
)


def compute(op_type: str, x: np.ndarray) -> np.ndarray:
    constants = [numpy_helper.from_array(a, f"c{i}") for i, a in enumerate(_CONSTANTS.get(op_type, ()))]
    names = ["x", *(tensor.name for tensor in constants)]
    if op_type == "Split":
        constants, names = [], ["x"]
    outputs = ["y", "z"] if op_type == "Split" else ["y"]
    domain = "com.microsoft" if op_type in _OWN else ""
    node = helper.make_node(op_type, names, outputs, domain=domain, **_ATTRIBUTES.get(op_type, {}))
    assert what(node) is OPERATORS.get(op_type, Is(0))
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        constants,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return run(helper.make_model(graph, opset_imports=opsets, ir_version=10), {"x": x})[0]


@pytest.mark.parametrize("op_type", ONE_INPUT)
def test_what_the_table_says_holds(op_type: str) -> None:
    x = np.random.default_rng(1).normal(0, 2, (1, 4, 6, 6)).astype(np.float32)
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


def test_layers() -> None:
    assert {"Conv", "Gemm", "MatMul"} == HEAVY
    assert {"Conv", "ConvTranspose", "Gemm", "MatMul"} == LAYERS


def test_an_operator_of_another_domain_is_nothing() -> None:
    assert not what(onnx.NodeProto(op_type="Relu", domain="mine"))
    assert Is.ACTIVATION in what(onnx.NodeProto(op_type="Gelu", domain="com.microsoft"))
