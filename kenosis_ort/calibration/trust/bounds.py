"""What a tensor cannot exceed, whatever the data: the bounds of activation functions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx

from kenosis_ort.calibration.session import initializer_arrays
from kenosis_ort.graph.operators import BOUNDS, Is, having

Range = tuple[float, float]

_WITHIN = having(Is.MOVE) | having(Is.PICK)


def hard_bounds(proto: onnx.ModelProto) -> dict[str, Range]:
    """The bounds of the tensors of the main graph that have any; an end without one is infinite."""
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
    if node.op_type in BOUNDS:
        return BOUNDS[node.op_type]
    if node.op_type == "Clip":
        attributes = {a.name: a.f for a in node.attribute}
        names = [*node.input[1:3], "", ""]
        return (
            attributes.get("min", constants.get(names[0], -math.inf)),
            attributes.get("max", constants.get(names[1], math.inf)),
        )
    if node.op_type in _WITHIN and node.input:
        return found.get(node.input[0])
    if node.op_type == "Concat" and all(name in found for name in node.input):
        return min(found[n][0] for n in node.input), max(found[n][1] for n in node.input)
    return None
