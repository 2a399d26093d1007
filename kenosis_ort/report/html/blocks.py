"""Repeated stretches of a graph, so that a deep net is first seen as a few blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_SHORTEST: Final = 4  # nodes of a block
_LONGEST: Final = 400
_CANDIDATES: Final = 400


@dataclass(frozen=True)
class Block:
    """Consecutive nodes that repeat.

    Attributes:
        start: Number of the first node.
        length: Number of nodes.
        number: Which repetition this is, from 1.
        repeats: How many there are.
    """

    start: int
    length: int
    number: int
    repeats: int


def find_blocks(operators: Sequence[str], crossing: Sequence[int] | None = None) -> tuple[Block, ...]:
    """Returns the repetitions of stretches of the same operators, in order and without overlap.

    Args:
        operators: Operator types in topological order.
        crossing: By node, how many values go from before it to it or behind it; where a repetition may begin at
            several places, it begins where there are few.

    Returns:
        The blocks; nodes that repeat nothing are in none. Work grows with the number of nodes times `_LONGEST`.
    """
    count = len(operators)
    numbers = {name: index for index, name in enumerate(dict.fromkeys(operators))}
    ids = np.array([numbers[name] for name in operators], np.int64)
    found: list[tuple[int, int, int]] = []  # covered nodes, first node, period
    for period in range(_SHORTEST, min(_LONGEST, count // 2) + 1):
        for start, length in _runs(ids[:-period] == ids[period:], period):
            repeats = (length + period) // period
            slack = length + period - repeats * period
            begin = start
            if crossing is not None:
                begin = min(range(start, start + min(slack, period - 1) + 1), key=lambda i: (crossing[i], i))
            found.append((repeats * period, begin, period))
    found.sort(key=lambda run: (-run[0], run[2], run[1]))
    taken = np.zeros(count, bool)
    blocks: list[Block] = []
    for covered, start, period in found[:_CANDIDATES]:
        if taken[start : start + covered].any():
            continue
        taken[start : start + covered] = True
        repeats = covered // period
        blocks += [Block(start + n * period, period, n + 1, repeats) for n in range(repeats)]
    return tuple(sorted(blocks, key=lambda block: block.start))


def _runs(same: npt.NDArray[np.bool_], shortest: int) -> list[tuple[int, int]]:
    """Returns start and length of the stretches of True that are long enough."""
    padded = np.concatenate(([False], same, [False])).astype(np.int8)
    change = np.diff(padded)
    starts, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    long = ends - starts >= shortest
    return list(zip(starts[long].tolist(), (ends - starts)[long].tolist(), strict=True))
