"""Which node keeps a file from being compiled: each is tried in a model of its own.

The provider validates nodes one by one and names those it refuses. What the compiler of the chip refuses afterwards it
does not name: ``Failed to finalize QNN graph``. So each node is loaded alone, between the DQ before and the Q behind
it; one of each kind first, then the others of the kinds that fail, or of all where none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import onnx
from onnx import helper

from kenosis_ort.graph.qdq import DQ, Q, SourceGraph, SourceNode
from kenosis_ort.graph.save import store_model
from kenosis_ort.graph.shapes import infer_shapes, value_types
from kenosis_ort.storage.scratch import Scratch
from kenosis_ort.targets.qnn.runtime import ask

_MOST: Final = 60
"""Nodes tried at most; each takes the simulator about two seconds."""
_INNER: Final = ("Relu", "Clip")


def not_compiled(model: onnx.ModelProto) -> tuple[tuple[str, ...], int]:
    """Finds the nodes that the provider cannot compile.

    Args:
        model: A quantized model that does not load, its weights inside. Its value_info is completed in place.

    Returns:
        The names of the nodes that do not load alone either, and how many were tried.

    Raises:
        VerificationError: The provider is not installed.
    """
    infer_shapes(model)
    graph, types = SourceGraph(model), value_types(model)
    nodes = [n for n in graph.nodes if n.is_compute and not n.graph and not _is_inner(n, graph)]
    kinds: dict[str, list[SourceNode]] = {}
    for node in nodes:
        kinds.setdefault(_kind(node, graph), []).append(node)
    first = [of_kind[0] for of_kind in kinds.values()][:_MOST]
    refused = _try(first, model, graph, types)
    rest = [n for of_kind in kinds.values() if not refused or of_kind[0] in refused for n in of_kind[1:]]
    rest = rest[: _MOST - len(first)]
    refused += _try(rest, model, graph, types)
    return tuple(node.proto.name for node in refused), len(first) + len(rest)


def _try(
    nodes: list[SourceNode], model: onnx.ModelProto, graph: SourceGraph, types: dict[str, onnx.TypeProto]
) -> list[SourceNode]:
    """Returns those of some nodes that do not load alone."""
    with Scratch("qnn") as folder:
        paths, asked = [], []
        for node in nodes:
            piece = alone(node, model, graph, types)
            if piece is not None:
                paths.append(Path(folder) / f"{node.index}.onnx")
                store_model(piece, paths[-1], external_data=False)
                asked.append(node)
        return [node for node, said in zip(asked, ask(paths), strict=True) if said.failure]


def alone(
    node: SourceNode, model: onnx.ModelProto, graph: SourceGraph, types: dict[str, onnx.TypeProto]
) -> onnx.ModelProto | None:
    """Returns a model of one node with the DQ before and the Q behind it; None where a type is not known."""
    piece = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    piece.graph.name = "alone"
    inner = list(_chain(node, graph))
    before: dict[int, SourceNode] = {}
    for value in (v for n in inner for v in n.proto.input if v):
        maker = graph.producer.get(value)
        if maker is not None and maker.op_type in (DQ, "Constant"):
            before[maker.index] = maker
    behind = [r for v in inner[-1].proto.output if v for r in graph.consumers.get(v, []) if r.op_type == Q]
    for member in (*before.values(), *inner, *behind):
        piece.graph.node.append(member.proto)
    made = {value for member in piece.graph.node for value in member.output}
    read = dict.fromkeys(v for member in piece.graph.node for v in member.input if v and v not in made)
    for value in read:
        if value in graph.initializers:
            piece.graph.initializer.append(graph.initializers[value])
        elif value in types:
            piece.graph.input.append(helper.make_value_info(value, types[value]))
        else:
            return None
    ends = behind or [inner[-1]]
    for value in (v for end in ends for v in end.proto.output if v):
        if value not in types and value not in {o.name for o in model.graph.output}:
            return None
        piece.graph.output.append(helper.make_value_info(value, types[value]))
    return piece


def _chain(node: SourceNode, graph: SourceGraph) -> Iterator[SourceNode]:
    """Yields a node and the Relu or Clip that is part of its kernel."""
    yield node
    readers = [r for v in node.proto.output if v for r in graph.consumers.get(v, [])]
    if len(readers) == 1 and _is_inner(readers[0], graph):
        yield from _chain(readers[0], graph)


def _is_inner(node: SourceNode, graph: SourceGraph) -> bool:
    maker = graph.producer.get(node.proto.input[0]) if node.op_type in _INNER and node.proto.input else None
    return maker is not None and maker.is_compute and len(graph.consumers[node.proto.input[0]]) == 1


def _kind(node: SourceNode, graph: SourceGraph) -> str:
    """Returns the operator with its attributes and the types that it reads and writes, behind DQ and Q."""
    attributes = sorted(helper.printable_attribute(a) for a in node.proto.attribute if a.type != a.GRAPH)
    reads = [
        graph.types.get(dq.proto.input[0]) if (dq := graph.dq_of(v)) else graph.types.get(v, 0)
        for v in node.proto.input
    ]
    writes = [
        graph.types.get(r.proto.output[0])
        for v in (list(_chain(node, graph))[-1].proto.output)
        for r in graph.consumers.get(v, [])
        if r.op_type == Q
    ]
    return f"{node.op_type} {attributes} {reads} {writes}"


__all__ = ["alone", "not_compiled"]
