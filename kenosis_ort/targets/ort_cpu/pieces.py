"""The optimized graph, indexed, and a large model cut into pieces that the runtime is asked about one by one.

The time that onnxruntime takes to load a graph grows with the square of its depth: 1,000 quantized Convs in a row take
seconds, 4,000 a minute. What it fuses depends on the neighbourhood of a node only, so the proof of a large model is
the sum of the proofs of its pieces. A cut runs through quantized uint8 values of known rank and nowhere else: on both
sides the same Q/DQ pairs stand around each node as before. A DequantizeLinear goes with its readers.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import TensorProto, helper

from kenosis_ort.graph import qdq, walk
from kenosis_ort.graph.load import base_op, token_of
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.qdq import DQ, QDQ_OPS, Q, SourceGraph, SourceNode
from kenosis_ort.graph.walk import rename_all
from kenosis_ort.targets.ort_cpu.work import DIRECT, PRODUCT, has_direct_kernel

_INTEGER_OPS: Final = frozenset(
    {"QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "DynamicQuantizeMatMul",
     "QAttention", "DynamicQuantizeLSTM", "NhwcMaxPool"}
)  # fmt: skip
_FLOAT_OUTPUT: Final = frozenset(
    {"ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "DynamicQuantizeMatMul", "QAttention",
     "DynamicQuantizeLSTM", "Shape", "Size", "ArgMax", "ArgMin", "NonZero"}
)  # fmt: skip
_QUANTIZED_TYPES: Final = frozenset(
    {TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.UINT4, TensorProto.INT4}
)
# What the optimizer adds on its own: never the kernel of a source node unless it carries the node's token.
LAYOUT_OPS: Final = frozenset(
    {"Transpose", "Reshape", "ReorderInput", "ReorderOutput", "Cast", "Squeeze", "Unsqueeze", "Identity", Q, DQ}
)
_QGEMM_OUTPUT_SCALE: Final = 7
_WEIGHT: Final = 3
_WEIGHT_ZERO: Final = 5


@dataclass(frozen=True, eq=False)
class KernelNode:
    """One node of the optimized graph.

    Attributes:
        proto: The node.
        token: Index of the source node in its name, or in the runtime's name of its output; None if there is none.
        nchwc_value: Value after which an NCHWc kernel is named, else None.
        integer: It works on quantized data.
    """

    proto: onnx.NodeProto
    token: int | None
    nchwc_value: str | None
    integer: bool

    @property
    def op_type(self) -> str:
        return self.proto.op_type

    @property
    def label(self) -> str:
        """Operator type with its domain unless that is the default one."""
        return f"{self.proto.domain}.{self.op_type}" if self.proto.domain not in ("", "ai.onnx") else self.op_type

    @property
    def base(self) -> str:
        """Operator type of the source node that this kernel executes."""
        return base_op(self.op_type)


class KernelGraph:
    """Indexes the optimized graph with all its bodies. Linear in its size.

    Args:
        graphs: The optimized graph, or those of the pieces of a model. With several, values are renamed in place.
        known: Names of the model's values; all others are the runtime's and may be the same in several pieces.
    """

    def __init__(self, graphs: Sequence[onnx.GraphProto], known: Set[str]) -> None:
        self.nodes: list[KernelNode] = []
        self.producer: dict[str, KernelNode] = {}
        self.consumers: dict[str, list[KernelNode]] = {}
        self.initializers: dict[str, onnx.TensorProto] = {}
        self._quantized: set[str] = set()
        for number, graph in enumerate(graphs):
            if len(graphs) > 1:
                rename_all(graph, {name: f"{name}@{number}" for name in walk.all_names(graph) - known})
            self._add_graph(graph)

    def _add_graph(self, graph: onnx.GraphProto) -> None:
        for body, _, node in qdq.walk(graph):
            if node is None:
                self.initializers.update((i.name, i) for i in body.initializer)
                self._quantized.update(i.name for i in body.initializer if i.data_type in _QUANTIZED_TYPES)
                self._quantized.update(i.name for i in body.input if i.type.tensor_type.elem_type in _QUANTIZED_TYPES)
            else:
                self._add(node)

    def _add(self, proto: onnx.NodeProto) -> None:
        first = next((v for v in proto.input if v), "")
        reads_quantized = first in self._quantized
        is_integer = proto.op_type in _INTEGER_OPS or proto.op_type.startswith("QLinear") or reads_quantized
        is_integer = is_integer and proto.op_type not in QDQ_OPS
        node = KernelNode(proto, token_of(proto.name), _nchwc_value(proto), is_integer)
        self.nodes.append(node)
        for value in filter(None, proto.input):
            self.consumers.setdefault(value, []).append(node)
        self.producer.update(dict.fromkeys(filter(None, proto.output), node))
        if self._makes_quantized(proto, reads_quantized):
            self._quantized.update(v for v in proto.output if v)

    def _makes_quantized(self, proto: onnx.NodeProto, reads_quantized: bool) -> bool:
        if proto.op_type == "QGemm":
            return len(proto.input) > _QGEMM_OUTPUT_SCALE and bool(proto.input[_QGEMM_OUTPUT_SCALE])
        if proto.op_type == DQ or proto.op_type in _FLOAT_OUTPUT:
            return False
        if proto.op_type == "Cast":
            return walk.attribute_int(proto, "to", 0) in _QUANTIZED_TYPES
        return proto.op_type in (Q, "DynamicQuantizeLinear") or proto.op_type.startswith("QLinear") or reads_quantized

    def weight_dq(self, node: KernelNode) -> bool:
        """Whether a kernel reads the DequantizeLinear of an initializer: work repeated on every run."""
        makers = [self.producer.get(value) for value in node.proto.input[1:]]
        return any(m is not None and m.op_type == DQ and m.proto.input[0] in self.initializers for m in makers)

    def conv_kernel(self, node: KernelNode) -> str:
        """The one of the two kernels behind QLinearConv that runs, by its stored weights; empty where it is not known.

        Args:
            node: Of this graph, on an x86-64 processor.
        """
        if node.op_type != "QLinearConv":
            return ""
        weight, zero = (self.initializers.get(node.proto.input[index]) for index in (_WEIGHT, _WEIGHT_ZERO))
        if weight is None or zero is None or zero.data_location == onnx.TensorProto.EXTERNAL:
            return ""
        groups = walk.attribute_int(node.proto, "group", 1)
        is_plain = weight.data_type == TensorProto.INT8 and not array_in(zero).any()
        return DIRECT if is_plain and has_direct_kernel(weight.dims[1] * groups, weight.dims[0], groups) else PRODUCT


def _nchwc_value(proto: onnx.NodeProto) -> str | None:
    if proto.domain != "com.microsoft.nchwc":
        return None
    name, found, _ = proto.name.rpartition("_nchwc")
    return name if found else None


PIECE_NODES: Final = 150  # nodes of one piece; constants and DequantizeLinear come on top


def cut(model: onnx.ModelProto, graph: SourceGraph, *, size: int = PIECE_NODES) -> list[onnx.ModelProto]:
    """Cuts a model into pieces of at least ``size`` nodes each, but for the last.

    Args:
        model: The model, nodes in topological order. Not changed.
        graph: Its index.
        size: Nodes of a piece before the next possible cut.

    Returns:
        The pieces in order, at least one; their nodes keep their names, a DequantizeLinear may stand in several.
    """
    groups = _groups(graph, size)
    if len(groups) == 1 or model.graph.sparse_initializer:
        return [model]
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = {info.name: info for info in model.graph.input}
    outputs = {info.name: info for info in model.graph.output}
    types = {info.name: info for info in model.graph.value_info if info.name not in outputs}
    pieces: list[onnx.ModelProto] = []
    later: set[str] = set()  # what pieces behind read
    for group in reversed(groups):
        nodes = _with_free(group, graph)
        made = {value for node in nodes for value in node.output if value}
        read = [value for value in dict.fromkeys(v for n in nodes for v in walk.read_names(n)) if value not in made]
        handed = made & later
        later.update(read)
        piece = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
        piece.graph.name = model.graph.name or "piece"
        piece.graph.node.extend(nodes)
        piece.graph.initializer.extend(constants[v] for v in read if v in constants)
        piece.graph.input.extend(inputs[v] if v in inputs else _quantized(v, graph) for v in read if v not in constants)
        piece.graph.output.extend(_quantized(v, graph) for v in sorted(handed) if v not in outputs)
        piece.graph.output.extend(info for name, info in outputs.items() if name in made)
        inner = (v for n in nodes for v in n.output if v in types and v not in handed)
        piece.graph.value_info.extend(types[v] for v in inner)
        pieces.insert(0, piece)
    return pieces


def _with_free(group: Sequence[SourceNode], graph: SourceGraph) -> list[onnx.NodeProto]:
    """Nodes, each behind the constants and DequantizeLinear nodes that it reads."""
    nodes: dict[int, onnx.NodeProto] = {}

    def bring(node: SourceNode) -> None:
        for value in walk.read_names(node.proto):
            maker = graph.producer.get(value)
            if maker is not None and maker.index not in nodes and not maker.graph and _is_free(maker, graph):
                bring(maker)
        nodes[node.index] = node.proto

    for node in group:
        bring(node)
    return list(nodes.values())


def _groups(graph: SourceGraph, size: int) -> list[list[SourceNode]]:
    """Cuts the nodes of the main graph where all that crosses is quantized; free DequantizeLinear nodes left out."""
    main = [n for n in graph.nodes if not n.graph and not _is_free(n, graph)]
    reads = [_needs(n, graph) for n in main]
    made = {value: position for position, node in enumerate(main) for value in node.proto.output}
    if any(made.get(value, -1) >= position for position, values in enumerate(reads) for value in values):
        return [main]  # not in topological order
    order = _depth_first([[made[value] for value in values if value in made] for values in reads])
    main, reads = [main[at] for at in order], [reads[at] for at in order]
    last = {value: position for position, values in enumerate(reads) for value in values}
    live_float: set[str] = set()
    ending: dict[int, list[str]] = {}
    groups: list[list[SourceNode]] = [[]]
    for position, node in enumerate(main):
        for value in ending.pop(position, []):
            live_float.discard(value)
        groups[-1].append(node)
        for value in node.proto.output:
            if last.get(value, -1) > position and not _may_cross(value, graph):
                live_float.add(value)
                ending.setdefault(last[value], []).append(value)
        if len(groups[-1]) >= size and not live_float and position + 1 < len(main):
            groups.append([])
    return groups


def _depth_first(above: Sequence[Sequence[int]]) -> list[int]:
    """Positions in an order in which a branch comes in one go, so that little is alive between two nodes.

    Args:
        above: By position, what a node reads; all of it lies before.
    """
    read = set().union(*above)
    order: dict[int, None] = {}
    opened: set[int] = set()
    for end in (position for position in range(len(above)) if position not in read):
        stack = [end]
        while stack:
            position = stack[-1]
            left = [] if position in opened else [other for other in above[position] if other not in order]
            opened.add(position)
            if left:
                stack += reversed(left)
            else:
                order.setdefault(stack.pop())
    return list(order)


def _is_free(node: SourceNode, graph: SourceGraph) -> bool:
    """A constant or a DequantizeLinear moves to its readers unless it makes a graph output."""
    return node.op_type in (DQ, "Constant") and node.proto.output[0] not in graph.outputs


def _needs(node: SourceNode, graph: SourceGraph) -> list[str]:
    """The values that a node and its bodies read, with those behind a free DequantizeLinear in its place."""
    needed = []
    for value in walk.read_names(node.proto):
        maker = graph.producer.get(value)
        while maker is not None and _is_free(maker, graph):
            value = maker.proto.input[0] if maker.op_type == DQ else ""
            maker = graph.producer.get(value)
        if maker is not None and not maker.graph:
            needed.append(value)
    return needed


def _may_cross(value: str, graph: SourceGraph) -> bool:
    maker = graph.producer.get(value)
    if maker is None or maker.op_type != Q or graph.types.get(value) != TensorProto.UINT8:
        return False
    return _shape_source(value, graph) is not None


def _shape_source(value: str, graph: SourceGraph) -> onnx.TensorShapeProto | None:
    """The shape of a Q output: its own, its input's, or that of a DQ behind it."""
    maker = graph.producer[value]
    around = [value, maker.proto.input[0], *(r.proto.output[0] for r in graph.consumers.get(value, []))]
    return next((graph.shapes[v] for v in around if v in graph.shapes), None)


def _quantized(value: str, graph: SourceGraph) -> onnx.ValueInfoProto:
    info = helper.make_tensor_value_info(value, TensorProto.UINT8, None)
    shape = _shape_source(value, graph)
    if shape is not None:
        info.type.tensor_type.shape.CopyFrom(shape)
    return info
