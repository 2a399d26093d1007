"""Iteration over all that a `ModelProto` nests (bodies of control flow, functions, tensors), attributes, and names.

Every node gets a unique name; names that are already there stay. The IR version is lowered to what the installed
runtime reads, or raised to what the operator sets need.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import onnx

MAIN_DOMAINS = ("", "ai.onnx")

MICROSOFT = "com.microsoft"
"""The domain of the runtime's own operators; its version is 1 whatever the main operator set is."""

_ALIKE = frozenset({"DequantizeLinear", "FastGelu", "Gelu", "QuantizeLinear", "QuickGelu"})
"""Operators that mean the same in the main domain and in the runtime's own."""

_OWNERS = ("If", "Loop", "Scan")
_LATEST = 2**31 - 1  # what ONNX takes for a version

NodeOwner = onnx.GraphProto | onnx.FunctionProto
"""What holds a list of nodes."""


def known_as(domain: str, op_type: str) -> str:
    """The name under which rules know an operator.

    A ``Relu`` of a custom domain may be anything: it goes by its full name, so that no rule about Relu meets it.
    """
    own = domain == MICROSOFT and (op_type in _ALIKE or not onnx.defs.has(op_type))
    return op_type if domain in MAIN_DOMAINS or own else f"{domain}.{op_type}"


@lru_cache(maxsize=4096)
def schema(op_type: str, version: int, domain: str = "") -> onnx.defs.OpSchema | None:
    """Schema of an operator in a version of its operator set, None for one that ONNX does not know."""
    try:
        return onnx.defs.get_schema(op_type, max(min(version, _LATEST), 0), domain)
    except onnx.defs.SchemaError:
        return None


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the bodies that a node carries (``If``, ``Loop``, ``Scan``, ...), not those nested deeper."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """A graph and every body nested in it at any depth, each behind the one that it stands in."""
    found, stack = list[onnx.GraphProto](), [graph]
    while stack:
        found.append(stack.pop())
        for node in found[-1].node:
            if node.attribute:
                stack.extend(subgraphs(node))
    return found


def all_nodes(model: onnx.ModelProto, *, functions: bool = True) -> list[onnx.NodeProto]:
    """Every node of the main graph, of nested bodies and (optionally) of model-local functions."""
    nodes = [node for graph in all_graphs(model.graph) for node in graph.node]
    for function in model.functions if functions else ():
        nodes += nodes_within(function.node)
    return nodes


def owners(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yields the nodes of the main graph that have bodies."""
    return (node for node in model.graph.node if node.op_type in _OWNERS and not node.domain)


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Nodes and those of their bodies, at any depth."""
    found, stack = list[onnx.NodeProto](), list(nodes)
    while stack:
        found.append(stack.pop())
        for body in subgraphs(found[-1]):
            stack.extend(body.node)
    return found


def all_tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Every tensor stored in the model: initializers, sparse ones and attributes, at any depth."""
    tensors, sparse = list[onnx.TensorProto](), list[onnx.SparseTensorProto]()
    inner = (node for function in model.functions for node in nodes_within(function.node))
    for graph in (*all_graphs(model.graph), *(body for node in inner for body in subgraphs(node))):
        tensors += graph.initializer
        sparse += graph.sparse_initializer
    for node in all_nodes(model):
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                tensors.append(attribute.t)
            elif attribute.type == onnx.AttributeProto.TENSORS:
                tensors += attribute.tensors
            elif attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                sparse.append(attribute.sparse_tensor)
            elif attribute.type == onnx.AttributeProto.SPARSE_TENSORS:
                sparse += attribute.sparse_tensors
    return [*tensors, *(part for each in sparse for part in (each.values, each.indices))]


def outer_names(body: onnx.GraphProto) -> tuple[str, ...]:
    """The names that a body, or one nested in it, reads from the graphs around it, in order."""
    read = dict.fromkeys(name for node in body.node for name in read_names(node))
    read.update(dict.fromkeys(value.name for value in body.output if value.name))
    own = {name for node in body.node for name in node.output}
    own.update(value.name for value in (*body.input, *body.initializer))
    own.update(tensor.values.name for tensor in body.sparse_initializer)
    return tuple(name for name in read if name not in own)


def captured_names(node: onnx.NodeProto) -> tuple[str, ...]:
    """The names that the bodies of a node read from the graph that the node is in, in order."""
    if not node.attribute:  # most nodes by far
        return ()
    return tuple(dict.fromkeys(name for body in subgraphs(node) for name in outer_names(body)))


def read_names(node: onnx.NodeProto) -> tuple[str, ...]:
    """The names that a node reads, as inputs or in its bodies, in order."""
    return tuple(dict.fromkeys((*(name for name in node.input if name), *captured_names(node))))


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the main operator set, of several entries the last, 0 where the model imports none."""
    versions = [entry.version for entry in model.opset_import if entry.domain in MAIN_DOMAINS]
    return versions[-1] if versions else 0


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    """A node's attribute, None if it has none of that name."""
    return next((a for a in node.attribute if a.name == name), None)


