"""The planner: one decision an edge, one a node, before the graph is touched; and regions left float by estimate.

Without measuring, a region is left float only where the gain is clear. Three questions are asked. Would the whole net
be slower in integer than in float, as nets of microseconds may be, whose kernels cost more to call than to run? Would
it be faster with its first few heavy nodes in float, as mobile nets may be, which begin with the two slowest shapes of
the integer kernels? And would it be parted anywhere else, at the least cost of kernels and conversions? An estimate is
off by up to `CostTable.error`, so a whole net is only given up beyond that; two placements of one net share part of the
error, so less is asked there.

Where integer kernels are slower than float ones for many shapes (`CostTable.anywhere`), the cheapest parting of the
net is asked for instead, wherever its float regions lie, and whether integer pays at all is the estimate's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from kenosis_ort.graph.constants import HEAVY
from kenosis_ort.graph.product_pairs import weight_pair
from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.options import PlacementOptions
from kenosis_ort.placement.absorption import saturation_limits
from kenosis_ort.placement.assignment import Assignment
from kenosis_ort.placement.cost import CostEstimate, NetCosts
from kenosis_ort.placement.decisions import Decider, Range, ScaleGroups, share_scales
from kenosis_ort.plan import Decision, How, PlacementPlan, RangeLimit
from kenosis_ort.targets import model as targets
from kenosis_ort.targets.model import Role
from kenosis_ort.targets.profile import CostTable

_LONGEST: Final = 3
_ROUNDS: Final = 3
_WORTH_IT: Final = 1.03
"""Nets that are estimated to gain less stay float."""
_PREFIX_GAIN: Final = 1.12
"""Estimated prefixes of up to 1.08x were slower when measured, by up to 10 %."""
_LEAST_PREFIX: Final = (1 - 1 / _PREFIX_GAIN) / 2
"""Share of the time below which a prefix cannot gain that much, with as much again for the nodes around it."""

Replan = Callable[[Mapping[str, str]], PlacementPlan]


@dataclass(frozen=True)
class Regions:
    """What to leave in float.

    Attributes:
        plan: The placement with these regions.
        cost: Its estimate.
        all_integer: The estimate of the placement that was asked about.
        keep_float: Node names with the reason.
        whole_net: Float is clearly faster as a whole; then ``plan`` is the one asked about.
        reason: For the report; empty where nothing is left in float.
    """

    plan: PlacementPlan
    cost: CostEstimate
    all_integer: CostEstimate
    keep_float: Mapping[str, str] = field(default_factory=dict)
    whole_net: bool = False
    reason: str = ""


def choose_regions(
    view: GraphView, plan: PlacementPlan, costs: CostTable, replan: Replan, writes_float: Collection[str] = ()
) -> Regions:
    """The regions to leave in float.

    Args:
        view: The prepared model.
        plan: Its placement.
        costs: The runtime's table.
        replan: Returns the placement with some nodes (name to reason) in float.
        writes_float: Operators whose integer kernels write float without a DQ.

    Returns:
        The regions; none where shapes are not known, or no gain is clear.
    """
    net = NetCosts(view, costs)
    base = net.estimate(plan)
    whole = Regions(plan, base, base)
    if base.unknown or not plan.integer_nodes():
        return whole
    parted = _parted(net, whole, replan, writes_float)
    if costs.anywhere:
        if parted.plan.integer_nodes() and parted.cost.speed >= _WORTH_IT:
            return parted
        reason = f"int8 would be {parted.cost.speed:.2f}x of float{_in_us(base.float_us, costs)}"
        return replace(parted if parted.plan.integer_nodes() else whole, whole_net=True, reason=reason)
    best, integer = whole, set(plan.integer_nodes())
    heavy = [node.node for node in plan.nodes if node.op_type in HEAVY and node.node in integer]
    for length in range(1, min(_LONGEST, len(heavy) - 1) + 1):
        names = heavy[:length]
        there = sum(cost.planned_us for cost in base.nodes if cost.node in names)
        if there < _LEAST_PREFIX * base.planned_us:
            continue
        first = f"the first {length} of {len(heavy)} heavy nodes{_in_us(there, costs)}"
        reason = f"float is estimated to be faster for {first}"
        keep = dict.fromkeys(names, reason)
        changed = replan(keep)
        cost = net.estimate(changed)
        if cost.planned_us * _PREFIX_GAIN < best.cost.planned_us:
            best = Regions(changed, cost, base, keep, reason=_compared(reason, cost, base, costs))
    gains = parted.cost.planned_us * _PREFIX_GAIN < best.cost.planned_us
    if gains and parted.keep_float and parted.plan.integer_nodes():
        best = parted
    if best.cost.speed * costs.error < 1:
        reason = f"int8 is estimated at {best.cost.speed:.2f}x of float{_in_us(base.float_us, costs)}"
        return replace(whole, whole_net=True, reason=reason)
    return best


def _parted(net: NetCosts, best: Regions, replan: Replan, writes_float: Collection[str]) -> Regions:
    """The cheapest parting of a net, found from the last one until none is cheaper."""
    base = best.all_integer
    for _ in range(_ROUNDS):
        slower = net.cheapest_in_float(best.plan, writes_float)
        if not slower:
            break
        reason = "float is estimated to be faster there, with the conversions around it"
        keep = {**best.keep_float, **dict.fromkeys(sorted(slower), reason)}
        changed = replan(keep)
        cost = net.estimate(changed)
        if cost.planned_us >= best.cost.planned_us:
            break
        count = sum(base.by_node[name].op_type in HEAVY for name in keep)
        reason = _compared(f"{count} heavy nodes stay float", cost, base, net.costs)
        best = Regions(changed, cost, base, keep, reason=reason)
    return best


def _compared(reason: str, cost: CostEstimate, base: CostEstimate, costs: CostTable) -> str:
    if not costs.shows_times:
        return f"{reason}: {cost.planned_us / base.planned_us:.2f}x of the time"
    return f"{reason}: {cost.planned_us:.0f} us for {base.planned_us:.0f} us"


def _in_us(us: float, costs: CostTable) -> str:
    return f" ({us:.0f} us)" if costs.shows_times else ""


_WIDE = (ir.DataType.UINT16, ir.DataType.INT16)


def find_own_grids(assignment: Assignment) -> dict[str, Range | None]:
    """The values whose kernels write on a grid of their own, with its range where that is one alone."""
    found: dict[str, Range | None] = {}
    rules = {rule.id: rule for rule in assignment.target.rules if rule.own_grid or rule.wide_output}
    for name in sorted(assignment.domain.integer):
        rule = rules.get(assignment.classes[name].rule)
        value = str(assignment.classes[name].node.outputs[0].name)
        is_wide = ir.DataType(assignment.constraints.overrides.type_of(value)) in _WIDE
        if rule is not None and rule.own_grid and not is_wide:
            assignment.constraints.overrides.refuse_offset(value, rule.why)
        if rule is not None and not assignment.constraints.overrides.has_scale(value):
            ends = rule.wide_output if is_wide else None
            found.update({value: ends} if rule.own_grid or ends is not None else {})
    return found


def grid_limits(
    assignment: Assignment, own_grids: Mapping[str, Range | None], groups: ScaleGroups
) -> tuple[RangeLimit, ...]:
    """The ranges of those of one alone, and of Concats that read any: none may saturate what it reads."""
    found = {name: ends for name, ends in own_grids.items() if ends is not None}
    ranges = groups.ranges
    for name in assignment.domain.integer if own_grids and ranges else ():
        c = assignment.classes[name]
        root = groups.root(str(c.node.outputs[0].name))
        read = [r for v in c.data if (r := groups.root(str(v.name))) in own_grids]
        if c.role is Role.CONCAT and read and root in ranges:
            ends = [found.get(value) or ranges[value] for value in (root, *read) if value in ranges]
            found[root] = min(low for low, _ in ends), max(high for _, high in ends)
    return tuple(RangeLimit(name, *ends) for name, ends in sorted(found.items()))


def values_moved(assignment: Assignment, groups: ScaleGroups) -> dict[str, str]:
    """The values that lie on a grid without Q of their own, for they are moved bytes, with what moved them.

    Before calibration nothing is known about which Concats share their grid: all values are observed then.
    """
    providers: dict[str, str] = {}
    for node in assignment.view.nodes:
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
        target: targets.Target,
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
        return {name for name in domain.integer if classes[name].role is targets.Role.ANCHOR} | domain.between

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
        groups = share_scales(placement.assignment, ranges, placement.own_grids)
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
        self.own_grids = find_own_grids(self.assignment)
        self.limits = tuple(limit for name, limit in limits.items() if name in quantized)
        narrowed = saturation_limits(self.view, quantized.values())
        few = filter(None, map(self._clipping_little, narrowed))
        self.saturations = tuple(few) if self.target.clips_slowly else narrowed
        self.spared = tuple(limit.value for limit in narrowed if limit not in self.saturations)

    def _clipping_little(self, limit: RangeLimit) -> RangeLimit | None:
        """A limit that an integer kernel seldom clips at: below 0, where half of the values may be, far off."""
        producer = self.assignment.quantized[limit.value].producer()
        if limit.low != 0.0 or producer is None or str(producer.name) not in self.assignment.domain.integer:
            return limit
        return None if limit.high is None else replace(limit, low=-limit.high)

    @cached_property
    def _decider(self) -> Decider:
        return Decider(self.assignment, self.own_grids)

    def plan(self, groups: ScaleGroups, ranges: Mapping[str, Range] | None) -> PlacementPlan:
        """The plan for values that share their scales in groups."""
        moved = values_moved(self.assignment, groups) if ranges and self.target.keeps_grid else {}
        decisions = self._decider.with_grids(groups, moved)
        by_value: dict[str, list[Decision]] = {}
        for d in decisions:
            by_value.setdefault(d.edge.value, []).append(d)
        a, domain = self.assignment, self.assignment.domain
        placed = targets.Placed(
            self.view, domain.integer, domain.float_output, a.absorbed, a.biased, a.requested, a.quantized, by_value
        )
        return PlacementPlan(
            target=self.target.name,
            decisions=decisions,
            nodes=tuple(self._decider.nodes),
            limits=self.limits,
            saturations=tuple(s for s in self.saturations if groups.members(s.value) == [s.value]),
            grids=grid_limits(self.assignment, self.own_grids, groups),
            barriers=self.target.hooks.barriers(placed),
            splits=self._splits(by_value),
            spared=tuple(value for value in self.spared if groups.members(value) == [value]),
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
