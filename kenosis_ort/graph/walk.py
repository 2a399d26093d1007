"""Iteration over everything that a `ModelProto` nests: bodies of control flow, functions, tensors."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx.defs

MAIN_DOMAINS = ("", "ai.onnx")

MICROSOFT = "com.microsoft"
"""The domain of the runtime's own operators; its version is 1 whatever the main operator set is."""

_ALIKE = frozenset({"DequantizeLinear", "FastGelu", "Gelu", "QuantizeLinear", "QuickGelu"})
"""Operators that mean the same in the main domain and in the runtime's own."""

NodeOwner = onnx.GraphProto | onnx.FunctionProto
"""What holds a list of nodes."""


def known_as(domain: str, op_type: str) -> str:
    """Returns the name under which rules know an operator.

    A ``Relu`` of a custom domain may be anything: it goes by its full name, so that no rule about Relu meets it.
    """
    own = domain == MICROSOFT and (op_type in _ALIKE or not onnx.defs.has(op_type))
    return op_type if domain in MAIN_DOMAINS or own else f"{domain}.{op_type}"


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the bodies that a node carries (``If``, ``Loop``, ``Scan``, ...), not those nested deeper."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yields a graph and every body nested in it at any depth."""
    stack = [graph]
    while stack:
        current = stack.pop()
        yield current
        for node in current.node:
            stack.extend(subgraphs(node))


def all_nodes(model: onnx.ModelProto, *, functions: bool = True) -> Iterator[onnx.NodeProto]:
    """Yields every node of the main graph, of nested bodies and (optionally) of model-local functions."""
    for graph in all_graphs(model.graph):
        yield from graph.node
    if functions:
        for function in model.functions:
            stack = list(function.node)
            while stack:
                node = stack.pop()
                yield node
                for body in subgraphs(node):
                    stack.extend(body.node)


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yields every tensor stored in the model: initializers, sparse ones and attributes, at any depth."""
    for graph in all_graphs(model.graph):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield sparse.values
            yield sparse.indices
    for node in all_nodes(model):
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == onnx.AttributeProto.TENSORS:
                yield from attribute.tensors
            elif attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                yield attribute.sparse_tensor.values
                yield attribute.sparse_tensor.indices
            elif attribute.type == onnx.AttributeProto.SPARSE_TENSORS:
                for sparse in attribute.sparse_tensors:
                    yield sparse.values
                    yield sparse.indices
    for graph in all_graphs_of_functions(model):
        yield from graph.initializer


def all_graphs_of_functions(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yields every body nested in model-local functions."""
    for function in model.functions:
        for node in function.node:
            for body in subgraphs(node):
                yield from all_graphs(body)


def outer_names(body: onnx.GraphProto) -> tuple[str, ...]:
    """Returns the names that a body, or one nested in it, reads from the graphs around it, in order."""
    read = dict.fromkeys(name for node in body.node for name in read_names(node))
    read.update(dict.fromkeys(value.name for value in body.output if value.name))
    own = {name for node in body.node for name in node.output}
    own.update(value.name for value in body.input)
    own.update(tensor.name for tensor in body.initializer)
    own.update(tensor.values.name for tensor in body.sparse_initializer)
    return tuple(name for name in read if name not in own)


def captured_names(node: onnx.NodeProto) -> tuple[str, ...]:
    """Returns the names that the bodies of a node read from the graph that the node is in, in order."""
    if not node.attribute:  # most nodes by far
        return ()
    return tuple(dict.fromkeys(name for body in subgraphs(node) for name in outer_names(body)))


def read_names(node: onnx.NodeProto) -> tuple[str, ...]:
    """Returns the names that a node reads, as inputs or in its bodies, in order."""
    return tuple(dict.fromkeys((*(name for name in node.input if name), *captured_names(node))))


def opset_of(model: onnx.ModelProto) -> int:
    """Returns the version of the main operator set, of several entries the last, 0 where the model imports none."""
    versions = [entry.version for entry in model.opset_import if entry.domain in MAIN_DOMAINS]
    return versions[-1] if versions else 0
