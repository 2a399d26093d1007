"""One spelling of any model, as the runtime reads each of several.

- *Operator sets*: of several entries of one domain the last one counts; without an entry it is the newest one that the
  runtime knows. Bodies of model-local functions are read by the model's entries.
- *Functions* of the model are put in the place of their calls, so that the operators in them can be planned.
- *Constants*: of several of one name the one counts that the runtime reads; sparse ones become dense.
- *Order*: nodes come after those they read from.
- *Outputs* that an operator need not have and nobody reads (a Dropout's mask, the indices of a MaxPool) are dropped.

Nothing here changes what the model computes.
"""

import heapq
import logging
from collections import Counter
from collections.abc import Collection, Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import onnx
import onnx.inliner

from kenosis_ort.graph import walk
from kenosis_ort.graph.constants import replace_entries, replace_nodes
from kenosis_ort.graph.outside import array_in, copy_model, copy_with_hollow_weights
from kenosis_ort.graph.walk import drop_initializers
from kenosis_ort.runtime.machine import runtime_limits
from kenosis_ort.runtime.session import open_session

_log = logging.getLogger(__name__)

_Option = onnx.defs.OpSchema.FormalParameterOption


def make_canonical(
    model: onnx.ModelProto, *, keep_values: Collection[str] = ()
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Respells a model, in place.

    Args:
        model: The model, its nodes named.
        keep_values: Values that must keep existing under their names.

    Returns:
        Sentences for the report; for each node of the main graph that called a function, the names of the nodes that
        do its work.
    """
    functions = len(model.functions)
    import_operator_sets(model)
    inlined = inline_functions(model)
    if functions:
        walk.name_nodes(model)
    overruled = settle_duplicates(model)
    densify(model)
    unordered = sort_nodes(model)
    unread = drop_unread_outputs(model, keep_values)
    counts = {
        f"{functions} functions of the model were put in the place of their calls.": functions,
        f"{overruled} constants in whose place the runtime reads others of the same name were dropped.": overruled,
        "The nodes were put in topological order.": unordered,
        f"{unread} optional outputs that nothing reads were dropped.": unread,
    }
    made = {name: node.name for node in model.graph.node for name in node.output if name}
    nodes = {call: tuple(made[name] for name in outputs if name in made) for call, outputs in inlined.items()}
    return [note for note, count in counts.items() if count], nodes


def import_operator_sets(model: onnx.ModelProto) -> None:
    """Writes one entry for each operator set that the model uses, the main one as "", in place."""
    entries = {entry.domain: entry.version for entry in model.opset_import if entry.domain not in walk.MAIN_DOMAINS}
    main = walk.opset_of(model) or runtime_limits().max_opset
    for function in model.functions:
        for entry in function.opset_import:
            if entry.domain not in walk.MAIN_DOMAINS:
                entries.setdefault(entry.domain, entry.version)
    for node in walk.all_nodes(model):
        if node.domain not in walk.MAIN_DOMAINS:
            entries.setdefault(node.domain, runtime_limits().max_ml if node.domain == "ai.onnx.ml" else 1)
    del model.opset_import[:]
    for domain, version in (("", main), *entries.items()):
        model.opset_import.add(domain=domain, version=version)
    for node in walk.all_nodes(model):
        if node.domain == "ai.onnx":
            node.domain = ""


def inline_functions(model: onnx.ModelProto) -> dict[str, tuple[str, ...]]:
    """Puts the model's functions in the place of their calls, in place.

    Returns:
        For each node of the main graph that called one, the first outputs of the nodes that do its work now.
    """
    if not model.functions:
        return {}
    own = {(function.domain, function.name) for function in model.functions}
    calls = [node for node in model.graph.node if (node.domain, node.op_type) in own]
    outline = copy_with_hollow_weights(model, {tensor.name for tensor in model.graph.initializer})
    for function in outline.functions:
        for entry in function.opset_import:
            if entry.domain in walk.MAIN_DOMAINS:
                entry.version = walk.opset_of(model)
    defaults = {(f.domain, f.name): f.attribute_proto for f in model.functions if f.attribute_proto}
    for node in walk.all_nodes(outline) if defaults else ():  # the inliner forgets them
        given = {attribute.name for attribute in node.attribute}
        node.attribute.extend(a for a in defaults.get((node.domain, node.op_type), ()) if a.name not in given)
    inlined = onnx.inliner.inline_local_functions(outline)
    done = _done_by([(call.name, set(call.output)) for call in calls], model, inlined.graph.node)
    replace_nodes(model.graph, list(inlined.graph.node))
    del model.functions[:]
    return done


def _done_by(
    calls: Iterable[tuple[str, set[str]]], before: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]
) -> dict[str, tuple[str, ...]]:
    """Nodes in the place of each call, by their first output; calls and nodes come in graph order."""
    known = {tuple(node.output) for node in before.graph.node}
    left = iter(calls)
    found: dict[str, tuple[str, ...]] = {}
    name, missing = next(left, ("", set()))
    for node in nodes:
        if tuple(node.output) in known and not missing.intersection(node.output):
            continue
        found[name] = (*found.get(name, ()), next(iter(node.output), ""))
        missing -= set(node.output)
        if not missing:
            name, missing = next(left, (name, set()))
    return found


def densify(model: onnx.ModelProto) -> None:
    """Makes sparse initializers, and Constant nodes that hold sparse tensors, dense ones, in place."""
    for graph in walk.all_graphs(model.graph):
        sparse = {s.values.name: s for s in graph.sparse_initializer}
        if sparse:
            graph.initializer.extend(_dense(tensor) for tensor in sparse.values())
            del graph.sparse_initializer[:]
    for node in walk.all_nodes(model):
        if _is_constant(node):
            for attribute in node.attribute:
                if attribute.name == "sparse_value":
                    dense = onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor))
                    attribute.CopyFrom(dense)


def _is_constant(node: onnx.NodeProto) -> bool:
    return node.op_type == "Constant" and node.domain in walk.MAIN_DOMAINS and bool(node.output)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    values, indices = (array_in(t) for t in (sparse.values, sparse.indices))
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 2:  # (values, axes)
        dense[tuple(indices.T)] = values
    else:
        dense.reshape(-1)[indices] = values
    return onnx.numpy_helper.from_array(dense, sparse.values.name)


def settle_duplicates(model: onnx.ModelProto) -> int:
    """Leaves one of several constants of the same name, the one that the runtime reads, in place.

    Which one that is depends on its version and on the size of the tensor, so it is asked.

    Returns:
        How many were dropped.
    """
    count = 0
    for graph in walk.all_graphs(model.graph)[::-1]:  # bodies first: replacing nodes copies them
        names = [t.name for t in graph.initializer] + [s.values.name for s in graph.sparse_initializer]
        names += [name for node in graph.node if _is_constant(node) for name in node.output]
        several = {name for name, times in Counter(names).items() if times > 1}
        values = _as_read(model, graph, several) if several else None
        if values is None:
            continue
        count += sum(name in several for name in names) - len(several)
        drop_initializers(graph, [at for at, tensor in enumerate(graph.initializer) if tensor.name in several])
        left_sparse = [s for s in graph.sparse_initializer if s.values.name not in several]
        replace_entries(graph, "sparse_initializer", left_sparse)
        left = [n for n in graph.node if not _is_constant(n) or n.output[0] not in several]
        if len(left) < len(graph.node):
            replace_nodes(graph, left)
        graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in values.items())
    return count


def _as_read(model: onnx.ModelProto, graph: onnx.GraphProto, names: Collection[str]) -> dict[str, Any] | None:
    """The values that the runtime gives to constants of which there are several; None where it refuses them."""
    asked = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    asked.graph.name = "constants"
    asked.graph.initializer.extend(t for t in graph.initializer if t.name in names)
    asked.graph.sparse_initializer.extend(s for s in graph.sparse_initializer if s.values.name in names)
    asked.graph.node.extend(n for n in graph.node if _is_constant(n) and n.output[0] in names)
    answers = {name: f"{name}/read" for name in names}
    for name, answer in answers.items():
        asked.graph.node.add(op_type="Identity", input=[name], output=[answer])
        asked.graph.output.add(name=answer)
    try:
        session = open_session(asked, optimize=False)
        return dict(zip(answers, session.run(list(answers.values()), {}), strict=True))
    except Exception as error:  # the runtime's classes have no common base
        _log.info("the runtime refuses constants of the same name: %s", error)
        return None


def sort_nodes(model: onnx.ModelProto) -> bool:
    """Puts every node behind those it reads from, in the main graph and in bodies, in place.

    Nodes that are in order keep it. A cycle is left as it is, for the runtime to refuse.

    Returns:
        Whether the main graph was out of order.
    """
    changed = False
    for graph in walk.all_graphs(model.graph)[::-1]:  # bodies first, as above
        order = _order(graph)
        if order is not None:
            replace_nodes(graph, [graph.node[at] for at in order])
            changed |= graph is model.graph
    return changed


def in_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model itself where its nodes are in topological order, else a copy in which they are."""
    if _order(model.graph) is None:
        return model
    ordered = copy_model(model)
    sort_nodes(ordered)
    return ordered


def _order(graph: onnx.GraphProto) -> list[int] | None:
    """The indices of the nodes in a topological order, None where they are in one or cannot be."""
    makers = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
    reads = [{makers[name] for name in walk.read_names(node) if name in makers} for node in graph.node]
    if all(at > maker for at, found in enumerate(reads) for maker in found):
        return None
    sorter = TopologicalSorter(dict(enumerate(reads)))
    try:
        sorter.prepare()
    except CycleError:
        return None
    order, ready = list[int](), sorted(sorter.get_ready())
    while ready:  # of those that may come next, the one that came first
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
        for at in sorter.get_ready():
            heapq.heappush(ready, at)
    return order


def drop_unread_outputs(model: onnx.ModelProto, keep_values: Collection[str] = ()) -> int:
    """Removes unread optional outputs of nodes of the main domain, in place; returns their number.

    A BatchNormalization keeps its own: the runtime normalizes by the batch where they are declared.
    """
    opset = walk.opset_of(model)
    count = 0
    for graph in walk.all_graphs(model.graph):
        used = {name for node in graph.node for name in walk.read_names(node)} | {v.name for v in graph.output}
        used.update(keep_values)
        for node in graph.node:
            if len(node.output) > 1 and node.domain in walk.MAIN_DOMAINS and node.op_type != "BatchNormalization":
                schema = walk.schema(node.op_type, opset)
                outputs = () if schema is None else schema.outputs
                optional = {at for at, output in enumerate(outputs) if output.option == _Option.Optional}
                for at, name in enumerate(node.output):
                    if name and at in optional and name not in used:
                        node.output[at] = ""
                        count += 1
                while len(node.output) > 1 and not node.output[-1] and len(node.output) - 1 in optional:
                    del node.output[-1]
    return count
