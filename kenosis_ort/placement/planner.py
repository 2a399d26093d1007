"""The planner: one decision an edge, one a node, before the graph is touched.

A decision says type and symmetry, whether scale and zero point are a value's own or shared, by which rule, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial

from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.product_pairs import weight_pair
from kenosis_ort.graph.view import CAPTURED, FLOAT, GraphView, ir
from kenosis_ort.placement.absorption import saturation_limits
from kenosis_ort.placement.assignment import Assignment
from kenosis_ort.placement.constraints import WEIGHTS_ONLY, channel_axis
from kenosis_ort.placement.scale_groups import Range, ScaleGroups
from kenosis_ort.plan import (
    Decision,
    Edge,
    EdgeRole,
    How,
    Kind,
    NodeDecision,
    PlacementOptions,
    PlacementPlan,
    RangeLimit,
)
from kenosis_ort.targets.model import Placed, Target
from kenosis_ort.targets.vocabulary import NodeClass, Role

_AS_INT32 = "int32 at input_scale * weight_scale"
_SIGNED = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT4)


class Decider:
    """The decisions that hold for all ranges, of which a plan's follow.

    Args:
        assignment: What each node is.
        own_grids: Values whose kernels write on a grid of their own.

    Attributes:
        nodes: A decision by node, in the order of the graph.
    """

    def __init__(self, assignment: Assignment, own_grids: Container[str]) -> None:
        self.assignment, self.own_grids = assignment, own_grids
        self.view, self.options, self.constraints = assignment.view, assignment.options, assignment.constraints
        self.classes, self.absorption, self.quantized = assignment.classes, assignment.absorption, assignment.quantized
        self._axes: dict[ir.Value, int | None] = {}  # of the scales of weights
        self.nodes: list[NodeDecision] = []
        self._decisions: list[Decision] = []  # by edge, each value with parameters of its own
        captured = [self.view.captured_by(node) for node in self.view.nodes]
        for node, values in zip(self.view.nodes, captured, strict=True):
            self._decide_node(node, values)
        self._decide_outputs()

    def _decide_node(self, node: ir.Node, captured: Iterable[ir.Value]) -> None:
        """Decides on a node and all that it reads, in its bodies too."""
        name = str(node.name)
        c = self.classes[name]
        self.nodes.append(NodeDecision(name, node.op_type, *self._kind(node, c)))
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == FLOAT:
                self._decisions.append(self._read(node, c, Edge(str(value.name), name, index), value))
        for value in captured:
            if value.dtype == FLOAT and not value.is_initializer():
                edge = Edge(str(value.name), name, CAPTURED)
                self._decisions.append(self._float_read(edge, value, EdgeRole.ACTIVATION))

    def _kind(self, node: ir.Node, c: NodeClass) -> tuple[Kind, str, str]:
        """Kind of a node, with rule and reason."""
        name, assigned, domain = str(node.name), self.assignment, self.assignment.domain
        if name in assigned.biased:
            return Kind.ABSORBED, "matmul-add-int32-bias", "its bias joins the MatMul before it as int32"
        if name in assigned.absorbed:
            into = "requantization" if node.op_type in assigned.target.clamps else "kernel"
            return Kind.ABSORBED, c.rule, f"vanishes into the {into} of '{self.absorption.by_activation[name].name}'"
        if name in domain.integer:
            missing = self.constraints.without_kernel(node)
            if missing is not None:
                return Kind.FLOAT, "caller-types", missing
            return (Kind.PASS_THROUGH if c.role is Role.PASS_THROUGH else Kind.INTEGER), c.rule, c.reason
        if name in assigned.requested:
            return Kind.FLOAT, "caller-insists", f"quantized all the same: {assigned.requested[name]}"
        if c.rule == WEIGHTS_ONLY:
            kind = Kind.FLOAT if name in self.options.keep_float else Kind.INTEGER
            return kind, c.rule, self.options.keep_float.get(name, c.reason)
        # Float, by whom?
        if c.role is Role.ANCHOR and domain.last_anchors.get(name):
            return Kind.FLOAT, "output-protection", "computes a graph output; the output policy keeps it float"
        if name in domain.refused:
            return Kind.FLOAT, "caller-float-output", domain.refused[name]
        if c.role is Role.ACTIVATION and name in self.absorption.refused:
            return Kind.FLOAT, c.rule, f"does not vanish: {self.absorption.refused[name]}"
        if c.role in (Role.ISLAND, Role.FLOAT, Role.ANCHOR):
            return Kind.FLOAT, c.rule, c.reason
        reason = "it is not fed by integer kernels only, or nothing behind it runs in integer"
        return Kind.FLOAT, "integer-domain", reason

    def _read(self, node: ir.Node, c: NodeClass, edge: Edge, value: ir.Value) -> Decision:
        """Decision about an input of a node."""
        name, assigned = edge.consumer, self.assignment
        if value.is_initializer():
            return self._read_constant(node, c, edge)
        carries = name in assigned.carrying and edge.value in self.quantized
        if carries and any(value is v for v in assigned.data(node)):
            return Decision(edge, EdgeRole.ACTIVATION, How.OWN, c.rule, f"'{name}' reads integers")
        if value is assigned.shortcuts.get(name):
            reason = f"the shortcut that the kernel of '{self.absorption.by_activation[name].name}' adds"
            return Decision(edge, EdgeRole.ACTIVATION, How.OWN, c.rule, reason)
        return self._float_read(edge, value, EdgeRole.ACTIVATION)

    def _read_constant(self, node: ir.Node, c: NodeClass, edge: Edge) -> Decision:
        name, assigned, overrides = edge.consumer, self.assignment, self.constraints.overrides
        integer, requested = name in assigned.domain.integer, name in assigned.requested
        weighted = (integer and c.role is Role.ANCHOR) or (requested and node.op_type in LAYERS)
        if name in assigned.biased and edge.index == assigned.biased[name][1]:
            rule, grids = "matmul-add-int32-bias", _grids(assigned.biased[name][0])
            return Decision(edge, EdgeRole.BIAS, How.DERIVED, rule, _AS_INT32, scale_from=grids)
        if (weighted or c.rule == WEIGHTS_ONLY) and edge.index == 1:
            axis, reason = self._weight_axis(node), "weights of an integer kernel"
            return Decision(edge, EdgeRole.WEIGHT, How.OWN, c.rule, reason, axis=axis)
        if edge.value in overrides and (integer or requested):
            axis, reason = overrides.axis(edge.value), "the caller's own parameters (TensorQuantOverrides)"
            return Decision(edge, EdgeRole.WEIGHT, How.OWN, c.rule, reason, axis=axis)
        if weighted and edge.index == 2:
            data = node.inputs[0]
            if not self.constraints.bias_follows(node) or data is None or str(data.name) not in self.quantized:
                return Decision(edge, EdgeRole.BIAS, How.FLOAT, c.rule, "the bias stays float")
            beta, grids = node.attributes.get_float("beta", 1.0), _grids(node)
            return Decision(edge, EdgeRole.BIAS, How.DERIVED, c.rule, _AS_INT32, scale_from=grids, beta=beta)
        table = assigned.target.rule(node.op_type)
        named = requested and table is not None and table.role is Role.BINARY
        if (integer and c.role is Role.BINARY) or named:
            return Decision(edge, EdgeRole.ACTIVATION, How.OWN, c.rule, "exact operand of an integer kernel")
        return Decision(edge, EdgeRole.WEIGHT, How.FLOAT, c.rule, "belongs to a float node")

    def _weight_axis(self, node: ir.Node) -> int | None:
        """The axis of a weight's scales, None for one scale; one answer for all nodes that share a weight."""
        if self.options.block_size and self.classes[str(node.name)].rule == WEIGHTS_ONLY:
            # Along the axis that the kernel sums over.
            return 1 - channel_axis(node) if node.op_type in ("Gemm", "MatMul") else 0
        weight = node.inputs[1]
        assert weight is not None
        if weight not in self._axes:
            readers, carrying = [c.node for c in self.view.consumers(weight) if c.index == 1], self.assignment.carrying
            known = [r for r in readers if str(r.name) in carrying or self.classes[str(r.name)].rule == WEIGHTS_ONLY]
            axes = {self.constraints.weight_axis(node) for node in known}
            self._axes[weight] = axes.pop() if len(axes) == 1 else None
        return self._axes[weight]

    def _float_read(self, edge: Edge, value: ir.Value, role: EdgeRole) -> Decision:
        if str(value.name) not in self.quantized:
            return Decision(edge, role, How.FLOAT, "not-quantized", "neither side needs integers")
        if self.assignment.owned_by_integer(value):
            reason = "the integer kernel before it writes integers only"
            return Decision(edge, role, How.DEQUANTIZED, "integer-producer", reason)
        return Decision(edge, role, How.FLOAT, "float-producer", "reads the float value beside its Q")

    def _decide_outputs(self) -> None:
        """Decides how the graph's outputs are read."""
        for index, value in enumerate(self.view.graph.outputs):
            edge, producer = Edge(str(value.name), "", index), value.producer()
            owned = edge.value in self.quantized and self.assignment.owned_by_integer(value)
            if value.dtype != FLOAT:
                continue
            if owned and producer is not None:
                rule = self.classes[str(producer.name)].rule
                reason = "comes out of an integer kernel"
                self._decisions.append(Decision(edge, EdgeRole.OUTPUT, How.OWN, rule, reason))
            else:
                self._decisions.append(self._float_read(edge, value, EdgeRole.OUTPUT))

    def with_grids(self, groups: ScaleGroups, moved: Mapping[str, str]) -> tuple[Decision, ...]:
        """The decisions with integer types and symmetry; values that an operator moved to a grid are read as they are.

        Args:
            groups: Which values share their parameters.
            moved: Values that lie on a grid without Q of their own, with what moved them.
        """
        shared = groups.applied(self._decisions)
        grids = zip(shared, self.constraints.overrides.grids(shared), strict=True)
        return tuple([_read_as_is(self._with_grid(d, *grid), moved) for d, grid in grids])

    def _with_grid(self, decision: Decision, dtype: int, symmetric: bool | None) -> Decision:
        """A decision with the integer type that its value is read in, and symmetry, as given or by the options."""
        value = decision.edge.value
        if decision.how is How.FLOAT:
            return decision
        if decision.how is How.DERIVED:
            return replace(decision, dtype="int32", symmetric=True)
        root = decision.provider or value
        weight = decision.role is EdgeRole.WEIGHT
        if symmetric is None and weight:
            symmetric = self.options.weight_symmetric
            symmetric = ir.DataType(dtype) in _SIGNED if symmetric is None else symmetric
        elif symmetric is None:
            symmetric = self.options.activation_symmetric and value not in self.view.graph.initializers
            symmetric = symmetric and root not in self.own_grids  # their kernels write from their own zero point
        return replace(decision, dtype=ir.DataType(dtype).name.lower(), symmetric=symmetric)


