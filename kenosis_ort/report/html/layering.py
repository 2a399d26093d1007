"""Layers of a directed graph, and the order of the nodes within them: the first half of its picture.

After Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures", IEEE
Transactions on Systems, Man and Cybernetics 11 (1981): layers by longest path, short edges made of one bend a layer,
order by barycenters. Long edges get no bends, so that the work stays proportional to the size of the graph.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Edge = tuple[int, int]

MAX_SPAN: Final = 10
"""Layers that an edge may span and still get a bend in each of them."""
MAX_READERS: Final = 6
_SWEEPS: Final = 4


@dataclass(frozen=True)
class Layered:
    """Nodes and bends by layer.

    Attributes:
        layers: By layer, from left to right, the numbers of nodes, and behind those the numbers of bends.
        layer_of: By node or bend its layer.
        above: By node or bend what it hangs from.
        below: The reverse.
        chains: By edge, in the order given, the nodes and bends along it; only the ends where it spans more than
            `MAX_SPAN` layers, or comes from a node with more than `MAX_READERS`.
        faint: By edge, whether it comes from such a node and is not its shortest: an attention mask that all layers
            read would hide the picture.
    """

    layers: list[list[int]]
    layer_of: list[int]
    above: list[list[int]]
    below: list[list[int]]
    chains: list[list[int]]
    faint: list[bool]


def layered(count: int, edges: Sequence[Edge]) -> Layered:
    """Returns the layers of a graph.

    Args:
        count: Number of nodes, in topological order.
        edges: From a node to a later one; others are taken for a line without influence on the layers.
    """
    forward = [(a, b) for a, b in edges if a < b]
    layer_of = _longest_paths(count, forward)
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    chains: list[list[int]] = []
    readers = Counter(a for a, _ in edges)
    faint = [readers[a] > MAX_READERS and layer_of[b] - layer_of[a] > 1 for a, b in edges]
    for (a, b), is_faint in zip(edges, faint, strict=True):
        chain = [a]
        if a < b and not is_faint and layer_of[b] - layer_of[a] <= MAX_SPAN:
            for layer in range(layer_of[a] + 1, layer_of[b]):
                chain.append(len(layer_of))
                layer_of.append(layer)
                above.append([])
                below.append([])
            chain.append(b)
            for upper, lower in itertools.pairwise(chain):
                below[upper].append(lower)
                above[lower].append(upper)
        else:
            chain.append(b)
        chains.append(chain)
    layers: list[list[int]] = [[] for _ in range(max(layer_of, default=-1) + 1)]
    for index, layer in enumerate(layer_of):
        layers[layer].append(index)
    found = Layered(layers, layer_of, above, below, chains, faint)
    _order(found)
    return found


def _longest_paths(count: int, edges: Sequence[Edge]) -> list[int]:
    """Returns the layer of each node: below all it hangs from, but what hangs from nothing right above its reader."""
    layer = [0] * count
    by_source: list[list[int]] = [[] for _ in range(count)]
    hangs = [False] * count
    for a, b in edges:
        by_source[a].append(b)
        hangs[b] = True
    for a in range(count):
        for b in by_source[a]:
            layer[b] = max(layer[b], layer[a] + 1)
    free = [not hanging for hanging in hangs]
    for a in range(count):
        for b in by_source[a]:
            free[b] = free[b] or (free[a] and len(by_source[a]) == 1)
    above_free = [True] * count  # everything it hangs from may move down with it
    for a, b in edges:
        above_free[b] = above_free[b] and free[a]
    for a in reversed(range(count)):
        if free[a] and above_free[a] and by_source[a]:
            layer[a] = max(layer[a], min(layer[b] for b in by_source[a]) - 1)
    return layer


def _order(graph: Layered) -> None:
    """Orders the layers so that few edges cross, in place."""
    place = [0.0] * len(graph.layer_of)
    for nodes in graph.layers:
        _number(nodes, place)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for nodes in graph.layers if down else reversed(graph.layers):
            side = graph.above if down else graph.below
            wish = {n: sum(place[m] for m in side[n]) / len(side[n]) if side[n] else place[n] for n in nodes}
            nodes.sort(key=lambda n, wish=wish: wish[n])  # type: ignore[misc]
            _number(nodes, place)


def _number(nodes: Sequence[int], place: list[float]) -> None:
    """Sets the places of a layer's nodes, centred on 0 so that layers of different width line up."""
    middle = (len(nodes) - 1) / 2
    for position, node in enumerate(nodes):
        place[node] = position - middle
