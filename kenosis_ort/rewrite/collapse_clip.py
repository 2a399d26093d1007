"""Bounds, written as Min, Max, Relu and Clip in a row, collapsed into one Clip or Relu.

With ``Clip(x; l, h) = min(max(x, l), h)`` and ``l <= h``, all of them are Clips::

    Max(x, l) = Clip(x; l, inf)      Min(x, h) = Clip(x; -inf, h)      Relu(x) = Clip(x; 0, inf)
    Clip(Clip(x; a, b); l, h) = Clip(x; min(max(a, l), h), min(max(b, l), h))

so that ``Min(Max(x, 0), 6)`` is ``Clip(x; 0, 6)`` and ``Max(x, 0)`` is ``Relu(x)``; the same to the bit. Some
exporters write Relu6 so. Min and Max are float operators to the runtime; a Clip or Relu vanishes into the
requantization of the Conv before it.

Not collapsed: bounds that are computed or not one number, a lower bound above the upper one, a type other than float32,
an inner value that another node, a body of control flow, the graph's outputs or the caller need. A Clip or Relu alone
is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import onnx

from kenosis_ort.graph.prepare import RewriteResult
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import NotCollapsibleError, other_operand

_BOUNDS = ("Min", "Max", "Relu", "Clip")
_OPEN = (-math.inf, math.inf)


class _Bounds(NamedTuple):
    """``low <= high`` around a value."""

    value: str
    low: float
    high: float


def collapse_clip(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
    """Turns rows of bounds in the main graph into one Clip or Relu each, in place; the last node keeps its name.

    Args:
        model: The model to change, of operator set 11 or later, its types and shapes inferred.
        keep_values: Values that must keep existing with their meaning.
    """
    if not any(node.op_type in _BOUNDS for node in model.graph.node):
        return RewriteResult()
    editor = Editor(model, keep_values)
    for last in reversed(editor.nodes(*_BOUNDS)):
        bounds = None if editor.is_gone(last) else _bounds(editor, last)
        if bounds is None:
            continue
        inner: list[onnx.NodeProto] = []
        while (node := editor.producer(bounds.value, *_BOUNDS)) is not None and editor.index.is_private(bounds.value):
            before = _bounds(editor, node)
            if before is None:
                break
            low, high = (min(max(bound, bounds.low), bounds.high) for bound in before[1:])
            bounds = _Bounds(before.value, low, high)
            inner.append(node)
        if not inner and last.op_type in ("Relu", "Clip"):
            continue
        try:
            editor.require_float32(bounds.value)
            constants = [name for node in (*inner, last) for name in node.input if editor.index.constant(name)]
            editor.require_no_growth(bounds.value, constants)
        except NotCollapsibleError as reason:
            editor.refuse(last, reason)
            continue
        _write(editor, last, bounds, inner)
    return editor.finish("rows of Min, Max, Relu and Clip became one Clip or Relu each", "rows of Min and Max stay")


def _bounds(editor: Editor, node: onnx.NodeProto) -> _Bounds | None:
    """Returns what a node bounds, None if its bounds are not constant numbers in order."""
    if node.op_type == "Relu":
        return _Bounds(node.input[0], 0.0, math.inf)
    if node.op_type == "Clip":
        given = [node.input[at] if at < len(node.input) else "" for at in (1, 2)]
        numbers = [editor.scalar(name) if name else infinity for name, infinity in zip(given, _OPEN, strict=True)]
        low, high = numbers
        if low is None or high is None or low > high:
            return None
        return _Bounds(node.input[0], low, high)
    for value in node.input:
        bound = editor.scalar(other_operand(node, value) or "")
        if bound is not None and editor.index.constant(value) is None:
            return _Bounds(value, bound, math.inf) if node.op_type == "Max" else _Bounds(value, -math.inf, bound)
    return None


def _write(editor: Editor, last: onnx.NodeProto, bounds: _Bounds, inner: Collection[onnx.NodeProto]) -> None:
    if bounds.low == 0.0 and math.isinf(bounds.high):
        editor.become(last, "Relu", [bounds.value], inner=inner)
        return
    names = [
        "" if math.isinf(bound) else editor.add_constant(np.array(bound, np.float32), f"{last.name}_{side}")
        for side, bound in (("min", bounds.low), ("max", bounds.high))
    ]
    editor.become(last, "Clip", [bounds.value, *(names if names[1] else names[:1])], inner=inner)