def _grids(node: ir.Node) -> tuple[str, str]:
    """The values whose scales make that of a layer's bias."""
    data, weight = node.inputs[0], node.inputs[1]
    assert data is not None
    assert weight is not None
    return str(data.name), str(weight.name)


def _read_as_is(decision: Decision, moved: Mapping[str, str]) -> Decision:
    """A decision to read a value as it is where an operator moved it there from a grid."""
    mover = moved.get(decision.edge.value)
    if mover is None or decision.how is How.FLOAT:
        return decision
    reason = f"'{mover}' moves bytes: it is on their grid already"
    return replace(
        decision, how=How.FLOAT, rule="moves-keep-grid", reason=reason, provider=None, dtype="", symmetric=False
    )


_WIDE = (ir.DataType.UINT16, ir.DataType.INT16)


class Planner:
    """Plans one model under one set of options; what does not depend on ranges is worked out once.

    Args:
        view: The prepared model.
        target: The runtime's table.
        options: The caller's wishes.
        finish: Returns what becomes of a plan; None leaves it as it is.

    Attributes:
        saturations: Bounds beyond which all consumers of a value saturate.
        constrained: The nodes that touch what the caller speaks about: no pass changes their weights, no rewrite their
            form.
    """

    def __init__(
        self,
        view: GraphView,
        target: Target,
        options: PlacementOptions,
        finish: Callable[[PlacementPlan], PlacementPlan] | None = None,
    ) -> None:
        self.view, self.target, self.options, self._finish = view, target, options, finish
        self._plans: dict[tuple[_Placement, bool, frozenset[tuple[str, str]]], PlacementPlan] = {}
        self._base = _Placement(Assignment(view, target, options))
        self._placements = {tuple(options.keep_float.items()): self._base}
        self.saturations = self._base.saturations
        self.constrained: set[str] = self._base.assignment.constraints.constrained()

    def integer_candidates(self) -> set[str]:
        """The nodes that a rewrite for integer kernels may change: integer anchors, and what lies between."""
        domain, classes = self._base.assignment.domain, self._base.assignment.classes
        return {name for name in domain.integer if classes[name].role is Role.ANCHOR} | domain.between

    def plan(
        self, ranges: Mapping[str, Range] | None = None, keep_float: Mapping[str, str] | None = None
    ) -> PlacementPlan:
        """The plan, made once for all ranges by which the same values share their scales.

        Args:
            ranges: Calibrated (low, high) by value name. None before calibration: the plan then names every value that
                may carry a Q, and so has to be observed.
            keep_float: Nodes left float, with the reason, in place of those of the options.
        """
        placement = self._base if keep_float is None else self._placement(keep_float)
        groups = placement.groups(ranges)
        shared = placement, bool(ranges), groups.shared
        if shared in self._plans:
            return self._plans[shared]
        plan = placement.plan(groups, ranges)
        plan = plan if self._finish is None else self._finish(plan)
        if not placement.own_grids:  # these follow the ranges
            self._plans[shared] = plan
        return plan

    def _placement(self, keep_float: Mapping[str, str]) -> _Placement:
        key = tuple(keep_float.items())
        if key not in self._placements:
            options = replace(self.options, keep_float=dict(keep_float))
            known = None if self.options.keep_float else self._base.assignment
            self._placements[key] = _Placement(Assignment(self.view, self.target, options, known))
        return self._placements[key]


