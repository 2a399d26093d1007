"""A scale and shift by channel, standing alone, as a depthwise 1x1 Conv.

A BatchNormalization that no weights in front of it can take up (pre-activation nets, DenseNet) computes, with scale
``g``, shift ``b``, mean ``m`` and variance ``v`` of channel ``c``::

    y[n, c, i, j] = g[c] * (x[n, c, i, j] - m[c]) / sqrt(v[c] + epsilon) + b[c]
                  = s[c] * x[n, c, i, j] + t[c]       with  s = g / sqrt(v + epsilon),  t = b - s * m

which is a Conv of ``group = C`` with weights ``s`` of shape ``[C, 1, 1, 1]`` and bias ``t``. The same holds for a chain
of Mul, Div, Add and Sub by constants of shape ``[C, 1, 1]`` or ``[1, C, 1, 1]`` (scalars among them)::

    x * k: (k s, k t)    x / k: (s / k, t / k)    x + k: (s, t + k)    x - k: (s, t - k)    k - x: (-s, k - t)

starting from ``(1, 0)``. All arithmetic is float64, rounded once to float32.

Float has no use for it. Between integer kernels a BatchNormalization is a float island with a Transpose on either
side, while this Conv is an integer kernel into which the Relu behind it vanishes (pre-activation nets 2.6x of FP32 for
1.6x to 1.8x).

Not changed: training mode, ``spatial=0``, used statistics, parameters that are not constant, a rank other than 4, a
type other than float32, a channel count that is not known or differs, chains of scalars only (the runtime has integer
kernels for these), results that are not finite.

Scales and shifts by channel behind a Conv or Gemm, folded into its weights.

With ``y[c] = x * W[c] + d[c]`` and constants ``k`` and ``t`` by channel (or one number for all)::

    y * k = x * (k W) + k d      y / k = x * (W / k) + d / k      y + t = x * W + (d + t)
    y - t = x * W + (d - t)      t - y = x * (-W) + (t - d)

Rows of them are joined first. All arithmetic is float64, rounded once to float32. In a float model the runtime does the
same; between Q and DQ it does not, and each of them would be a float operator, or a depthwise Conv.

Not folded: weights or a bias that are not constant, ``alpha`` and ``beta`` of Gemm that are not 1, a type other than
float32, an inner value that another node, a body of control flow, the graph's outputs or the caller need, results that
are not finite.

Arithmetic with a constant, one operator after the other, as one ``x * scale + shift``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.walk import attribute_float, attribute_int, opset_of
from kenosis_ort.rewrite.matching import Editor, Matcher, NotCollapsibleError, other_operand
from kenosis_ort.rewrite.rule import FloatArray, IntegerForm, float_rule, integer_rule


def affine_step(
    node: onnx.NodeProto, value: str, scale: FloatArray, shift: FloatArray, constant: FloatArray
) -> tuple[FloatArray, FloatArray] | None:
    """Scale and shift with one more Mul, Add, Sub or Div behind them.

    Args:
        node: The operator, of two operands.
        value: Its operand that holds ``x * scale + shift``.
        scale: Factor so far, by channel.
        shift: Summand so far, by channel.
        constant: Its other operand, by channel. Overflow gives infinity, which is for the caller to refuse.

    Returns:
        The new pair; None where the constant is divided by the value, which is not affine.
    """
    swapped = node.input[0] != value
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if node.op_type == "Mul":
            return scale * constant, shift * constant
        if node.op_type == "Add":
            return scale, shift + constant
        if node.op_type == "Sub":
            return (-scale, constant - shift) if swapped else (scale, shift - constant)
        return None if swapped else (scale / constant, shift / constant)


@float_rule(
    "Conv",
    "Gemm",
    did="scales and shifts by channel were folded into the weights in front of them",
    stays="Conv or Gemm nodes have a scale or shift behind them that stays",
)
def fold_scale(editor: Editor, layer: onnx.NodeProto) -> None:
    """Folds Mul, Div, Add and Sub by constants behind every Conv and Gemm of the main graph, in place.

    The Conv or Gemm keeps its name and takes over the output of the last one.
    """
    weights = editor.array(layer.input[1])
    if weights is None or weights.ndim < 2:
        return
    _fold(editor, layer, weights)


def _fold(matcher: Matcher, layer: onnx.NodeProto, weights: npt.NDArray[np.generic]) -> None:
    axis = 1 if layer.op_type == "Gemm" and not attribute_int(layer, "transB", 0) else 0
    channels = weights.shape[axis]
    spatial = 0 if layer.op_type == "Gemm" else weights.ndim - 2
    scale, shift = np.ones(channels), np.zeros(channels)
    value, steps = layer.output[0], []
    while matcher.index.is_private(value) and (readers := matcher.readers(value, *_STEPS)):
        constant = _by_channel(matcher, readers[0], value, channels, spatial)
        if constant is None:
            break
        applied = affine_step(readers[0], value, scale, shift, constant)
        if applied is None:
            break
        scale, shift = applied
        steps.append(readers[0])
        value = readers[0].output[0]
    if not steps:
        return
    bias_name = layer.input[2] if len(layer.input) > 2 else ""
    bias = _bias(matcher, layer, bias_name, channels)
    if weights.dtype != np.float32:
        raise NotCollapsibleError("its weights are not float32")
    factor = scale.reshape([channels if at == axis else 1 for at in range(weights.ndim)])
    with np.errstate(over="ignore", invalid="ignore"):
        new_weights = (weights.astype(np.float64) * factor).astype(np.float32)
        new_bias = (bias * scale + shift).astype(np.float32)
    if not (np.isfinite(new_weights).all() and np.isfinite(new_bias).all()):
        raise NotCollapsibleError("the folded weights would not be finite")
    base = layer.input[1]
    matcher.index.store_constant(layer, 1, onnx.numpy_helper.from_array(new_weights), f"{base}_scaled")
    matcher.index.store_constant(layer, 2, onnx.numpy_helper.from_array(new_bias), f"{base}_bias")
    for step in steps:
        matcher.index.remove(step)
        matcher.merged[step.name] = layer.name
    matcher.index.take_over_output(layer, steps[-1].output[0])
    matcher.done += len(steps)


def _bias(matcher: Matcher, layer: onnx.NodeProto, name: str, channels: int) -> FloatArray:
    if any(attribute_float(layer, factor, 1.0) != 1.0 for factor in ("alpha", "beta")):
        raise NotCollapsibleError("its alpha or beta is not 1")
    if not name:
        return np.zeros(channels)
    array = matcher.array(name)
    if array is None or (array.size != 1 and (array.size != channels or array.shape[-1] != channels)):
        raise NotCollapsibleError(f"its bias '{name}' is not one number a channel")
    return np.broadcast_to(array.astype(np.float64).reshape(-1), (channels,))


def _by_channel(matcher: Matcher, step: onnx.NodeProto, value: str, channels: int, spatial: int) -> FloatArray | None:
    """The constant operand as one number a channel, None if there is none of such a shape."""
    array = matcher.array(other_operand(step, value) or "")
    if array is None or array.dtype != np.float32 or array.ndim > spatial + 2:
        return None
    shape = (1,) * (spatial + 2 - array.ndim) + array.shape
    if shape[1] not in (1, channels) or any(dim != 1 for at, dim in enumerate(shape) if at != 1):
        return None
    return np.broadcast_to(array.astype(np.float64).reshape(-1), (channels,))


_INFERENCE_BY_DEFAULT = 7
"""Before this operator set BatchNormalization is in training mode unless it says ``is_test``."""

_STEPS = ("Mul", "Div", "Add", "Sub")


@integer_rule(
    "BatchNormalization",
    *_STEPS,
    did="scales and shifts by channel became depthwise 1x1 Convs",
    stays="scales and shifts by channel stay as they are",
)
def batch_norm_to_conv(form: IntegerForm, node: onnx.NodeProto) -> None:
    """Turns the named BatchNormalizations, and chains of Mul, Div, Add and Sub by channel, into Convs, in place.

    The Conv keeps name and output of the BatchNormalization, or of the chain's last node.
    """
    if form.is_gone(node):
        return
    if node.op_type == "BatchNormalization":
        scale, shift = _of_norm(form, node, opset_of(form.model) >= _INFERENCE_BY_DEFAULT)
        chain = [node]
    else:
        scale, shift, chain = _of_chain(form, node)
    if chain:
        _convert(form, chain, scale, shift)


def _of_norm(form: IntegerForm, norm: onnx.NodeProto, inference: bool) -> tuple[FloatArray, FloatArray]:
    if not inference or attribute_int(norm, "training_mode", 0):
        raise NotCollapsibleError("it is in training mode")
    if not attribute_int(norm, "spatial", 1):
        raise NotCollapsibleError("it normalizes each element (spatial=0)")
    if any(norm.output[1:]):
        raise NotCollapsibleError("its statistics are outputs")
    channels = form.picture(norm.input[0]).channels
    given = [form.array(name) for name in norm.input[1:5]]
    arrays = [array.astype(np.float64) for array in given if array is not None]
    if len(arrays) != 4:
        raise NotCollapsibleError("its parameters are not constant")
    gamma, beta, mean, variance = arrays
    if any(a.ndim != 1 or a.shape != gamma.shape for a in arrays) or channels not in (None, len(gamma)):
        raise NotCollapsibleError("its parameters are not one number a channel")
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scale = gamma / np.sqrt(variance + attribute_float(norm, "epsilon", 1e-5))
        return scale, beta - scale * mean


def _of_chain(form: IntegerForm, first: onnx.NodeProto) -> tuple[FloatArray, FloatArray, list[onnx.NodeProto]]:
    """Scale and shift of the longest chain of named nodes that starts here; an empty one of scalars only."""
    value = next((name for name in first.input if form.index.constant(name) is None), "")
    if len(first.input) != 2 or all(form.index.constant(name) is None for name in first.input):
        return np.empty(0), np.empty(0), []
    channels = form.picture(value).channels
    if channels is None:
        raise NotCollapsibleError(f"the channel count of '{value}' is not known")
    scale, shift = np.ones(channels), np.zeros(channels)
    chain: list[onnx.NodeProto] = []
    by_channel = False
    node = first
    while True:
        try:
            constant = _constant_operand(form, node, value, channels)
            step = affine_step(node, value, scale, shift, constant)
            if step is None:
                raise NotCollapsibleError("it divides by its input")
            scale, shift = step
        except NotCollapsibleError:
            if not chain:
                raise
            break
        chain.append(node)
        by_channel |= constant.size > 1
        value = node.output[0]
        readers = form.index.readers.get(value, [])
        if not form.index.is_private(value) or readers[0].name not in form.named or readers[0].op_type not in _STEPS:
            break
        node = readers[0]
    return scale, shift, chain if by_channel else []


def _constant_operand(form: IntegerForm, node: onnx.NodeProto, value: str, channels: int) -> FloatArray:
    """The constant operand as one number, or one number a channel."""
    other = other_operand(node, value)
    array = None if other is None else form.array(other)
    if array is None:
        raise NotCollapsibleError("none of its operands is constant")
    shape = (1,) * (4 - array.ndim) + array.shape
    if len(shape) != 4 or shape[0] != 1 or shape[2:] != (1, 1) or shape[1] not in (1, channels):
        raise NotCollapsibleError(f"its constant '{other}' of shape {array.shape} is not one number a channel")
    return array.astype(np.float64).reshape(-1)


def _convert(form: IntegerForm, chain: list[onnx.NodeProto], scale: FloatArray, shift: FloatArray) -> None:
    with np.errstate(over="ignore"):
        weights, bias = scale.astype(np.float32), shift.astype(np.float32)
    if not (np.isfinite(weights).all() and np.isfinite(bias).all()):
        raise NotCollapsibleError("its scale and shift are not finite")
    first, last = chain[0], chain[-1]
    inputs = [
        next(name for name in first.input if form.index.constant(name) is None),
        form.add_constant(weights.reshape(-1, 1, 1, 1), f"{last.name}_weight"),
        form.add_constant(bias, f"{last.name}_bias"),
    ]
    form.become(last, "Conv", inputs, {"group": len(weights), "kernel_shape": (1, 1)}, inner=chain[:-1])
