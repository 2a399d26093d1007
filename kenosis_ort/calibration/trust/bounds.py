"""What a tensor cannot exceed, whatever the data: the bounds of activation functions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx

from kenosis_ort.calibration.session import initializer_arrays

Range = tuple[float, float]

_FUNCTIONS: Mapping[str, Range] = {
    "Sigmoid": (0.0, 1.0),
    "HardSigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Erf": (-1.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "Sin": (-1.0, 1.0),
    "Cos": (-1.0, 1.0),
    "Relu": (0.0, math.inf),
    "Softplus": (0.0, math.inf),
    "Exp": (0.0, math.inf),
    "Abs": (0.0, math.inf),
    "Sqrt": (0.0, math.inf),
    "LogSoftmax": (-math.inf, 0.0),
}
_PASSING = frozenset(
    {"MaxPool", "GlobalMaxPool", "GlobalAveragePool", "Identity", "Reshape", "Transpose", "Flatten", "Squeeze",
     "Unsqueeze", "Slice", "Gather", "Expand", "Split", "DepthToSpace", "SpaceToDepth", "Dropout"}
)  # fmt: skip


def hard_bounds(proto: onnx.ModelProto) -> dict[str, Range]:
    """Returns the bounds of the tensors of the main graph that have any; an end without one is infinite."""
    limits = {name for node in proto.graph.node if node.op_type == "Clip" for name in node.input[1:] if name}
    constants = {name: float(np.min(a)) for name, a in initializer_arrays(proto, limits).items() if a.size == 1}
    found: dict[str, Range] = {}
    for node in proto.graph.node:
        bound = _bound(node, found, constants)
        if bound is not None:
            found.update(dict.fromkeys(node.output, bound))
    return found


def _bound(node: onnx.NodeProto, found: Mapping[str, Range], constants: Mapping[str, float]) -> Range | None:
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in _FUNCTIONS:
        return _FUNCTIONS[node.op_type]
    if node.op_type == "Clip":
        attributes = {a.name: a.f for a in node.attribute}
        names = [*node.input[1:3], "", ""]
        return (
            attributes.get("min", constants.get(names[0], -math.inf)),
            attributes.get("max", constants.get(names[1], math.inf)),
        )
    if node.op_type in _PASSING and node.input:
        return found.get(node.input[0])
    if node.op_type == "Concat" and all(name in found for name in node.input):
        return min(found[n][0] for n in node.input), max(found[n][1] for n in node.input)
    return None