def attribute_int(node: onnx.NodeProto, name: str, default: int) -> int:
    """An integer attribute, or its default."""
    found = attribute(node, name)
    return default if found is None else int(found.i)


def attribute_float(node: onnx.NodeProto, name: str, default: float) -> float:
    """A float attribute, or its default."""
    found = attribute(node, name)
    return default if found is None else float(found.f)


def reserve_name(base: str, taken: set[str]) -> str:
    """Unique name, with a number at its end where ``taken`` has it already; it is added to ``taken``."""
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    taken.add(name)
    return name


def all_names(owner: onnx.ModelProto | onnx.GraphProto) -> set[str]:
    """The names of all nodes and values of a canonical model or a graph, those in bodies too."""
    names: set[str] = set()
    for graph in all_graphs(owner.graph if isinstance(owner, onnx.ModelProto) else owner):
        names.update(v.name for v in (*graph.input, *graph.output, *graph.value_info, *graph.initializer))
        names.update(sparse.values.name for sparse in graph.sparse_initializer)
        names.update(name for node in graph.node for name in (node.name, *node.input, *node.output))
    return names - {""}


def rename_all(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Renames nodes and values of a graph and of the bodies in it."""
    for nested in all_graphs(graph):
        for value in (*nested.input, *nested.output, *nested.value_info, *nested.initializer):
            value.name = names.get(value.name, value.name)
        for node in nested.node:
            node.name = names.get(node.name, node.name)
            for values in (node.input, node.output):
                for at, name in enumerate(values):
                    if name in names:
                        values[at] = names[name]


def part_names(graph: onnx.GraphProto) -> None:
    """Renames values so that no two bodies side by side have one name for two values, in place.

    A name that hides one of a graph around it stays: it is for the runtime to refuse.
    """
    taken, known = all_names(graph), set[str]()
    pending = [(graph, frozenset[str]())]
    while pending:
        nested, around = pending.pop()
        own = {value.name for value in (*nested.input, *nested.initializer)}
        own.update(name for node in nested.node for name in node.output if name)
        renamed = {name: reserve_name(name, taken) for name in sorted(own & known - around)}
        if renamed:
            rename_all(nested, renamed)
        known |= own
        inside = around.union(own, renamed.values())
        pending += [(body, inside) for node in nested.node for body in subgraphs(node)]


class Naming(NamedTuple):
    """Names given to nodes.

    Attributes:
        unnamed: How many nodes had no name.
        duplicates: For each name that several nodes of the main graph had, the names they have now.
    """

    unnamed: int
    duplicates: dict[str, tuple[str, ...]]


def name_nodes(model: onnx.ModelProto) -> Naming:
    """Gives each node of the main graph and of its bodies a name of its own, in place.

    A node without a name is called ``<op type>_<first output>``; of several nodes of one name in the main graph the
    first keeps it and the others get a suffix.
    """
    taken = {node.name for graph in all_graphs(model.graph) for node in graph.node}
    used: set[str] = set()
    suffixes: dict[str, int] = {}
    duplicates: dict[str, list[str]] = {}
    unnamed = 0

    def fresh(base: str) -> str:
        name = base
        while name in taken:
            suffixes[base] = suffixes.get(base, 0) + 1
            name = f"{base}_{suffixes[base]}"
        taken.add(name)
        return name

    for graph in all_graphs(model.graph):
        for node in graph.node:
            if not node.name:
                unnamed += 1
                node.name = fresh(f"{node.op_type}_{next((name for name in node.output if name), '')}")
            elif node.name in used:
                original = node.name
                node.name = fresh(original)
                if graph is model.graph:
                    duplicates.setdefault(original, [original]).append(node.name)
            used.add(node.name)
    return Naming(unnamed, {name: tuple(now) for name, now in duplicates.items()})


_DEFAULT_INPUTS_SINCE = 4
"""From this IR version on, initializers need not be graph inputs."""


def fit_ir_version(model: onnx.ModelProto, *, max_ir: int) -> str | None:
    """Sets the model's IR version in place.

    The IR version only says which fields a reader must know; lowering it is right as long as the model uses
    none that came later, and the runtime ignores the later ones (metadata, device configurations).

    Returns:
        A note where the version changed, else None.
    """
    before = model.ir_version
    needed = max(before, _DEFAULT_INPUTS_SINCE, _needed_for_opset(opset_of(model)))
    model.ir_version = min(needed, max_ir)
    if model.ir_version == before:
        return None
    if model.ir_version < before:
        return f"IR version lowered from {before} to {model.ir_version}, the newest that the installed runtime reads."
    return f"IR version raised from {before} to {model.ir_version}."


def _needed_for_opset(opset: int) -> int:
    """The IR version that was current when a main operator set was published."""
    published = onnx.helper.OP_SET_ID_VERSION_MAP.items()
    known = {version: ir for (domain, version), ir in published if domain in MAIN_DOMAINS}
    if not known or not opset:
        return 0
    return known.get(opset, max(known.values()))


def drop_initializers(graph: onnx.GraphProto, indices: Iterable[int]) -> None:
    """Removes the initializers at some places, in place."""
    for at in sorted(indices, reverse=True):
        del graph.initializer[at]
