"""Coordinates for the picture of a graph: layers from top to bottom, folded into columns like a newspaper's.

Layers of a directed graph, and the order of the nodes within them: the first half of its picture.

After Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures", IEEE
Transactions on Systems, Man and Cybernetics 11 (1981): layers by longest path, short edges made of one bend a layer,
order by barycenters. Long edges get no bends, so that the work stays proportional to the size of the graph.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

Edge = tuple[int, int]

MAX_SPAN: Final = 10
"""Layers that an edge may span and still get a bend in each of them."""
MAX_READERS: Final = 6
_ORDER_SWEEPS: Final = 4


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
    above: Mapping[int, list[int]]
    below: Mapping[int, list[int]]
    chains: list[list[int]]
    faint: list[bool]


def layered(count: int, edges: Sequence[Edge]) -> Layered:
    """The layers of a graph.

    Args:
        count: Number of nodes, in topological order.
        edges: From a node to a later one; others are taken for a line without influence on the layers.
    """
    forward = [(a, b) for a, b in edges if a < b]
    layer_of = _longest_paths(count, forward)
    above, below = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    chains: list[list[int]] = []
    readers = Counter(a for a, _ in edges)
    faint = [readers[a] > MAX_READERS and layer_of[b] - layer_of[a] > 1 for a, b in edges]
    for (a, b), is_faint in zip(edges, faint, strict=True):
        chain = [a, b]
        if a < b and not is_faint and layer_of[b] - layer_of[a] <= MAX_SPAN:
            bends = range(layer_of[a] + 1, layer_of[b])
            chain[1:1] = range(len(layer_of), len(layer_of) + len(bends))
            layer_of += bends
            for upper, lower in pairwise(chain):
                below[upper].append(lower)
                above[lower].append(upper)
        chains.append(chain)
    layers: list[list[int]] = [[] for _ in range(max(layer_of, default=-1) + 1)]
    for index, layer in enumerate(layer_of):
        layers[layer].append(index)
    found = Layered(layers, layer_of, above, below, chains, faint)
    _order(found)
    return found


def _longest_paths(count: int, edges: Sequence[Edge]) -> list[int]:
    """Layer of each node: below all of its producers; a node without producers is right above its reader."""
    layer = [0] * count
    by_source: list[list[int]] = [[] for _ in range(count)]
    free = [True] * count
    for a, b in edges:
        by_source[a].append(b)
        free[b] = False
    for a in range(count):
        for b in by_source[a]:
            layer[b] = max(layer[b], layer[a] + 1)
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
    for sweep in range(_ORDER_SWEEPS):
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


NODE_WIDTH: Final = 148.0
NODE_HEIGHT: Final = 40.0
ROW: Final = 72.0
"""From the top of one layer to the top of the next."""
_FIRM: Final = 8.0  # how much less a node is moved aside than a bend
_GAP: Final = 24.0
_BEND_WIDTH: Final = 26.0
_GUTTER: Final = 84.0
_RAIL: Final = 26.0
_ASPECT: Final = 0.95  # width over height that columns aim at
_UNFOLDED: Final = 16  # layers that stay one column
_SWEEPS: Final = 8
_STRAIGHT: Final = 5.0  # how much more a straight line between nodes counts than one to a bend
_LANES: Final = 6  # parallel lines in a gutter

Point = tuple[float, float]


@dataclass(frozen=True)
class GraphLayout:
    """Places of nodes and edges, in pixels at full size; x to the right, y down.

    Attributes:
        centres: Of the nodes.
        routes: By edge, in the order given, the points from the bottom of one node to the top of the other.
        faint: By edge, whether it is one of many from the same node and better drawn faintly.
        width: Of the whole.
        height: Of the whole.
    """

    centres: tuple[Point, ...]
    routes: tuple[tuple[Point, ...], ...]
    faint: tuple[bool, ...]
    width: float
    height: float


def layout_of(count: int, edges: Sequence[Edge]) -> GraphLayout:
    """Coordinates for a graph; the time is proportional to its size but for sorting.

    Args:
        count: Number of nodes, in topological order.
        edges: From one node to another, by number.
    """
    if count == 0:
        return GraphLayout((), (), (), 0.0, 0.0)
    graph = layered(count, edges)
    widths = [NODE_WIDTH if n < count else _BEND_WIDTH for n in range(len(graph.layer_of))]
    x = _across(graph, count, widths)
    columns = _columns(graph, x)
    points, sides = _place(graph, x, widths, columns)
    routes = tuple(_route(chain, points, sides, lane % _LANES) for lane, chain in enumerate(graph.chains))
    width = max(right for _, right in sides) + _GUTTER / 2
    height = max(y for _, y in points[:count]) + NODE_HEIGHT / 2
    return GraphLayout(tuple(points[:count]), routes, tuple(graph.faint), width, height)


def _across(graph: Layered, count: int, widths: Sequence[float]) -> list[float]:
    """The x of nodes and bends: near their producers and readers, without overlap."""
    x = [0.0] * len(graph.layer_of)
    gaps = [[(widths[a] + widths[b]) / 2 + _GAP for a, b in pairwise(nodes)] for nodes in graph.layers]
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        last = sweep >= _SWEEPS - 2
        for number in range(len(graph.layers))[:: 1 if down else -1]:
            nodes = graph.layers[number]
            wishes = []
            firm = [_FIRM if n < count else 1.0 for n in nodes]
            for n in nodes:
                near = graph.above[n] + graph.below[n] if last else graph.above[n] if down else graph.below[n]
                weights = [_STRAIGHT if m < count else 1.0 for m in near]
                wishes.append(
                    sum(w * x[m] for w, m in zip(weights, near, strict=True)) / sum(weights) if near else x[n]
                )
            for n, at in zip(nodes, _apart(wishes, gaps[number], firm), strict=True):
                x[n] = at
    return x


def _apart(wishes: Sequence[float], gaps: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Places as near to the wishes as the gaps allow, by weighted least squares, in the same order.

    Pool adjacent violators: what would come too close is moved as one group (Barlow et al., "Statistical Inference
    under Order Restrictions", 1972).
    """
    offsets = [0.0, *accumulate(gaps)]
    groups: list[tuple[float, float, int]] = []  # weighted sum of the wishes without offsets, weight, members
    for wish, offset, weight in zip(wishes, offsets, weights, strict=True):
        total, heavy, members = weight * (wish - offset), weight, 1
        while groups and groups[-1][0] / groups[-1][1] >= total / heavy:
            before = groups.pop()
            total, heavy, members = total + before[0], heavy + before[1], members + before[2]
        groups.append((total, heavy, members))
    flat = [total / heavy for total, heavy, members in groups for _ in range(members)]
    return [place + offset for place, offset in zip(flat, offsets, strict=True)]


