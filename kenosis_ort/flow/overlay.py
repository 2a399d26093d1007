"""Corrections belong to integer nodes: one that is left float has its own weights and biases again, whoever decided it.

Rounded weights and corrected biases make up for the error of int8 arithmetic. In a node that runs in float they make up
for an error that is not there: the first three nodes of MLPerf's ResNet-8 left float with their corrections have an
error of 0.00210, with their own biases of 0.00096.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

from kenosis_ort.graph.copying import copy_model
from kenosis_ort.graph.operators import LAYERS
from kenosis_ort.plan import Kind, PlacementPlan


def restored(model: onnx.ModelProto, base: onnx.ModelProto, plan: PlacementPlan) -> onnx.ModelProto:
    """Returns the model with the base's weights and biases in all layers that the plan leaves float.

    Args:
        model: The corrected model. Not changed.
        base: The same nodes and names, without corrections. Not changed.
        plan: Says which layers run in integer.

    Returns:
        A changed copy; the model itself where nothing differs.
    """
    integer = set(plan.integer_nodes())
    left = {n.node for n in plan.nodes if n.op_type in LAYERS and n.kind is not Kind.INTEGER}
    kept = {node.name for node in model.graph.node if node.op_type in LAYERS and node.name in integer}
    wanted = _constants(model, left) - _constants(model, kept)
    originals = {tensor.name: tensor for tensor in base.graph.initializer if tensor.name in wanted}
    differ = {
        tensor.name
        for tensor in model.graph.initializer
        if tensor.name in originals and tensor != originals[tensor.name]
    }
    if not differ:
        return model
    changed = copy_model(model)
    for tensor in changed.graph.initializer:
        if tensor.name in differ:
            tensor.CopyFrom(originals[tensor.name])
    return changed


def _constants(model: onnx.ModelProto, layers: Collection[str]) -> set[str]:
    """Returns what layers read, and the Adds that hold their biases."""
    outputs = {o for node in model.graph.node if node.name in layers for o in node.output}
    return {
        name
        for node in model.graph.node
        if node.name in layers or (node.op_type == "Add" and outputs.intersection(node.input))
        for name in node.input
    }
