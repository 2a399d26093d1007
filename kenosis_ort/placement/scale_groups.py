"""Groups of values that share one scale and zero point.

Operators that move bytes need the same parameters in and out. Producers of a Concat may take over the parameters
of its output, which saves the requantization; they do so only where nothing is lost: no absorbed activation would
come back to life, and no other consumer of the value would see a much coarser grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kenosis_ort.plan import Decision, EdgeRole, How, RangeLimit

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

    def applied(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Decisions with the values that provide the parameters of what is read."""
        found = []
        for d in decisions:
            root = d.edge.value
            if d.how in (How.OWN, How.DEQUANTIZED) and d.role is not EdgeRole.WEIGHT:
                root = self.root(root)
            if root == d.edge.value:
                found.append(d)
            elif d.how is How.DEQUANTIZED:
                found.append(replace(d, provider=root))
            else:
                reason = f"{d.reason}, with the parameters of '{root}'"
                found.append(replace(d, how=How.SHARED, reason=reason, provider=root))
        return found
