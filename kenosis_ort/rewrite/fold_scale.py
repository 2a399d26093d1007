"""Scales and shifts by channel behind a Conv or Gemm, folded into its weights.

With ``y[c] = x * W[c] + d[c]`` and constants ``k`` and ``t`` by channel (or one number for all)::

    y * k = x * (k W) + k d      y / k = x * (W / k) + d / k      y + t = x * W + (d + t)
    y - t = x * W + (d - t)      t - y = x * (-W) + (t - d)

Rows of them are joined first. All arithmetic is float64, rounded once to float32. In a float model the runtime does the
same; between Q and DQ it does not, and each of them would be a float operator, or a depthwise Conv.

Not folded: weights or a bias that are not constant, ``alpha`` and ``beta`` of Gemm that are not 1, a type other than
float32, an inner value that another node, a body of control flow, the graph's outputs or the caller need, results that
are not finite.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.attributes import attribute_float, attribute_int
from kenosis_ort.rewrite.affine import FloatArray, affine_step
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import Matcher, NotCollapsibleError, other_operand
from kenosis_ort.rewrite.rule import float_rule

_STEPS = ("Mul", "Div", "Add", "Sub")


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
    """Returns the constant operand as one number a channel, None if there is none of such a shape."""
    array = matcher.array(other_operand(step, value) or "")
    if array is None or array.dtype != np.float32 or array.ndim > spatial + 2:
        return None
    shape = (1,) * (spatial + 2 - array.ndim) + array.shape
    if shape[1] not in (1, channels) or any(dim != 1 for at, dim in enumerate(shape) if at != 1):
        return None
    return np.broadcast_to(array.astype(np.float64).reshape(-1), (channels,))
