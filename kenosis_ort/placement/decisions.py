"""Decisions on nodes and edges: type, symmetry, own or shared scale and zero point, by which rule, why.

Operators that move bytes need the same parameters in and out. Producers of a Concat may take over the parameters
of its output, which saves the requantization; they do so only where nothing is lost: no absorbed activation would
come back to life, and no other consumer of the value would see a much coarser grid.

Nodes whose data, weights or products are too small or large for float32 scales stay float. An integer kernel multiplies
the scales of its data and its weights in float32. Where that underflows or overflows, as with weights near 1e-36, the
kernel and the int32 bias beside it compute on different grids.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace

from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.view import CAPTURED, GraphView, ir
from kenosis_ort.placement.assignment import Assignment, channel_axis
from kenosis_ort.placement.eligibility import WEIGHTS_ONLY
from kenosis_ort.plan import Decision, Edge, EdgeRole, How, Kind, NodeDecision, PlacementPlan, RangeLimit
from kenosis_ort.targets import model as targets
from kenosis_ort.targets.model import NodeClass, Role

Range = tuple[float, float]


@dataclass
class ScaleGroups:
    """Union-find over value names; a group's root provides the parameters.

    Args:
        ranges: Calibrated (low, high) by value name; empty while planning before calibration.
        limits: Bounds that absorbed activations put on a value's range.
        share_limit: Largest coarsening of a value that has other consumers.
    """

    ranges: Mapping[str, Range]
    limits: Mapping[str, RangeLimit]
    share_limit: float
    _parent: dict[str, str] = field(default_factory=dict)
    _members: dict[str, list[str]] = field(default_factory=dict)

    def root(self, value: str) -> str:
        while (parent := self._parent.get(value, value)) != value:
            self._parent[value] = self._parent.get(parent, parent)
            value = parent
        return value

    @property
    def shared(self) -> frozenset[tuple[str, str]]:
        """The values that take another's parameters, each with the one that provides them."""
        return frozenset((value, self.root(value)) for value in list(self._parent))

    def tie(self, value: str, provider: str) -> None:
        """Makes ``value``'s whole group use ``provider``'s parameters."""
        a, b = self.root(value), self.root(provider)
        if a != b:
            self._parent[a] = b
            self._members.setdefault(b, [b]).extend(self._members.pop(a, [a]))

    def members(self, value: str) -> list[str]:
        return self._members.get(self.root(value), [self.root(value)])

    def may_share(self, value: str, provider: str, read_elsewhere: Callable[[str], bool]) -> str | None:
        """Reason why ``value``'s group must not take ``provider``'s parameters, None if it may.

        Args:
            value: A producer of a Concat.
            provider: The Concat's output.
            read_elsewhere: Tells whether a value has consumers beside the Concat.
        """
        target = self.ranges.get(self.root(provider))
        if target is None:
            return None
        low, high = min(target[0], 0.0), max(target[1], 0.0)
        for member in self.members(value):
            limit = self.limits.get(member)
            if limit is not None:
                if limit.low is not None and low < limit.low:
                    return f"the shared range reaches below {limit.low}, which '{member}' absorbs"
                if limit.high is not None and high > limit.high:
                    return f"the shared range reaches above {limit.high}, which '{member}' absorbs"
            own = self.ranges.get(member)
            if own is not None and read_elsewhere(member):
                width = max(own[1], 0.0) - min(own[0], 0.0)
                if high - low > self.share_limit * width:
                    return f"'{member}' is read elsewhere and would lose resolution"
        return None


def share_scales(
    assignment: Assignment, ranges: Mapping[str, Range] | None, own_grids: Container[str] = ()
) -> ScaleGroups:
    """Groups of quantized values that use one scale and zero point.

    Args:
        assignment: What each node is.
        ranges: Calibrated (low, high) by value name; None or empty while planning before calibration.
        own_grids: Values whose kernels write on a grid of their own: they take no other's.
    """
    target, caller_set = assignment.target, assignment.constraints.values
    groups = ScaleGroups(ranges or {}, assignment.absorption.limits, target.concat_share_limit)
    for node in assignment.view.nodes:
        c = assignment.classes[str(node.name)]
        if not assignment.carries(node):
            continue
        for out in (str(v.name) for v in assignment.q_values(node)):
            if c.role is Role.PASS_THROUGH:
                _tie(groups, out, str(c.data[0].name), caller_set)
            elif c.role is Role.CONCAT and groups.root(out) not in caller_set:
                for value in dict.fromkeys(str(v.name) for v in c.data):
                    if groups.root(value) in caller_set or groups.root(value) in own_grids:
                        continue
                    if target.whole or groups.may_share(value, out, _read_beside(assignment, node)) is None:
                        groups.tie(value, out)
    return groups


def _tie(groups: ScaleGroups, value: str, provider: str, caller_set: Container[str]) -> None:
    """Gives two values the same parameters: the caller's own where one of them has such."""
    if groups.root(value) in caller_set:
        value, provider = provider, value
    groups.tie(value, provider)


def _read_beside(assignment: Assignment, concat: ir.Node) -> Callable[[str], bool]:
    view = assignment.view

    def read_beside(name: str) -> bool:
        value = assignment.quantized[name]
        return view.is_output(value) or any(
            c.node is not concat
            and (c.index == CAPTURED or assignment.classes[str(c.node.name)].role is not Role.PASS_THROUGH)
            for c in view.consumers(value)
        )

    return read_beside


_LEAST, _MOST = 1e-30, 1e35  # what is left of float32 when 8-bit steps, sums and a product of scales are taken off


def beyond_scales(view: GraphView, plan: PlacementPlan, ranges: Mapping[str, Range]) -> dict[str, str]:
    """The integer nodes that have to stay float, with the reason.

    Args:
        view: The prepared model.
        plan: Its placement.
        ranges: Calibrated (low, high) by value name.
    """
    found: dict[str, str] = {}
    data: dict[str, float] = {}
    weights: dict[str, tuple[str, float]] = {}
    integer = {n.node for n in plan.nodes if n.kind in (Kind.INTEGER, Kind.PASS_THROUGH)}
    for d in plan.decisions:
        node = d.edge.consumer
        if node not in integer or d.how not in (How.OWN, How.SHARED):
            continue
        if d.role is EdgeRole.WEIGHT:
            value = view.constant(d.edge.value)
            weights[node] = d.edge.value, view.largest(value) if value is not None else 0.0
        elif d.edge.value in ranges:
            largest = max(abs(end) for end in ranges[d.edge.value])
            data[node] = max(largest, data.get(node, 0.0))
            if not _fits(largest):
                found[node] = f"its data '{d.edge.value}' reaches {largest:.1e}: beyond what scales hold"
    for node, (name, largest) in weights.items():
        if not _fits(largest):
            found[node] = f"its weight '{name}' reaches {largest:.1e}: beyond what scales hold"
        elif not _fits(largest * data.get(node, 0.0)):
            found.setdefault(node, f"its data times its weight '{name}' is beyond what scales hold")
    return found


def _fits(largest: float) -> bool:
    return largest == 0.0 or _LEAST <= largest <= _MOST


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
