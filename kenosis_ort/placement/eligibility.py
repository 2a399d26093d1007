"""Which node may run in integer at all: the target's rules against the node's operands, types and the caller's wishes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import PlacementOptions
from kenosis_ort.targets.model import FusionRule, Requirement, Role, Target

_DEFAULT_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class NodeClass:
    """What a node could become.

    Attributes:
        node: The node.
        role: Its role in the target; `Role.FLOAT` or `Role.ISLAND` if something forbids the integer kernel.
        rule: The rule that decided.
        reason: Why.
        data: The values that carry activations, by input position (float32, not constant).
    """

    node: ir.Node
    role: Role
    rule: str
    reason: str
    data: tuple[ir.Value, ...]


def classify(
    view: GraphView, target: Target, options: PlacementOptions, protected: Mapping[str, str]
) -> dict[str, NodeClass]:
    """Returns the class of every main-graph node, by node name.

    Args:
        view: The prepared model.
        target: The runtime's table.
        options: The caller's wishes.
        protected: Node name to reason for nodes that must stay float.
    """
    return {str(node.name): _classify(view, target, options, protected, node) for node in view.nodes}


def _classify(
    view: GraphView, target: Target, options: PlacementOptions, protected: Mapping[str, str], node: ir.Node
) -> NodeClass:
    name = str(node.name)
    data = tuple(v for v in node.inputs if v is not None and view.is_float32(v) and not view.is_constant(v))
    rule = target.rule(node.op_type)
    if rule is not None and node.domain not in _DEFAULT_DOMAINS and rule.role is not Role.ISLAND:
        rule = None

    def made(role: Role, rule_id: str, reason: str) -> NodeClass:
        return NodeClass(node, role, rule_id, reason, data)

    # A cheap float operator stays transparent for the integer domain around it, whoever keeps it float.
    cheap = Role.FLOAT if rule is None or rule.role in (Role.ANCHOR, Role.FLOAT) else Role.ISLAND
    if rule is None:
        return made(Role.FLOAT, "unsupported-op", f"{target.name} has no integer kernel for {_op(node)}")
    if name in options.nodes_to_exclude:
        return made(cheap, "caller-excluded", "excluded by the caller (nodes_to_exclude)")
    if options.nodes_to_quantize and name not in options.nodes_to_quantize:
        return made(cheap, "caller-not-named", "not among the caller's nodes_to_quantize")
    if options.op_types is not None and node.op_type not in options.op_types and rule.role is not Role.ISLAND:
        return made(cheap, "caller-op-types", f"{node.op_type} is not among the caller's op_types_to_quantize")
    if name in protected:
        return made(cheap, "protected-input", protected[name])
    if name in options.keep_float:
        return made(cheap, "verified-float", options.keep_float[name])
    if rule.role in (Role.ISLAND, Role.FLOAT):
        return made(rule.role, rule.id, rule.why)
    if view.opset() < rule.min_opset:
        return made(cheap, rule.id, f"needs opset {rule.min_opset}, the model has {view.opset()}")
    if rule.data_inputs is not None:
        positions = [node.inputs[i] if i < len(node.inputs) else None for i in rule.data_inputs]
        data = tuple(v for v in positions if v is not None)
    if not data or not all(view.is_float32(v) for v in data) or not _outputs_float32(view, node):
        return made(Role.FLOAT, "not-float32", "its data is not known to be float32")
    if any(view.is_constant(v) for v in data):
        return made(cheap, "constant-operand", "its data input is a constant")
    failed = _failed_requirement(view, node, rule)
    if failed is not None:
        return made(cheap, failed[0], failed[1])
    return NodeClass(node, rule.role, rule.id, rule.why, data)


def _failed_requirement(view: GraphView, node: ir.Node, rule: FusionRule) -> tuple[str, str] | None:
    for requirement in rule.requires:
        reason = _unmet(view, node, requirement)
        if reason is not None:
            matmul = node.op_type == "MatMul" and requirement is Requirement.CONSTANT_WEIGHT
            return ("matmul-activations" if matmul else rule.id), reason
    return None


def _unmet(view: GraphView, node: ir.Node, requirement: Requirement) -> str | None:
    """Returns why a node misses a requirement, None if it meets it."""
    inputs = node.inputs
    if requirement is Requirement.CONSTANT_WEIGHT:
        weight = inputs[1] if len(inputs) > 1 else None
        if not view.is_constant(weight):
            return "its second operand is not a constant weight"
        assert weight is not None
        if not view.is_float32(weight):
            return f"its weight '{weight.name}' is {weight.dtype}, not float32"
        if math.prod(weight.const_value.shape.numpy() if weight.const_value is not None else ()) == 0:
            return f"its weight '{weight.name}' is empty"
        return None
    if requirement is Requirement.CONSTANT_OR_NO_BIAS:
        bias = inputs[2] if len(inputs) > 2 else None
        if bias is None:
            return None
        if not view.is_constant(bias):
            return f"its bias '{bias.name}' is not a constant"
        weight = inputs[1]
        channels = _out_channels(view, node, weight) if weight is not None else None
        if bias.shape is None or len(bias.shape) != 1 or (channels is not None and bias.shape[0] != channels):
            return f"its bias '{bias.name}' is not a vector of one value a channel"
        return None
    if requirement is Requirement.UNIT_ALPHA:
        if view.attribute_float(node, "alpha", 1.0) != 1.0:
            return "alpha is not 1: the runtime would run it in float"
        return None
    if requirement is Requirement.NO_TRANS_A:
        return "its first operand is transposed" if view.attribute_int(node, "transA", 0) else None
    if requirement is Requirement.WEIGHT_RANK_2:
        weight = inputs[1]
        if weight is None or view.rank(weight) != 2:
            return "its weight is not a matrix"
        return None
    if requirement is Requirement.RESIZE_NEAREST:
        if view.attribute_str(node, "mode", "nearest") != "nearest":
            return "only nearest mode runs on bytes"
        return None
    if requirement is Requirement.ONE_OUTPUT:
        used = [v for v in node.outputs[1:] if v.name and (view.consumers(v) or view.is_output(v))]
        return f"its further output '{used[0].name}' is used" if used else None
    if requirement is Requirement.SCALAR_CONSTANT:
        for value in inputs:
            if value is not None and view.is_constant(value) and view.array(value).size != 1:
                return f"its constant operand '{value.name}' holds several values, which one scale would blur"
        return None
    if view.rank(inputs[0]) != 4 if inputs and inputs[0] is not None else True:  # FOUR_DIMENSIONAL
        return "only four-dimensional data has an integer kernel"
    return None


def _out_channels(view: GraphView, node: ir.Node, weight: ir.Value) -> int | None:
    dims = view.dims(weight)
    if not dims:
        return None
    if node.op_type == "Conv" or view.attribute_int(node, "transB", 0):
        return dims[0]
    return dims[-1]


def _outputs_float32(view: GraphView, node: ir.Node) -> bool:
    return bool(node.outputs) and view.is_float32(node.outputs[0])


def _op(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type
