"""The float model behind a quantized one: its grids are dropped, its ranges stay.

- A quantized constant becomes the float constant that its integers stand for.
- The quantizer of an activation becomes a Clip to the range of its integers. What a quantizer cuts off belongs to what
  the model computes (a quantizer that begins at zero is often the only Relu that is left), its rounding does not.
- The sign that a BipolarQuant takes of data stays: without it there would be no net.
- Trunc divides, without rounding.
"""

from __future__ import annotations

import numpy as np
import onnx

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats.draft import Draft
from kenosis_ort.formats.from_qdq import is_dequantize
from kenosis_ort.formats.from_qonnx import Reader
from kenosis_ort.formats.qonnx_nodes import Float, Grid, base_name, check_bits, check_scale, parameter
from kenosis_ort.formats.tensors import QuantizedTensor, integer_bounds, quantizers_of


def to_float(model: onnx.ModelProto) -> onnx.ModelProto:
    """The float model behind one in the canonical form.

    Args:
        model: A private model; it is changed.

    Raises:
        UnsupportedModelError: Scales by block or that are not constant, integers that no quantizer writes.
    """
    draft = Draft(model)
    quantized = {tensor.dequantize.output[0]: tensor for tensor in quantizers_of(model)}
    for node in model.graph.node:
        tensor = quantized.get(node.output[0]) if is_dequantize(node) else None
        if tensor is None:
            draft.nodes.append(node)
        elif tensor.constant is not None:
            _dequantize(tensor, draft)
        elif tensor.quantize is not None:
            _bound(tensor, draft)
        else:
            draft.nodes.append(node)
    remaining = draft.nodes
    while True:  # Q and Clip whose integers nothing reads any more
        read = {name for node in remaining for name in node.input} | draft.pinned()
        left = [n for n in remaining if n.op_type not in ("QuantizeLinear", "Clip") or n.output[0] in read]
        if len(left) == len(remaining):
            return draft.finish(left)
        remaining = left


def _dequantize(tensor: QuantizedTensor, draft: Draft) -> None:
    integers = draft.array(tensor.integers)
    if integers is None:
        raise UnsupportedModelError("the integers of a constant are not stored as such", where=tensor.where)
    q = tensor.quantizer
    scale, zero_point = q.scale, q.zero_point
    if q.axis is not None:
        shape = [-1 if at == q.axis else 1 for at in range(integers.ndim)]
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    real = (integers.astype(np.int64) - zero_point).astype(np.float32) * scale
    draft.constant(real, tensor.dequantize.output[0], named=True)


def _bound(tensor: QuantizedTensor, draft: Draft) -> None:
    q = tensor.quantizer
    ends = [((end - q.zero_point).astype(np.float32) * q.scale).astype(np.float32) for end in q.bounds]
    if q.axis is not None:
        rank = _rank(tensor, draft.graph) if q.axis >= 0 else 0
        behind = rank - 1 - q.axis if q.axis >= 0 else -1 - q.axis
        ends = [end.reshape(-1, *[1] * behind) for end in ends]
    clip(draft, tensor.real, ends, tensor.dequantize.output[0])


def clip(draft: Draft, x: str, ends: list[Float], output: str) -> None:
    """Adds what bounds a value, by one number or by numbers that are broadcast to it."""
    low, high = (draft.constant(end, f"{output}_bound") for end in ends)
    if ends[0].ndim == 0:
        draft.add("Clip", [x, low, high], output, output=output)
    else:
        draft.add("Min", [draft.add("Max", [x, low], output), high], output, output=output)


def _rank(tensor: QuantizedTensor, graph: onnx.GraphProto) -> int:
    names = (tensor.real, tensor.dequantize.output[0])
    for value in (*graph.value_info, *graph.input, *graph.output):
        if value.name in names and value.type.tensor_type.HasField("shape"):
            return len(value.type.tensor_type.shape.dim)
    raise UnsupportedModelError("the rank of a value that is quantized by channel is not known", where=tensor.where)


class FloatReader(Reader):
    """Reads QONNX into the float model behind it, with any bits and any rounding."""

    def _check_grid(self, node: onnx.NodeProto, grid: Grid) -> None:
        del node, grid  # any range will do

    def _store(self, node: onnx.NodeProto, grid: Grid, whole: Float) -> None:
        real = ((whole - grid.zero_point) * grid.scale).astype(np.float32)
        self.constant(real, node.output[0], named=True)

    def _quantize(self, x: str, node: onnx.NodeProto, grid: Grid) -> None:
        bounds = integer_bounds(grid.bits, signed=grid.signed, narrow=grid.narrow)
        if grid.bits == 1 and grid.signed:
            bounds = (-1, 1)
        scale, zero_point = np.broadcast_arrays(grid.scale, grid.zero_point)
        ends = [np.asarray((np.float32(end) - zero_point) * scale, np.float32) for end in bounds]
        if ends[0].size == 1:
            ends = [end.reshape(()) for end in ends]
        clip(self, x, ends, node.output[0])

    def bipolar(self, node: onnx.NodeProto) -> None:
        """Writes a BipolarQuant: a constant's values, the sign of data."""
        if self.array(node.input[0]) is not None:
            super().bipolar(node)
            return
        check_scale(node, parameter(node, 1, "scale", self))
        self._spelling.bipolar(node, node.output[0])

    def trunc(self, node: onnx.NodeProto) -> None:
        """Writes a Trunc as what it divides by."""
        second = len(node.input) == 6
        scale = parameter(node, 1, "scale", self)
        zero_point = parameter(node, 2, "zero point", self)
        check_scale(node, scale)
        base = base_name(node)
        if second:
            out_scale = parameter(node, 4, "output scale", self)
            check_scale(node, out_scale)
            factor = out_scale / scale / np.exp2(np.round(np.log2(out_scale / scale)))
            shift = np.zeros((), np.float32)
        else:
            before = check_bits(node, parameter(node, 3, "input bit width", self))
            after = check_bits(node, parameter(node, 4, "output bit width", self))
            factor = np.float32(2.0 ** (after - before))
            shift = np.asarray(zero_point * scale * (factor - 1), np.float32)
        scaled = self.constant(np.asarray(factor, np.float32), f"{base}_factor")
        if not shift.any():
            self.add("Mul", [node.input[0], scaled], base, output=node.output[0])
            return
        product = self.add("Mul", [node.input[0], scaled], base)
        self.add("Add", [product, self.constant(shift, f"{base}_shift")], base, output=node.output[0])