class _Placement:
    """One model with some nodes left float, as far as it does not depend on ranges.

    Args:
        assignment: What each node is.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.view, self.target, self.options = assignment.view, assignment.target, assignment.options
        self.assignment = assignment
        quantized, limits = self.assignment.quantized, self.assignment.absorption.limits
        self.own_grids = self._find_own_grids()
        self.limits = tuple(limit for name, limit in limits.items() if name in quantized)
        narrowed = saturation_limits(self.view, quantized.values())
        few = filter(None, map(self._clipping_little, narrowed))
        self.saturations = tuple(few) if self.target.clips_slowly else narrowed
        self.quantile_lows = tuple(limit.value for limit in narrowed if limit not in self.saturations)

    def _clipping_little(self, limit: RangeLimit) -> RangeLimit | None:
        """A limit that an integer kernel seldom clips at: below 0, where half of the values may be, far off."""
        producer = self.assignment.quantized[limit.value].producer()
        if limit.low != 0.0 or producer is None or str(producer.name) not in self.assignment.domain.integer:
            return limit
        return None if limit.high is None else replace(limit, low=-limit.high)

    def _find_own_grids(self) -> dict[str, Range | None]:
        """The values whose kernels write on a grid of their own, with its range where that is one alone."""
        found: dict[str, Range | None] = {}
        assignment, overrides = self.assignment, self.assignment.constraints.overrides
        rules = {rule.id: rule for rule in assignment.target.rules if rule.own_grid or rule.wide_output}
        for name in sorted(assignment.domain.integer):
            rule = rules.get(assignment.classes[name].rule)
            value = str(assignment.classes[name].node.outputs[0].name)
            is_wide = ir.DataType(overrides.type_of(value)) in _WIDE
            if rule is not None and rule.own_grid and not is_wide:
                overrides.refuse_offset(value, rule.why)
            if rule is not None and not overrides.has_scale(value):
                ends = rule.wide_output if is_wide else None
                found.update({value: ends} if rule.own_grid or ends is not None else {})
        return found

    def groups(self, ranges: Mapping[str, Range] | None) -> ScaleGroups:
        """Groups of quantized values that use one scale and zero point.

        Args:
            ranges: Calibrated (low, high) by value name; None or empty while planning before calibration.
        """
        assignment, target, view = self.assignment, self.target, self.view
        fixed = assignment.constraints.values
        groups = ScaleGroups(ranges or {}, assignment.absorption.limits, target.concat_share_limit)

        def is_read_beside(concat: ir.Node, name: str) -> bool:
            value = assignment.quantized[name]
            return view.is_output(value) or any(
                c.node is not concat
                and (c.index == CAPTURED or assignment.classes[str(c.node.name)].role is not Role.PASS_THROUGH)
                for c in view.consumers(value)
            )

        for node in view.nodes:
            c = assignment.classes[str(node.name)]
            if str(node.name) not in assignment.carrying:
                continue
            for out in [str(v.name) for v in assignment.written[str(node.name)]]:
                if c.role is Role.PASS_THROUGH:
                    read = str(c.data[0].name)
                    groups.tie(*((read, out) if groups.root(out) in fixed else (out, read)))  # the caller's own provide
                elif c.role is Role.CONCAT and groups.root(out) not in fixed:
                    for value in dict.fromkeys(str(v.name) for v in c.data):
                        if groups.root(value) in fixed or groups.root(value) in self.own_grids:
                            continue
                        if target.whole or groups.may_share(value, out, partial(is_read_beside, node)) is None:
                            groups.tie(value, out)
        return groups

    def _values_moved(self, groups: ScaleGroups) -> dict[str, str]:
        """The values that lie on a grid without Q of their own, for they are moved bytes, with what moved them.

        Before calibration nothing is known about which Concats share their grid: all values are observed then.
        """
        assignment, providers = self.assignment, dict[str, str]()
        for node in self.view.nodes:
            name = str(node.name)
            copies = assignment.classes[name].role in (Role.PASS_THROUGH, Role.CONCAT)
            if not copies or name not in assignment.domain.integer:
                continue
            read = {groups.root(str(v.name)) for v in assignment.data(node)}
            for value in [str(v.name) for v in assignment.written[name]]:
                free = value in assignment.quantized and value not in assignment.constraints.values
                if free and read == {groups.root(value)}:
                    providers[value] = name
        return providers

    def _grid_limits(self, groups: ScaleGroups) -> tuple[RangeLimit, ...]:
        """The ranges of grids of one range alone, and of Concats that read any: none may saturate what it reads."""
        found = {name: ends for name, ends in self.own_grids.items() if ends is not None}
        ranges = groups.ranges
        for name in self.assignment.domain.integer if self.own_grids and ranges else ():
            c = self.assignment.classes[name]
            root = groups.root(str(c.node.outputs[0].name))
            read = [r for v in c.data if (r := groups.root(str(v.name))) in self.own_grids]
            if c.role is Role.CONCAT and read and root in ranges:
                ends = [found.get(value) or ranges[value] for value in (root, *read) if value in ranges]
                found[root] = min(low for low, _ in ends), max(high for _, high in ends)
        return tuple(RangeLimit(name, *ends) for name, ends in sorted(found.items()))

    @cached_property
    def _decider(self) -> Decider:
        return Decider(self.assignment, self.own_grids)

    def plan(self, groups: ScaleGroups, ranges: Mapping[str, Range] | None) -> PlacementPlan:
        """The plan for values that share their scales in groups."""
        moved = self._values_moved(groups) if ranges and self.target.keeps_grid else {}
        decisions = self._decider.with_grids(groups, moved)
        by_value: dict[str, list[Decision]] = {}
        for d in decisions:
            by_value.setdefault(d.edge.value, []).append(d)
        a, domain = self.assignment, self.assignment.domain
        placed = Placed(
            self.view, domain.integer, domain.float_output, a.absorbed, a.biased, a.requested, a.quantized, by_value
        )
        return PlacementPlan(
            target=self.target.name,
            decisions=decisions,
            nodes=tuple(self._decider.nodes),
            limits=self.limits,
            saturations=tuple(s for s in self.saturations if groups.members(s.value) == [s.value]),
            grids=self._grid_limits(groups),
            barriers=self.target.hooks.barriers(placed),
            splits=self._splits(by_value),
            quantile_lows=tuple(value for value in self.quantile_lows if groups.members(value) == [value]),
            largest_pair=weight_pair(self.target.types.largest_pair),
            even_channels=self.target.types.even_channels,
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        names = ", ".join(f"'{name}'" for name in self.own_grids)
        if not (names and self.options.activation_symmetric):
            return ()
        return (f"ActivationSymmetric is not kept for {names}: kernels of {self.target.name} write zero point 0 there",)

    def _splits(self, decisions: Mapping[str, list[Decision]]) -> dict[str, bool]:
        """The quantized values with several readers, where the runtime wants one each.

        Source: rules int8-activation-branch-float and int8-branches-behind-barrier.
        """
        if not self.options.splits_readers:
            return {}
        found = {}
        for name, value in self.assignment.quantized.items():
            reads = [d for d in decisions.get(name, ()) if d.how is not How.FLOAT]
            if len(reads) > 1 and not self.assignment.constraints.overrides.converts(name):
                found[name] = self.assignment.owned_by_integer(value)
        return found
