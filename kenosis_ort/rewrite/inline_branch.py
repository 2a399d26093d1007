"""An If whose condition is constant, replaced by the branch that it takes.

``If(c; then, else)`` with a constant ``c`` computes what one of its branches does, on every run. Exporters write such
nodes where a condition depends on the rank of a value or on one of its sizes, which are known by now: a Squeeze in one
branch, a copy in the other. What is inlined may settle further conditions, so shapes are inferred and constants
folded again until no condition is constant any more.

Left alone: conditions that are not constant, and a model that the runtime refuses afterwards: it is stricter about
constants than about values that it does not know (a Range to one number of rank 1).
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import onnx
import onnx.helper
import onnx.numpy_helper

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.bodies import rename_all
from kenosis_ort.graph.constants import constants_to_initializers, replace_nodes
from kenosis_ort.graph.copying import copy_model
from kenosis_ort.graph.names import all_names, reserve_name
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.prepare import RewriteResult
from kenosis_ort.graph.session import open_session
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.rewrite.drop_identity import drop_identity
from kenosis_ort.rewrite.fold_constants import fold_constants

_log = logging.getLogger(__name__)


def inline_branch(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
    """Replaces every If of the main graph whose condition is constant, in place.

    Args:
        model: The model to change, its nodes named, its constants folded.
        keep_values: Values that must keep existing with their meaning.
    """
    if not _settled(model):
        return RewriteResult()
    before = copy_model(model)
    notes: list[str] = []
    merged: dict[str, str] = {}
    inlined = 0
    while found := _inline(model):
        inlined += len(found)
        merged.update(dict.fromkeys(found, ""))
        constants_to_initializers(model)
        infer_shapes(model, thorough=False)
        for rewrite in (drop_identity, fold_constants):
            result = rewrite(model, keep_values=keep_values)
            merged.update(result.merged)
            notes += result.notes
    if not _opens(model) and _opens(before):
        model.CopyFrom(before)
        return RewriteResult()
    return RewriteResult((f"{inlined} If nodes of a constant condition became the branch they take.", *notes), merged)


def _inline(model: onnx.ModelProto) -> list[str]:
    """Inlines the nodes whose condition is a constant now; returns their names."""
    graph = model.graph
    settled = _settled(model)
    if not settled:
        return []
    constants = {tensor.name: tensor for tensor in graph.initializer}
    taken = all_names(model)
    chosen = {id(node): _branch(node, constants[node.input[0]], taken) for node in settled}
    nodes = []
    for node in graph.node:
        branch = chosen.get(id(node))
        if branch is None:
            nodes.append(node)
            continue
        graph.initializer.extend(branch.initializer)
        graph.sparse_initializer.extend(branch.sparse_initializer)
        nodes += branch.node
        for value, output in zip(branch.output, node.output, strict=True):
            if output:
                name = reserve_name(f"{node.name}_{output}", taken)
                nodes.append(onnx.helper.make_node("Identity", [value.name], [output], name=name))
    names = [node.name for node in settled]
    replace_nodes(graph, nodes)
    return names


def _settled(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Returns the If nodes of the main graph whose condition is a constant that callers cannot override."""
    overridable = {value.name for value in model.graph.input}
    constants = {tensor.name for tensor in model.graph.initializer} - overridable
    nodes = model.graph.node
    return [n for n in nodes if n.op_type == "If" and n.domain in MAIN_DOMAINS and n.input[0] in constants]


def _opens(model: onnx.ModelProto) -> bool:
    try:
        open_session(model, optimize=False)
    except VerificationError as error:
        _log.info("not inlined: %s", error)
        return False
    return True


def _branch(node: onnx.NodeProto, condition: onnx.TensorProto, taken: set[str]) -> onnx.GraphProto:
    """Returns a copy of the branch that a node takes; what it defines has names that nothing else has."""
    taken_branch = "then_branch" if array_in(condition).any() else "else_branch"
    made = onnx.GraphProto()
    made.CopyFrom(next(attribute.g for attribute in node.attribute if attribute.name == taken_branch))
    values = {tensor.name for tensor in made.initializer}
    values.update(name for inner in made.node for name in inner.output if name)
    rename_all(made, {name: reserve_name(name, taken) for name in sorted(values)})
    return made
