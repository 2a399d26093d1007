"""The QOperator format: integer operators with their scales as inputs, in place of float ones between DQ and Q.

What the runtime would fuse is spelled out: the same kernels run, with graph optimizations off too. A node that no
operator of integers stands for keeps its DQ and Q. Below 8 bits a Clip of integers follows the operator, which is the
paper's "quantized operators with clipping".
Source: Pappalardo et al., "QONNX", 2022, sections III and IV; the operators' schemas (ONNX', com.microsoft's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats.tensors import QLINEAR, QuantizationSpec, QuantizedTensor, quantizers_of
from kenosis_ort.graph.constants import GraphIndex
from kenosis_ort.graph.outside import array_in, copy_model
from kenosis_ort.graph.qdq import on_grid
from kenosis_ort.graph.view import drop_stale_value_info, has_rank, value_types
from kenosis_ort.graph.walk import MAIN_DOMAINS, MICROSOFT, attribute, attribute_float, attribute_int, opset_of

_BYTES: Final = (TensorProto.UINT8, TensorProto.INT8)
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
        raise UnsupportedModelError(
            f"QOperator format has 8 bits, and '{narrow.real}' has {narrow.quantizer.bits}",
            where=narrow.where,
            fix="write format='qop-clip', in which Clips stand behind the operators",
        )
    return _Writer(model, tensors).run()


@dataclass(frozen=True)
class _Integers:
    """A value of integers as an operator takes it: its name, and the names of scale and zero point."""

    value: str
    scale: str
    zero_point: str
    quantizer: QuantizationSpec
    elem_type: int
    constant: TensorProto | None = None

    @property
    def ends(self) -> list[str]:
        return [self.value, self.scale, self.zero_point]

    def same_scale(self, other: _Integers) -> bool:
        mine, its = self.quantizer, other.quantizer
        return (
            self.elem_type == other.elem_type
            and np.array_equal(mine.scale, its.scale)
            and np.array_equal(mine.zero_point, its.zero_point)
        )


@dataclass(frozen=True)
class _Written:
    """An integer operator that takes a node's place."""

    op_type: str
    inputs: list[str]
    domain: str = ""
    attributes: Mapping[str, Any] | None = None


