"""Magnitudes that float32 scales cannot hold: nodes whose data, weights or products are that small or large stay float.

An integer kernel multiplies the scales of its data and its weights in float32. Where that underflows or overflows, as
with weights near 1e-36, the kernel and the int32 bias beside it compute on different grids.
"""

from __future__ import annotations

from collections.abc import Mapping

from kenosis_ort.graph.view import GraphView
from kenosis_ort.placement.sharing import Range
from kenosis_ort.plan import How, Kind, PlacementPlan, Role

_LEAST, _MOST = 1e-30, 1e35  # what is left of float32 when 8-bit steps, sums and a product of scales are taken off


def beyond_scales(view: GraphView, plan: PlacementPlan, ranges: Mapping[str, Range]) -> dict[str, str]:
    """Returns the integer nodes that have to stay float, with the reason.

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
        if d.role is Role.WEIGHT:
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
