"""Which regions to leave in float by estimate, without measuring: nothing unless the gain is clear.

Three questions are asked. Would the whole net be slower in integer than in float, as nets of microseconds may be, whose
kernels cost more to call than to run? Would it be faster with its first few heavy nodes in float, as mobile nets may
be, which begin with the two slowest shapes of the integer kernels? And would it be parted anywhere else, at the least
cost of kernels and conversions? An estimate is off by up to `CostTable.error`, so a whole net is only given up beyond
that; two placements of one net share part of the error, so less is asked there.

Where integer kernels are slower than float ones for many shapes (`CostTable.anywhere`), the cheapest parting of the
net is asked for instead, wherever its float regions lie, and whether integer pays at all is the estimate's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kenosis_ort.graph.operators import HEAVY
from kenosis_ort.graph.view import GraphView
from kenosis_ort.placement.cost import CostEstimate, cheapest_in_float, estimate
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.targets.costs import CostTable

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
    base = estimate(view, plan, costs)
    best = Regions(plan, base, base)
    if not base.is_complete or not plan.integer_nodes():
        return best
    if costs.anywhere:
        return _anywhere(view, best, costs, replan, writes_float)
    integer = set(plan.integer_nodes())
    parted = _parted(view, best, costs, replan, writes_float)
    heavy = [node.node for node in plan.nodes if node.op_type in HEAVY and node.node in integer]
    for length in range(1, min(_LONGEST, len(heavy) - 1) + 1):
        names = heavy[:length]
        there = sum(cost.planned_us for cost in base.nodes if cost.node in names)
        if there < _LEAST_PREFIX * base.planned_us:
            continue
        reason = (
            f"float is estimated to be faster for the first {length} of {len(heavy)} heavy nodes{_in_us(there, costs)}"
        )
        keep = dict.fromkeys(names, reason)
        changed = replan(keep)
        cost = estimate(view, changed, costs)
        if cost.planned_us * _PREFIX_GAIN < best.cost.planned_us:
            best = Regions(changed, cost, base, keep, reason=_compared(reason, cost, base, costs))
    if (
        parted.keep_float
        and parted.plan.integer_nodes()
        and parted.cost.planned_us * _PREFIX_GAIN < best.cost.planned_us
    ):
        best = parted
    if best.cost.speed * costs.error < 1:
        reason = f"int8 is estimated at {best.cost.speed:.2f}x of float{_in_us(base.float_us, costs)}"
        return Regions(plan, base, base, whole_net=True, reason=reason)
    return best


def _anywhere(
    view: GraphView, best: Regions, costs: CostTable, replan: Replan, writes_float: Collection[str]
) -> Regions:
    """The cheapest parting of a net, or that integer does not pay."""
    base, plan = best.all_integer, best.plan
    best = _parted(view, best, costs, replan, writes_float)
    if not best.plan.integer_nodes() or best.cost.speed < _WORTH_IT:
        reason = f"int8 would be {best.cost.speed:.2f}x of float{_in_us(base.float_us, costs)}"
        best = best if best.plan.integer_nodes() else Regions(plan, base, base)
        return replace(best, whole_net=True, reason=reason)
    return best


def _parted(view: GraphView, best: Regions, costs: CostTable, replan: Replan, writes_float: Collection[str]) -> Regions:
    """The cheapest parting of a net, found from the last one until none is cheaper."""
    base = best.all_integer
    for _ in range(_ROUNDS):
        slower = cheapest_in_float(view, best.plan, costs, writes_float)
        if not slower:
            break
        reason = "float is estimated to be faster there, with the conversions around it"
        keep = {**best.keep_float, **dict.fromkeys(sorted(slower), reason)}
        changed = replan(keep)
        cost = estimate(view, changed, costs)
        if cost.planned_us >= best.cost.planned_us:
            break
        count = sum(base.by_node[name].op_type in HEAVY for name in keep)
        reason = _compared(f"{count} heavy nodes stay float", cost, base, costs)
        best = Regions(changed, cost, base, keep, reason=reason)
    return best


def _compared(reason: str, cost: CostEstimate, base: CostEstimate, costs: CostTable) -> str:
    if not costs.shows_times:
        return f"{reason}: {cost.planned_us / base.planned_us:.2f}x of the time"
    return f"{reason}: {cost.planned_us:.0f} us for {base.planned_us:.0f} us"


def _in_us(us: float, costs: CostTable) -> str:
    return f" ({us:.0f} us)" if costs.shows_times else ""
