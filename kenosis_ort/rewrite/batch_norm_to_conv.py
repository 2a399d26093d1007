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
"""

from __future__ import annotations

import numpy as np
import onnx

from kenosis_ort.graph.attributes import attribute_float, attribute_int
from kenosis_ort.graph.walk import opset_of
from kenosis_ort.rewrite.affine import affine_step
from kenosis_ort.rewrite.integer_form import FloatArray, IntegerForm
from kenosis_ort.rewrite.matching import NotCollapsibleError, other_operand
from kenosis_ort.rewrite.rule import integer_rule

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
    """Returns scale and shift of the longest chain of named nodes that starts here; an empty one of scalars only."""
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
    """Returns the constant operand as one number, or one number a channel."""
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
