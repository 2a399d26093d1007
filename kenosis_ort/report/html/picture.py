"""The data behind the interactive picture: nodes with all that is known of them, laid out as nodes and as blocks.

Repeated stretches of a graph, so that a deep net is first seen as a few blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kenosis_ort.plan import Decision
from kenosis_ort.report.evidence import GraphSketch, ReportEvidence, SketchNode, TensorProfile, by_key, explain_plan
from kenosis_ort.report.html.cards import REGIONS, Region, region_of
from kenosis_ort.report.html.layout import GraphLayout, crossing, layout_of
from kenosis_ort.storage.data import finite

if TYPE_CHECKING:  # which makes pages
    from kenosis_ort.report.quantization_report import QuantizationReport

_SHORTEST: Final = 4  # nodes of a block
_LONGEST: Final = 400
_CANDIDATES: Final = 400


@dataclass(frozen=True)
class RepeatedNodes:
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


def find_blocks(operators: Sequence[str], crossing: Sequence[int] | None = None) -> tuple[RepeatedNodes, ...]:
    """The repetitions of stretches of the same operators, in order and without overlap.

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
    blocks: list[RepeatedNodes] = []
    for covered, start, period in found[:_CANDIDATES]:
        if taken[start : start + covered].any():
            continue
        taken[start : start + covered] = True
        repeats = covered // period
        blocks += [RepeatedNodes(start + n * period, period, n + 1, repeats) for n in range(repeats)]
    return tuple(sorted(blocks, key=lambda block: block.start))


def _runs(same: npt.NDArray[np.bool_], shortest: int) -> list[tuple[int, int]]:
    """Start and length of the stretches of True that are long enough."""
    change = np.diff(np.concatenate(([False], same, [False])).astype(np.int8))
    starts, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    long = ends - starts >= shortest
    return list(zip(starts[long].tolist(), (ends - starts)[long].tolist(), strict=True))


_LEVELS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Heights of bars, 0 to 61, one character each."""
_BLOCKS_FROM: Final = 90
"""Nodes from which on blocks are shown first."""
_LEAST_COVER: Final = 0.4  # share of the nodes that blocks must cover to be of use


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node; numbers are None where nothing was measured."""

    name: str
    op_type: str
    region: Region
    rule: str
    reason: str
    kernel: str
    status: str
    why: str
    absorbed: tuple[str, ...]
    remedy: str
    shape: str
    weight: str
    sqnr_db: float | None
    before_ms: float | None
    after_ms: float | None
    path: str = ""
    estimated_ms: float | None = None


def node_facts(report: QuantizationReport, evidence: ReportEvidence) -> tuple[NodeFacts, ...]:
    """The facts about every node: of the graph where there is one, else of the plan and the proof."""
    kernels = {} if report.fusion is None else {k.node: k for k in report.fusion.kernels}
    named = {n.node: n.op_type for n in report.plan.nodes} or {k.node: k.op_type for k in kernels.values()}
    decisions = report.plan.by_node
    remedies = {e.node: e.remedy for e in explain_plan(report.plan)}
    from_names = (SketchNode(name, op_type, (), ()) for name, op_type in named.items())
    sketch = from_names if evidence.graph is None else evidence.graph.nodes
    times = evidence.times
    before, after = ({}, {}) if times is None else (by_key(taken, "node") for taken in (times.before, times.after))
    signal = evidence.signal_by_node
    paths = {layer.node: layer.path for layer in report.layers}
    estimated = {x.node: x.estimated_us / 1e3 for x in report.layers if x.estimated_us is not None}
    facts = []
    for node in sketch:
        decision, kernel = decisions.get(node.name), kernels.get(node.name)
        facts.append(
            NodeFacts(
                name=node.name,
                op_type=node.op_type,
                region=region_of(decision, kernel),
                rule="" if decision is None else decision.rule,
                reason="" if decision is None else decision.reason,
                kernel="" if kernel is None else kernel.kernel,
                status="" if kernel is None else getattr(kernel.status, "value", kernel.status),
                why="" if kernel is None else kernel.reason,
                absorbed=() if kernel is None else tuple(kernel.absorbed),
                remedy=remedies.get(node.name, ""),
                shape=node.shape,
                weight=node.weight,
                sqnr_db=signal.get(node.name),
                before_ms=before.get(node.name),
                after_ms=after.get(node.name),
                path=paths.get(node.name, ""),
                estimated_ms=estimated.get(node.name),
            )
        )
    return tuple(facts)


