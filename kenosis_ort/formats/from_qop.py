"""Reads the quantized-operator format: QLinearConv, QLinearMatMul and the runtime's QLinear operators and QGemm.

Each becomes the float operator between the DQ of what it reads and the Q of what it writes, under the names that the
integers have in the file. Operators that only move integers about (MaxPool, Reshape, Concat, ...) between two quantized
ones get a DQ in front and a Q behind, since in the canonical form integers stand between Q and DQ alone. A Clip of
integers behind an operator stays behind its Q: quantized operators with Clip are read the same way.
Source: ONNX' and ONNX Runtime's operator documentation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from kenosis_ort.formats.from_qdq import is_quantize
from kenosis_ort.formats.qonnx_nodes import refuse
from kenosis_ort.formats.tensors import Draft
from kenosis_ort.graph.constants import Is, having
from kenosis_ort.graph.walk import MAIN_DOMAINS, MICROSOFT, attribute, attribute_float, attribute_int

DATA, WEIGHT, BIAS, RESULT, OTHER = "data", "weight", "bias", "result", "other"
_INPUTS: Final[Mapping[str, int]] = {DATA: 3, WEIGHT: 3, BIAS: 1, RESULT: 2, OTHER: 1}
"""How many inputs stand for one of a kind: integers or reals, and scale and zero point beside those but for a bias."""


@dataclass(frozen=True)
class QOperator:
    """How a quantized operator stands for one of float values, which both directions go by.

    Attributes:
        op_type: The float operator.
        layout: What its inputs are, in order: `DATA` and `WEIGHT` are integers, scale and zero point, `RESULT` scale
            and zero point of what it writes, `BIAS` int32 at the product of the scales of data and weight, `OTHER` is
            not quantized. `DATA` at the end repeats. The float operator's inputs are the same without `RESULT`.
        attributes: Those of the float operator that it knows too; None for all.
        domain: Its own.
    """

    op_type: str
    layout: tuple[str, ...]
    attributes: tuple[str, ...] | None = None
    domain: str = MICROSOFT

    def kinds(self, data: int) -> tuple[str, ...]:
        """The layout for a number of data inputs."""
        more = data - self.layout.count(DATA) if self.layout[-1] == DATA else 0
        return (*self.layout, *(DATA,) * more)


_ONE, _TWO = (DATA, RESULT), (DATA, DATA, RESULT)
_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
OPERATORS: Final[Mapping[str, QOperator]] = {
    "QGemm": QOperator("Gemm", (DATA, WEIGHT, BIAS, RESULT)),
    "QLinearAdd": QOperator("Add", _TWO),
    "QLinearAveragePool": QOperator("AveragePool", _ONE, _POOL),
    "QLinearConcat": QOperator("Concat", (RESULT, DATA), ("axis",)),
    "QLinearConv": QOperator("Conv", (DATA, WEIGHT, RESULT, BIAS), domain=""),
    "QLinearGlobalAveragePool": QOperator("GlobalAveragePool", _ONE, ()),
    "QLinearLeakyRelu": QOperator("LeakyRelu", _ONE, ("alpha",)),
    "QLinearMatMul": QOperator("MatMul", (DATA, WEIGHT, RESULT), domain=""),
    "QLinearMul": QOperator("Mul", _TWO),
    "QLinearSigmoid": QOperator("Sigmoid", _ONE, ()),
    "QLinearSoftmax": QOperator("Softmax", _ONE, ("axis",)),
    "QLinearWhere": QOperator("Where", (OTHER, DATA, DATA, RESULT)),
}
"""The quantized operators that have a form with QuantizeLinear."""


def weight_axis(op_type: str, transposed: int, rank: int) -> int:
    """The axis of a layer's weights along which its output channels lie.

    Args:
        op_type: The float operator.
        transposed: Its ``transB``, 0 without one.
        rank: Of the weights.
    """
    return 0 if op_type == "Conv" or transposed else rank - 1


_DATA_MOVEMENT: Final = (having(Is.MOVE) | having(Is.PICK)) - having(Is.POOL) - having(Is.REDUCTION) | {
    *("Concat", "MaxPool", "Pad", "ReduceMax", "ReduceMin", "Resize")
}
"""Operators whose integers mean what those that they read mean."""

_DYNAMIC: Final = frozenset(
    {
        *("ConvInteger", "DynamicQuantizeLSTM", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger"),
        *("MatMulIntegerToFloat", "QAttention", "QEmbedLayerNormalization", "QLinearConvTranspose", "QMoE"),
        *("QOrderedAttention", "QOrderedGelu", "QOrderedLayerNormalization", "QOrderedLongformerAttention"),
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

    def read(self) -> onnx.ModelProto:
        for node in self.graph.node:
            row = OPERATORS.get(node.op_type) if node.domain in (*MAIN_DOMAINS, MICROSOFT) else None
            if row is not None:
                self._write(node, row)
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

    def _write(self, node: onnx.NodeProto, row: QOperator) -> None:
        """Writes a quantized operator as the float one between the DQ of what it reads and the Q of what it writes."""
        if attribute_int(node, "channels_last", 0):
            refuse(node, "its data are channels-last, as only the runtime itself writes them")
        given = [*node.input, *[""] * (2 * len(_INPUTS))]
        inputs, at, places = list[str](), 0, dict[str, int]()
        for kind in row.kinds(len(node.input) // _INPUTS[DATA]):
            places[kind] = at
            if kind in (DATA, WEIGHT):
                transposed, rank = attribute_int(node, "transB", 0), self.rank(given[at]) or 0
                axis = weight_axis(row.op_type, transposed, rank) if kind == WEIGHT else None
                integers, scale, zero_point = given[at : at + 3]
                inputs.append(self.dequantized(node, integers, scale, zero_point, axis))
            elif kind == OTHER:
                inputs.append(given[at])
            at += _INPUTS[kind]
        if BIAS in places and given[places[BIAS]]:
            scales = (given[places[DATA] + 1], given[places[WEIGHT] + 1])
            inputs.append(self._bias(node, given[places[BIAS]], scales, attribute_float(node, "alpha", 1.0)))
        real = self._compute(node, row.op_type, inputs)
        scale, zero_point = given[places[RESULT] : places[RESULT] + 2]
        if scale:
            self.requantized(node, real, node.output[0], scale, zero_point)
        else:
            self.nodes[-1].output[0] = node.output[0]

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

    def requantized(self, node: onnx.NodeProto, real: str, output: str, scale: str, zero_point: str) -> None:
        """Adds the Q that writes ``output``."""
        if self._constant(node, scale, "scale").size != 1:
            refuse(node, f"a scale by channel for '{output}'; one number is wanted")
        names = self._parameters(node, output, scale, zero_point, 1)
        self.add("QuantizeLinear", [real, *names], output, output=output)
        self._grids[output] = (names[0], names[1])

    def _compute(self, node: onnx.NodeProto, op_type: str, inputs: Sequence[str]) -> str:
        """Adds the float operator under the node's name; returns what it writes."""
        value = self.fresh(f"{node.output[0]}_real")
        given = {} if op_type != "Softmax" else {"axis": self._softmax_axis(node)}
        new = helper.make_node(op_type, list(inputs), [value], name=node.name)
        new.attribute.extend(a for a in node.attribute if a.name not in (*given, "channels_last", "opset"))
        new.attribute.extend(helper.make_attribute(name, number) for name, number in given.items())
        self.nodes.append(new)
        return value

    def _softmax_axis(self, node: onnx.NodeProto) -> int:
        opset = attribute_int(node, "opset", 13)
        axis = attribute_int(node, "axis", -1 if opset >= 13 else 1)
        rank = self.rank(node.input[0])
        if opset < 13 and axis != -1 and (rank is None or axis % rank != rank - 1):
            refuse(node, f"a Softmax of operator set {opset} over several axes has no form in later ones")
        return -1 if opset < 13 else axis

    def _bias(self, node: onnx.NodeProto, name: str, factors: Sequence[str], factor: float) -> str:
        """The real value of an int32 bias, whose scale is the product of two others."""
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


def holds_quantized_operators(model: onnx.ModelProto) -> bool:
    """Whether the main graph holds quantized operators."""
    return any(node.op_type in OPERATORS and node.domain in (*MAIN_DOMAINS, MICROSOFT) for node in model.graph.node)
