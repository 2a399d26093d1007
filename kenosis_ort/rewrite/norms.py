"""Norms as arithmetic, as one operator each, or in the spelling that the runtime knows."""

import math
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.view import ir, optional
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, operand, other_operand, refuse_if, rule

LAYER_NORM_OPSET, RMS_NORM_OPSET = 17, 23


class Norm(NamedTuple):
    """The nodes of ``d / sqrt(mean(d * d) + epsilon)``, the last of which is ``last``.

    ``d`` is ``x`` or, if centred, what is left of it without its mean.
    """

    x: ir.Value
    centred: bool
    epsilon: float
    axes: tuple[int, ...]
    inner: tuple[ir.Node, ...]
    last: ir.Node


@rule(
    "Sqrt",
    did="norms over the last dimensions, written as arithmetic, became one node each",
    stays="norms over the last dimensions stay as arithmetic",
    least_opset=LAYER_NORM_OPSET,
)
def collapse_layer_norm(editor: Editor, root: ir.Node) -> None:
    """Normalization over the last dimensions, written as arithmetic, collapsed into one operator.

    With the mean over the last dimensions of ``x``, ``LayerNormalization`` (operator set 17) is by definition::

        d = x - mean(x)
        LayerNormalization(x; g, b, epsilon) = d / sqrt(mean(d * d) + epsilon) * g + b

    and ``RMSNormalization`` (operator set 23) is the same with ``d = x`` and without ``b``. Exporters write the square
    as Pow or Mul, the quotient as Div, or as Mul by the Reciprocal of the root, and the difference ``d`` once or twice.
    Where there is no constant ``g``, it is 1.

    With a mean much larger than the spread, the results differ by an error of rounding: the arithmetic's since runtime
    1.30, whose operator computes in higher precision, and the operator's before, which squares before it subtracts the
    mean. The runtime makes the same collapse by itself in a float model, so nothing is lost against that. For
    quantization it must be made first: the norm is then one float operator, into which no Q and DQ can be placed.
    Behind an integer Conv, where DequantizeLinear stands in the way of the runtime, blocks with an RMS norm ran at 2.4x
    of FP32 for 2.1x. The operator that the runtime has for RMS norms before operator set 23 is none of ONNX, and so is
    not written.

    Not collapsed: earlier operator sets, a type other than float32, axes that are computed or not the last ones, an
    unknown shape of the normalized dimensions or one of a single element, an inner value that another node, a body of
    control flow, the graph's outputs or the caller need. A ``g`` or ``b`` that is not constant, or of another shape,
    stays behind the operator.
    """
    norm = norm_around(editor, root)
    if norm is None or not (norm.centred or editor.opset() >= RMS_NORM_OPSET):
        return
    count = len(norm.axes)
    refuse_if(norm.axes != tuple(range(-count, 0)), "it is not over the last dimensions")
    editor.require_float32(norm.x)
    dims = editor.dims(norm.x) or ()
    rank, sizes = len(dims), tuple(size for size in dims[-count:] if size)
    refuse_if(len(sizes) < count, f"the last dimensions of '{norm.x.name}' are not known")
    refuse_if(math.prod(sizes) == 1, "it is over a single element")  # which runtimes before 1.24 do not run
    constants = [value for node in norm.inner if node.op_type in ("Add", "Pow", "Div") for value in node.inputs]
    editor.require_no_growth(norm.x, constants)
    editor.require_closed(norm.inner, norm.last)

    inner, last = list(norm.inner), norm.last
    scale, shift = np.ones(sizes, np.float32), None
    if (scaled := _affine(editor, last, "Mul", rank, sizes)) is not None:
        inner.append(last)
        last, scale = scaled
    if norm.centred and (shifted := _affine(editor, last, "Add", rank, sizes)) is not None:
        inner.append(last)
        last, shift = shifted
    operator = "LayerNormalization" if norm.centred else "RMSNormalization"
    attributes = {"axis": -count, "epsilon": norm.epsilon}
    editor.become(last, operator, [norm.x], attributes, inner=inner)
    for position, array in ((1, scale), (2, shift)):
        if array is not None:
            editor.store_array(last, position, array, f"{last.name}_{'scale' if position == 1 else 'bias'}")


# -- the pattern --------------------------------------------------------------------------------------------------


def norm_around(editor: Editor, root: ir.Node) -> Norm | None:
    """The norm around a Sqrt, None if there is none."""
    spread, quotient = _mean_square(editor, root), _quotient(editor, root)
    if spread is None or quotient is None:
        return None
    value, epsilon, axes, nodes = spread
    divided, inverse, last = quotient
    inner = (root, *nodes, *inverse)
    left, right = (_difference(editor, each, axes) for each in (value, divided))
    if left is not None and right is not None and left[0] is right[0]:
        return Norm(left[0], True, epsilon, axes, tuple(dict.fromkeys((*inner, *left[1], *right[1]))), last)
    return Norm(divided, False, epsilon, axes, inner, last) if value is divided else None