def picture_data(
    report: QuantizationReport, evidence: ReportEvidence, facts: Sequence[NodeFacts]
) -> dict[str, Any] | None:
    """The picture as compact JSON data; None without a graph.

    The scripts of the page are the only readers: texts are numbers into ``texts``, see ``static/data.js``.
    """
    graph = evidence.graph
    if graph is None or not graph.nodes:
        return None
    texts: dict[str, int] = {}  # each once, by number

    def add(text: str) -> int:
        return texts.setdefault(text, len(texts))

    tensors = {tensor.name: index for index, tensor in enumerate(evidence.tensors)}
    reads: dict[str, list[Decision]] = {}
    for decision in report.plan.decisions:
        reads.setdefault(decision.edge.consumer, []).append(decision)
    nodes = [
        _node(fact, node, reads.get(node.name, ()), tensors, add) for fact, node in zip(facts, graph.nodes, strict=True)
    ]
    items = _Items(graph)
    regions: list[Region] = ["terminal"] * len(graph.inputs)
    regions += [fact.region for fact in facts] + ["terminal"] * len(graph.outputs)
    order = list(REGIONS)
    views = [_node_view(items)]
    blocks = find_blocks([node.op_type for node in graph.nodes], items.crossing())
    covered = sum(block.length for block in blocks)
    if covered >= _LEAST_COVER * len(graph.nodes) and len(graph.nodes) >= _BLOCKS_FROM // 3:
        views.append(_block_view(items, blocks, regions))
    return {
        "texts": list(texts),
        "inputs": list(graph.inputs),
        "nodes": nodes,
        "outputs": list(graph.outputs),
        "regions": [order.index(region) for region in regions],
        "regionNames": order,
        "regionLabels": [REGIONS[region].label for region in order],
        "regionShorts": [REGIONS[region].short for region in order],
        "tensors": [_tensor(tensor) for tensor in evidence.tensors],
        "views": views,
        "first": len(views) - 1 if len(graph.nodes) >= _BLOCKS_FROM else 0,
    }


def _node(
    fact: NodeFacts, node: SketchNode, reads: Sequence[Decision], tensors: Mapping[str, int], add: Callable[[str], int]
) -> list[Any]:
    texts = (
        *(fact.name, fact.op_type, fact.rule, fact.reason, fact.kernel, fact.status, fact.why, fact.shape),
        *(fact.weight, ", ".join(fact.absorbed), fact.remedy),
    )
    edges = [
        [add(d.edge.value), add(d.how.value), add(d.rule), add(d.reason), tensors.get(d.edge.value, -1)] for d in reads
    ]
    return [
        *(add(text) for text in texts),
        *(_short(number) for number in (fact.sqnr_db, fact.before_ms, fact.after_ms)),
        edges,
        [tensors[name] for name in node.outputs if name in tensors],
    ]


def _tensor(tensor: TensorProfile) -> list[Any]:
    chosen = tensor.chosen or (None, None)
    bars = tensor.bars
    return [
        tensor.name,
        int(tensor.kind == "weight"),
        *(_short(number) for number in (tensor.low, tensor.high, *chosen)),
        tensor.precision,
        tensor.scales,
        _short(tensor.sqnr_db),
        None if bars is None else [_short(bars.low), _short(bars.high), heights(bars.counts)],
    ]


