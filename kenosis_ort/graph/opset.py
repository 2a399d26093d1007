"""The operator set that quantization and the installed runtime need.

The main operator set is raised or lowered. The conversion works node by node on the model as it is, so names, bodies,
custom domains and weights of any size stay untouched. For each operator three cases are told apart by ONNX's own
schemas:

- its definition is the same in both operator sets: nothing to do;
- the later definition only allows more (types, optional inputs, attributes whose default is the old meaning):
  nothing to do, and in the other direction nothing to do for a node that uses none of the additions;
- its meaning or its signature changed: an adapter rewrites the node.

ONNX's version converter is used only for models older than operator set 7.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import onnx

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.constants import detach_initializers, replace_nodes
from kenosis_ort.graph.opset_adapters import ADAPTERS, Adapter, AdapterContext, NoEquivalentError
from kenosis_ort.graph.shapes import infer_shapes, value_types
from kenosis_ort.graph.walk import MAIN_DOMAINS, name_nodes, opset_of, schema, subgraphs

_OLDEST = 7
"""The oldest operator set that the adapters start from; also the oldest that onnxruntime supports."""

_OLDEST_TARGET = 13
"""Adapters write nodes in the form that operator set 13 and later have: a model is raised at least to it."""


def fit_opset(model: onnx.ModelProto, *, min_opset: int, max_opset: int) -> str | None:
    """Brings a model to an operator set between two bounds, in place and with the smallest change.

    Args:
        model: The model to change, canonical.
        min_opset: Lowest main operator set allowed.
        max_opset: Highest main operator set allowed.

    Returns:
        A note where something changed, else None.

    Raises:
        UnsupportedModelError: A node has no equivalent in the other operator set.
    """
    before = opset_of(model)
    target = min(max(before, min_opset), max_opset)
    if before == target:
        return None
    if before > onnx.defs.onnx_opset_version():
        raise UnsupportedModelError(
            f"The model uses operator set {before}; the installed onnx {onnx.__version__} knows up to "
            f"{onnx.defs.onnx_opset_version()}.",
            where=f"graph '{model.graph.name}'",
            fix=f"Upgrade the onnx package, or export the model with operator set {max_opset} or lower.",
        )
    if target > before:
        target = max(target, min(_OLDEST_TARGET, max_opset))
    start = before
    if start < _OLDEST <= target:
        _convert_ancient(model)
        start = _OLDEST
    infer_shapes(model, thorough=False)  # while every node is in the form that inference knows best
    changed = _convert_graph(model.graph, AdapterContext(model, partial(value_types, model)), start, target)
    for entry in model.opset_import:
        if not entry.domain:
            entry.version = target
    direction = "raised" if target > before else "lowered"
    rewritten = f", {changed} nodes rewritten" if changed else ""
    return f"Operator set {direction} from {before} to {target}{rewritten}."


def _convert_graph(graph: onnx.GraphProto, context: AdapterContext, before: int, target: int) -> int:
    changed = 0
    for inner in [body for node in graph.node for body in subgraphs(node)]:  # first, since replacing nodes copies them
        changed += _convert_graph(inner, context, before, target)
    nodes: list[onnx.NodeProto] = []
    grown = False
    for node in graph.node:
        if node.domain not in MAIN_DOMAINS:
            nodes.append(node)
            continue
        adapters = _adapters(node.op_type, before, target)
        try:
            if adapters:
                context.enter(graph, node)
                for adapter in adapters:
                    adapter(node, context)
                changed += 1
            else:
                _check_relabel(node, before, target)
        except NoEquivalentError as error:
            what = f"{node.op_type} has no equivalent in operator set {target} (the model uses {before}): {error}."
            fix = f"Export the model with operator set {target}, or replace the node."
            raise UnsupportedModelError(what, where=f"node '{node.name}'", fix=fix) from error
        if adapters and (context.before or context.after):
            grown = True
            nodes += [*context.before, node, *context.after]
        else:
            nodes.append(node)
    if grown:
        replace_nodes(graph, nodes)
    return changed


@lru_cache(maxsize=4096)
def _adapters(op_type: str, before: int, target: int) -> tuple[Adapter, ...]:
    old, new = schema(op_type, before), schema(op_type, target)
    if old is None or new is None or old.since_version >= new.since_version:
        return ()
    return tuple(a for version, a in ADAPTERS.get(op_type, ()) if old.since_version < version <= new.since_version)


def _check_relabel(node: onnx.NodeProto, before: int, target: int) -> None:
    """Checks that a node means the same in both operator sets without any change but dropped default attributes.

    Operators that no operator set defines (the runtime's own under the main domain) are left to the runtime.

    Raises:
        NoEquivalentError: The node does not exist, or means something else, in the target.
    """
    old, new = schema(node.op_type, before), schema(node.op_type, target)
    if old is None:
        return
    if new is None or (new.deprecated and not old.deprecated):
        raise NoEquivalentError("the operator does not exist there")
    if old.since_version == new.since_version:
        return
    if target < before and any(
        new.since_version < version <= old.since_version for version, _ in ADAPTERS.get(node.op_type, ())
    ):
        raise NoEquivalentError("its definition changed in between")
    for attribute in list(node.attribute):
        if attribute.name in new.attributes:
            continue
        if attribute.name in old.attributes and old.attributes[attribute.name].default_value == attribute:
            node.attribute.remove(attribute)
            continue
        raise NoEquivalentError(f"it does not know the attribute '{attribute.name}'")
    if _used(node.input) > new.max_input or _used(node.output) > new.max_output:
        raise NoEquivalentError("it has fewer inputs or outputs there")
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in new.attributes.items():
        if attribute.required and name not in given:
            raise NoEquivalentError(f"it needs the attribute '{name}'")


def _used(names: Sequence[str]) -> int:
    return max((at + 1 for at, name in enumerate(names) if name), default=0)


def _convert_ancient(model: onnx.ModelProto) -> None:
    """Converts a model older than operator set 7, in place, with ONNX's version converter."""
    before = opset_of(model)
    listed = {value.name for value in model.graph.input}
    model.graph.input.extend(  # the converter knows no initializer that is not an input
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in model.graph.initializer
        if tensor.name not in listed
    )
    try:
        converted = onnx.version_converter.convert_version(model, _OLDEST)
    except Exception as error:  # the binding lets any C++ exception through
        what = f"ONNX cannot convert the model from operator set {before} to {_OLDEST}: {str(error).splitlines()[0]}."
        fix = "Export the model again with operator set 13 or later."
        raise UnsupportedModelError(what, where=f"graph '{model.graph.name}'", fix=fix) from error
    detach_initializers(converted, keep=listed)
    model.CopyFrom(converted)
    name_nodes(model)