class _Writer:
    """Writes one model."""

    def __init__(self, model: onnx.ModelProto, tensors: Sequence[QuantizedTensor]) -> None:
        self.index = GraphIndex(copy_model(model))
        self.opset = opset_of(model)
        self.types = value_types(model)
        self._dequantized = {t.dequantize.output[0]: t for t in tensors}
        self._by_integers = {t.quantize.output[0]: t for t in tensors if t.quantize is not None}

    def run(self) -> onnx.ModelProto:
        for node in self.index.nodes:
            if node.domain not in MAIN_DOMAINS:
                continue
            if node.op_type in _SAME_SCALE:
                self._move_integers(node)
            elif node.op_type == "MatMul":
                self._write_product(node)
            elif node.op_type in _OPERATORS:
                self._write(node)
        for node in reversed(self.index.nodes):
            if node.op_type == "DequantizeLinear" and not self._is_read(node.output[0]):
                self.index.remove(node)
        model = self.index.commit()
        drop_stale_value_info(model)
        if any(n.domain == MICROSOFT for n in model.graph.node) and not any(
            entry.domain == MICROSOFT for entry in model.opset_import
        ):
            model.opset_import.add(domain=MICROSOFT, version=1)
        return model

    def _is_read(self, value: str) -> bool:
        return bool(self.index.readers.get(value)) or self.index.is_pinned(value)

    # ---- what stands around a node --------------------------------------------------------------------------------

    def integers(self, value: str) -> _Integers | None:
        """The integers behind the DQ that writes a value; None where no DQ of bytes writes it."""
        tensor = self._dequantized.get(value)
        if tensor is None or tensor.elem_type not in (*_BYTES, TensorProto.INT32):
            return None
        return self._of(tensor, tensor.dequantize.input, tensor.integers)

    def _of(self, tensor: QuantizedTensor, inputs_read: Sequence[str], value: str) -> _Integers:
        zero_point = inputs_read[2] if len(inputs_read) > 2 else ""
        if not zero_point:
            array = np.zeros(tensor.quantizer.scale.shape, helper.tensor_dtype_to_np_dtype(tensor.elem_type))
            zero_point = self.add(array, f"{inputs_read[1]}_zero_point")
        return _Integers(value, inputs_read[1], zero_point, tensor.quantizer, tensor.elem_type, tensor.constant)

    def activation(self, value: str) -> _Integers | None:
        """The bytes behind a value; None where it has a scale by channel or no DQ of bytes writes it."""
        found = self.integers(value)
        return None if found is None or found.quantizer.scale.ndim or found.elem_type not in _BYTES else found

    def result(self, value: str) -> tuple[_Integers, list[onnx.NodeProto]] | None:
        """Quantized value that the only reader of a value computes, and the nodes that become superfluous.

        The reader is Q, or a Relu or Clip whose bounds the integers keep anyway, with Q behind it.
        """
        gone: list[onnx.NodeProto] = []
        while self.index.is_private(value):
            (reader,) = self.index.readers[value]
            gone.append(reader)
            if reader.op_type == "QuantizeLinear":
                tensor = self._by_integers.get(reader.output[0])
                if tensor is None or tensor.quantizer.scale.ndim or tensor.elem_type not in _BYTES:
                    return None
                found = self._of(tensor, reader.input, reader.output[0])
                return (found, gone) if all(self._keeps(n, tensor.quantizer) for n in gone[:-1]) else None
            if reader.op_type not in ("Relu", "Clip") or reader.domain not in MAIN_DOMAINS:
                return None
            value = reader.output[0]
        return None

    def _keeps(self, node: onnx.NodeProto, quantizer: QuantizationSpec) -> bool:
        """Whether no integer represents a value outside the bounds of a Relu or Clip, to half a step."""
        scale, zero = float(quantizer.scale), int(quantizer.zero_point)
        least, most = ((end - zero) * scale for end in quantizer.bounds)
        low, high = (0.0, np.inf) if node.op_type == "Relu" else self._bounds(node)
        return least > low - scale / 2 and most < high + scale / 2

    def _bounds(self, node: onnx.NodeProto) -> tuple[float, float]:
        ends = [attribute_float(node, "min", -np.inf), attribute_float(node, "max", np.inf)]
        for position, name in enumerate(node.input[1:3]):
            tensor = self.index.constant(name) if name else None
            if name and tensor is None:
                return np.inf, -np.inf
            if tensor is not None:
                ends[position] = float(array_in(tensor).reshape(()))
        return ends[0], ends[1]

    def constant(self, value: str) -> npt.NDArray[np.float64] | None:
        """A constant's real content, behind DQ or not."""
        tensor = self.index.constant(value)
        if tensor is not None:
            return np.asarray(array_in(tensor), np.float64)
        found = self.integers(value)
        if found is None or found.constant is None:
            return None
        q, array = found.quantizer, np.asarray(array_in(found.constant), np.float64)
        shape = [1] * array.ndim
        if q.axis is not None and array.ndim:
            shape[q.axis] = -1
        scale, zero = (
            np.asarray(a, np.float64).reshape(shape if q.scale.ndim else ()) for a in (q.scale, q.zero_point)
        )
        return (array - zero) * scale

    def bias(self, value: str, data: _Integers, weight: _Integers, beta: float = 1.0) -> str | None:
        """The name of the int32 bias at ``data scale * weight scale``; None where it is not constant."""
        scale = (data.quantizer.scale * weight.quantizer.scale).astype(np.float32)
        known = self.integers(value)
        if known is not None and known.elem_type == TensorProto.INT32 and beta == 1.0:
            same = np.array_equal(np.broadcast_to(known.quantizer.scale, scale.shape), scale)
            if same and known.constant is not None and not known.quantizer.zero_point.any():
                return known.value
        real = self.constant(value)
        if real is None:
            return None
        limit = np.iinfo(np.int32)
        values = on_grid(real.reshape(-1) * beta, scale.astype(np.float64), 0, limit.min, limit.max)
        return self.add(values.astype(np.int32), f"{value}_quantized")

    def add(self, array: npt.NDArray[Any], base: str) -> str:
        """Adds a constant and returns its name."""
        name = self.index.fresh_name(base)
        self.index.replace_constant(name, numpy_helper.from_array(np.asarray(array), name))
        return name

    # ---- writing --------------------------------------------------------------------------------------------------

    def put(
        self, node: onnx.NodeProto, written: _Written, output: str | None, gone: Sequence[onnx.NodeProto] = ()
    ) -> None:
        """Makes a node another one; what it writes takes the place of what the nodes behind it wrote."""
        for value in node.input:
            if value:
                self.index.release(node, value)
        for value in written.inputs:
            if value:
                self.index.readers.setdefault(value, []).append(node)
        node.op_type, node.domain = written.op_type, written.domain
        node.ClearField("input")
        node.input.extend(written.inputs)
        if written.attributes is not None:
            node.ClearField("attribute")
            node.attribute.extend(
                helper.make_attribute(name, value) for name, value in written.attributes.items() if value is not None
            )
        for reader in gone:
            self.index.remove(reader)
        if output is not None:
            self.index.take_over_output(node, output)

    def _write(self, node: onnx.NodeProto) -> None:
        """Writes a node of one output for which there is an operator."""
        behind = self.result(node.output[0])
        written = None if behind is None else _OPERATORS[node.op_type](self, node, behind[0])
        if behind is not None and written is not None:
            self.put(node, written, behind[0].value, behind[1])
        elif node.op_type == "Gemm":
            floating = _gemm(self, node, None)
            if floating is not None:
                self.put(node, floating, None)

    def _move_integers(self, node: onnx.NodeProto) -> None:
        """Moves a node of one scale in front of the DQs before it, where all that it writes is quantized so again."""
        source = self.activation(node.input[0]) if node.input else None
        if source is None or not self._takes_bytes(node):
            return
        behind = [(position, self.result(value)) for position, value in enumerate(node.output) if value]
        if not all(found is not None and len(found[1]) == 1 and source.same_scale(found[0]) for _, found in behind):
            return
        self.put(node, _Written(node.op_type, [source.value, *node.input[1:]]), None)
        for position, found in behind:
            if found is not None:
                self.index.remove(found[1][0])
                self.index.take_over_output(node, found[0].value, position=position)

    def _takes_bytes(self, node: onnx.NodeProto) -> bool:
        if node.op_type == "MaxPool":
            return self.opset >= 12 and len([o for o in node.output if o]) == 1
        if node.op_type == "Resize":
            mode = attribute(node, "mode")
            return self.opset >= 13 and (mode is None or mode.s == b"nearest")
        return node.op_type != "DepthToSpace" or self.opset >= 13

    def _write_product(self, node: onnx.NodeProto) -> None:
        """Writes a MatMul: with a bias in two dimensions, with Q behind it, or with float output."""
        data, weight = self.activation(node.input[0]), self.integers(node.input[1])
        if data is None or weight is None or weight.elem_type not in _BYTES or _columns(weight) is None:
            return
        value = node.output[0]
        if self._rank(node.input[0]) == 2 and weight.constant is not None and self.index.is_private(value):
            (reader,) = self.index.readers[value]
            if reader.op_type == "Add" and reader.domain in MAIN_DOMAINS and self._add_bias(node, reader, data, weight):
                return
        behind = self.result(value)
        if behind is not None:
            inputs = [*data.ends, *weight.ends, behind[0].scale, behind[0].zero_point]
            self.put(node, _Written("QLinearMatMul", inputs), behind[0].value, behind[1])
            return
        ends = [data.value, weight.value, data.scale, weight.scale, data.zero_point, weight.zero_point]
        self.put(node, _Written("MatMulIntegerToFloat", ends, MICROSOFT), None)

    def _add_bias(self, node: onnx.NodeProto, add: onnx.NodeProto, data: _Integers, weight: _Integers) -> bool:
        """Makes a MatMul and the Add behind it one QGemm, where the operand is a bias; tells whether it did."""
        other = add.input[1] if add.input[0] == node.output[0] else add.input[0]
        assert weight.constant is not None
        real = self.constant(other)
        if real is None or real.size != weight.constant.dims[1] or real.ndim > 2 or real.shape[-1] != real.size:
            return False
        behind = self.result(add.output[0])
        bias = self.bias(other, data, weight)
        if bias is None:
            return False
        ends = ["", ""] if behind is None else [behind[0].scale, behind[0].zero_point]
        written = _gemm_of(data, weight, bias, ends, transposed=False)
        output = add.output[0] if behind is None else behind[0].value
        self.put(node, written, output, [add, *(behind[1] if behind is not None else ())])
        return True

    def _rank(self, value: str) -> int | None:
        kind = self.types.get(value)
        info = None if kind is None else onnx.ValueInfoProto(name=value, type=kind)
        return len(kind.tensor_type.shape.dim) if kind is not None and has_rank(info) else None