def heights(counts: Sequence[int]) -> str:
    """Bars as one character each, on a logarithmic scale so that tails are seen."""
    top = math.log1p(max(counts, default=0))
    if not top:
        return _LEVELS[0] * len(counts)
    highest = len(_LEVELS) - 1
    return "".join(_LEVELS[min(math.ceil(highest * math.log1p(count) / top), highest)] for count in counts)


def _short(number: float | None) -> float | str | None:
    """A number with five digits; infinite ones by name, since JSON has none."""
    return None if number is None else finite(float(f"{number:.5g}"))


# ---- graph --------------------------------------------------------------------------------------------------------


class _Items:
    """The graph's inputs, nodes and outputs, numbered in this order, and the edges between them."""

    def __init__(self, graph: GraphSketch) -> None:
        self.graph = graph
        self.first_node = len(graph.inputs)
        self.first_output = self.first_node + len(graph.nodes)
        self.count = self.first_output + len(graph.outputs)
        maker = {name: index for index, name in enumerate(graph.inputs)}
        for index, node in enumerate(graph.nodes, self.first_node):
            maker.update((name, index) for name in node.outputs)
        edges: dict[tuple[int, int], None] = {}
        for index, node in enumerate(graph.nodes, self.first_node):
            edges.update(((maker[name], index), None) for name in node.inputs if name in maker)
        for index, name in enumerate(graph.outputs, self.first_output):
            if name in maker:
                edges[maker[name], index] = None
        self.edges = list(edges)

    def crossing(self) -> list[int]:
        """Number of edges by node that lead from before it to it or behind it."""
        forward = (edge for edge in self.edges if edge[0] < edge[1])
        return crossing(forward, self.count)[self.first_node : self.first_output]


def _node_view(items: _Items) -> dict[str, Any]:
    layout = layout_of(items.count, items.edges)
    placed = [[0, index, *_pixels(centre)] for index, centre in enumerate(layout.centres)]
    return _view("All nodes", layout, placed, items.edges)


def _block_view(items: _Items, blocks: Sequence[RepeatedNodes], regions: Sequence[Region]) -> dict[str, Any]:
    """The picture in which each block is one box."""
    starts = {block.start + items.first_node: block for block in blocks}
    box_of = [0] * items.count
    boxes: list[list[Any]] = []
    index = 0
    while index < items.count:
        block = starts.get(index)
        length = 1 if block is None else block.length
        box_of[index : index + length] = [len(boxes)] * length
        boxes.append([0, index] if block is None else _box(items, block, regions))
        index += length
    edges = list(dict.fromkeys((box_of[a], box_of[b]) for a, b in items.edges if box_of[a] != box_of[b]))
    layout = layout_of(len(boxes), edges)
    placed = [[*box, *_pixels(centre)] for box, centre in zip(boxes, layout.centres, strict=True)]
    return _view("Repeated blocks", layout, placed, edges)


def _box(items: _Items, block: RepeatedNodes, regions: Sequence[Region]) -> list[Any]:
    first = items.first_node + block.start
    operators = Counter(node.op_type for node in items.graph.nodes[block.start : block.start + block.length])
    label = ", ".join(op if n == 1 else f"{n} {op}" for op, n in operators.most_common())
    shares = Counter(regions[first : first + block.length])
    counts = [shares.get(region, 0) for region in REGIONS]
    return [1, first, block.length, block.number, block.repeats, label, counts]


def _view(label: str, layout: GraphLayout, placed: list[list[Any]], edges: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {
        "label": label,
        "width": round(layout.width),
        "height": round(layout.height),
        "items": placed,
        "edges": [
            [a, b, [n for point in route for n in _pixels(point)], *([1] if faint else [])]
            for (a, b), route, faint in zip(edges, layout.routes, layout.faint, strict=True)
        ],
    }


def _pixels(point: tuple[float, float]) -> tuple[int, int]:
    return round(point[0]), round(point[1])
