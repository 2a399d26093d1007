"""QONNX: one operator ``Quant`` from float to float for Q, Clip and DQ, with its number of bits as an input.

Weights are float initializers in front of their Quant; those of 2 bits that are all one step above or below zero have
1 bit in truth and get ``BipolarQuant``. Integer inputs of the graph keep their DequantizeLinear: QONNX has no operator
that takes integers.
Source: Pappalardo et al., "QONNX", 2022, table II; `qonnx` 1.0.0, `custom_op.general`.
"""

from __future__ import annotations

import numpy as np
import onnx

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats.conventions import Export, along, real_values
from kenosis_ort.formats.model import QuantizedTensor
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.shapes import value_types

DOMAIN = "qonnx.custom_op.general"
_VERSION = 1


def to_qonnx(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a canonical model in QONNX.

    Args:
        model: The canonical model. Not changed.

    Raises:
        UnsupportedModelError: The model is not canonical, or an activation's rank, needed for scales by channel, is
            unknown.
    """
    export = Export(model)
    types = value_types(model)
    for tensor in export.tensors:
        if tensor.quantize is not None:
            rank = _rank(tensor, types)
            _write(export, tensor, str(tensor.quantize.input[0]), rank)
        elif tensor.constant is not None:
            real = real_values(tensor)
            base = tensor.integers.removesuffix("_quantized")
            _write(export, tensor, export.constant(real, base), real.ndim)
    written = export.finish()
    written.opset_import.append(onnx.helper.make_opsetid(DOMAIN, _VERSION))
    return written


def _write(export: Export, tensor: QuantizedTensor, source: str, rank: int | None) -> None:
    """Makes a DQ the Quant of a float value."""
    q, node = tensor.quantizer, tensor.dequantize
    if q.axis is not None and rank is None:
        raise UnsupportedModelError(
            f"the rank of '{source}', which has scales by channel, is unknown", where=tensor.where
        )
    base = str(node.output[0]).removesuffix("_DequantizeLinear_Output")
    scale = export.constant(along(q.scale, tensor, rank or 0).astype(np.float32), f"{base}_quant_scale")
    if _is_bipolar(tensor):
        export.put(node, "BipolarQuant", [source, scale])
    else:
        zero_point = export.constant(
            along(q.zero_point, tensor, rank or 0).astype(np.float32), f"{base}_quant_zero_point"
        )
        bits = export.constant(np.float32(q.bits), f"{base}_quant_bits")
        said = {"signed": int(q.signed), "narrow": int(q.narrow), "rounding_mode": q.rounding}
        export.put(node, "Quant", [source, scale, zero_point, bits], **said)
    node.domain = DOMAIN
    for entry in list(export.index.graph.quantization_annotation):
        if entry.tensor_name == tensor.integers:
            export.index.graph.quantization_annotation.remove(entry)


def _is_bipolar(tensor: QuantizedTensor) -> bool:
    """Tells whether a constant's integers are -1 and 1 alone."""
    q = tensor.quantizer
    if tensor.constant is None or q.bits != 2 or not q.signed or q.zero_point.any():
        return False
    array = array_in(tensor.constant)
    return bool(array.size) and bool((np.abs(array.astype(np.int64)) == 1).all())


def _rank(tensor: QuantizedTensor, types: dict[str, onnx.TypeProto]) -> int | None:
    for name in (tensor.real, str(tensor.dequantize.output[0])):
        kind = types.get(name)
        if kind is not None and kind.tensor_type.HasField("shape"):
            return len(kind.tensor_type.shape.dim)
    return None
