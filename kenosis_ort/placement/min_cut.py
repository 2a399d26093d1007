"""The cheapest way to part things in two, where some cost more on one side, and some pairs cost to be held apart.

A minimum cut of a directed graph from source to sink, found by a maximum flow (Dinic's algorithm).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)
_NOTHING: Final = 1e-9  # a capacity below it is none: costs are microseconds
_SOURCE: Final = 0
_SINK: Final = 1


class MinCut(Generic[T]):
    """A problem to be solved once."""

    def __init__(self) -> None:
        self._number: dict[T, int] = {}
        self._arcs: list[list[int]] = [[], []]  # by vertex, numbers of arcs; an arc and its reverse are 2k and 2k + 1
        self._head: list[int] = []
        self._left: list[float] = []

    def cost(self, thing: T, *, here: float, there: float) -> None:
        """Says what a thing costs on either side."""
        self._arc(self._of(thing), _SINK, here)
        self._arc(_SOURCE, self._of(thing), there)

    def part(self, here: T, there: T, cost: float) -> None:
        """Says what it costs to have one thing here and the other there, and not the other way round."""
        self._arc(self._of(here), self._of(there), cost)

    def solve(self) -> set[T]:
        """Returns the things that are cheapest here; where both sides cost the same, they are there."""
        while True:
            level = self._levels()
            if level[_SINK] < 0:
                return {thing for thing, number in self._number.items() if level[number] >= 0}
            at = [0] * len(self._arcs)
            while self._augment(level, at):
                pass

    def _of(self, thing: T) -> int:
        if thing not in self._number:
            self._number[thing] = len(self._arcs)
            self._arcs.append([])
        return self._number[thing]

    def _arc(self, tail: int, head: int, capacity: float) -> None:
        for begin, end, left in ((tail, head, capacity), (head, tail, 0.0)):
            self._arcs[begin].append(len(self._head))
            self._head.append(end)
            self._left.append(left)

    def _levels(self) -> list[int]:
        """Returns each vertex' distance from the source by arcs that have something left, -1 where there is none."""
        level = [-1] * len(self._arcs)
        level[_SOURCE] = 0
        waiting = deque([_SOURCE])
        while waiting:
            vertex = waiting.popleft()
            for arc in self._arcs[vertex]:
                if self._left[arc] > _NOTHING and level[self._head[arc]] < 0:
                    level[self._head[arc]] = level[vertex] + 1
                    waiting.append(self._head[arc])
        return level

    def _augment(self, level: list[int], at: list[int]) -> bool:
        """Sends what one shortest path still takes; tells whether there was one."""
        path: list[int] = []
        vertex = _SOURCE
        while vertex != _SINK:
            arcs = self._arcs[vertex]
            while at[vertex] < len(arcs):
                arc = arcs[at[vertex]]
                if self._left[arc] > _NOTHING and level[self._head[arc]] == level[vertex] + 1:
                    path.append(arc)
                    vertex = self._head[arc]
                    break
                at[vertex] += 1
            else:
                if not path:
                    return False
                level[vertex] = -1
                vertex = self._head[path.pop() ^ 1]
        sent = min(self._left[arc] for arc in path)
        for arc in path:
            self._left[arc] -= sent
            self._left[arc ^ 1] += sent
        return True
