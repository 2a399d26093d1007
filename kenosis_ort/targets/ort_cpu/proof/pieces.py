"""Cuts a large model into pieces that the runtime can be asked about one by one.

The time that onnxruntime takes to load a graph grows with the square of its depth: 1,000 quantized Convs in a row take
seconds, 4,000 a minute. What it fuses depends on the neighbourhood of a node only, so the proof of a large model is
the sum of the proofs of its pieces. A cut runs through quantized uint8 values of known rank and nowhere else: on both
sides the same Q/DQ pairs stand around each node as before. A DequantizeLinear goes with its readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import onnx
from onnx import TensorProto, helper

from kenosis_ort.graph.qdq import DQ, Q, SourceGraph, SourceNode, walk
from kenosis_ort.graph.session import WHOLE_LIMIT

PIECE_NODES: Final = 150  # nodes of one piece; constants and DequantizeLinear come on top


@dataclass
class _Piece:
    """Inputs and outputs of one piece among the others."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    read: dict[str, None] = field(default_factory=dict)


class _Known:
    """The main graph's declarations by name."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.initializers = {i.name: i for i in graph.initializer}
        self.inputs = {i.name: i for i in graph.input}
        self.outputs = {o.name: o for o in graph.output}
        self.types = {i.name: i for i in graph.value_info if i.name not in self.outputs}


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
    known = _Known(model)
    pieces = [_piece(group, graph, known) for group in groups]
    wanted = [set[str]() for _ in pieces]
    later: set[str] = set()
    for number in range(len(pieces) - 1, -1, -1):
        wanted[number] = pieces[number].made & later
        later |= set(pieces[number].read) - pieces[number].made
    return [_model(model, piece, graph, known, handed) for piece, handed in zip(pieces, wanted, strict=True)]


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
    for value in _inputs(node.proto):
        maker = graph.producer.get(value)
        while maker is not None and _is_free(maker, graph):
            value = maker.proto.input[0] if maker.op_type == DQ else ""
            maker = graph.producer.get(value)
        if maker is not None and not maker.graph:
            needed.append(value)
    return needed


def _inputs(node: onnx.NodeProto) -> Iterable[str]:
    yield from (v for v in node.input if v)
    for attribute in node.attribute:
        bodies = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else list(attribute.graphs)
        for body in bodies:
            for inner, _, inside in walk(body):
                yield from (o.name for o in inner.output) if inside is None else (v for v in inside.input if v)


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


def _piece(group: Sequence[SourceNode], graph: SourceGraph, known: _Known) -> _Piece:
    piece = _Piece()
    for node in group:
        _bring(node, graph, known, piece)
    return piece


def _bring(node: SourceNode, graph: SourceGraph, known: _Known, piece: _Piece) -> None:
    """Adds a node behind the constants and DequantizeLinear nodes that it reads."""
    for value in _inputs(node.proto):
        maker = graph.producer.get(value)
        if maker is not None and value not in piece.made and not maker.graph and _is_free(maker, graph):
            _bring(maker, graph, known, piece)
        if value in known.initializers or value in known.inputs or (maker is not None and not maker.graph):
            piece.read.setdefault(value)
    piece.nodes.append(node.proto)
    piece.made.update(v for v in node.proto.output if v)


def _model(
    whole: onnx.ModelProto, piece: _Piece, graph: SourceGraph, known: _Known, handed: set[str]
) -> onnx.ModelProto:
    model = onnx.ModelProto(ir_version=whole.ir_version)
    model.opset_import.extend(whole.opset_import)
    model.functions.extend(whole.functions)
    target = model.graph
    target.name = whole.graph.name or "piece"
    target.node.extend(piece.nodes)
    for value in piece.read:
        if value in piece.made:
            continue
        if value in known.initializers:
            target.initializer.append(known.initializers[value])
        elif value in known.inputs:
            target.input.append(known.inputs[value])
        else:
            target.input.append(_quantized(value, graph))
    target.output.extend(_quantized(v, graph) for v in sorted(handed) if v not in known.outputs)
    target.output.extend(info for name, info in known.outputs.items() if name in piece.made)
    target.value_info.extend(
        known.types[v] for n in piece.nodes for v in n.output if v in known.types and v not in handed
    )
    return model


def _quantized(value: str, graph: SourceGraph) -> onnx.ValueInfoProto:
    info = helper.make_tensor_value_info(value, TensorProto.UINT8, None)
    shape = _shape_source(value, graph)
    if shape is not None:
        info.type.tensor_type.shape.CopyFrom(shape)
    return info


def is_large(graph: SourceGraph) -> bool:
    """Whether a model has so many nodes that it is proved in pieces."""
    return len(graph.nodes) > WHOLE_LIMIT
