"""Scales and shifts by channel, BatchNormalizations and factors of Gemm, folded into the weights beside them."""

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.view import GraphView, channel_axis, further_outputs, ir, optional
from kenosis_ort.rewrite.rule import (
    Editor,
    FloatArray,
    NotCollapsibleError,
    known,
    operand,
    other_operand,
    refuse_if,
    rule,
)

Weights = npt.NDArray[np.generic]


def affine_step(
    op_type: str, scale: FloatArray, shift: FloatArray, constant: FloatArray, *, swapped: bool
) -> tuple[FloatArray, FloatArray] | None:
    """Scale and shift with one more Mul, Add, Sub or Div behind them.

    Args:
        op_type: The operator.
        scale: Factor so far, by channel.
        shift: Summand so far, by channel.
        constant: Its other operand, by channel. Overflow gives infinity, which is for the caller to refuse.
        swapped: Whether the constant is the first operand, and ``x * scale + shift`` the second.

    Returns:
        The new pair; None where the constant is divided by the value, which is not affine.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if op_type == "Mul":
            return scale * constant, shift * constant
        if op_type == "Add":
            return scale, shift + constant
        if op_type == "Sub":
            return (-scale, constant - shift) if swapped else (scale, shift - constant)
        return None if swapped else (scale / constant, shift / constant)


@rule(
    "Conv",
    "Gemm",
    did="scales and shifts by channel were folded into the weights in front of them",
    stays="Conv or Gemm nodes have a scale or shift behind them that stays",
)
def fold_scale(editor: Editor, layer: ir.Node) -> None:
    """Scales and shifts by channel behind a Conv or Gemm, folded into its weights.

    With ``y[c] = x * W[c] + d[c]`` and constants ``k`` and ``t`` by channel (or one number for all)::

        y * k = x * (k W) + k d      y / k = x * (W / k) + d / k      y + t = x * W + (d + t)
        y - t = x * W + (d - t)      t - y = x * (-W) + (t - d)

    Rows of them are joined first. All arithmetic is float64, rounded once to float32. In a float model the runtime does
    the same; between Q and DQ it does not, and each of them would be a float operator, or a depthwise Conv.

    Not folded: weights or a bias that are not constant, ``alpha`` and ``beta`` of Gemm that are not 1, a type other
    than float32, an inner value that another node, a body of control flow, the graph's outputs or the caller need,
    results that are not finite.
    """
    weights = editor.array(layer.inputs[1])
    if weights is None or weights.ndim < 2:
        return
    axis = channel_axis(layer)
    channels = weights.shape[axis]
    spatial = 0 if layer.op_type == "Gemm" else weights.ndim - 2
    scale, shift = np.ones(channels), np.zeros(channels)
    value, steps = layer.outputs[0], []
    while editor.is_private(value) and (readers := editor.readers_of(value, *STEPS)):
        array = editor.array(other_operand(readers[0], value))
        usable = array is not None and array.dtype == np.float32
        constant = by_channel(array, channels, 2 + spatial) if usable else None
        swapped = readers[0].inputs[0] is not value
        op_type = readers[0].op_type
        applied = None if constant is None else affine_step(op_type, scale, shift, constant, swapped=swapped)
        if applied is None:
            break
        scale, shift = applied
        steps.append(readers[0])
        value = readers[0].outputs[0]
    if not steps:
        return
    if any(layer.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        raise NotCollapsibleError("its alpha or beta is not 1")
    bias = _bias(editor, layer, channels)
    refuse_if(weights.dtype != np.float32, "its weights are not float32")
    factor = scale.reshape([channels if at == axis else 1 for at in range(weights.ndim)])
    with np.errstate(over="ignore", invalid="ignore"):
        new_weights = (weights.astype(np.float64) * factor).astype(np.float32)
        new_bias = (bias * scale + shift).astype(np.float32)
    if not (np.isfinite(new_weights).all() and np.isfinite(new_bias).all()):
        raise NotCollapsibleError("the folded weights would not be finite")
    base = operand(layer, 1).name
    editor.store_array(layer, 1, new_weights, f"{base}_scaled")
    editor.store_array(layer, 2, new_bias, f"{base}_bias")
    editor.drop(steps, layer.name)
    editor.take_over_output(layer, steps[-1].outputs[0])
    editor.done += len(steps)


def _bias(editor: Editor, layer: ir.Node, channels: int) -> FloatArray:
    """The bias of a layer as one number a channel, zeros without one."""
    bias = optional(layer, 2) if layer.op_type != "MatMul" else None
    if bias is None:
        return np.zeros(channels)
    found = by_channel(editor.array(bias), channels, 2 if layer.op_type == "Gemm" else 1)
    return known(found, f"its bias '{bias.name}' is not one number a channel, or not constant")


def by_channel(array: npt.NDArray[np.generic] | None, channels: int, rank: int) -> FloatArray | None:
    """A constant as one number a channel, axis 1 of ``rank`` or the only axis; None if it is not one."""
    if array is None or array.ndim > rank:
        return None
    shape, axis = (1,) * (rank - array.ndim) + array.shape, min(1, rank - 1)
    if any(dim != 1 for at, dim in enumerate(shape) if at != axis) or shape[axis] not in (1, channels):
        return None
    return np.broadcast_to(array.astype(np.float64).reshape(-1), (channels,))


_INFERENCE_BY_DEFAULT = 7
"""Before this operator set BatchNormalization is in training mode unless it says ``is_test``."""

STEPS = ("Mul", "Div", "Add", "Sub")


def scale_of_norm(graph: GraphView, norm: ir.Node) -> tuple[FloatArray, FloatArray]:
    """Scale and shift of a BatchNormalization in inference."""
    if graph.opset() < _INFERENCE_BY_DEFAULT or norm.attributes.get_int("training_mode", 0) != 0:
        raise NotCollapsibleError("it is in training mode")
    refuse_if(not norm.attributes.get_int("spatial", 1), "it normalizes each element (spatial=0)")
    refuse_if(further_outputs(norm), "its statistics are outputs")
    arrays = [array.astype(np.float64) for value in norm.inputs[1:5] if (array := graph.array(value)) is not None]
    refuse_if(len(arrays) != 4, "its parameters are not constant")
    gamma, beta, mean, variance = arrays
    if any(array.ndim != 1 or array.shape != gamma.shape for array in arrays):
        raise NotCollapsibleError("its parameters are not one number a channel")
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scale = gamma / np.sqrt(variance + norm.attributes.get_float("epsilon", 1e-5))
        return scale, beta - scale * mean


_FOLDABLE = ("Add", *sorted(LAYERS))


@rule(
    "BatchNormalization",
    did="BatchNormalization nodes were folded into the weights in front of them",
    stays="BatchNormalization nodes stay: nothing in front of them can take them up",
    least_opset=_INFERENCE_BY_DEFAULT,
)
def fold_batch_norm(editor: Editor, norm: ir.Node) -> None:
    """BatchNormalization folded into the Conv, ConvTranspose, Gemm or MatMul in front of it.

    In inference, with scale ``g``, shift ``b``, mean ``m`` and variance ``v`` per channel ``c``::

        BN(y)[c] = g[c] * (y[c] - m[c]) / sqrt(v[c] + epsilon) + b[c]
                 = s[c] * y[c] + t[c]        with  s = g / sqrt(v + epsilon),  t = b - s * m

    The node in front is affine in its weights: ``y[c] = x * W[c] + d[c]``. Hence::

        BN(y)[c] = x * (s[c] * W[c]) + (s[c] * d[c] + t[c])

    that is, the same node with weights ``s * W`` and bias ``s * d + t``. The bias ``d`` may also be an ``Add`` of a
    constant between the two. Gemm computes ``alpha * A * B + beta * C``: its weights become ``s * B``, its bias
    ``beta * s * C + t`` and ``beta`` 1. A MatMul has no bias: without an ``Add`` the BatchNormalization turns into one.

    All arithmetic is float64 and rounded once, to the type of the weights. The channel of a BatchNormalization is
    axis 1, for MatMul and Gemm the last axis, so these must be of rank 2.

    Not folded: training mode, ``spatial=0``, parameters or weights that are not constant, an intermediate
    value that another node, a body of control flow, the graph's outputs or the caller need, results that overflow.
    """
    scale, shift = scale_of_norm(editor, norm)
    affine, add, weights = _in_front(editor, norm)
    weights, bias = _folded(editor, affine, add, weights, scale, shift)
    _put_in(editor, affine, add, norm, weights, bias)
    editor.done += 1


def _in_front(editor: Editor, norm: ir.Node) -> tuple[ir.Node, ir.Node | None, Weights]:
    """The layer in front of a BatchNormalization, the Add between them, if there is one, and the layer's weights.

    Every value between them is read by the next node only.
    """
    affine, add = _affine_before(editor, operand(norm, 0)), None
    if affine.op_type == "Add":
        add = affine
        variable = [value for value in add.inputs if value is not None and editor.constant(value) is None]
        refuse_if(len(variable) != 1, "the Add in front of it adds no constant")
        affine = _affine_before(editor, variable[0])
        refuse_if(affine.op_type == "Add", "it follows an Add")
    weights = known(editor.array(affine.inputs[1]), f"the weights of '{affine.name}' are not constant")
    if affine.op_type == "MatMul":
        values = (affine.inputs[0], affine.outputs[0], norm.outputs[0])
        ranks = [rank for value in values if (rank := editor.rank(value)) is not None]
        refuse_if(weights.ndim != 2 or ranks[:1] != [2], f"'{affine.name}' is not known to give a matrix")
    return affine, add, weights


def _affine_before(editor: Editor, value: ir.Value) -> ir.Node:
    """The layer or Add that makes a value for one reader."""
    node = known(value.producer(), "it follows no node")
    editor.require_private(value)
    return known(editor.producer(value, *_FOLDABLE), f"it follows a {node.op_type}")


def _folded(
    editor: Editor, affine: ir.Node, add: ir.Node | None, weights: Weights, scale: FloatArray, shift: FloatArray
) -> tuple[Weights, Weights]:
    """The new weights and the new bias, in the type of the old weights."""
    factor = _weight_factor(affine, weights.shape, scale)
    bias = _bias(editor, affine, len(scale)) * affine.attributes.get_float("beta", 1.0)
    if add is not None:
        constant = next(value for value in add.inputs if editor.constant(value) is not None)
        rank = weights.ndim if affine.op_type in ("Conv", "ConvTranspose") else 2
        addend = by_channel(editor.array(constant), len(scale), rank)
        bias = bias + known(addend, f"'{constant.name if constant else ''}' is not one number a channel")
    with np.errstate(over="ignore", invalid="ignore"):
        new_weights = (weights.astype(np.float64) * factor).astype(weights.dtype)
        new_bias = (bias * scale + shift).astype(weights.dtype)
    if not all(np.isfinite(array.astype(np.float64)).all() for array in (new_weights, new_bias)):
        raise NotCollapsibleError("the folded weights are not finite")
    return new_weights, new_bias


def _weight_factor(affine: ir.Node, shape: tuple[int, ...], scale: FloatArray) -> FloatArray:
    """``scale`` in a shape that multiplies weights of ``shape`` along their output channels."""
    channels = len(scale)
    if affine.op_type == "ConvTranspose":
        groups = affine.attributes.get_int("group", 1)
        refuse_if(shape[1] * groups != channels or shape[0] % groups, "the channel counts differ")
        per_input = np.repeat(scale.reshape(groups, shape[1]), shape[0] // groups, axis=0)
        return per_input.reshape(shape[0], shape[1], *([1] * (len(shape) - 2)))
    axis = channel_axis(affine)
    refuse_if(shape[axis] != channels, "the channel counts differ")
    return scale.reshape([channels if at == axis else 1 for at in range(len(shape))])


def _put_in(
    editor: Editor, affine: ir.Node, add: ir.Node | None, norm: ir.Node, weights: Weights, bias: Weights
) -> None:
    """Gives the layer its new weights; the last of the nodes that stay takes over the output."""
    base, output = operand(affine, 1).name, norm.outputs[0]
    editor.store_array(affine, 1, weights, f"{base}_folded")
    if affine.op_type == "MatMul" and add is None:
        editor.rewrite(norm, "Add", [norm.inputs[0]])
        editor.store_array(norm, 1, bias, f"{base}_bias")
        return
    editor.drop([norm], affine.name)
    if affine.op_type == "MatMul" and add is not None:
        at = next(at for at, value in enumerate(add.inputs) if editor.constant(value) is not None)
        editor.store_array(add, at, bias, f"{base}_bias")
        editor.take_over_output(add, output)
        return
    editor.store_array(affine, 2, bias, f"{base}_bias")
    if affine.op_type == "Gemm":
        editor.set_attribute(affine, "beta", None)
    if add is not None:
        editor.drop([add], affine.name)
    editor.take_over_output(affine, output)


@rule(
    "Gemm",
    did="Gemm nodes had their factors folded into their constants",
    stays="Gemm nodes keep a factor that is not 1",
)
def fold_gemm_factors(editor: Editor, node: ir.Node) -> None:
    """The factors of a Gemm, folded into its constants, and its transposed first operand as a Transpose.

    With constants ``B`` and ``C``, by the definition of the operator::

        Gemm(A, B, C; alpha, beta) = alpha A B + beta C = Gemm(A, alpha B, beta C; 1, 1)
        Gemm(A, B, C; beta = 0)    = Gemm(A, B)
        Gemm(A, B, C; transA)      = Gemm(Transpose(A), B, C)

    and a ``C`` of one number is as many of them as the result has columns. The runtime's integer kernel knows neither
    factors nor a transposed first operand, and wants one bias a column. The arithmetic is float64, rounded once to
    float32.

    Not folded: weights that are not constant, a ``beta`` in front of a ``C`` that is not constant, types other than
    float32, results that are not finite.
    """
    weights = editor.array(node.inputs[1])
    if weights is None or weights.dtype != np.float32 or weights.ndim != 2:
        return
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    addend = optional(node, 2)
    bias = editor.array(addend)
    columns = weights.shape[channel_axis(node)]
    dropped = addend is not None and beta == 0.0
    widened = bias is not None and bias.size == 1 and columns > 1
    transposed = bool(node.attributes.get_int("transA", 0))
    if alpha == 1.0 and (beta == 1.0 or addend is None) and not (widened or transposed):
        return
    if addend is not None and beta not in (0.0, 1.0) and bias is None:
        raise NotCollapsibleError(f"beta multiplies '{addend.name}', which is not a constant")
    new_weights = _scaled(weights, alpha) if alpha != 1.0 else None
    new_bias = None
    if bias is not None and not dropped and (widened or beta != 1.0):
        new_bias = _scaled(np.broadcast_to(bias.reshape(-1), (columns,)) if widened else bias, beta)
    if new_weights is not None:
        editor.store_array(node, 1, new_weights, f"{operand(node, 1).name}_scaled")
    if addend is not None and new_bias is not None:
        editor.store_array(node, 2, new_bias, f"{addend.name}_scaled")
    if dropped:
        editor.read(node, 2, None)
        node.resize_inputs(2)
    if transposed:
        editor.read(node, 0, editor.insert_before(node, "Transpose", [node.inputs[0]], perm=[1, 0]))
    for name in [name for name in node.attributes if name != "transB"]:
        editor.set_attribute(node, name, None)
    editor.done += 1


def _scaled(array: Weights, factor: float) -> Weights:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = (array.astype(np.float64) * factor).astype(np.float32)
    refuse_if(not np.isfinite(scaled).all(), "the folded constants would not be finite")
    return scaled