def _columns(graph: Layered, x: Sequence[float]) -> list[int]:
    """The first layer of each column; a column ends where few edges go on."""
    layers = len(graph.layers)
    if layers <= _UNFOLDED:
        return [0]
    extents = sorted(
        max(x[n] for n in nodes) - min(x[n] for n in nodes) + NODE_WIDTH if nodes else NODE_WIDTH
        for nodes in graph.layers
    )
    typical = extents[int(0.8 * (len(extents) - 1))] + _GUTTER
    wanted = max(1, round(math.sqrt(_ASPECT * layers * ROW / typical)))
    ends = ((graph.layer_of[chain[0]], graph.layer_of[chain[-1]]) for chain in graph.chains)
    come_from_above = crossing((sorted(pair) for pair in ends), layers)
    starts = [0]
    for number in range(1, wanted):
        ideal = number * layers / wanted
        slack = max(2, int(0.2 * layers / wanted))
        choices = [c for c in range(int(ideal) - slack, int(ideal) + slack + 1) if starts[-1] + 2 < c < layers - 1]
        if choices:
            starts.append(min(choices, key=lambda c: (come_from_above[c], abs(c - ideal))))
    return starts


def crossing(spans: Iterable[Sequence[int]], count: int) -> list[int]:
    """Number of spans by place that come from before it and end there or behind it.

    Args:
        spans: First and last place of each.
        count: Number of places.
    """
    change = [0] * (count + 1)
    for first, last in spans:
        change[first + 1] += 1
        change[min(last + 1, count)] -= 1
    return list(accumulate(change))


def _place(
    graph: Layered, x: Sequence[float], widths: Sequence[float], starts: Sequence[int]
) -> tuple[list[Point], list[tuple[float, float]]]:
    """Points of nodes and bends, and the left and right edge of the column that each stands in."""
    points: list[Point] = [(0.0, 0.0)] * len(graph.layer_of)
    sides = points.copy()
    left = _GUTTER / 2
    for start, end in pairwise([*starts, len(graph.layers)]):
        members = [n for layer in graph.layers[start:end] for n in layer]
        low = min(x[n] - widths[n] / 2 for n in members)
        high = max(x[n] + widths[n] / 2 for n in members)
        right = left + high - low
        for n in members:
            row = graph.layer_of[n] - start
            points[n] = (x[n] - low + left, _RAIL * 2 + row * ROW + NODE_HEIGHT / 2)
            sides[n] = (left, right)
        left = right + _GUTTER
    return points, sides


def _route(
    chain: Sequence[int], points: Sequence[Point], sides: Sequence[tuple[float, float]], lane: int
) -> tuple[Point, ...]:
    """The points of one edge; between columns, and where it has no bends, it runs in the gutters."""
    half = NODE_HEIGHT / 2
    shift = (lane - _LANES / 2) * 5
    first, last = points[chain[0]], points[chain[-1]]
    route: list[Point] = [(first[0], first[1] + half)]
    for a, b in pairwise(chain):
        (xa, ya), (xb, yb) = points[a], points[b]
        if sides[a] != sides[b]:
            out, back = sides[a][1] + _GUTTER / 2 + shift, sides[b][0] - _GUTTER / 2 + shift
            top = _RAIL / 2 - shift / 3
            route += [(xa, ya + half + 14), (out, ya + half + 14), (out, top)]
            route += [(back, top)] if abs(out - back) > 1 else []
            route += [(back, yb - half - 16), (xb, yb - half - 16)]
        elif len(chain) == 2 and abs(yb - ya) > ROW * 1.5:
            side = sides[a][0] - _GUTTER / 4 + shift
            route += [(xa, ya + half + 14), (side, ya + half + 14), (side, yb - half - 16), (xb, yb - half - 16)]
        if b != chain[-1]:
            route.append((xb, yb))
    route.append((last[0], last[1] - half))
    return tuple(route)
