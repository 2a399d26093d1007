"""QDQ models: an index of their nodes and values, and the grids of their integers.

The index holds every node of every graph body, who makes and who reads a value, and what is quantized. It is built on
the protobuf: the proof has to see exactly what the runtime is given, and reading a net into `onnx_ir` takes three times
as long. Linear in the model's size.

Nodes are traced in the runtime's graphs, messages and profiles by names: every node of a private copy is renamed to a
token (`tag`), so that a name in the optimized graph (``kv#17#/MatMulAddFusion``, ``kv#17#_token_2``) tells its source
node without doubt.

How many bits of its container a tensor uses is an annotation of the graph. Source: Pappalardo et al., "QONNX", 2022,
equations 2 and 3; `qonnx.core.modelwrapper` for the annotation's key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.outside import array_in, is_outside
from kenosis_ort.graph.walk import MAIN_DOMAINS, all_graphs, known_as, part_names

_LEVELS = 255
_TOLERANCE = 1e-6  # of the largest value: what float32 leaves of a quotient such as 25 / 9


class ExactGrid(NamedTuple):
    """Values as multiples of one step.

    Attributes:
        step: The step, positive.
        low: The least multiple among the values and 0.
        multiples: Which multiple each value is, of the shape of the values.
    """

    step: float
    low: int
    multiples: npt.NDArray[np.int64]


def exact_grid(values: npt.NDArray[np.generic]) -> ExactGrid | None:
    """The coarsest grid of at most 256 steps, 0 among them, that holds all values; None if there is none.

    Args:
        values: Finite numbers of any shape.
    """
    numbers = np.asarray(values, np.float64)
    if not numbers.size or not np.isfinite(numbers).all():
        return None
    distinct = np.sort(numbers, axis=None)
    distinct = distinct[np.diff(distinct, prepend=-np.inf) > 0.0]  # as `np.unique`, which loads numpy.ma
    largest = float(np.abs(distinct).max())
    if largest == 0.0:
        return ExactGrid(1.0, 0, np.zeros(numbers.shape, np.int64))
    if distinct.size > _LEVELS + 1:
        return None
    for count in range(1, _LEVELS + 1):
        scaled = distinct * (count / largest)
        whole = np.rint(scaled)
        if max(whole[-1], 0.0) - min(whole[0], 0.0) > _LEVELS:
            return None
        if np.abs(scaled - whole).max() <= _TOLERANCE * count:
            multiples = np.rint(numbers * (count / largest)).astype(np.int64)
            return ExactGrid(largest / count, int(min(whole[0], 0.0)), multiples)
    return None


ANNOTATION: Final = "finn_datatype"
"""The key under which QONNX' tools keep a tensor's data type, as ``INT4``, in the graph's quantization annotation."""


INTEGERS: Final[Mapping[int, tuple[bool, int]]] = {
    kind: (not found[1], int(found[2]))
    for name, kind in TensorProto.DataType.items()
    if (found := re.fullmatch(r"(U?)INT(2|4|8|16)", name))  # older versions of ONNX have none of 2 bits
}
"""The element types of quantized weights and activations: whether integers may be negative, and their bits."""


def bounds_of(elem_type: int) -> tuple[int, int]:
    """The least and the largest integer of one of `INTEGERS`."""
    signed, bits = INTEGERS[elem_type]
    return integer_bounds(bits, signed=signed)


def on_grid(real: Any, scale: Any, zero_point: Any, low: float, high: float) -> npt.NDArray[np.float64]:
    """Whole numbers nearest to reals on a grid, in float64: half to even, then the zero point, then the bounds.

    Args:
        real: Reals of any shape.
        scale: Steps, of a shape that broadcasts.
        zero_point: Whole numbers, likewise.
        low: Least number.
        high: Largest number.
    """
    return np.asarray(np.clip(np.rint(np.asarray(real, np.float64) / scale) + zero_point, low, high))


def integer_bounds(bits: int, *, signed: bool, narrow: bool = False) -> tuple[int, int]:
    """The least and the largest integer of a width."""
    if signed:
        return -(2 ** (bits - 1)) + narrow, 2 ** (bits - 1) - 1
    return 0, 2**bits - 1 - narrow


