"""QCDQ: QuantizeLinear, Clip of integers, DequantizeLinear.

The canonical form is QCDQ already, as the runtime fuses it: weights are bytes in the range of their bits. What QONNX'
tools convert has float weights in front of Q, Clip and DQ of their own: they read neither the bits nor the channels of
an integer initializer.
Source: Pappalardo et al., "QONNX", 2022, section IV; `qonnx.transformation.qcdq_to_qonnx` 1.0.0, measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from kenosis_ort.formats.conventions import Export, real_values
from kenosis_ort.formats.model import QuantizedTensor, integer_bounds


def to_qcdq(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a canonical model with float weights in front of Q, Clip and DQ, as QONNX' tools convert it.

    Args:
        model: The canonical model. Not changed.

    Raises:
        UnsupportedModelError: The model is not canonical.
    """
    export = Export(model)
    for tensor in export.tensors:
        if tensor.constant is not None and tensor.quantize is None:
            _spell_out(export, tensor)
    return export.finish()


def _spell_out(export: Export, tensor: QuantizedTensor) -> None:
    """Puts a float constant, Q and Clip in front of a DQ."""
    assert tensor.constant is not None
    index, dequantize, q = export.index, tensor.dequantize, tensor.quantizer
    base = tensor.integers.removesuffix("_quantized")
    real = export.constant(real_values(tensor), base)
    scale = str(dequantize.input[1])
    container = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    zero_point = str(dequantize.input[2]) if len(dequantize.input) > 2 else ""
    zero_point = zero_point or export.constant(q.zero_point.astype(container), f"{base}_zero_point")
    axis: dict[str, Any] = {} if q.axis is None else {"axis": q.axis}
    integers = index.fresh_name(f"{base}_QuantizeLinear_Output")
    nodes = [helper.make_node("QuantizeLinear", [real, scale, zero_point], [integers], f"{base}_Quantize", **axis)]
    low, high = q.bounds
    if (low, high) != integer_bounds(8, signed=q.signed) and tensor.elem_type in (TensorProto.INT8, TensorProto.UINT8):
        clipped = index.fresh_name(f"{base}_Clip_Output")
        ends = [export.constant(np.asarray(end, container), f"{base}_bound") for end in (low, high)]
        nodes.append(helper.make_node("Clip", [integers, *ends], [clipped], f"{base}_Clip"))
        integers = clipped
    export.put(dequantize, "DequantizeLinear", [integers, scale, zero_point], **axis)
    export.insert(dequantize, nodes)
