"""Conformance to a document: which Conv of a QDQ model is an instance of the documented pattern, which breaks it.

No runtime is asked: the model is held against the text. The pattern of a Conv is read outward from it:
its inputs back through TypeCast, Dequantize and Quantize, its output on through the epilogue up to the Quantize.

Source: oneDNN developer guide, Graph extension, "Quantized Convolution Fusion Patterns"; the operations of the epilogue
are those of its "Binary Fusions" and "Unary Fusions", to which the text refers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto

from kenosis_ort.graph.qdq import DQ, QDQ_OPS, Q, SourceGraph, SourceNode, indexed
from kenosis_ort.targets.proof import BrokenClause, Clause, ConvPattern, PatternReport

_DOCUMENT: Final = "oneDNN, Quantized Convolution Fusion Patterns"
# Data types, by the names that the document gives them, as they enter and leave the pattern.
_SRC: Final = ("u8", "s8")
_WEIGHTS: Final = ("s8", "f32")
_BIAS: Final = ("f32", "bf16", "f16")
_DST: Final = ("u8", "s8", "bf16", "f16", "f32")
_CAST_BEFORE_QUANTIZE: Final = ("bf16", "f32")
"""Types between which a TypeCast may stand in front of the Quantize that ends the pattern."""
_BINARY: Final = {
    "Add": "Add",
    "Sub": "Subtract",
    "Max": "Maximum",
    "Min": "Minimum",
    "Mul": "Multiply",
    "Div": "Divide",
}
"""Operators of an epilogue with two operands, with the document's names of them."""
_SAME: Final = "Abs Elu Exp HardSigmoid HardSwish Log Mish Round Sigmoid Sqrt Tanh"
_UNARY: Final = {
    **{name: name for name in _SAME.split()},
    "Clip": "Clamp",
    "Gelu": "GELU",
    "LeakyRelu": "LeakyReLU",
    "Relu": "ReLU",
    "Softplus": "SoftPlus",
}
"""The same of those with one."""
_NAMES: Final = {**_UNARY, **_BINARY}
_MOST_OPERATIONS: Final = 4  # of an epilogue, a BiasAdd at its start not counted


_TYPES: Final[dict[int, str]] = {
    TensorProto.FLOAT: "f32", TensorProto.FLOAT16: "f16", TensorProto.BFLOAT16: "bf16", TensorProto.DOUBLE: "f64",
    TensorProto.UINT8: "u8", TensorProto.INT8: "s8", TensorProto.UINT16: "u16", TensorProto.INT16: "s16",
    TensorProto.UINT4: "u4", TensorProto.INT4: "s4", TensorProto.INT32: "s32",
}  # fmt: skip
_OTHER_FORMS: Final = frozenset({"QLinearConv", "ConvInteger", "FusedConv", "NhwcConv"})
_LONGEST_GATE: Final = 8  # functions of x, one behind the other, in a product x * f(x)


def conform(model: onnx.ModelProto, folder: Path | None, target: str) -> PatternReport:
    """Holds every Conv of a model against the pattern.

    Args:
        model: Of any origin; not changed.
        folder: Of its external data, None without any; they are not read.
        target: Name of the target, for the report.
    """
    graph = indexed(model, folder)
    convs = (n for n in graph.nodes if n.op_type == "Conv" or n.proto.op_type in _OTHER_FORMS)
    found = tuple(_Reading(graph, node).result() for node in convs)
    return PatternReport(target, _DOCUMENT, found)


