"""Which quantized values use one scale and zero point.

Operators that move bytes need the same parameters in and out. Producers of a Concat may take over the parameters
of its output, which saves the requantization; they do so only where nothing is lost: no absorbed activation would
come back to life, and no other consumer of the value would see a much coarser grid.

Magnitudes that float32 scales cannot hold: nodes whose data, weights or products are that small or large stay float.

An integer kernel multiplies the scales of its data and its weights in float32. Where that underflows or overflows, as
with weights near 1e-36, the kernel and the int32 bias beside it compute on different grids.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from kenosis_ort.graph.view import CAPTURED, GraphView, ir
from kenosis_ort.placement.assignment import Assignment
from kenosis_ort.plan import EdgeRole, How, Kind, PlacementPlan, RangeLimit
from kenosis_ort.targets.model import Role

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
