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
from kenosis_ort.formats.tensors import Edits
from kenosis_ort.graph.constants import Is, having
from kenosis_ort.graph.view import ir, optional, required
from kenosis_ort.graph.walk import MAIN_DOMAINS, MICROSOFT

DATA, WEIGHT, BIAS, RESULT, OTHER = "data", "weight", "bias", "result", "other"
_INPUTS: Final[Mapping[str, int]] = {DATA: 3, WEIGHT: 3, BIAS: 1, RESULT: 2, OTHER: 1}
"""How many inputs stand for one of a kind: integers or reals, and scale and zero point beside those but for a bias."""


@dataclass(frozen=True)
class QOperator:
    """Correspondence of a quantized operator to one of float values, for both directions.

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


def from_qop(model: Edits) -> Edits:
    """The model with its quantized operators written as float ones between DQ and Q.

    Args:
        model: Edits of a private model with Constant nodes made initializers, nodes in order, shapes inferred; it is
            changed.

    Raises:
        UnsupportedModelError: A quantized operator that has no such form; the message names node and clause.
    """
    return _Reader(model).run()


_Parameters = tuple[ir.Value, ir.Value | None]


class _Reader:
    """Writes one quantized operator after the other."""

    def __init__(self, model: Edits) -> None:
        self.live = model.next_step()
        self._dequantized: dict[tuple[ir.Value | int | None, ...], ir.Value] = {}
        self._scalars: dict[tuple[ir.Value, bool], ir.Value] = {}
        self._grids: dict[ir.Value | None, _Parameters] = {}  # integers -> scale and zero point

    def run(self) -> Edits:
        for node in self.live.nodes:
            operator = node.op_type.removeprefix(f"{MICROSOFT}.")
            row = OPERATORS.get(operator)
            if row is not None:
                self._write(node, row)
            elif operator in _DYNAMIC:
                clause = "the operator quantizes with scales computed from data, or has no form with QuantizeLinear"
                refuse(node, clause, "quantize the float model statically")
            elif operator in _DATA_MOVEMENT and node.domain in MAIN_DOMAINS and node.inputs[0] in self._grids:
                self._move(node)
            elif is_quantize(node) and (scale := self.live.array(node.inputs[1])) is not None and scale.size == 1:
                self._grids[node.outputs[0]] = (required(node, 1), optional(node, 2))
            elif operator == "Clip" and node.inputs[0] in self._grids:
                self._grids[node.outputs[0]] = self._grids[node.inputs[0]]
        return self.live

    # -- parts --------------------------------------------------------------------------------------------------

    def _write(self, node: ir.Node, row: QOperator) -> None:
        """Writes a quantized operator as the float one between the DQ of what it reads and the Q of what it writes."""
        if node.attributes.get_int("channels_last", 0):
            refuse(node, "its data are channels-last, as only the runtime itself writes them")
        given = [*node.inputs, *[None] * (2 * len(_INPUTS))]
        inputs, at, places = list[ir.Value | None](), 0, dict[str, int]()
        for kind in row.kinds(len(node.inputs) // _INPUTS[DATA]):
            places[kind] = at
            if kind in (DATA, WEIGHT):
                first = row.op_type == "Conv" or node.attributes.get_int("transB", 0) != 0
                axis = (0 if first else (self.live.rank(given[at]) or 0) - 1) if kind == WEIGHT else None
                inputs.append(self._real(node, required(node, at), required(node, at + 1), given[at + 2], axis))
            elif kind == OTHER:
                inputs.append(given[at])
            at += _INPUTS[kind]
        bias = given[places[BIAS]] if BIAS in places else None
        if bias is not None:
            scales = [required(node, places[kind] + 1) for kind in (DATA, WEIGHT)]
            inputs.append(self._bias(node, bias, scales, node.attributes.get_float("alpha", 1.0)))
        if row.op_type == "Softmax":
            self.live.set_attribute(node, "axis", self._softmax_axis(node))
        for name in ("channels_last", "opset"):
            self.live.set_attribute(node, name, None)
        scale, zero_point = given[places[RESULT] : places[RESULT] + 2]
        if scale is not None:
            self._requantize(node, node.outputs[0], scale, zero_point)
        self.live.put(node, row.op_type, inputs)

    def _real(
        self, node: ir.Node, integers: ir.Value, scale: ir.Value, zero_point: ir.Value | None, axis: int | None = None
    ) -> ir.Value:
        """The output of the DQ of integers; ``axis`` is the channels' where there is a scale for each."""
        found = self._content(node, scale, "scale")
        along = None if found.size == 1 else axis
        if found.size > 1 and (axis is None or found.ndim != 1):
            refuse(node, f"a scale of shape {list(found.shape)} for '{integers.name}'; one number is wanted")
        key = (integers, scale, zero_point, along)
        if key not in self._dequantized:
            inputs = [integers, *self._parameters(node, integers, scale, zero_point, found.size)]
            self._dequantized[key] = self.live.add(node, "DequantizeLinear", inputs, integers.name, axis=along)
        return self._dequantized[key]

    def _requantize(self, node: ir.Node, value: ir.Value, scale: ir.Value, zero_point: ir.Value | None) -> None:
        """Puts a Q behind a node, which writes the integers under the name that they have."""
        output = self.live.hand_over(value, f"{value.name}_real")
        if self._content(node, scale, "scale").size != 1:
            refuse(node, f"a scale by channel for '{output.name}'; one number is wanted")
        parameters = self._parameters(node, output, scale, zero_point, 1)
        self.live.add(node, "QuantizeLinear", [value, *parameters], output.name, behind=True, output=output)
        self._grids[output] = parameters

    def _softmax_axis(self, node: ir.Node) -> int:
        opset = node.attributes.get_int("opset", 13)
        axis = node.attributes.get_int("axis", -1 if opset >= 13 else 1)
        rank = self.live.rank(node.inputs[0])
        if opset < 13 and axis != -1 and (rank is None or axis % rank != rank - 1):
            refuse(node, f"a Softmax of operator set {opset} over several axes has no form in later ones")
        return -1 if opset < 13 else axis

    def _bias(self, node: ir.Node, bias: ir.Value, factors: Sequence[ir.Value], factor: float) -> ir.Value:
        """The real value of an int32 bias, whose scale is the product of two others."""
        scale = np.asarray(factor, np.float32)
        for each in factors:
            scale = scale * self._content(node, each, "scale").reshape(-1)
        scale = scale.reshape(()) if scale.size == 1 else scale
        stored = self.live.store(scale.astype(np.float32), f"{bias.name}_scale")
        zero = self.live.store(np.zeros(scale.shape, np.int32), f"{bias.name}_zero_point")
        return self._real(node, bias, stored, zero, 0)

    def _content(self, node: ir.Node, value: ir.Value | None, what: str) -> Any:
        found = self.live.array(value)
        if found is None:
            refuse(node, f"its {what} '{'' if value is None else value.name}' is computed from data")
        return found

    def _parameters(
        self, node: ir.Node, integers: ir.Value, scale: ir.Value, zero_point: ir.Value | None, size: int
    ) -> tuple[ir.Value, ir.Value]:
        """Scale and zero point in the shapes that Q and DQ take."""
        if zero_point is not None:
            zero = self._content(node, zero_point, "zero point")
        else:
            elem_type = self.live.element_type(integers) or TensorProto.UINT8
            zero = np.zeros((), helper.tensor_dtype_to_np_dtype(elem_type))
            zero_point = self.live.store(zero, f"{integers.name}_zero_point")
        if size == 1:
            return self._scalar(scale), self._scalar(zero_point)
        if zero.size == size:
            return scale, zero_point
        key = (zero_point, True)
        if key not in self._scalars:
            self._scalars[key] = self.live.store(np.full(size, zero.reshape(-1)[0]), f"{zero_point.name}_by_channel")
        return scale, self._scalars[key]

    def _scalar(self, value: ir.Value) -> ir.Value:
        found = self.live.array(value)
        if found is None or found.ndim == 0:
            return value
        key = (value, False)
        if key not in self._scalars:
            self._scalars[key] = self.live.store(found.reshape(-1)[0], f"{value.name}_scalar")
        return self._scalars[key]

    def _same(self, one: _Parameters | None, other: _Parameters) -> bool:
        """Whether two pairs of scale and zero point are alike."""
        if one is None or one == other:
            return one == other
        ends = [np.zeros(1) if value is None else self.live.array(value) for value in (*one, *other)]
        numbers = [None if array is None else array.reshape(-1)[0] for array in ends]
        return None not in numbers and numbers[:2] == numbers[2:]

    def _move(self, node: ir.Node) -> None:
        """Writes an operator that moves integers about as one that moves reals."""
        scale, zero_point = grid = self._grids[node.inputs[0]]
        data = range(len(node.inputs)) if node.op_type == "Concat" else range(1)
        alone = len(node.outputs) == 1 or node.op_type == "Split"
        if not alone or not all(self._same(self._grids.get(node.inputs[at]), grid) for at in data):
            return
        filled = node.op_type == "Pad" and optional(node, 2) is not None
        for at in (*data, *([2] if filled else [])):
            self.live.read(node, at, self._real(node, required(node, at), scale, zero_point))
        if node.op_type == "Pad" and not filled and "mode" not in node.attributes:
            zero = self.live.store(
                np.zeros((), self._content(node, zero_point, "zero point").dtype), f"{node.name}_zero"
            )
            self.live.read(node, 2, self._real(node, zero, scale, zero_point))
        for value in list(node.outputs):
            if value.name:
                self._requantize(node, value, scale, zero_point)


def holds_quantized_operators(model: onnx.ModelProto) -> bool:
    """Whether the main graph holds quantized operators."""
    return any(node.op_type in OPERATORS and node.domain in (*MAIN_DOMAINS, MICROSOFT) for node in model.graph.node)