def width_of(low: int, high: int, *, signed: bool) -> tuple[int, bool] | None:
    """(bits, narrow) of a range of integers, None where no width has these bounds."""
    if high < 1:
        return None
    bits = high.bit_length() + signed
    for narrow in (False, True):
        if integer_bounds(bits, signed=signed, narrow=narrow) == (low, high):
            return bits, narrow
    return None


def annotate(graph: onnx.GraphProto, tensor: str, datatype: str) -> None:
    """Annotates a tensor with its number of bits; an earlier annotation is replaced."""
    entry = next((entry for entry in graph.quantization_annotation if entry.tensor_name == tensor), None)
    if entry is None:
        entry = graph.quantization_annotation.add(tensor_name=tensor)
    pairs = entry.quant_parameter_tensor_names
    pair = next((pair for pair in pairs if pair.key == ANNOTATION), None) or pairs.add(key=ANNOTATION)
    pair.value = datatype


def declared_datatypes(graph: onnx.GraphProto) -> dict[str, str]:
    """The data type that the graph says of each tensor, as ``INT4``."""
    return {
        entry.tensor_name: pair.value
        for entry in graph.quantization_annotation
        for pair in entry.quant_parameter_tensor_names
        if pair.key == ANNOTATION
    }


Q: Final = "QuantizeLinear"
DQ: Final = "DequantizeLinear"
QDQ_OPS: Final = frozenset({Q, DQ})

_FLOATS: Final = frozenset(
    {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16, TensorProto.UNDEFINED}
)
_RESULTS: Final[Mapping[str, int]] = {
    **dict.fromkeys(["Shape", "Size", "ArgMax", "ArgMin", "NonZero", "NonMaxSuppression"], TensorProto.INT64),
    **dict.fromkeys(["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"], TensorProto.BOOL),
    **dict.fromkeys(["And", "Or", "Not", "Xor", "IsNaN", "IsInf"], TensorProto.BOOL),
    **dict.fromkeys(["If", "Loop", "Scan", "OneHot"], TensorProto.FLOAT),
}
"""The element types that operators write whatever they read."""