def _mean_square(editor: Editor, root: ir.Node) -> tuple[ir.Value, float, tuple[int, ...], tuple[ir.Node, ...]] | None:
    """``value``, epsilon, axes and nodes of the ``mean(value ^ 2) + epsilon`` that a Sqrt reads, None without one."""
    add = editor.producer(root.inputs[0], "Add")
    summands = () if add is None else add.inputs
    shift = _only([number for value in summands if (number := editor.scalar(value)) is not None])
    mean = _only([node for value in summands if (node := editor.producer(value, "ReduceMean")) is not None])
    square = None if mean is None else editor.producer(mean.inputs[0], "Pow", "Mul")
    axes = None if mean is None else mean_axes(editor, mean)
    if add is None or shift is None or shift < 0.0 or mean is None or square is None or axes is None:
        return None
    is_square = editor.scalar(square.inputs[1]) == 2.0 if square.op_type == "Pow" else len(set(square.inputs)) == 1
    return (operand(square, 0), shift, axes, (add, mean, square)) if is_square else None


def _quotient(editor: Editor, root: ir.Node) -> tuple[ir.Value, tuple[ir.Node, ...], ir.Node] | None:
    """Value divided by the root, the nodes that invert the root, and the node that divides."""
    value = root.outputs[0]
    for reader in editor.readers_of(value, "Div", "Reciprocal"):
        if reader.op_type == "Div" and editor.scalar(reader.inputs[0]) is None:
            return (operand(reader, 0), (), reader) if other_operand(reader, value) is reader.inputs[0] else None
        if reader.op_type == "Div" and editor.scalar(reader.inputs[0]) != 1.0:
            return None
        for product in editor.readers_of(reader.outputs[0], "Mul"):
            divided = other_operand(product, reader.outputs[0])
            if divided is not None:
                return divided, (reader,), product
    return None


def _difference(
    editor: Editor, value: ir.Value, axes: tuple[int, ...]
) -> tuple[ir.Value, tuple[ir.Node, ir.Node]] | None:
    """``x`` and the nodes of ``x - mean(x)``, None if the value is something else."""
    minus = editor.producer(value, "Sub")
    mean = None if minus is None else editor.producer(minus.inputs[1], "ReduceMean")
    if minus is None or mean is None or mean.inputs[0] is not minus.inputs[0] or mean_axes(editor, mean) != axes:
        return None
    return operand(mean, 0), (mean, minus)


def mean_axes(editor: Editor, mean: ir.Node) -> tuple[int, ...] | None:
    """The axes of a mean that keeps dimensions, counted from the last one as -1 and sorted."""
    given = optional(mean, 1)
    array = editor.array(given)
    axes = mean.attributes.get_ints("axes") if given is None else None if array is None else array.reshape(-1).tolist()
    rank = editor.rank(mean.inputs[0])
    if not axes or not mean.attributes.get_int("keepdims", 1) or (rank is None and max(axes) >= 0):
        return None
    return tuple(sorted(axis if axis < 0 else axis - (rank or 0) for axis in axes))


def _affine(
    editor: Editor, node: ir.Node, op_type: str, rank: int, sizes: tuple[int, ...]
) -> tuple[ir.Node, npt.NDArray[np.float32]] | None:
    """The only node behind another, and its constant in the normalized shape, if it is of that operator."""
    value = node.outputs[0]
    readers = editor.readers_of(value, op_type)
    if len(readers) != 1 or not editor.is_private(value):
        return None
    array = editor.array(other_operand(readers[0], value))
    if array is None or array.dtype != np.float32 or array.ndim > rank:
        return None
    last = array.shape[-len(sizes) :]
    padded = (1,) * (len(sizes) - len(last)) + last
    if array.size != math.prod(last) or any(have not in (1, want) for have, want in zip(padded, sizes, strict=True)):
        return None
    return readers[0], np.ascontiguousarray(np.broadcast_to(array.reshape(padded), sizes))


T = TypeVar("T")


@rule(
    "Sqrt",
    did="norms written as a computed scale and shift became LayerNormalization",
    stays="norms stay as a computed scale and shift",
    least_opset=LAYER_NORM_OPSET,
)
def collapse_affine_norm(editor: Editor, root: ir.Node) -> None:
    """LayerNormalization as TensorFlow writes it, collapsed into one operator.

    With ``m = mean(x)``, ``v = mean((x - m)^2)`` over the last dimension and ``k = g / sqrt(v + epsilon)``::

        x * k + (b - m * k) = (x - m) * k + b = LayerNormalization(x; g, b, epsilon)

    TensorFlow's layers compute a scale and a shift first, and its converters keep the dozen of nodes. The runtime does
    not know this editor, so the collapse speeds up the float model too; where the mean is much larger than the spread
    it is also more accurate, as ``x * k - m * k`` cancels.

    Not collapsed: operator sets before 17, a ``g`` or ``b`` that is not a constant vector, other dimensions than the
    last, a type other than float32, an inner value that another node, a body of control flow, the graph's outputs or
    the caller need.
    """
    found = _match(editor, root)
    if found is None:
        return
    inputs, epsilon, inner, last = found
    x, *constants = inputs
    editor.require_float32(x)
    width = (editor.dims(x) or (None,))[-1]
    for value in constants:
        tensor = editor.constant(value)
        if tensor is None or width is None or list(tensor.dims) != [width]:
            raise NotCollapsibleError(f"'{value.name}' is not a constant vector of the last dimension")
    refuse_if(width == 1, "it is over a single element")  # which runtimes before 1.24 do not run
    editor.require_closed(inner, last)
    editor.become(last, "LayerNormalization", inputs, {"axis": -1, "epsilon": epsilon}, inner=inner)