# ---- operators ------------------------------------------------------------------------------------------------------


def _conv(writer: _Writer, node: onnx.NodeProto, result: _Integers) -> _Written | None:
    data, weight = writer.activation(node.input[0]), writer.integers(node.input[1])
    if data is None or weight is None or weight.elem_type not in _BYTES or weight.quantizer.axis not in (None, 0):
        return None
    bias = None
    if len(node.input) > 2 and node.input[2]:
        bias = writer.bias(node.input[2], data, weight)
        if bias is None:
            return None
    ends = [*data.ends, *weight.ends, result.scale, result.zero_point, *([bias] if bias is not None else [])]
    return _Written("QLinearConv", ends)


def _gemm(writer: _Writer, node: onnx.NodeProto, result: _Integers | None) -> _Written | None:
    data, weight = writer.activation(node.input[0]), writer.integers(node.input[1])
    transposed = attribute_int(node, "transB", 0)
    if data is None or weight is None or weight.elem_type not in _BYTES or weight.constant is None:
        return None
    if attribute_float(node, "alpha", 1.0) != 1.0 or attribute_int(node, "transA", 0):
        return None
    if weight.quantizer.axis not in (None, 0 if transposed else 1):
        return None
    bias: str | None = ""
    if len(node.input) > 2 and node.input[2]:
        real = writer.constant(node.input[2])
        if real is None or real.size != weight.constant.dims[0 if transposed else 1]:
            return None
        bias = writer.bias(node.input[2], data, weight, attribute_float(node, "beta", 1.0))
    if bias is None:
        return None
    ends = ["", ""] if result is None else [result.scale, result.zero_point]
    return _gemm_of(data, weight, bias, ends, transposed=bool(transposed))