@dataclass(frozen=True, eq=False)
class SourceNode:
    """One node of the model.

    Attributes:
        index: Position over all graphs; the token of the node in the runtime's graph.
        proto: The node.
        op_type: Its operator by the name of `known_as`.
        label: Its name, or ``<OpType value>`` where it has none.
        graph: Path of the body it stands in, empty for the main graph.
    """

    index: int
    proto: onnx.NodeProto
    op_type: str
    label: str
    graph: str

    @property
    def is_compute(self) -> bool:
        return self.op_type not in QDQ_OPS and self.op_type != "Constant"

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value, bytes decoded."""
        for attribute in self.proto.attribute:
            if attribute.name == name:
                value = helper.get_attribute_value(attribute)
                return value.decode() if isinstance(value, bytes) else value
        return default


class QuantParams(NamedTuple):
    """Scale and zero point of one Q or DQ; None where they are not constant.

    Attributes:
        scale: float64 values, rank as in the model.
        zero_point: int64 values; zeros where the model gives none.
        elem_type: ONNX element type of the quantized tensor, None if it is not known.
    """

    scale: npt.NDArray[np.float64] | None
    zero_point: npt.NDArray[np.int64] | None
    elem_type: int | None

    def same(self, other: QuantParams) -> bool:
        """Whether both quantize alike: bit-equal scale and zero point, same type."""
        pairs = ((self.scale, other.scale), (self.zero_point, other.zero_point))
        return self.elem_type == other.elem_type and all(
            a is not None and b is not None and np.array_equal(a.ravel(), b.ravel()) for a, b in pairs
        )


class SourceGraph:
    """Indexes a model with all its bodies, no two of which share a name (`walk.part_names`).

    Args:
        model: The model. Not changed.
        base: Folder of external data, for scales and zero points stored there.
        labels: Names to report for the nodes in the order of `nodes_by_path`; their own by default.
        paths: Paths of their bodies to report, likewise.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        base: Path | None = None,
        *,
        labels: Sequence[str] | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        self._base = base
        self._labels = labels
        self._paths = paths
        self.opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
        self.nodes: list[SourceNode] = []
        self.producer: dict[str, SourceNode] = {}
        self.consumers: dict[str, list[SourceNode]] = {}
        self.initializers: dict[str, TensorProto] = {}
        self.outputs: set[str] = set()
        self.types: dict[str, int] = {}
        self.shapes: dict[str, onnx.TensorShapeProto] = {}
        for graph, path, node in nodes_by_path(model.graph):
            if node is None:
                self._add_graph(graph)
            else:
                self._add_node(node, path)

    def _add_graph(self, graph: onnx.GraphProto) -> None:
        self.initializers.update((i.name, i) for i in graph.initializer)
        self.types.update((i.name, i.data_type) for i in graph.initializer)
        self.outputs.update(o.name for o in graph.output)
        for info in (*graph.input, *graph.value_info):
            if info.type.HasField("tensor_type"):
                self.types.setdefault(info.name, info.type.tensor_type.elem_type)
                if info.type.tensor_type.HasField("shape"):
                    self.shapes[info.name] = info.type.tensor_type.shape

    def _add_node(self, proto: onnx.NodeProto, path: str) -> None:
        label = self._labels[len(self.nodes)] if self._labels is not None else label_of(proto)
        where = self._paths[len(self.nodes)] if self._paths is not None else path
        op_type = proto.op_type if proto.domain in MAIN_DOMAINS else known_as(proto.domain, proto.op_type)
        node = SourceNode(len(self.nodes), proto, op_type, label, where)
        self.nodes.append(node)
        for value in filter(None, dict.fromkeys(proto.input)):
            self.consumers.setdefault(value, []).append(node)
        for value in filter(None, proto.output):
            self.producer[value] = node
            for attribute in proto.attribute if proto.op_type == "Constant" else ():
                if attribute.name == "value" and attribute.HasField("t"):
                    self.initializers[value] = attribute.t
                    self.types[value] = attribute.t.data_type
            if value not in self.types:
                self.types[value] = self._type_of_output(node)

    def _type_of_output(self, node: SourceNode) -> int:
        op, inputs = node.op_type, node.proto.input
        if op in _RESULTS:
            return _RESULTS[op]
        if op == "Cast":
            return int(node.attribute("to", TensorProto.FLOAT))
        if op == DQ and node.attribute("output_dtype", 0):
            return int(node.attribute("output_dtype"))
        if op == Q:
            return self._quantized_type(node)
        if op == "ConstantOfShape":
            value = node.attribute("value")
            return int(value.data_type) if value is not None else int(TensorProto.FLOAT)
        source = 1 if op in ("Where", DQ) else 0
        return self.types.get(inputs[source], TensorProto.FLOAT) if len(inputs) > source else int(TensorProto.FLOAT)

    def _quantized_type(self, node: SourceNode) -> int:
        inputs = node.proto.input
        if len(inputs) > 2 and inputs[2]:
            return self.types.get(inputs[2], int(TensorProto.UINT8))
        return int(node.attribute("output_dtype", 0)) or int(TensorProto.UINT8)

    # ---- questions --------------------------------------------------------------------------------------------

    def computes_float(self, node: SourceNode) -> bool:
        """Whether the node reads or makes a float tensor (Shape, Size and control flow do not count)."""
        if node.op_type in ("Shape", "Size", "If", "Loop", "Scan"):
            return False
        return any(self.is_float(v) for v in (*node.proto.input, *node.proto.output) if v)

    def names(self) -> set[str]:
        """The names of all values."""
        return {*self.producer, *self.initializers, *self.consumers, *self.types}

    def is_float(self, value: str) -> bool:
        return self.types.get(value, TensorProto.FLOAT) in _FLOATS

    def dq_of(self, value: str) -> SourceNode | None:
        """The DequantizeLinear that makes a value, or None."""
        node = self.producer.get(value)
        return node if node is not None and node.op_type == DQ else None

    def is_dq_constant(self, value: str) -> bool:
        """Whether a value is a quantized initializer behind DequantizeLinear."""
        dq = self.dq_of(value)
        return dq is not None and dq.proto.input[0] in self.initializers

    def array(self, name: str, most: int = 1 << 20) -> npt.NDArray[Any] | None:
        """Constant of a name, None if the value is not constant or has more elements than ``most``."""
        tensor = self.initializers.get(name)
        if tensor is None or int(np.prod(tensor.dims, dtype=np.int64)) > most:
            return None
        if tensor.data_location == TensorProto.EXTERNAL and not is_outside(tensor):
            if self._base is None:
                return None
            loaded = TensorProto()
            loaded.CopyFrom(tensor)
            return np.asarray(numpy_helper.to_array(loaded, str(self._base)))
        return array_in(tensor)

    def params(self, node: SourceNode) -> QuantParams:
        """Scale, zero point and type of a Q or DQ."""
        inputs = node.proto.input
        scale = self.array(inputs[1]) if len(inputs) > 1 else None
        kind = self._quantized_type(node) if node.op_type == Q else self.types.get(inputs[0])
        if len(inputs) > 2 and inputs[2]:
            zero = self.array(inputs[2])
            kind = self.types.get(inputs[2], kind)
            zero_point = None if zero is None else zero.astype(np.int64)
        else:
            zero_point = None if scale is None else np.zeros(scale.shape, np.int64)
        return QuantParams(None if scale is None else scale.astype(np.float64), zero_point, kind)