def _match(editor: Editor, root: ir.Node) -> tuple[list[ir.Value], float, tuple[ir.Node, ...], ir.Node] | None:
    """``x`` with scale and shift, epsilon, inner nodes and the last one of the norm around a Sqrt, None without one."""
    spread = _spread(editor, root)
    inverse = _only(editor.readers_of(root.outputs[0], "Reciprocal", "Div"))
    if spread is None or inverse is None or (inverse.op_type == "Div" and editor.scalar(inverse.inputs[0]) != 1.0):
        return None
    x, mean, epsilon, inner = spread
    factor = _only(editor.readers_of(inverse.outputs[0], "Mul"))
    scale = None if factor is None else other_operand(factor, inverse.outputs[0])
    if factor is None or scale is None:
        return None
    products = {other_operand(node, factor.outputs[0]): node for node in editor.readers_of(factor.outputs[0], "Mul")}
    scaled, moved = products.get(x), products.get(mean.outputs[0])
    if len(products) != 2 or scaled is None or moved is None:
        return None
    rest = _only(editor.readers_of(moved.outputs[0], "Sub"))
    last = _only(editor.readers_of(scaled.outputs[0], "Add"))
    if rest is None or last is None or rest.inputs[1] is not moved.outputs[0]:
        return None
    if other_operand(last, scaled.outputs[0]) is not rest.outputs[0]:
        return None
    nodes = (*inner, root, inverse, factor, scaled, moved, rest)
    return [x, scale, operand(rest, 0)], epsilon, nodes, last


def _spread(editor: Editor, root: ir.Node) -> tuple[ir.Value, ir.Node, float, tuple[ir.Node, ...]] | None:
    """``x``, the node of its mean, epsilon, and the nodes of ``mean((x - mean)^2) + epsilon``."""
    value, epsilon, axes, nodes = _mean_square(editor, root) or (None, 0.0, (), ())
    minus = editor.producer(value, "Sub")
    if minus is None or axes != (-1,):
        return None
    for x, centre in (tuple(minus.inputs), tuple(minus.inputs)[::-1]):
        mean = editor.producer(centre, "ReduceMean")
        if x is not None and mean is not None and mean.inputs[0] is x and mean_axes(editor, mean) == axes:
            return x, mean, epsilon, (mean, minus, *nodes)
    return None


def _only(found: list[T]) -> T | None:
    return found[0] if len(found) == 1 else None


@rule(
    "Sqrt",
    did="norms in arithmetic are spelled as the runtime knows them",
    stays="norms stay in a spelling that it does not know",
)
def spell_norm(editor: Editor, root: ir.Node) -> None:
    """A norm in arithmetic, in the spelling that the runtime makes an operator from.

    Where the operator set has no operator for a norm (before 17 for LayerNormalization, before 23 for
    RMSNormalization), it stays in arithmetic, and the runtime makes an operator of its own from it at load. It knows
    some spellings only, so::

        d * d                -> Pow(d, 2)
        d * Reciprocal(root) -> Div(d, root)

    The square is the same to the bit, the quotient to a rounding. An RMS norm over ``[128, 256]`` takes 12 microseconds
    for 31 (one AVX512 thread).

    Not changed: norms over other dimensions than the last or without a constant scale behind them, which the runtime
    does not know in any spelling; a type other than float32; an inner value that is needed elsewhere.
    """
    opset = editor.opset()
    norm = None if opset >= RMS_NORM_OPSET else norm_around(editor, root)
    if norm is None or (norm.centred and opset >= LAYER_NORM_OPSET) or not _is_scaled(editor, norm):
        return
    products = [node for node in norm.inner if node.op_type == "Mul"]
    inverses = [node for node in norm.inner if node.op_type == "Reciprocal"]
    if not products and not inverses:
        return
    editor.require_float32(norm.x)
    editor.require_closed(norm.inner, norm.last)
    for product in products:
        two = editor.add_constant(np.array(2.0, np.float32), f"{product.name}_two")
        editor.rewrite(product, "Pow", [product.inputs[0], two])
    for inverse in inverses:
        divided = other_operand(norm.last, inverse.outputs[0])
        editor.drop([inverse], norm.last.name)
        editor.rewrite(norm.last, "Div", [divided or norm.x, root.outputs[0]])
    editor.done += 1


def _is_scaled(editor: Editor, norm: Norm) -> bool:
    """Whether the norm is over the last dimension, with a constant vector as its scale."""
    output = norm.last.outputs[0]
    scales = editor.readers_of(output, "Mul") if editor.is_private(output) else []
    scale = editor.constant(other_operand(scales[0], output)) if scales else None
    return norm.axes == (-1,) and scale is not None and len(scale.dims) == 1
