"""The QOperator format: integer operators with their scales as inputs, in place of float ones between DQ and Q.

What the runtime would fuse is spelled out: the same kernels run, with graph optimizations off too. A node that no
operator of integers stands for keeps its DQ and Q. Below 8 bits a Clip of integers follows the operator, which is the
paper's "quantized operators with clipping".
Source: Pappalardo et al., "QONNX", 2022, sections III and IV; the operators' schemas (ONNX', com.microsoft's).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats.from_qop import BIAS, DATA, OPERATORS, OTHER, RESULT, WEIGHT
from kenosis_ort.formats.tensors import Edits, QuantizationSpec, QuantizedTensor, quantizers_of
from kenosis_ort.graph.constants import drop_stale_value_info
from kenosis_ort.graph.live import Attribute
from kenosis_ort.graph.qdq import on_grid
from kenosis_ort.graph.shapes import rank_in, value_types
from kenosis_ort.graph.view import channel_axis, further_outputs, ir, optional, required
from kenosis_ort.graph.walk import MAIN_DOMAINS, MICROSOFT

_BYTES: Final = (TensorProto.UINT8, TensorProto.INT8)
_INTEGERS: Final = (*_BYTES, TensorProto.INT32)
_SAME_SCALE: Final = frozenset(
    {
        *("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "DepthToSpace", "Slice", "Expand", "Tile"),
        *("Gather", "GatherElements", "Split", "Resize", "MaxPool"),
    }
)
"""Operators that move integers as they are, where scale and zero point are the same in and out."""


def to_qop(model: onnx.ModelProto, *, clip: bool = False) -> onnx.ModelProto:
    """A canonical model in QOperator format.

    Args:
        model: The canonical model. Not changed.
        clip: Allow Clips of integers behind the operators, for activations of fewer bits than 8.

    Raises:
        UnsupportedModelError: An activation has fewer bits than 8, and no Clip is allowed.
    """
    tensors = quantizers_of(model)
    narrow = next((t for t in tensors if t.clip is not None), None)
    if narrow is not None and not clip:
        what = f"QOperator format has 8 bits, and '{narrow.real}' has {narrow.quantizer.bits}"
        fix = "write format='qop-clip', in which Clips stand behind the operators"
        raise UnsupportedModelError(what, where=narrow.where, fix=fix)
    return _Writer(model, tensors).run()


class _Integers(NamedTuple):
    """A value of integers as an operator takes it, with its scale and zero point."""

    value: ir.Value
    scale: ir.Value
    zero_point: ir.Value
    quantizer: QuantizationSpec
    elem_type: int
    constant: TensorProto | None = None

    @property
    def ends(self) -> list[ir.Value]:
        return [self.value, self.scale, self.zero_point]

    def same_scale(self, other: _Integers) -> bool:
        pairs = [(q.scale, q.zero_point) for q in (self.quantizer, other.quantizer)]
        return self.elem_type == other.elem_type and all(map(np.array_equal, *pairs))


class _Writer(Edits):
    """Writes one model."""

    def __init__(self, model: onnx.ModelProto, tensors: Sequence[QuantizedTensor]) -> None:
        super().__init__(model)
        self.types = value_types(model)
        self._dequantized = {self.makers[t.dequantize.output[0]]: t for t in tensors}
        self._quantized = {self.makers[t.quantize.output[0]]: t for t in tensors if t.quantize is not None}

    def run(self) -> onnx.ModelProto:
        for node in self.nodes:
            if node.domain not in MAIN_DOMAINS or node.graph is None:
                continue
            if node.op_type in _SAME_SCALE:
                self._move_integers(node)
            elif node.op_type in _ROWS and not (node.op_type == "MatMul" and self._add_bias(node)):
                self._write(node)
        self.remove_unread(lambda node: node.op_type == "DequantizeLinear")
        model = self.write()
        drop_stale_value_info(model)
        return model

    # ---- what stands around a node --------------------------------------------------------------------------------

    def integers(self, value: ir.Value | None) -> _Integers | None:
        """The integers behind the DQ that writes a value; None where no DQ of bytes writes it."""
        node = None if value is None else value.producer()
        tensor = None if node is None else self._dequantized.get(node)
        if node is None or tensor is None or tensor.elem_type not in _INTEGERS:
            return None
        return self._of(tensor, node, required(node, 0))

    def _of(self, tensor: QuantizedTensor, node: ir.Node, value: ir.Value) -> _Integers:
        scale, zero_point = required(node, 1), optional(node, 2)
        if zero_point is None:
            array = np.zeros(tensor.quantizer.scale.shape, helper.tensor_dtype_to_np_dtype(tensor.elem_type))
            zero_point = self.store(array, f"{scale.name}_zero_point")
        return _Integers(value, scale, zero_point, tensor.quantizer, tensor.elem_type, tensor.constant)

    def activation(self, value: ir.Value | None) -> _Integers | None:
        """The bytes behind a value; None where it has a scale by channel or no DQ of bytes writes it."""
        found = self.integers(value)
        return None if found is None or found.quantizer.scale.ndim or found.elem_type not in _BYTES else found

    def result(self, value: ir.Value) -> tuple[_Integers, list[ir.Node]] | None:
        """Quantized value that the only reader of a value computes, and the nodes that become superfluous.

        The reader is Q, or a Relu or Clip whose bounds the integers keep anyway, with Q behind it.
        """
        gone: list[ir.Node] = []
        while self.is_private(value):
            (reader,) = self.readers(value)
            gone.append(reader)
            if reader.op_type == "QuantizeLinear":
                tensor = self._quantized.get(reader)
                if tensor is None or tensor.quantizer.scale.ndim or tensor.elem_type not in _BYTES:
                    return None
                found = self._of(tensor, reader, reader.outputs[0])
                return (found, gone) if all(self._keeps(n, tensor.quantizer) for n in gone[:-1]) else None
            if reader.op_type not in ("Relu", "Clip") or reader.domain not in MAIN_DOMAINS:
                return None
            value = reader.outputs[0]
        return None

    def _keeps(self, node: ir.Node, quantizer: QuantizationSpec) -> bool:
        """Whether no integer represents a value outside the bounds of a Relu or Clip, to half a step."""
        scale, zero = float(quantizer.scale), int(quantizer.zero_point)
        least, most = ((end - zero) * scale for end in quantizer.bounds)
        bounds = self.activation_bounds(node)
        if bounds is None:
            return False
        low, high = bounds
        return (low is None or least > low - scale / 2) and (high is None or most < high + scale / 2)

    def real(self, value: ir.Value) -> npt.NDArray[np.float64] | None:
        """A constant's real content, behind DQ or not."""
        array, maker = self.array(value), value.producer()
        if array is not None:
            return np.asarray(array, np.float64)
        found = None if maker is None else self._dequantized.get(maker)
        known = found is not None and found.constant is not None and found.elem_type in _INTEGERS
        return found.real_values(np.float64) if found is not None and known else None

    def bias(self, value: ir.Value, data: _Integers, weight: _Integers, beta: float = 1.0) -> ir.Value | None:
        """The int32 bias at ``data scale * weight scale``; None where it is not constant."""
        scale = (data.quantizer.scale * weight.quantizer.scale).astype(np.float32)
        known = self.integers(value)
        if known is not None and known.elem_type == TensorProto.INT32 and beta == 1.0:
            same = np.array_equal(np.broadcast_to(known.quantizer.scale, scale.shape), scale)
            if same and known.constant is not None and not known.quantizer.zero_point.any():
                return known.value
        real = self.real(value)
        if real is None:
            return None
        limit = np.iinfo(np.int32)
        values = on_grid(real.reshape(-1) * beta, scale.astype(np.float64), 0, limit.min, limit.max)
        return self.store(values.astype(np.int32), f"{value.name}_quantized")

    # ---- writing --------------------------------------------------------------------------------------------------

    def _take_place(self, node: ir.Node, output: ir.Value, gone: Sequence[ir.Node]) -> None:
        """Has a node write what the nodes behind it wrote."""
        for reader in gone:
            self.remove(reader)
        self.take_over_output(node, output)

    def _write(self, node: ir.Node) -> None:
        """Writes a node of one output for which there is an operator; a layer with float output too."""
        behind = self.result(node.outputs[0])
        inputs = self._inputs(node, None if behind is None else behind[0])
        if inputs is None:
            return
        name, row = _ROWS[node.op_type]
        if behind is None and node.op_type == "MatMul":
            name, row = "MatMulIntegerToFloat", _ROWS["Gemm"][1]
            inputs = [inputs[at] for at in (0, 3, 1, 4, 2, 5)]
        self.put(node, name, inputs, self._attributes(node), domain=row.domain)
        if behind is not None:
            self._take_place(node, behind[0].value, behind[1])

    def _inputs(self, node: ir.Node, result: _Integers | None) -> list[ir.Value | None] | None:
        """The inputs of the operator that stands for a node, None where none does."""
        _, row = _ROWS[node.op_type]
        known = row.attributes is None or node.attributes.keys() <= set(row.attributes)
        if not known or (result is None and node.op_type not in ("Gemm", "MatMul")):
            return None
        given = node.attributes
        if (given.get_float("alpha", 1.0) != 1.0 and WEIGHT in row.layout) or given.get_int("transA", 0) != 0:
            return None
        inputs, values = list[ir.Value | None](), iter(node.inputs)
        read: dict[str, _Integers] = {}
        for kind in row.kinds(len(node.inputs)):
            value = next(values, None) if kind != RESULT else None
            if kind == RESULT:
                inputs += [None, None] if result is None else [result.scale, result.zero_point]
            elif kind == OTHER:
                inputs.append(value)
            elif kind == BIAS:
                bias = None if value is None else self._bias(node, value, read[DATA], read[WEIGHT])
                if value is not None and bias is None:
                    return None
                inputs.append(bias)
            else:
                found = self._weight(node, value) if kind == WEIGHT else self.activation(value)
                if found is None or (result and WEIGHT not in row.layout and found.elem_type != result.elem_type):
                    return None
                read[kind] = found
                inputs += found.ends
        while inputs[-1] is None:
            inputs.pop()
        return inputs

    def _weight(self, node: ir.Node, value: ir.Value | None) -> _Integers | None:
        """The bytes of a layer's weights, None where their scales are not those of its output channels."""
        found = self.integers(value)
        if found is None or found.elem_type not in _BYTES:
            return None
        rank = 0 if found.constant is None else len(found.constant.dims)
        if node.op_type == "Gemm" and not rank:
            return None
        axis = found.quantizer.axis
        if axis is None or ((node.op_type != "MatMul" or rank == 2) and axis == channel_axis(node, rank)):
            return found
        return None

    def _bias(self, node: ir.Node, value: ir.Value, data: _Integers, weight: _Integers) -> ir.Value | None:
        real = self.real(value)
        if real is None or (weight.constant is not None and real.size != weight.constant.dims[channel_axis(node, 2)]):
            return None
        return self.bias(value, data, weight, node.attributes.get_float("beta", 1.0))

    def _attributes(self, node: ir.Node) -> dict[str, Attribute] | None:
        """The attributes of the operator that stands for a node, None where they are the node's."""
        if node.op_type == "Gemm":
            return {"alpha": 1.0, "transB": node.attributes.get_int("transB", 0)}
        if node.op_type == "Softmax":
            axis = node.attributes.get_int("axis", -1 if self.opset() >= 13 else 1)
            return {"axis": axis, "opset": self.opset()}
        return None

    def _move_integers(self, node: ir.Node) -> None:
        """Moves a node of one scale in front of the DQs before it, where all that it writes is quantized so again."""
        source = self.activation(node.inputs[0]) if node.inputs else None
        if source is None or not self._takes_bytes(node):
            return
        behind = [(position, self.result(value)) for position, value in enumerate(node.outputs) if value.name]
        if not all(found is not None and len(found[1]) == 1 and source.same_scale(found[0]) for _, found in behind):
            return
        self.put(node, node.op_type, [source.value, *node.inputs[1:]])
        for position, found in behind:
            if found is not None:
                self.remove(found[1][0])
                self.take_over_output(node, found[0].value, position=position)

    def _takes_bytes(self, node: ir.Node) -> bool:
        if node.op_type == "MaxPool":
            return self.opset() >= 12 and not further_outputs(node)
        if node.op_type == "Resize":
            return self.opset() >= 13 and node.attributes.get_string("mode", "nearest") == "nearest"
        return node.op_type != "DepthToSpace" or self.opset() >= 13

    def _add_bias(self, node: ir.Node) -> bool:
        """Makes a MatMul of matrices and the Add behind it one QGemm, where the operand is a bias; tells whether."""
        data, weight = self.activation(node.inputs[0]), self._weight(node, node.inputs[1])
        if data is None or weight is None or weight.constant is None or not self.is_private(node.outputs[0]):
            return False
        if rank_in(self.types, required(node, 0).name or "") != 2:
            return False
        (add,) = self.readers(node.outputs[0])
        if add.op_type != "Add" or add.domain not in MAIN_DOMAINS:
            return False
        other = required(add, 1 if add.inputs[0] is node.outputs[0] else 0)
        real = self.real(other)
        if real is None or real.size != weight.constant.dims[1] or real.ndim > 2 or real.shape[-1] != real.size:
            return False
        behind = self.result(add.outputs[0])
        bias = self.bias(other, data, weight)
        if bias is None:
            return False
        ends = [] if behind is None else [behind[0].scale, behind[0].zero_point]
        attributes = {"alpha": 1.0, "transB": 0}
        self.put(node, "QGemm", [*data.ends, *weight.ends, bias, *ends], attributes, domain=MICROSOFT)
        self._take_place(node, *(add.outputs[0], [add]) if behind is None else (behind[0].value, [add, *behind[1]]))
        return True


_ROWS: Final = {row.op_type: (name, row) for name, row in OPERATORS.items()}
"""The quantized operators by the float ones that they stand for."""
