"""Which node may run in integer at all: the target's rules against its operands, types and the caller's wishes."""

from __future__ import annotations

from collections.abc import Mapping

from kenosis_ort.graph.view import CAPTURED, GraphView, ir
from kenosis_ort.placement.constraints import Constraints, closed
from kenosis_ort.placement.requirements import unmet
from kenosis_ort.targets.model import FusionRule, NodeClass, Requirement, Role, Target

_DEFAULT_DOMAINS = ("", "ai.onnx")
_ATTENTION = "matmul-activations"
WEIGHTS_ONLY = "caller-weights-only"
"""The rule by which a linear layer is quantized in its weights alone."""


def classify(
    view: GraphView, target: Target, constraints: Constraints, protected: Mapping[str, str]
) -> dict[str, NodeClass]:
    """Returns the class of every main-graph node, by node name.

    Args:
        view: The prepared model.
        target: The runtime's table.
        constraints: The caller's wishes.
        protected: Node name to reason for nodes that must stay float.
    """
    return {str(node.name): _classify(view, target, constraints, protected, node) for node in view.nodes}


def _classify(
    view: GraphView, target: Target, constraints: Constraints, protected: Mapping[str, str], node: ir.Node
) -> NodeClass:
    rules = target.rules_of(node.op_type)
    found = [_by_rule(view, target, constraints, protected, node, rule) for rule in rules or (None,)]
    return next((c for c in found if c.role not in (Role.FLOAT, Role.ISLAND)), found[0])


def _by_rule(
    view: GraphView,
    target: Target,
    constraints: Constraints,
    protected: Mapping[str, str],
    node: ir.Node,
    rule: FusionRule | None,
) -> NodeClass:
    data = tuple(v for v in node.inputs if v is not None and view.is_float32(v) and not view.is_constant(v))
    if rule is None or (node.domain not in _DEFAULT_DOMAINS and rule.role is not Role.ISLAND):
        reason = f"{target.name} has no integer kernel for {_op(node)}"
        return NodeClass(node, Role.FLOAT, "unsupported-op", reason, data)
    # A cheap float operator stays transparent for the integer domain around it, whoever keeps it float.
    cheap = Role.FLOAT if rule.role in (Role.ANCHOR, Role.FLOAT) else Role.ISLAND
    wish = _kept_float(view, constraints, protected, node, rule)
    if wish is not None and not (rule.role is Role.PASS_THROUGH and _read_by_body(view, node)):
        return NodeClass(node, cheap, *wish, data)
    if rule.role in (Role.ISLAND, Role.FLOAT):
        return NodeClass(node, rule.role, rule.id, rule.why, data)
    data = _data_inputs(view, node, rule)
    if not data or not all(view.is_float32(v) for v in (*data, *node.outputs[:1])):
        return NodeClass(node, Role.FLOAT, "not-float32", "its data is not known to be float32", data)
    if any(view.is_constant(v) for v in data):
        return NodeClass(node, cheap, "constant-operand", "its data input is a constant", data)
    if view.opset() < rule.min_opset:
        reason = f"needs opset {rule.min_opset}, the model has {view.opset()}"
        return NodeClass(node, cheap, rule.id, reason, data)
    failed = _failed_requirement(view, target, node, rule) or _failed_constraint(view, constraints, node, rule)
    if failed is not None:
        return NodeClass(node, cheap, *failed, data)
    return NodeClass(node, rule.role, rule.id, rule.why, data)


def _kept_float(
    view: GraphView, constraints: Constraints, protected: Mapping[str, str], node: ir.Node, rule: FusionRule
) -> tuple[str, str] | None:
    """Returns the rule and reason by which the caller, protection or verification keeps a node float."""
    name = str(node.name)
    wish = closed(constraints.options, node)
    vanishes = rule.role in (Role.ISLAND, Role.ACTIVATION)  # never quantized themselves
    if wish is not None and (name in constraints.options.nodes_to_exclude or not vanishes):
        return wish
    if name in constraints.insisted or constraints.weights_only(view, node) is not None:
        return None
    if name in protected:
        return "protected-input", protected[name]
    if name in constraints.options.keep_float:
        return "verified-float", constraints.options.keep_float[name]
    return None


def _failed_constraint(
    view: GraphView, constraints: Constraints, node: ir.Node, rule: FusionRule
) -> tuple[str, str] | None:
    """Returns the rule and reason by which no integer kernel fits what the caller says about a node's tensors."""
    clash = constraints.clashing_types(view, node)
    if clash is not None:
        return "caller-tensor-types", clash
    if rule.role is not Role.ANCHOR:
        return None
    weights_only = constraints.weights_only(view, node)
    return None if weights_only is None else (WEIGHTS_ONLY, weights_only)


def _read_by_body(view: GraphView, node: ir.Node) -> bool:
    """Tells whether a body reads what a node writes.

    A shape operator there takes part even against the caller's wish: it changes no value, and in float, behind a
    DQ, the session dies of it (rule pass-through-into-body-dies).
    """
    return any(c.index == CAPTURED for value in node.outputs for c in view.consumers(value))


def _data_inputs(view: GraphView, node: ir.Node, rule: FusionRule) -> tuple[ir.Value, ...]:
    """Returns the inputs that the integer kernel would read as quantized data."""
    if rule.data_inputs is not None:
        found = [node.inputs[i] for i in rule.data_inputs if i < len(node.inputs)]
    else:
        found = list(node.inputs)
    return tuple(v for v in found if v is not None and not (rule.role is Role.BINARY and view.is_constant(v)))


def _failed_requirement(view: GraphView, target: Target, node: ir.Node, rule: FusionRule) -> tuple[str, str] | None:
    for requirement in rule.requires:
        reason = unmet(view, node, requirement)
        if reason is not None:
            matmul = node.op_type == "MatMul" and requirement is Requirement.CONSTANT_WEIGHT
            return (_ATTENTION if matmul and _ATTENTION in dict(target.facts) else rule.id), reason
    return None


def _op(node: ir.Node) -> str:
    named = not node.domain or node.op_type.startswith(f"{node.domain}.")
    return node.op_type if named else f"{node.domain}.{node.op_type}"