class _Reading:
    """One Conv, read outward.

    Args:
        graph: The model.
        conv: The node.
    """

    def __init__(self, graph: SourceGraph, conv: SourceNode) -> None:
        self._graph, self._conv = graph, conv
        self._broken: list[BrokenClause] = []

    def result(self) -> ConvPattern:
        """The pattern that the Conv is an instance of, or what it breaks."""
        conv = self._conv
        inputs, why = list(conv.proto.input), ""
        if conv.op_type != "Conv":
            why = f"{conv.proto.op_type} holds its conversions inside; the pattern is made of nodes of their own"
        elif len(inputs) < 2 or not conv.proto.output:
            why = "it has no weights"
        if why:
            return ConvPattern(conv.label, conv.graph, broken=(BrokenClause(Clause.CONVOLUTION, why),))
        src = self._source(inputs[0])
        weights = self._weights(inputs[1])
        bias = self._bias(inputs[2]) if len(inputs) > 2 and inputs[2] else ""
        epilogue, end, stopped = self._epilogue(conv.proto.output[0], biased=bool(bias))
        dst = self._destination(end)
        return ConvPattern(conv.label, conv.graph, src, weights, bias, epilogue, dst, stopped, tuple(self._broken))

    def _break(self, clause: Clause, why: str) -> None:
        self._broken.append(BrokenClause(clause, why))

    def _type(self, value: str) -> str:
        kind = self._graph.types.get(value, TensorProto.FLOAT)
        return _TYPES.get(kind) or f"of ONNX type {kind}"

    def _check_type(self, clause: Clause, what: str, found: str, allowed: tuple[str, ...]) -> None:
        if found not in allowed:
            self._break(clause, f"{what} is {found}; the table of data types has {', '.join(allowed)}")

    # ---- what the Conv reads ------------------------------------------------------------------------------------

    def _through_cast(self, value: str) -> tuple[str, SourceNode | None]:
        """The value before a TypeCast between floating-point types, and the node that makes it."""
        maker = self._graph.producer.get(value)
        if maker is not None and maker.op_type == "Cast" and self._graph.is_float(maker.proto.input[0]):
            value = maker.proto.input[0]
            maker = self._graph.producer.get(value)
        return value, maker

    def _source(self, value: str) -> str:
        """Checks the Q2F conversion of the source: Dequantize, or Dequantize and TypeCast."""
        value, maker = self._through_cast(value)
        if maker is None or maker.op_type != DQ:
            by = "the graph's input" if maker is None else f"{maker.op_type} '{maker.label}'"
            self._break(Clause.SRC_CONVERSION, f"the source comes from {by} without a DequantizeLinear in between")
            return self._type(value)
        found = self._type(maker.proto.input[0])
        self._check_type(Clause.SRC_TYPE, "the source", found, _SRC)
        return found

    def _weights(self, value: str) -> str:
        """Checks the Q2F conversion of the weights: as the source's, or with a Quantize of float weights before it."""
        value, maker = self._through_cast(value)
        if maker is None or maker.op_type != DQ:
            self._break(Clause.WEIGHTS_CONVERSION, "the weights have no DequantizeLinear behind them")
            return self._type(value)
        quantized = maker.proto.input[0]
        found = self._type(quantized)
        before = self._graph.producer.get(quantized)
        if before is not None and before.op_type == Q:
            if found != "s8":
                self._break(Clause.WEIGHTS_TYPE, f"float weights are quantized to {found}, not to s8")
            found = self._type(before.proto.input[0])
            self._check_type(Clause.WEIGHTS_TYPE, "the tensor of weights before its Quantize", found, ("f32",))
            return found
        if before is not None and before.op_type != "Constant":
            why = f"{before.op_type} '{before.label}' stands inside the weights' conversion, none of the four forms"
            self._break(Clause.WEIGHTS_CONVERSION, why)
        self._check_type(Clause.WEIGHTS_TYPE, "the quantized tensor of weights", found, _WEIGHTS)
        return found

    def _bias(self, value: str) -> str:
        """Checks the F2F conversion of the bias: nothing, or one TypeCast."""
        value, maker = self._through_cast(value)
        if maker is not None and maker.op_type == DQ:
            found = self._type(maker.proto.input[0])
            why = f"the bias is {found} behind a DequantizeLinear; the text has floating-point and TypeCast only"
            self._break(Clause.BIAS_CONVERSION, why)
            return found
        found = self._type(value)
        self._check_type(Clause.BIAS_TYPE, "the bias", found, _BIAS)
        return found

    # ---- what stands behind it ----------------------------------------------------------------------------------

    def _epilogue(self, value: str, *, biased: bool) -> tuple[tuple[str, ...], str, str]:
        """The epilogue's operations, the value that leaves it, and why it ends there if not at a conversion."""
        names: list[str] = []
        count = 0
        seen: set[int] = set()
        while True:
            step, stopped = self._step(value)
            if step is None or not seen.isdisjoint(node.index for node in step):
                break
            seen.update(node.index for node in step)
            for node in step:
                bias_add = not names and not biased and self._adds_a_bias(node, value)
                names.append("BiasAdd" if bias_add else _NAMES[node.op_type])
                count += not bias_add
            value = step[-1].proto.output[0]
        if count > _MOST_OPERATIONS:
            why = f"{count} binary and unary operations behind the Conv; the text allows 0 to {_MOST_OPERATIONS}"
            self._break(Clause.EPILOGUE, why)
        return tuple(names), value, stopped

    def _step(self, value: str) -> tuple[list[SourceNode] | None, str]:
        """The next operation behind a value (of a gate all its nodes), or None and why there is none."""
        readers = self._graph.consumers.get(value, [])
        if value in self._graph.outputs:
            return None, f"'{value}' is an output of the graph" if readers else ""
        if len(readers) == 1:
            reader = readers[0]
            if self._is_operation(reader, value):
                return [reader], ""
            why = f"{reader.op_type} '{reader.label}' is no operation of an epilogue"
            return None, "" if self._converts(reader, value) else why
        gate = self._gate(value, readers)
        if gate is not None:
            return gate, ""
        return None, f"'{value}' has {len(readers)} readers" if readers else ""

    def _gate(self, value: str, readers: list[SourceNode]) -> list[SourceNode] | None:
        """The nodes of a product of a value with a function of it, as ``x * Sigmoid(x)``; None for others."""
        if len(readers) != 2:
            return None
        for start, end in (readers, readers[::-1]):
            nodes, at, read = [start], start, value
            while at.op_type in _UNARY and at.proto.input[0] == read and len(nodes) < _LONGEST_GATE:
                read = at.proto.output[0]
                behind = self._graph.consumers.get(read, [])
                if read in self._graph.outputs or len(behind) != 1:
                    break
                at = behind[0]
                nodes.append(at)
                if at is end and set(at.proto.input) == {value, read} and at.op_type in _BINARY:
                    return nodes
        return None

    def _is_operation(self, node: SourceNode, value: str) -> bool:
        """Whether a node is an operation of the epilogue, of which a value is the operand."""
        if node.op_type in _UNARY:
            return bool(node.proto.input[0] == value)
        return node.op_type in _BINARY and sum(1 for v in node.proto.input if v) == 2

    def _converts(self, node: SourceNode, value: str) -> bool:
        if node.proto.input[0] != value:
            return False
        return node.op_type == Q or (node.op_type == "Cast" and self._graph.is_float(node.proto.output[0]))

    def _adds_a_bias(self, node: SourceNode, value: str) -> bool:
        """Whether an Add puts one constant a channel, axis 1, on what the Conv writes."""
        if node.op_type != "Add":
            return False
        weight = self._shape(self._conv.proto.input[1])
        for other in (v for v in node.proto.input if v != value):
            tensor = self._graph.initializers.get(self._through_cast(other)[0])
            dims = list(tensor.dims) if tensor is not None else []
            if weight is None or len(dims) < len(weight) - 1 or len(dims) > len(weight):
                continue
            channels = dims[-(len(weight) - 1)]
            if channels == weight[0] and all(d == 1 for d in (*dims[: -(len(weight) - 1)], *dims[2 - len(weight) :])):
                return True
        return False

    def _shape(self, value: str) -> list[int] | None:
        """The shape of the constant behind the conversions of a value."""
        value, maker = self._through_cast(value)
        while maker is not None and maker.op_type in QDQ_OPS:
            value = maker.proto.input[0]
            maker = self._graph.producer.get(value)
        tensor = self._graph.initializers.get(value)
        return None if tensor is None else list(tensor.dims)

    def _destination(self, value: str) -> str:
        """Checks the conversion of what the epilogue writes: none, TypeCast, Quantize, or TypeCast and Quantize."""
        found = self._type(value)
        for node in self._conversion(value):
            out = node.proto.output[0]
            if node.op_type == Q and (cast := self._graph.producer.get(node.proto.input[0])) and cast.op_type == "Cast":
                pair = (self._type(cast.proto.input[0]), self._type(cast.proto.output[0]))
                if pair != _CAST_BEFORE_QUANTIZE:
                    given, allowed = (f"{a} to {b}" for a, b in (pair, _CAST_BEFORE_QUANTIZE))
                    why = f"a TypeCast from {given} before the Quantize; supported is {allowed} only"
                    self._break(Clause.DST_CONVERSION, why)
            found = self._type(out)
        self._check_type(Clause.DST_TYPE, "the destination", found, _DST)
        return found

    def _conversion(self, value: str) -> Iterator[SourceNode]:
        """Yields the TypeCast and the Quantize that alone read a value, in order."""
        for op in ("Cast", Q):
            readers = self._graph.consumers.get(value, [])
            if len(readers) == 1 and value not in self._graph.outputs and readers[0].op_type == op:
                if not self._converts(readers[0], value):
                    return
                yield readers[0]
                value = readers[0].proto.output[0]