def _gemm_of(data: _Integers, weight: _Integers, bias: str, ends: list[str], *, transposed: bool) -> _Written:
    inputs = [*data.ends, *weight.ends, bias, *ends]
    while not inputs[-1]:
        inputs.pop()
    return _Written("QGemm", inputs, MICROSOFT, {"alpha": 1.0, "transB": int(transposed)})


def _columns(weight: _Integers) -> int | None:
    """A number where the scales of a matrix are one, or one for each of its columns."""
    q = weight.quantizer
    if q.axis is None:
        return 1
    rank = None if weight.constant is None else len(weight.constant.dims)
    return q.scale.size if rank == 2 and q.axis == 1 else None


def _by_table(writer: _Writer, node: onnx.NodeProto, result: _Integers) -> _Written | None:
    name, row = _ROWS[node.op_type]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if row.attributes is not None and not attributes.keys() <= set(row.attributes):
        return None
    inputs, values = list[str](), iter(node.input)
    for kind in row.kinds(len(node.input)):
        if kind == "result":
            inputs += [result.scale, result.zero_point]
        elif kind == "other":
            inputs.append(next(values))
        else:
            data = writer.activation(next(values))
            if data is None or data.elem_type != result.elem_type:
                return None
            inputs += data.ends
    return _Written(name, inputs, MICROSOFT, None if row.attributes is None else attributes)


def _softmax(writer: _Writer, node: onnx.NodeProto, result: _Integers) -> _Written | None:
    data = writer.activation(node.input[0])
    if data is None or data.elem_type != result.elem_type:
        return None
    axis = attribute_int(node, "axis", -1 if writer.opset >= 13 else 1)
    inputs = [*data.ends, result.scale, result.zero_point]
    return _Written("QLinearSoftmax", inputs, MICROSOFT, {"axis": axis, "opset": writer.opset})


_ROWS: Final = {row.op_type: (name, row) for name, row in QLINEAR.items()}
_OPERATORS: Final[Mapping[str, Callable[[_Writer, onnx.NodeProto, _Integers], _Written | None]]] = {
    **dict.fromkeys(_ROWS, _by_table),
    "Conv": _conv,
    "Gemm": _gemm,
    "Softmax": _softmax,
}