def label_of(node: onnx.NodeProto) -> str:
    """A node's name, or ``<OpType value>`` after its first output where it has none."""
    return node.name or f"<{node.op_type} {next((o for o in node.output if o), '')}>"


def nodes_by_path(graph: onnx.GraphProto, path: str = "") -> list[tuple[onnx.GraphProto, str, onnx.NodeProto | None]]:
    """Each graph (node is None) and then its nodes in order; bodies come before the node that owns them.

    The path of a body is ``<node name or op type>.<attribute>``, joined by ``/``.
    """
    found: list[tuple[onnx.GraphProto, str, onnx.NodeProto | None]] = [(graph, path, None)]
    for node in graph.node:
        for attribute in node.attribute:
            bodies = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs
            for number, body in enumerate(bodies):
                step = f"{node.name or node.op_type}.{attribute.name}{number or ''}"
                found += nodes_by_path(body, f"{path}/{step}" if path else step)
        found.append((graph, path, node))
    return found


_TOKEN: Final = re.compile(r"kv#(\d+)#")


class Tagged(NamedTuple):
    """A copy of a model whose nodes are named by tokens.

    Attributes:
        proto: The copy.
        labels: What the nodes are called in messages, in the order of `nodes_by_path`.
        paths: The path of each node's body with the nodes' own names, in the same order.
    """

    proto: onnx.ModelProto
    labels: tuple[str, ...]
    paths: tuple[str, ...]


def token_of(text: str) -> int | None:
    """The index of the source node that a name of the optimized graph comes from."""
    match = _TOKEN.search(text)
    return int(match.group(1)) if match else None


def tag(model: onnx.ModelProto) -> Tagged:
    """Copies a model and names its nodes by tokens."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    found = [(label_of(node), path, node) for _, path, node in nodes_by_path(proto.graph) if node is not None]
    for index, (_, _, node) in enumerate(found):
        node.name = f"kv#{index}#"
    if any(path for _, path, _ in found):
        part_names(proto.graph)
    return Tagged(proto, tuple(label for label, _, _ in found), tuple(path for _, path, _ in found))


def with_labels(message: str, labels: Sequence[str]) -> str:
    """A message of the runtime with tokens replaced by what the nodes are called."""
    return _TOKEN.sub(lambda m: labels[int(m.group(1))], message)


def indexed(model: onnx.ModelProto, base: Path | None = None) -> SourceGraph:
    """The index of a model of any origin; where it has bodies, of a copy in which no two of them share a name."""
    if len(all_graphs(model.graph)) == 1:
        return SourceGraph(model, base)
    copy = tag(model)
    return SourceGraph(copy.proto, base, labels=copy.labels, paths=copy.paths)
