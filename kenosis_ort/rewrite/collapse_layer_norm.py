"""Normalization over the last dimensions, written as arithmetic, collapsed into one operator.

With the mean over the last dimensions of ``x``, ``LayerNormalization`` (operator set 17) is by definition::

    d = x - mean(x)
    LayerNormalization(x; g, b, epsilon) = d / sqrt(mean(d * d) + epsilon) * g + b

and ``RMSNormalization`` (operator set 23) is the same with ``d = x`` and without ``b``. Exporters write the square as
Pow or Mul, the quotient as Div, or as Mul by the Reciprocal of the root, and the difference ``d`` once or twice. Where
there is no constant ``g``, it is 1.

With a mean much larger than the spread, the results differ by an error of rounding: the arithmetic's since runtime
1.30, whose operator computes in higher precision, and the operator's before, which squares before it subtracts the
mean. The runtime makes the same collapse by itself in a float model, so nothing is lost against that. For
quantization it must be made first: the norm is then one float operator, into which no Q and DQ can be placed. Behind an
integer Conv, where DequantizeLinear stands in the way of the runtime, blocks with an RMS norm ran at 2.4x of FP32 for
2.1x. The operator that the runtime has for RMS norms before operator set 23 is none of ONNX, and so is not written.

Not collapsed: earlier operator sets, a type other than float32, axes that are computed or not the last ones, an unknown
shape of the normalized dimensions or one of a single element, an inner value that another node, a body of control
flow, the graph's outputs or the caller need. A ``g`` or ``b`` that is not constant, or of another shape, stays
behind the operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.attributes import attribute, attribute_int
from kenosis_ort.graph.walk import opset_of
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import Matcher, NotCollapsibleError, other_operand
from kenosis_ort.rewrite.rule import float_rule

LAYER_NORM_OPSET, RMS_NORM_OPSET = 17, 23


@dataclass(frozen=True)
class Norm:
    """The nodes of ``d / sqrt(mean(d * d) + epsilon)``, the last of which is ``last``.

    ``d`` is ``x`` or, if centred, what is left of it without its mean.
    """

    x: str
    centred: bool
    epsilon: float
    axes: tuple[int, ...]
    inner: tuple[onnx.NodeProto, ...]
    last: onnx.NodeProto


@float_rule(
    "Sqrt",
    did="norms over the last dimensions, written as arithmetic, became one node each",
    stays="norms over the last dimensions stay as arithmetic",
    least_opset=LAYER_NORM_OPSET,
)
def collapse_layer_norm(editor: Editor, root: onnx.NodeProto) -> None:
    """Turns every norm of the main graph that is written as arithmetic into one operator, in place.

    The last node of the arithmetic keeps its name and becomes the operator.
    """
    norm = norm_around(editor, root)
    if norm is None or (not norm.centred and opset_of(editor.model) < RMS_NORM_OPSET):
        return
    _collapse(editor, norm)


# -- the pattern --------------------------------------------------------------------------------------------------


def norm_around(matcher: Matcher, root: onnx.NodeProto) -> Norm | None:
    """Returns the norm around a Sqrt, None if there is none."""
    add = matcher.producer(root.input[0], "Add")
    if add is None:
        return None
    shifts = [number for name in add.input if (number := matcher.scalar(name)) is not None]
    means = [mean for name in add.input if (mean := matcher.producer(name, "ReduceMean")) is not None]
    if len(shifts) != 1 or len(means) != 1 or shifts[0] < 0.0:
        return None
    square = matcher.producer(means[0].input[0], "Pow", "Mul")
    axes = mean_axes(matcher, means[0])
    if square is None or axes is None:
        return None
    is_square = matcher.scalar(square.input[1]) == 2.0 if square.op_type == "Pow" else len(set(square.input)) == 1
    quotient = _quotient(matcher, root) if is_square else None
    if quotient is None:
        return None
    squared, (divided, inverse, last) = square.input[0], quotient
    inner = [root, add, means[0], square, *inverse]
    left, right = _difference(matcher, squared, axes), _difference(matcher, divided, axes)
    if left is not None and right is not None and left[0] == right[0]:
        distinct = {id(node): node for node in (*inner, *left[1], *right[1])}
        return Norm(left[0], True, shifts[0], axes, tuple(distinct.values()), last)
    return Norm(squared, False, shifts[0], axes, tuple(inner), last) if squared == divided else None


def _quotient(matcher: Matcher, root: onnx.NodeProto) -> tuple[str, tuple[onnx.NodeProto, ...], onnx.NodeProto] | None:
    """Returns what is divided by the root, the nodes that invert the root, and the node that divides."""
    value = root.output[0]
    for reader in matcher.readers(value, "Div", "Reciprocal"):
        if reader.op_type == "Div" and matcher.scalar(reader.input[0]) is None:
            return (reader.input[0], (), reader) if reader.input[1] == value != reader.input[0] else None
        if reader.op_type == "Div" and matcher.scalar(reader.input[0]) != 1.0:
            return None
        for product in matcher.readers(reader.output[0], "Mul"):
            divided = other_operand(product, reader.output[0])
            if divided is not None:
                return divided, (reader,), product
    return None


def _difference(
    matcher: Matcher, value: str, axes: tuple[int, ...]
) -> tuple[str, tuple[onnx.NodeProto, onnx.NodeProto]] | None:
    """Returns ``x`` and the nodes of ``x - mean(x)``, None if the value is something else."""
    minus = matcher.producer(value, "Sub")
    mean = None if minus is None else matcher.producer(minus.input[1], "ReduceMean")
    if minus is None or mean is None or mean.input[0] != minus.input[0] or mean_axes(matcher, mean) != axes:
        return None
    return str(mean.input[0]), (mean, minus)


def mean_axes(matcher: Matcher, mean: onnx.NodeProto) -> tuple[int, ...] | None:
    """Returns the axes of a mean that keeps dimensions, counted from the last one as -1 and sorted."""
    if len(mean.input) > 1 and mean.input[1]:
        array = matcher.array(mean.input[1])
        axes = None if array is None else [int(axis) for axis in array.reshape(-1)]
    else:
        stored = attribute(mean, "axes")
        axes = None if stored is None else list(stored.ints)
    rank = matcher.rank(mean.input[0])
    if not axes or not attribute_int(mean, "keepdims", 1) or (rank is None and max(axes) >= 0):
        return None
    return tuple(sorted(axis if axis < 0 else axis - (rank or 0) for axis in axes))


# -- the edit -----------------------------------------------------------------------------------------------------


def _collapse(matcher: Matcher, norm: Norm) -> None:
    count = len(norm.axes)
    if norm.axes != tuple(range(-count, 0)):
        raise NotCollapsibleError("it is not over the last dimensions")
    matcher.require_float32(norm.x)
    rank, dims = matcher.rank(norm.x), matcher.dims(norm.x)
    shape = () if dims is None else dims[-count:]
    sizes = tuple(size for size in shape if size)
    if rank is None or len(sizes) < count:
        raise NotCollapsibleError(f"the last dimensions of '{norm.x}' are not known")
    if math.prod(sizes) == 1:  # which runtimes before 1.24 do not run
        raise NotCollapsibleError("it is over a single element")
    constants = [name for node in norm.inner if node.op_type in ("Add", "Pow", "Div") for name in node.input]
    matcher.require_no_growth(norm.x, [name for name in constants if matcher.index.constant(name) is not None])
    matcher.require_closed(norm.inner, norm.last)

    inner, last = list(norm.inner), norm.last
    scale, shift = np.ones(sizes, np.float32), None
    if (scaled := _affine(matcher, last, "Mul", rank, sizes)) is not None:
        inner.append(last)
        last, scale = scaled
    if norm.centred and (shifted := _affine(matcher, last, "Add", rank, sizes)) is not None:
        inner.append(last)
        last, shift = shifted
    operator = "LayerNormalization" if norm.centred else "RMSNormalization"
    attributes = {"axis": -count, "epsilon": norm.epsilon}
    matcher.collapse(inner, last, operator, [norm.x], attributes=attributes)
    for position, array in ((1, scale), (2, shift)):
        if array is not None:
            base = f"{last.name}_{'scale' if position == 1 else 'bias'}"
            matcher.index.store_constant(last, position, onnx.numpy_helper.from_array(array), base)


def _affine(
    matcher: Matcher, node: onnx.NodeProto, op_type: str, rank: int, sizes: tuple[int, ...]
) -> tuple[onnx.NodeProto, npt.NDArray[np.float32]] | None:
    """Returns the only node behind another, and its constant in the normalized shape, if it is of that operator."""
    value = node.output[0]
    readers = matcher.readers(value, op_type)
    if len(readers) != 1 or not matcher.index.is_private(value):
        return None
    array = matcher.array(other_operand(readers[0], value) or "")
    if array is None or array.dtype != np.float32 or array.ndim > rank:
        return None
    last = array.shape[-len(sizes) :]
    padded = (1,) * (len(sizes) - len(last)) + last
    if array.size != math.prod(last) or any(have not in (1, want) for have, want in zip(padded, sizes, strict=True)):
        return None
    return readers[0], np.ascontiguousarray(np.broadcast_to(array.reshape(padded), sizes))
