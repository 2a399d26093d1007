"""Reads QCDQ, as Brevitas, QKeras and the qonnx package write it: constants quantized and clipped in the graph.

A weight stands in a file as ``float -> QuantizeLinear -> Clip -> DequantizeLinear`` or as ``integer initializer -> Clip
-> DequantizeLinear``. Both become the integer initializer that the runtime would compute, in front of DequantizeLinear;
the bits that the Clip says are written down beside it.
Source: Pappalardo et al., "QONNX", 2022, section IV.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.formats.draft import Draft
from kenosis_ort.formats.tensors import annotate, width_of
from kenosis_ort.graph.walk import MAIN_DOMAINS, MICROSOFT, attribute_int

_INTEGERS = (np.int8, np.uint8)


def from_qcdq(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with QuantizeLinear and integer Clip of constants performed.

    Args:
        model: A private model with Constant nodes made initializers, its nodes in order; it is changed.
    """
    draft = Draft(model)
    for node in model.graph.node:
        integers = _quantized(node, draft)
        if integers is None or node.output[0] in draft.outputs:
            draft.nodes.append(node)
            continue
        name = draft.constant(integers, node.output[0], named=True)
        if node.op_type == "Clip":
            low, high = _bounds(node, draft, integers.dtype)
            width = width_of(low, high, signed=integers.dtype == np.int8)
            if width is not None:
                annotate(model.graph, name, f"{'' if integers.dtype == np.int8 else 'U'}INT{width[0]}")
    return draft.finish()


def _quantized(node: onnx.NodeProto, draft: Draft) -> npt.NDArray[Any] | None:
    """Constant behind a QuantizeLinear or an integer Clip; None for other nodes."""
    if node.domain not in (*MAIN_DOMAINS, MICROSOFT) or len(node.output) != 1 or not node.input:
        return None
    x = draft.array(node.input[0])
    if x is None:
        return None
    if node.op_type == "Clip" and x.dtype.type in _INTEGERS:
        if not all(draft.is_constant(name) for name in node.input[1:3] if name):
            return None
        low, high = _bounds(node, draft, x.dtype)
        return np.clip(x, low, max(low, high)).astype(x.dtype)
    if node.op_type != "QuantizeLinear" or x.dtype != np.float32 or attribute_int(node, "block_size", 0):
        return None
    scale = draft.array(node.input[1])
    given = len(node.input) > 2 and bool(node.input[2])
    zero_point = draft.array(node.input[2]) if given else np.zeros((), np.uint8)
    if scale is None or zero_point is None or scale.dtype != np.float32 or zero_point.dtype.type not in _INTEGERS:
        return None
    if scale.size > 1:
        axis = attribute_int(node, "axis", 1)
        if not -x.ndim <= axis < x.ndim or scale.shape != (x.shape[axis],) or zero_point.shape != scale.shape:
            return None  # the runtime refuses it
        shape = [-1 if at == axis % x.ndim else 1 for at in range(x.ndim)]
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    else:
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    limits = np.iinfo(zero_point.dtype)
    steps = np.round(x / scale) + zero_point.astype(np.float32)
    return np.clip(steps, limits.min, limits.max).astype(zero_point.dtype)


def _bounds(node: onnx.NodeProto, draft: Draft, dtype: np.dtype[Any]) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    ends = [int(limits.min), int(limits.max)]
    for at, name in enumerate(node.input[1:3]):
        found = draft.array(name) if name else None
        if found is not None:
            ends[at] = int(found.reshape(-1)[0])
    return ends[0], ends[1]
