"""Reads the quantized-operator format: QLinearConv, QLinearMatMul and the runtime's QLinear operators and QGemm.

Each becomes the float operator between the DQ of what it reads and the Q of what it writes, under the names that the
integers have in the file. Operators that only move integers about (MaxPool, Reshape, Concat, ...) between two quantized
ones get a DQ in front and a Q behind, since in the canonical form integers stand between Q and DQ alone. A Clip of
integers behind an operator stays behind its Q: quantized operators with Clip are read the same way.
Source: ONNX' and ONNX Runtime's operator documentation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from kenosis_ort.formats.from_qdq import is_quantize
from kenosis_ort.formats.qonnx_nodes import base_name, refuse
from kenosis_ort.formats.tensors import QLINEAR, Draft
from kenosis_ort.graph.constants import Is, having
from kenosis_ort.graph.walk import MAIN_DOMAINS, MICROSOFT, attribute, attribute_float, attribute_int, opset_of

_DATA_MOVEMENT: Final = (having(Is.MOVE) | having(Is.PICK)) - having(Is.POOL) - having(Is.REDUCTION) | {
    *("Concat", "MaxPool", "Pad", "ReduceMax", "ReduceMin", "Resize")
}
"""Operators whose integers mean what those that they read mean."""

_DYNAMIC: Final = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeLinear",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "QAttention",
        "QEmbedLayerNormalization",
        "QLinearConvTranspose",
        "QMoE",
        "QOrderedAttention",
        "QOrderedGelu",
        "QOrderedLayerNormalization",
        "QOrderedLongformerAttention",
        "QOrderedMatMul",
    }
)


def from_qop(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its quantized operators written as float ones between DQ and Q.

    Args:
        model: A private model with Constant nodes made initializers, nodes in order, shapes inferred; it is changed.

    Raises:
        UnsupportedModelError: A quantized operator that has no such form; the message names node and clause.
    """
    return _Reader(model).read()


