"""Which regions to leave in float by estimate, without measuring: nothing unless the gain is clear.

Two questions are asked. Would the whole net be slower in integer than in float, as nets of microseconds may be, whose
kernels cost more to call than to run? And would it be faster with its first few heavy nodes in float, as mobile nets
may be, which begin with the two slowest shapes of the integer kernels? An estimate is off by up to `CostTable.error`,
so a whole net is only given up beyond that; two placements of one net share part of the error, so less is asked there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kenosis_ort.graph.operators import HEAVY
from kenosis_ort.graph.view import GraphView
from kenosis_ort.placement.cost import CostEstimate, estimate
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.targets.costs import CostTable

_LONGEST: Final = 3
_PREFIX_GAIN: Final = 1.12
"""Estimated prefixes of up to 1.08x were slower when measured, by up to 10 %."""

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


def choose_regions(view: GraphView, plan: PlacementPlan, costs: CostTable, replan: Replan) -> Regions:
    """Returns the regions to leave in float.

    Args:
        view: The prepared model.
        plan: Its placement.
        costs: The runtime's table.
        replan: Returns the placement with some nodes (name to reason) in float.

    Returns:
        The regions; none where shapes are not known, or no gain is clear.
    """
    base = estimate(view, plan, costs)
    best = Regions(plan, base, base)
    if not base.is_complete or not plan.integer_nodes():
        return best
    integer = set(plan.integer_nodes())
    heavy = [node.node for node in plan.nodes if node.op_type in HEAVY and node.node in integer]
    for length in range(1, min(_LONGEST, len(heavy) - 1) + 1):
        names = heavy[:length]
        there = sum(cost.planned_us for cost in base.nodes if cost.node in names)
        reason = f"float is estimated to be faster for the first {length} of {len(heavy)} heavy nodes ({there:.0f} us)"
        keep = dict.fromkeys(names, reason)
        changed = replan(keep)
        cost = estimate(view, changed, costs)
        if cost.planned_us * _PREFIX_GAIN < best.cost.planned_us:
            best = Regions(changed, cost, base, keep, reason=_compared(reason, cost, base))
    if best.cost.speed * costs.error < 1:
        reason = f"int8 is estimated at {best.cost.speed:.2f}x of float ({base.float_us:.0f} us)"
        return Regions(plan, base, base, whole_net=True, reason=reason)
    return best


def _compared(reason: str, cost: CostEstimate, base: CostEstimate) -> str:
    return f"{reason}: {cost.planned_us:.0f} us for {base.planned_us:.0f} us"
