"""LayerNormalization as TensorFlow writes it, collapsed into one operator.

With ``m = mean(x)``, ``v = mean((x - m)^2)`` over the last dimension and ``k = g / sqrt(v + epsilon)``::

    x * k + (b - m * k) = (x - m) * k + b = LayerNormalization(x; g, b, epsilon)

TensorFlow's layers compute a scale and a shift first, and its converters keep the dozen of nodes. The runtime does not
know this form, so the collapse speeds up the float model too; where the mean is much larger than the spread it is also
more accurate, as ``x * k - m * k`` cancels.

Not collapsed: operator sets before 17, a ``g`` or ``b`` that is not a constant vector, other dimensions than the last,
a type other than float32, an inner value that another node, a body of control flow, the graph's outputs or the caller
need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import onnx

from kenosis_ort.rewrite.collapse_layer_norm import LAYER_NORM_OPSET, mean_axes
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import Matcher, NotCollapsibleError, other_operand
from kenosis_ort.rewrite.rule import float_rule

T = TypeVar("T")


@dataclass(frozen=True)
class _Norm:
    """The nodes of a norm of ``x``, the last of which is ``last``."""

    x: str
    scale: str
    shift: str
    epsilon: float
    inner: tuple[onnx.NodeProto, ...]
    last: onnx.NodeProto


@float_rule(
    "Sqrt",
    did="norms written as a computed scale and shift became LayerNormalization",
    stays="norms stay as a computed scale and shift",
    least_opset=LAYER_NORM_OPSET,
)
def collapse_affine_norm(editor: Editor, root: onnx.NodeProto) -> None:
    """Turns every norm of the main graph that is written as a computed scale and shift into one operator, in place.

    The last node of the arithmetic keeps its name and becomes the operator.
    """
    norm = _match(editor, root)
    if norm is None:
        return
    _check(editor, norm)
    attributes = {"axis": -1, "epsilon": norm.epsilon}
    editor.collapse(
        norm.inner, norm.last, "LayerNormalization", [norm.x, norm.scale, norm.shift], attributes=attributes
    )


def _match(matcher: Matcher, root: onnx.NodeProto) -> _Norm | None:
    """Returns the norm around a Sqrt, None if there is none."""
    spread = _spread(matcher, root)
    inverse = _only(matcher.readers(root.output[0], "Reciprocal", "Div"))
    if spread is None or inverse is None or (inverse.op_type == "Div" and matcher.scalar(inverse.input[0]) != 1.0):
        return None
    x, mean, epsilon, inner = spread
    factor = _only(matcher.readers(inverse.output[0], "Mul"))
    scale = None if factor is None else other_operand(factor, inverse.output[0])
    if factor is None or scale is None:
        return None
    products = {other_operand(node, factor.output[0]): node for node in matcher.readers(factor.output[0], "Mul")}
    scaled, moved = products.get(x), products.get(mean.output[0])
    if len(products) != 2 or scaled is None or moved is None:
        return None
    rest = _only(matcher.readers(moved.output[0], "Sub"))
    last = _only(matcher.readers(scaled.output[0], "Add"))
    if rest is None or last is None or rest.input[1] != moved.output[0]:
        return None
    if other_operand(last, scaled.output[0]) != rest.output[0]:
        return None
    nodes = (*inner, root, inverse, factor, scaled, moved, rest)
    return _Norm(x, scale, rest.input[0], epsilon, nodes, last)


def _spread(
    matcher: Matcher, root: onnx.NodeProto
) -> tuple[str, onnx.NodeProto, float, tuple[onnx.NodeProto, ...]] | None:
    """Returns ``x``, the node of its mean, epsilon, and the nodes of ``mean((x - mean)^2) + epsilon``."""
    add = matcher.producer(root.input[0], "Add")
    epsilon = None if add is None else _only([n for name in add.input if (n := matcher.scalar(name)) is not None])
    variance = None if add is None else _only([n for v in add.input if (n := matcher.producer(v, "ReduceMean"))])
    square = None if variance is None else matcher.producer(variance.input[0], "Mul", "Pow")
    if add is None or epsilon is None or variance is None or square is None:
        return None
    squared = matcher.scalar(square.input[1]) == 2.0 if square.op_type == "Pow" else len(set(square.input)) == 1
    minus = matcher.producer(square.input[0], "Sub") if squared else None
    if minus is None:
        return None
    for x, centre in (tuple(minus.input), tuple(minus.input)[::-1]):
        mean = matcher.producer(centre, "ReduceMean")
        if (
            mean is not None
            and mean.input[0] == x
            and mean_axes(matcher, mean) == mean_axes(matcher, variance) == (-1,)
        ):
            return x, mean, epsilon, (mean, minus, square, variance, add)
    return None


def _check(matcher: Matcher, norm: _Norm) -> None:
    matcher.require_float32(norm.x)
    width = (matcher.dims(norm.x) or (None,))[-1]
    for name in (norm.scale, norm.shift):
        tensor = matcher.index.constant(name)
        if tensor is None or width is None or list(tensor.dims) != [width]:
            raise NotCollapsibleError(f"'{name}' is not a constant vector of the last dimension")
    if width == 1:  # which runtimes before 1.24 do not run
        raise NotCollapsibleError("it is over a single element")
    matcher.require_closed(norm.inner, norm.last)


def _only(found: list[T]) -> T | None:
    return found[0] if len(found) == 1 else None
