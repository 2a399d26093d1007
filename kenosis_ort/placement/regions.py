"""The cheapest way to part a net in two, integer and float, by estimated costs.

Nodes are parted in two, where some cost more on one side and some pairs cost to be apart, by a minimum cut of a
directed graph from source to sink, found by a maximum flow (Dinic's algorithm).

Without measuring, a region is left float only where the gain is clear by these estimates. Three questions are asked.
Would the whole net be slower in integer than in float, as nets of microseconds may be, whose kernels cost more to call
than to run? Would it be faster with its first few heavy nodes in float, as mobile nets may be, which begin with the two
slowest shapes of the integer kernels? And would it be parted anywhere else, at the least cost of kernels and
conversions? An estimate is off by up to `HostProfile.error`, so a whole net is only given up beyond that; two
placements of one net share part of the error, so less is asked there.

Where integer kernels are slower than float ones for many shapes (`CostTable.anywhere`), the cheapest parting of the
net is asked for instead, wherever its float regions lie, and whether integer pays at all is the estimate's to say.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from kenosis_ort.graph.constants import HEAVY
from kenosis_ort.graph.view import FLOAT, GraphView
from kenosis_ort.placement.cost import ON_INTEGERS, CostEstimate, NetCosts, PlannedCosts
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.targets.profile import CostTable

_NOTHING: Final = 1e-9  # a capacity below it is none: costs are microseconds
Vertex = tuple[str, str]
_SOURCE: Final[Vertex] = ("source", "")
_SINK: Final[Vertex] = ("sink", "")


class MinCut:
    """A minimum cut: a problem to be solved once."""

    def __init__(self) -> None:
        self._left: dict[Vertex, dict[Vertex, float]] = {_SOURCE: {}, _SINK: {}}  # capacities, by both ends

    def cost(self, thing: Vertex, *, here: float, there: float) -> None:
        """Adds the costs of a thing on either side."""
        self.part(thing, _SINK, here)
        self.part(_SOURCE, thing, there)

    def part(self, here: Vertex, there: Vertex, cost: float) -> None:
        """Adds the cost of having one thing here and the other there, and not the other way round."""
        for tail, head, capacity in ((here, there, cost), (there, here, 0.0)):
            left = self._left.setdefault(tail, {})
            left[head] = left.get(head, 0.0) + capacity

    def solve(self) -> set[Vertex]:
        """The things that are cheapest here; where both sides cost the same, they are there."""
        while _SINK in (level := self._levels()):
            ways = {vertex: list(left) for vertex, left in self._left.items()}
            while path := self._shortest_path(level, ways):
                arcs = list(pairwise(path))
                sent = min(self._left[tail][head] for tail, head in arcs)
                for tail, head in arcs:
                    self._left[tail][head] -= sent
                    self._left[head][tail] += sent
        return level.keys() - {_SOURCE}

    def _levels(self) -> dict[Vertex, int]:
        """Each vertex' distance from the source by arcs that have something left; those that can be reached."""
        level = {_SOURCE: 0}
        waiting = deque([_SOURCE])
        while waiting:
            vertex = waiting.popleft()
            for head, left in self._left[vertex].items():
                if left > _NOTHING and head not in level:
                    level[head] = level[vertex] + 1
                    waiting.append(head)
        return level

    def _shortest_path(self, level: Mapping[Vertex, int], ways: Mapping[Vertex, list[Vertex]]) -> list[Vertex]:
        """A shortest path from source to sink that still takes something; empty where there is none.

        Args:
            level: Distances from the source.
            ways: The ends of each vertex' arcs; those by which no path leads on are taken off.
        """
        path = [_SOURCE]
        while path and path[-1] != _SINK:
            vertex, ends = path[-1], ways[path[-1]]
            while ends and not self._leads_on(vertex, ends[-1], level):
                ends.pop()
            if ends:
                path.append(ends[-1])
                continue
            path.pop()
            if path:
                ways[path[-1]].pop()
        return path

    def _leads_on(self, tail: Vertex, head: Vertex, level: Mapping[Vertex, int]) -> bool:
        return self._left[tail][head] > _NOTHING and level.get(head) == level[tail] + 1


def cheapest_in_float(net: NetCosts, plan: PlacementPlan, writes_float: Collection[str]) -> set[str]:
    """The integer nodes of a plan that had better be float, wherever they are: the sum of all is the least.

    Each node costs what its kernel does on its side, each value that is written on one side and read on the other a
    conversion. A minimum cut of the net finds the cheapest way to part it.

    Args:
        net: The costs of its kernels.
        plan: The placement.
        writes_float: Operators whose integer kernels write float without a DQ.
    """
    view, planned = net.view, PlannedCosts(net, plan)
    outside = ("outside", "")
    cut = MinCut()
    cut.cost(outside, here=math.inf, there=0.0)
    # Kernels: here is integer, there is float.
    for node in view.nodes:
        name, kind = ("node", str(node.name)), planned.kind(node)
        in_integer, own = net.integer_us.get(name[1]), net.float_us.get(name[1])
        in_float = net.in_float.get(name[1], 0.0)
        producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        before = None if producer is None else ("node", str(producer.name))
        if kind is Kind.ABSORBED and before is not None:
            cut.cost(name, here=0.0, there=in_float)
            cut.part(name, before, math.inf)
            cut.part(before, name, math.inf)
        elif kind in ON_INTEGERS and in_integer is not None:
            cut.cost(name, here=in_integer, there=in_float)
            if own is not None and before is not None and name[1] in net.fused:
                cut.part(before, name, own)
        else:
            cut.cost(name, here=math.inf, there=0.0)
    # Conversions of what is written on one side and read on the other.
    values = [v for v in net.values() if v.dtype == FLOAT]
    consumers = {value: view.consumers(value) for value in values}
    outputs = {value for value in values if view.is_output(value)}
    to_float, to_integer = (planned.conversions(n, dict.fromkeys(values, ())) for n in ("dequantize", "quantize"))
    for value, us in to_float.items():
        read, producer = str(value.name), value.producer()
        maker = outside if producer is None else ("node", str(producer.name))
        free = producer is not None and producer.op_type in writes_float
        cut.part(maker, ("dequantized", read), 0.0 if free else us)
        cut.part(("quantized", read), maker, to_integer[value])
        readers = {("node", str(c.node.name)) for c in consumers[value]}
        for reader in (*readers, *([outside] if value in outputs else [])):
            cut.part(("dequantized", read), reader, math.inf)
            cut.part(reader, ("quantized", read), math.inf)
    return set(plan.integer_nodes()) - {name for what, name in cut.solve() if what == "node"}


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
    """Nodes to leave in float, with costs before and after.

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
    if best.cost.speed * costs.profile.error < 1:
        reason = f"int8 is estimated at {best.cost.speed:.2f}x of float{_in_us(base.float_us, costs)}"
        return replace(whole, whole_net=True, reason=reason)
    return best


def _parted(net: NetCosts, best: Regions, replan: Replan, writes_float: Collection[str]) -> Regions:
    """The cheapest parting of a net, found from the last one until none is cheaper."""
    base = best.all_integer
    for _ in range(_ROUNDS):
        slower = cheapest_in_float(net, best.plan, writes_float)
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
