"""Ranges of values that nobody calibrated, from those of their neighbours.

Rewrites put Reshape, Transpose, Pad and the like where the model had none, and calibrators of other code observe only
what their own quantizer asks for. Such operators move values or pick among them, so that their ranges follow: exactly
where all values pass, else as a range that holds the true one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import onnx

from kenosis_ort.graph.operators import Is, having
from kenosis_ort.graph.outside import array_in
from kenosis_ort.rewrite.integer_form import PADDED

Range = tuple[float, float]
_Ranges = dict[str, Range]

_MOVES: Final = having(Is.MOVE)
"""Operators whose output holds exactly the values of their first input."""
_PICKS: Final = having(Is.PICK) - having(Is.REDUCTION)
"""Operators whose outputs stay within the values of their first input."""


def with_derived(model: onnx.ModelProto, known: Mapping[str, Range]) -> _Ranges:
    """Returns the known ranges and those that follow from them, nodes in topological order.

    Args:
        model: The model, complete in memory.
        known: (low, high) by value name.
    """
    found = dict(known)
    constants = {t.name: t for t in model.graph.initializer}
    for name in {name for node in model.graph.node for name in node.output if name.endswith(PADDED)}:
        if name.removesuffix(PADDED) in known:
            found.setdefault(name, known[name.removesuffix(PADDED)])
    for node in model.graph.node:
        _forward(node, found, constants)
    for node in reversed(model.graph.node):
        if node.op_type in _MOVES and not node.domain and node.output[0] in found and node.input[0] not in constants:
            found.setdefault(node.input[0], found[node.output[0]])
    return found


def _forward(node: onnx.NodeProto, found: _Ranges, constants: Mapping[str, onnx.TensorProto]) -> None:
    if node.domain or not node.input or all(name in found for name in node.output if name):
        return
    rule = _RULES.get(node.op_type, _same if node.op_type in _MOVES | _PICKS else None)
    ends = None if rule is None else rule(node, found, constants)
    if ends is not None:
        for name in node.output:
            if name:
                found.setdefault(name, ends)


def _same(node: onnx.NodeProto, found: _Ranges, _: Mapping[str, onnx.TensorProto]) -> Range | None:
    return found.get(node.input[0])


def _relu(node: onnx.NodeProto, found: _Ranges, _: Mapping[str, onnx.TensorProto]) -> Range | None:
    ends = found.get(node.input[0])
    return None if ends is None else (max(ends[0], 0.0), max(ends[1], 0.0))


def _clip(node: onnx.NodeProto, found: _Ranges, constants: Mapping[str, onnx.TensorProto]) -> Range | None:
    ends = found.get(node.input[0])
    if ends is None:
        return None
    limits = [-np.inf, np.inf]
    for index, name in enumerate(node.input[1:3]):
        if name:
            if name not in constants:
                return ends
            limits[index] = float(array_in(constants[name]).reshape(-1)[0])
    low, high = (min(max(end, limits[0]), limits[1]) for end in ends)
    return low, high


def _concat(node: onnx.NodeProto, found: _Ranges, constants: Mapping[str, onnx.TensorProto]) -> Range | None:
    return _union([_range_of(name, found, constants) for name in node.input])


def _pad(node: onnx.NodeProto, found: _Ranges, constants: Mapping[str, onnx.TensorProto]) -> Range | None:
    filled: Range | None = (0.0, 0.0)
    if len(node.input) > 2 and node.input[2]:
        filled = _range_of(node.input[2], found, constants)
    return _union([found.get(node.input[0]), filled])


def _range_of(name: str, found: _Ranges, constants: Mapping[str, onnx.TensorProto]) -> Range | None:
    if name not in constants:
        return found.get(name)
    array = array_in(constants[name])
    return (float(array.min()), float(array.max())) if array.size and array.dtype.kind == "f" else None


def _union(ranges: Sequence[Range | None]) -> Range | None:
    known = [r for r in ranges if r is not None]
    if len(known) < len(ranges) or not known:
        return None
    return min(low for low, _ in known), max(high for _, high in known)


_RULES: Final[Mapping[str, Callable[[onnx.NodeProto, _Ranges, Mapping[str, onnx.TensorProto]], Range | None]]] = {
    "Clip": _clip,
    "Concat": _concat,
    "Pad": _pad,
    "Relu": _relu,
}
