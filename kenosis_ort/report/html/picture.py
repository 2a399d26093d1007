"""The data behind the interactive picture: nodes with all that is known of them, laid out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kenosis_ort.plan import Decision
from kenosis_ort.report.evidence import GraphSketch, ReportEvidence, SketchNode, TensorProfile, by_key, explain_plan
from kenosis_ort.report.html.cards import REGIONS, Region, region_of
from kenosis_ort.report.html.layout import GraphLayout, layout_of
from kenosis_ort.storage.data import finite

if TYPE_CHECKING:  # which makes pages
    from kenosis_ort.report.quantization_report import QuantizationReport

_LEVELS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Heights of bars, 0 to 61, one character each."""


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
    edges = _edges(graph)
    regions: list[Region] = ["terminal"] * len(graph.inputs)
    regions += [fact.region for fact in facts] + ["terminal"] * len(graph.outputs)
    order = list(REGIONS)
    return {
        "texts": list(texts),
        "inputs": list(graph.inputs),
        "nodes": nodes,
        "outputs": list(graph.outputs),
        "regions": [order.index(region) for region in regions],
        "regionNames": order,
        "regionLabels": [REGIONS[region].label for region in order],
        "tensors": [_tensor(tensor) for tensor in evidence.tensors],
        "view": _view(layout_of(len(regions), edges), edges),
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


def _edges(graph: GraphSketch) -> list[tuple[int, int]]:
    """The edges between inputs, nodes and outputs, which are numbered in this order."""
    maker = {name: index for index, name in enumerate(graph.inputs)}
    for index, node in enumerate(graph.nodes, len(graph.inputs)):
        maker.update((name, index) for name in node.outputs)
    readers = [*(node.inputs for node in graph.nodes), *((name,) for name in graph.outputs)]
    found = ((maker[name], i) for i, names in enumerate(readers, len(graph.inputs)) for name in names if name in maker)
    return list(dict.fromkeys(found))


def _view(layout: GraphLayout, edges: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {
        "width": round(layout.width),
        "height": round(layout.height),
        "items": [_pixels(centre) for centre in layout.centres],
        "edges": [
            [a, b, [n for point in route for n in _pixels(point)], *([1] if faint else [])]
            for (a, b), route, faint in zip(edges, layout.routes, layout.faint, strict=True)
        ],
    }


def _pixels(point: tuple[float, float]) -> tuple[int, int]:
    return round(point[0]), round(point[1])
