"""Node names: every node gets a unique one, names that are already there stay."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from kenosis_ort.graph.walk import all_graphs


def reserve_name(base: str, taken: set[str]) -> str:
    """Returns the name, with a number behind it where it is taken already, and adds it to ``taken``."""
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    taken.add(name)
    return name


def all_names(owner: onnx.ModelProto | onnx.GraphProto) -> set[str]:
    """Returns the names of all nodes and values of a model or graph, those in bodies and functions too."""
    is_model = isinstance(owner, onnx.ModelProto)
    names: set[str] = set()
    for graph in all_graphs(owner.graph if is_model else owner):
        names.update(v.name for v in (*graph.input, *graph.output, *graph.value_info, *graph.initializer))
        names.update(sparse.values.name for sparse in graph.sparse_initializer)
        names.update(name for node in graph.node for name in (node.name, *node.input, *node.output))
    for function in owner.functions if is_model else ():
        names.update(name for node in function.node for name in (node.name, *node.input, *node.output))
    return names - {""}


@dataclass(frozen=True)
class Naming:
    """What was named.

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
