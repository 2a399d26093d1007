"""Decides on nodes and edges, one by one: type, symmetry, own or shared parameters, by which rule, why."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from kenosis_ort.graph.operators import LAYERS
from kenosis_ort.graph.view import CAPTURED, ir
from kenosis_ort.placement.assignment import Assignment, channel_axis
from kenosis_ort.placement.eligibility import WEIGHTS_ONLY
from kenosis_ort.placement.sharing import ScaleGroups
from kenosis_ort.plan import Decision, Edge, EdgeRole, How, Kind, NodeDecision
from kenosis_ort.targets import model as targets
from kenosis_ort.targets.model import NodeClass

_SIGNED = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT4)


class Decider:
    """Collects the decisions of one plan.

    Args:
        assignment: What each node is.
        groups: Which values share their parameters.
        own_grids: Values whose kernels write on a grid of their own.

    Attributes:
        nodes: A decision by node, in the order of :meth:`decide_node`.
        decisions: A decision by edge.
    """

    def __init__(self, assignment: Assignment, groups: ScaleGroups, own_grids: Container[str]) -> None:
        self.assignment = assignment
        self.groups = groups
        self.own_grids = own_grids
        self.view = assignment.view
        self.options = assignment.options
        self.constraints = assignment.constraints
        self.classes = assignment.classes
        self.absorption = assignment.absorption
        self.domain = assignment.domain
        self.quantized = assignment.quantized
        self.nodes: list[NodeDecision] = []
        self.decisions: list[Decision] = []

    def decide_node(self, node: ir.Node) -> None:
        """Decides on a node and all that it reads."""
        name = str(node.name)
        c = self.classes[name]
        if name in self.assignment.biased:
            kind, rule, reason = Kind.ABSORBED, "matmul-add-int32-bias", "its bias joins the MatMul before it as int32"
        elif name in self.assignment.absorbed:
            kind, rule = Kind.ABSORBED, c.rule
            into = "requantization" if node.op_type in self.assignment.target.clamps else "kernel"
            reason = f"vanishes into the {into} of '{self.absorption.by_activation[name].name}'"
        elif self.assignment.is_integer(node):
            passes = c.role is targets.Role.PASS_THROUGH
            kind, rule, reason = (Kind.PASS_THROUGH if passes else Kind.INTEGER), c.rule, c.reason
            missing = self.constraints.without_kernel(self.view, node, self.assignment.natural_axis(node))
            if missing is not None:
                kind, rule, reason = Kind.FLOAT, "caller-types", missing
        elif name in self.assignment.requested:
            kind, rule, reason = (
                Kind.FLOAT,
                "caller-insists",
                f"quantized all the same: {self.assignment.requested[name]}",
            )
        elif c.rule == WEIGHTS_ONLY:
            kind = Kind.FLOAT if name in self.options.keep_float else Kind.INTEGER
            rule, reason = c.rule, self.options.keep_float.get(name, c.reason)
        else:
            kind, (rule, reason) = Kind.FLOAT, self._why_float(node, c)
        self.nodes.append(NodeDecision(name, node.op_type, kind, rule, reason))
        for index, value in enumerate(node.inputs):
            if value is not None and self.view.is_float32(value):
                self._decide_edge(node, c, index, value)
        for value in self.view.captured_by(node):
            if self.view.is_float32(value) and not self.view.is_constant(value):
                edge = Edge(str(value.name), name, CAPTURED)
                self.decisions.append(self._float_read(edge, value, EdgeRole.ACTIVATION))

    def _why_float(self, node: ir.Node, c: NodeClass) -> tuple[str, str]:
        name = str(node.name)
        if c.role is targets.Role.ANCHOR and self.domain.heads.get(name):
            return "output-protection", "computes a graph output; the output policy keeps it float"
        if name in self.domain.refused:
            return "caller-float-output", self.domain.refused[name]
        if c.role is targets.Role.ACTIVATION and name in self.absorption.refused:
            return c.rule, f"does not vanish: {self.absorption.refused[name]}"
        if c.role in (targets.Role.ISLAND, targets.Role.FLOAT, targets.Role.ANCHOR):
            return c.rule, c.reason
        return "integer-domain", "it is not fed by integer kernels only, or nothing behind it runs in integer"

    def _decide_edge(self, node: ir.Node, c: NodeClass, index: int, value: ir.Value) -> None:
        name, edge = str(node.name), Edge(str(value.name), str(node.name), index)
        carries = self.assignment.carries(node) and edge.value in self.quantized
        if self.view.is_constant(value):
            self._decide_constant(node, c, edge)
            return
        if carries and any(value is v for v in self.assignment.data(node)):
            self.decisions.append(self._quantized(edge, EdgeRole.ACTIVATION, c.rule, f"'{name}' reads integers"))
            return
        if value is self.assignment.shortcut(node):
            reason = f"the shortcut that the kernel of '{self.absorption.by_activation[name].name}' adds"
            self.decisions.append(self._quantized(edge, EdgeRole.ACTIVATION, c.rule, reason))
            return
        self.decisions.append(self._float_read(edge, value, EdgeRole.ACTIVATION))

    def _decide_constant(self, node: ir.Node, c: NodeClass, edge: Edge) -> None:
        integer, requested = self.assignment.is_integer(node), str(node.name) in self.assignment.requested
        weighted = (integer and c.role is targets.Role.ANCHOR) or (requested and node.op_type in LAYERS)
        how, role, rule, reason = How.FLOAT, EdgeRole.WEIGHT, c.rule, "belongs to a float node"
        axis: int | None = None
        scale_from: tuple[str, str] | None = None
        beta = 1.0
        name = str(node.name)
        if name in self.assignment.biased and edge.index == self.assignment.biased[name][1]:
            matmul = self.assignment.biased[name][0]
            how, role, rule = How.DERIVED, EdgeRole.BIAS, "matmul-add-int32-bias"
            reason, scale_from = "int32 at input_scale * weight_scale", _scale_from(matmul)
        elif (weighted or c.rule == WEIGHTS_ONLY) and edge.index == 1:
            how, reason, axis = How.OWN, "weights of an integer kernel", self._weight_axis(node)
        elif edge.value in self.constraints.overrides and (integer or requested):
            how, reason = How.OWN, "the caller's own parameters (TensorQuantOverrides)"
            axis = self.constraints.overrides.axis(edge.value)
        elif weighted and edge.index == 2 and self.assignment.bias_follows(node) and self._reads_quantized(node):
            how, role, reason = How.DERIVED, EdgeRole.BIAS, "int32 at input_scale * weight_scale"
            scale_from, beta = _scale_from(node), self.view.attribute_float(node, "beta", 1.0)
        elif weighted and edge.index == 2:
            role, reason = EdgeRole.BIAS, "the bias stays float"
        elif (integer and c.role is targets.Role.BINARY) or (requested and self._is_binary(node)):
            how, role, reason = How.OWN, EdgeRole.ACTIVATION, "exact operand of an integer kernel"
        self.decisions.append(Decision(edge, role, how, rule, reason, None, axis, scale_from, beta))

    def _reads_quantized(self, node: ir.Node) -> bool:
        return node.inputs[0] is not None and str(node.inputs[0].name) in self.quantized

    def _is_binary(self, node: ir.Node) -> bool:
        rule = self.assignment.target.rule(node.op_type)
        return rule is not None and rule.role is targets.Role.BINARY

    def _weight_axis(self, node: ir.Node) -> int | None:
        """The axis of a weight's scales, None for one scale; one answer for all nodes that share a weight."""
        if (
            self.options.block_size and self.classes[str(node.name)].rule == WEIGHTS_ONLY
        ):  # along the axis that the kernel sums over
            return 1 - channel_axis(self.view, node) if node.op_type in ("Gemm", "MatMul") else 0
        weight = node.inputs[1]
        assert weight is not None
        axes = {
            self.constraints.weight_axis(self.view, c.node, self.assignment.natural_axis(c.node))
            for c in self.view.consumers(weight)
            if c.index == 1 and (self.assignment.carries(c.node) or self.classes[str(c.node.name)].rule == WEIGHTS_ONLY)
        }
        return axes.pop() if len(axes) == 1 else None

    def _quantized(self, edge: Edge, role: EdgeRole, rule: str, reason: str) -> Decision:
        root = self.groups.root(edge.value)
        if root == edge.value:
            return Decision(edge, role, How.OWN, rule, reason)
        return Decision(edge, role, How.SHARED, rule, f"{reason}, with the parameters of '{root}'", provider=root)

    def _float_read(self, edge: Edge, value: ir.Value, role: EdgeRole) -> Decision:
        if str(value.name) not in self.quantized:
            return Decision(edge, role, How.FLOAT, "not-quantized", "neither side needs integers")
        if self.assignment.owned_by_integer(value):
            root = self.groups.root(edge.value)
            reason = "the integer kernel before it writes integers only"
            provider = None if root == edge.value else root
            return Decision(edge, role, How.DEQUANTIZED, "integer-producer", reason, provider)
        return Decision(edge, role, How.FLOAT, "float-producer", "reads the float value beside its Q")

    def decide_outputs(self) -> None:
        """Decides how the graph's outputs are read."""
        for index, value in enumerate(self.view.outputs):
            if self.view.is_float32(value):
                edge = Edge(str(value.name), "", index)
                producer = value.producer()
                if (
                    str(value.name) in self.quantized
                    and producer is not None
                    and self.assignment.owned_by_integer(value)
                ):
                    rule = self.classes[str(producer.name)].rule
                    decision = self._quantized(edge, EdgeRole.OUTPUT, rule, "comes out of an integer kernel")
                else:
                    decision = self._float_read(edge, value, EdgeRole.OUTPUT)
                self.decisions.append(decision)

    def with_grid(self, decision: Decision) -> Decision:
        """A decision with the integer type and symmetry that its value is read in."""
        overrides, value = self.constraints.overrides, decision.edge.value
        if decision.how is How.FLOAT:
            return decision
        if decision.how is How.DERIVED:
            return replace(decision, dtype=_type_name(ir.DataType.INT32), symmetric=True)
        root = decision.provider or value
        weight = decision.role is EdgeRole.WEIGHT
        dtype = overrides.weight_type(value) if weight else overrides.type_read(root, decision.edge.consumer)
        symmetric = overrides.symmetric(root)
        if symmetric is None and weight:
            symmetric = self.options.weight_symmetric
            symmetric = ir.DataType(dtype) in _SIGNED if symmetric is None else symmetric
        elif symmetric is None:
            symmetric = self.options.activation_symmetric and not self.view.constant(value)
            symmetric = symmetric and root not in self.own_grids  # their kernels write from their own zero point
        return replace(decision, dtype=_type_name(dtype), symmetric=symmetric)


def _scale_from(node: ir.Node) -> tuple[str, str]:
    data, weight = node.inputs[0], node.inputs[1]
    assert data is not None
    assert weight is not None
    return str(data.name), str(weight.name)


def _type_name(element_type: int) -> str:
    return ir.DataType(element_type).name.lower()