class _Reader(Draft):
    """Writes one quantized operator after the other."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self._dequantized: dict[tuple[str, str, str, int | None], str] = {}
        self._scalars: dict[tuple[str, bool], str] = {}
        self._grids: dict[str, tuple[str, str]] = {}  # integers -> names of their scale and zero point
        self.reduces_by_input = opset_of(model) >= 18

    def read(self) -> onnx.ModelProto:
        for node in self.graph.node:
            handler = _HANDLERS.get(node.op_type) if node.domain in (*MAIN_DOMAINS, MICROSOFT) else None
            if handler is not None:
                if attribute_int(node, "channels_last", 0):
                    refuse(node, "its data are channels-last, as only the runtime itself writes them")
                handler(self, node)
            elif node.op_type in _DYNAMIC and node.domain in (*MAIN_DOMAINS, MICROSOFT):
                refuse(
                    node,
                    "the operator quantizes with scales computed from data, or has no form with QuantizeLinear",
                    "quantize the float model statically",
                )
            elif node.op_type in _DATA_MOVEMENT and node.domain in MAIN_DOMAINS and node.input[0] in self._grids:
                self._move(node)
            else:
                scale = self.array(node.input[1]) if is_quantize(node) else None
                if scale is not None and scale.size == 1:
                    self._grids[node.output[0]] = (node.input[1], node.input[2] if len(node.input) > 2 else "")
                elif node.op_type == "Clip" and node.input[0] in self._grids:
                    self._grids[node.output[0]] = self._grids[node.input[0]]
                self.nodes.append(node)
        return self.finish()

    # -- parts --------------------------------------------------------------------------------------------------

    def real(self, node: onnx.NodeProto, at: int, axis: int | None = None) -> str:
        """The real value of the integers at input ``at``, whose scale and zero point follow them."""
        integers, scale = node.input[at], node.input[at + 1]
        zero_point = node.input[at + 2] if len(node.input) > at + 2 else ""
        return self.dequantized(node, integers, scale, zero_point, axis)

    def dequantized(
        self, node: onnx.NodeProto, integers: str, scale: str, zero_point: str, axis: int | None = None
    ) -> str:
        """The output of the DQ of integers; ``axis`` is the channels' where there is a scale for each."""
        found = self._constant(node, scale, "scale")
        along = None if found.size == 1 else axis
        if found.size > 1 and (axis is None or found.ndim != 1):
            refuse(node, f"a scale of shape {list(found.shape)} for '{integers}'; one number is wanted")
        key = (integers, scale, zero_point, along)
        if key not in self._dequantized:
            names = self._parameters(node, integers, scale, zero_point, found.size)
            self._dequantized[key] = self.add("DequantizeLinear", [integers, *names], integers, axis=along)
        return self._dequantized[key]

    def quantized(self, node: onnx.NodeProto, real: str, at: int) -> None:
        """Adds the Q that writes what the node writes, by the scale at input ``at``."""
        zero_point = node.input[at + 1] if len(node.input) > at + 1 else ""
        self.requantized(node, real, node.output[0], node.input[at], zero_point)

    def requantized(self, node: onnx.NodeProto, real: str, output: str, scale: str, zero_point: str) -> None:
        """Adds the Q that writes ``output``."""
        if self._constant(node, scale, "scale").size != 1:
            refuse(node, f"a scale by channel for '{output}'; one number is wanted")
        names = self._parameters(node, output, scale, zero_point, 1)
        self.add("QuantizeLinear", [real, *names], output, output=output)
        self._grids[output] = (names[0], names[1])

    def compute(self, node: onnx.NodeProto, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Adds the float operator under the node's name, with the node's attributes and others; returns its output."""
        value = self.fresh(f"{node.output[0]}_real")
        new = helper.make_node(op_type, list(inputs), [value], name=node.name)
        given = {name: number for name, number in attributes.items() if number is not None}
        new.attribute.extend(a for a in node.attribute if a.name not in (*attributes, "channels_last", "opset"))
        new.attribute.extend(helper.make_attribute(name, number) for name, number in given.items())
        self.nodes.append(new)
        return value

    def bias(self, node: onnx.NodeProto, name: str, factors: Sequence[str], factor: float = 1.0) -> str:
        """The real value of an int32 bias, whose scale is the product of two others."""
        if not name:
            return ""
        scale = np.asarray(factor, np.float32)
        for each in factors:
            scale = scale * self._constant(node, each, "scale").reshape(-1)
        scale = scale.reshape(()) if scale.size == 1 else scale
        stored = self.constant(scale.astype(np.float32), f"{name}_scale")
        zero = self.constant(np.zeros(scale.shape, np.int32), f"{name}_zero_point")
        return self.dequantized(node, name, stored, zero, 0)

    def _constant(self, node: onnx.NodeProto, name: str, what: str) -> Any:
        found = self.array(name)
        if found is None:
            refuse(node, f"its {what} '{name}' is computed from data")
        return found

    def _parameters(
        self, node: onnx.NodeProto, integers: str, scale: str, zero_point: str, size: int
    ) -> tuple[str, str]:
        """The names of scale and zero point in the shapes that Q and DQ take."""
        if zero_point:
            zero = self._constant(node, zero_point, "zero point")
        else:
            elem_type = self.elem_type(integers)
            known = self.types.get(integers)
            if elem_type is None and known is not None:
                elem_type = known.tensor_type.elem_type
            zero = np.zeros((), helper.tensor_dtype_to_np_dtype(elem_type or TensorProto.UINT8))
            zero_point = self.constant(zero, f"{integers}_zero_point")
        if size == 1:
            return self._scalar(scale), self._scalar(zero_point)
        if zero.size == size:
            return scale, zero_point
        key = (zero_point, True)
        if key not in self._scalars:
            self._scalars[key] = self.constant(np.full(size, zero.reshape(-1)[0]), f"{zero_point}_by_channel")
        return scale, self._scalars[key]

    def _scalar(self, name: str) -> str:
        found = self.array(name)
        if found is None or found.ndim == 0:
            return name
        key = (name, False)
        if key not in self._scalars:
            self._scalars[key] = self.constant(found.reshape(-1)[0].reshape(()), f"{name}_scalar")
        return self._scalars[key]

    def _same(self, one: tuple[str, str] | None, other: tuple[str, str]) -> bool:
        """Whether two pairs of scale and zero point are alike."""
        if one is None or one == other:
            return one == other
        pairs = [
            (self.array(a) if a else np.zeros(1), self.array(b) if b else np.zeros(1))
            for a, b in zip(one, other, strict=True)
        ]
        return all(a is not None and b is not None and a.reshape(-1)[0] == b.reshape(-1)[0] for a, b in pairs)

    def _move(self, node: onnx.NodeProto) -> None:
        """Writes an operator that moves integers about as one that moves reals."""
        scale, zero_point = grid = self._grids[node.input[0]]
        data = range(len(node.input)) if node.op_type == "Concat" else range(1)
        alone = len(node.output) == 1 or node.op_type == "Split"
        if not alone or not all(self._same(self._grids.get(node.input[at]), grid) for at in data):
            self.nodes.append(node)
            return
        for at in data:
            node.input[at] = self.dequantized(node, node.input[at], scale, zero_point)
        if node.op_type == "Pad" and len(node.input) > 2 and node.input[2]:
            node.input[2] = self.dequantized(node, node.input[2], scale, zero_point)
        elif node.op_type == "Pad" and attribute(node, "mode") is None:
            zero = self.constant(
                np.zeros((), self._constant(node, zero_point, "zero point").dtype), f"{node.name}_zero"
            )
            node.input.extend([""] * (2 - len(node.input)))
            node.input[2:] = [self.dequantized(node, zero, scale, zero_point)]
        written = list(node.output)
        for at, name in enumerate(written):
            node.output[at] = self.fresh(f"{name}_real") if name else ""
        self.nodes.append(node)
        for name, value in zip(written, node.output, strict=True):
            if name:
                self.requantized(node, value, name, scale, zero_point)


# ---- the operators ------------------------------------------------------------------------------------------------


def _conv(draft: _Reader, node: onnx.NodeProto) -> None:
    inputs = [draft.real(node, 0), draft.real(node, 3, axis=0)]
    if len(node.input) > 8 and node.input[8]:
        inputs.append(draft.bias(node, node.input[8], (node.input[1], node.input[4])))
    draft.quantized(node, draft.compute(node, "Conv", inputs), 6)


def _matmul(draft: _Reader, node: onnx.NodeProto) -> None:
    rank = draft.rank(node.input[3])
    axis = -1 if rank is None else rank - 1
    inputs = [draft.real(node, 0), draft.real(node, 3, axis=axis)]
    draft.quantized(node, draft.compute(node, "MatMul", inputs), 6)


def _gemm(draft: _Reader, node: onnx.NodeProto) -> None:
    transposed = attribute_int(node, "transB", 0)
    inputs = [draft.real(node, 0), draft.real(node, 3, axis=0 if transposed else 1)]
    if len(node.input) > 6 and node.input[6]:
        alpha = attribute_float(node, "alpha", 1.0)
        inputs.append(draft.bias(node, node.input[6], (node.input[1], node.input[4]), alpha))
    real = draft.compute(node, "Gemm", inputs)
    if len(node.input) > 7 and node.input[7]:
        draft.quantized(node, real, 7)
    else:
        draft.nodes[-1].output[0] = node.output[0]


def _by_table(draft: _Reader, node: onnx.NodeProto) -> None:
    row, at, inputs, result = QLINEAR[node.op_type], 0, list[str](), 0
    for kind in row.kinds(len(node.input) // 3):
        if kind == "result":
            result, at = at, at + 2
        elif kind == "data":
            inputs.append(draft.real(node, at))
            at += 3
        else:
            inputs.append(node.input[at])
            at += 1
    draft.quantized(node, draft.compute(node, row.op_type, inputs), result)


def _softmax(draft: _Reader, node: onnx.NodeProto) -> None:
    opset = attribute_int(node, "opset", 13)
    axis = attribute_int(node, "axis", -1 if opset >= 13 else 1)
    rank = draft.rank(node.input[0])
    if opset < 13 and axis != -1 and (rank is None or axis % rank != rank - 1):
        refuse(node, f"a Softmax of operator set {opset} over several axes has no form in later ones")
    draft.quantized(node, draft.compute(node, "Softmax", [draft.real(node, 0)], axis=-1 if opset < 13 else axis), 3)


def _reduce_mean(draft: _Reader, node: onnx.NodeProto) -> None:
    axes = attribute(node, "axes")
    base, inputs = base_name(node), [draft.real(node, 0)]
    by_input = draft.reduces_by_input
    if axes is not None and by_input:
        inputs.append(draft.constant(np.asarray(axes.ints, np.int64), f"{base}_axes"))
        node.attribute.remove(axes)
    draft.quantized(node, draft.compute(node, "ReduceMean", inputs), 3)


_HANDLERS: Final[Mapping[str, Callable[[_Reader, onnx.NodeProto], None]]] = {
    **dict.fromkeys(QLINEAR, _by_table),
    "QGemm": _gemm,
    "QLinearConv": _conv,
    "QLinearMatMul": _matmul,
    "QLinearReduceMean": _reduce_mean,
    "QLinearSoftmax": _softmax,
}
"""The quantized operators that have a form with QuantizeLinear, and how it is written."""


def holds_quantized_operators(model: onnx.ModelProto) -> bool:
    """Whether the main graph holds quantized operators."""
    return any(node.op_type in _HANDLERS and node.domain in (*MAIN_DOMAINS, MICROSOFT) for node in model.graph.node)
