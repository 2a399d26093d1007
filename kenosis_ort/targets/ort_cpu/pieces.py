"""A large model cut into pieces that the runtime is asked about one by one.

The time that onnxruntime takes to load a graph grows with the square of its depth: 1,000 quantized Convs in a row take
seconds, 4,000 a minute. What it fuses depends on the neighbourhood of a node only, so the proof of a large model is
the sum of the proofs of its pieces. A cut runs through quantized uint8 values of known rank and nowhere else: on both
sides the same Q/DQ pairs stand around each node as before. A DequantizeLinear goes with its readers.
"""

from collections.abc import Sequence
from typing import Final

import onnx
from onnx import TensorProto, helper

from kenosis_ort.graph import walk
from kenosis_ort.graph.qdq import DQ, Q, SourceGraph, SourceNode

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
    groups: list[list[SourceNode]] = [[]]
    read_until = 0  # where the last of the float values so far is read for the last time
    for position, node in enumerate(main):
        groups[-1].append(node)
        floats = (value for value in node.proto.output if value in last and not _may_cross(value, graph))
        read_until = max([read_until, *(last[value] for value in floats)])
        if len(groups[-1]) >= size and read_until <= position and position + 1 < len(main):
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
