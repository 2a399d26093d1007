"""Facts about nodes, and the page's pictures of them as data: the graph, signal by layer, ranges, histograms, time.

The scripts of the page draw the graph, which is laid out here. The plots are few and plain, so they are drawn by hand,
geometry here and SVG in the templates: a plotting library would add tens of megabytes to an installation, and its SVG
knows neither the page's colours, light and dark, nor which node a mark stands for. Each has a ``summary`` for a reader
who cannot see it; lengths are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kenosis_ort.plan import Decision, Kind, NodeDecision, PlacementPlan
from kenosis_ort.report.evidence import (
    GraphSketch,
    LayerTime,
    OpTimes,
    ReportEvidence,
    SketchNode,
    TensorKind,
    TensorProfile,
    by_key,
    explain_plan,
)
from kenosis_ort.report.html.layout import GraphLayout, layout_of
from kenosis_ort.report.html.words import REGIONS, Region, decibels, number, region_of
from kenosis_ort.storage.data import finite
from kenosis_ort.targets.proof import FusionReport, KernelReport

_LEVELS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Heights of bars, 0 to 61, one character each."""


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node, those that are not known empty; numbers are None where nothing was measured."""

    node: SketchNode
    decision: NodeDecision
    kernel: KernelReport
    layer: LayerTime
    region: Region
    status: str
    remedy: str
    sqnr_db: float | None
    before_ms: float | None
    after_ms: float | None


def node_facts(
    plan: PlacementPlan, fusion: FusionReport | None, layers: Sequence[LayerTime], evidence: ReportEvidence
) -> tuple[NodeFacts, ...]:
    """The facts about every node: of the graph where there is one, else of the plan and the proof."""
    kernels = {} if fusion is None else {k.node: k for k in fusion.kernels}
    named = {n.node: n.op_type for n in plan.nodes} or {k.node: k.op_type for k in kernels.values()}
    decisions = plan.by_node
    remedies = {e.node: e.remedy for e in explain_plan(plan)}
    from_names = (SketchNode(name, op_type, (), ()) for name, op_type in named.items())
    sketch = from_names if evidence.graph is None else evidence.graph.nodes
    times = evidence.times
    before, after = ({}, {}) if times is None else (by_key(taken, "node") for taken in (times.before, times.after))
    signal = evidence.signal_by_node
    known = {layer.node: layer for layer in layers}
    facts = []
    for node in sketch:
        name, op_type = node.name, node.op_type
        decision, kernel = decisions.get(name), kernels.get(name)
        facts.append(
            NodeFacts(
                node=node,
                decision=decision or NodeDecision(name, op_type, Kind.FLOAT, "", ""),
                kernel=kernel or KernelReport(name, op_type, "", integer=False),
                layer=known.get(name) or LayerTime(name, op_type),
                region=region_of(decision, kernel),
                status="" if kernel is None else kernel.status.value,
                remedy=remedies.get(name, ""),
                sqnr_db=signal.get(name),
                before_ms=before.get(name),
                after_ms=after.get(name),
            )
        )
    return tuple(facts)


def picture_data(plan: PlacementPlan, evidence: ReportEvidence, facts: Sequence[NodeFacts]) -> dict[str, Any] | None:
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
    for decision in plan.decisions:
        reads.setdefault(decision.edge.consumer, []).append(decision)
    nodes = [_node(fact, reads.get(fact.node.name, ()), tensors, add) for fact in facts]
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
    fact: NodeFacts, reads: Sequence[Decision], tensors: Mapping[str, int], add: Callable[[str], int]
) -> list[Any]:
    node = fact.node
    texts = (
        *(node.name, node.op_type, fact.decision.rule, fact.decision.reason, fact.kernel.kernel, fact.status),
        *(fact.kernel.reason, node.shape, node.weight, ", ".join(fact.kernel.absorbed), fact.remedy),
    )
    edges = [
        [add(d.edge.value), add(d.how.value), add(d.rule), add(d.reason), tensors.get(d.edge.value, -1)] for d in reads
    ]
    return [
        *(add(text) for text in texts),
        *(_short(value) for value in (fact.sqnr_db, fact.before_ms, fact.after_ms)),
        edges,
        [tensors[name] for name in node.outputs if name in tensors],
    ]


def _tensor(tensor: TensorProfile) -> list[Any]:
    chosen = tensor.chosen or (None, None)
    bars = tensor.bars
    return [
        tensor.name,
        int(tensor.kind == "weight"),
        *(_short(value) for value in (tensor.low, tensor.high, *chosen)),
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


def _short(value: float | None) -> float | str | None:
    """A number with five digits; infinite ones by name, since JSON has none."""
    return None if value is None else finite(float(f"{value:.5g}"))


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


# -- plots

Plot = dict[str, Any]

WIDTH: Final = 960
HEIGHT: Final = 250
LEFT: Final = 56
RIGHT: Final = 16
TOP: Final = 16
BOTTOM: Final = 28
INNER: Final = HEIGHT - TOP - BOTTOM
"""Height between the lowest and the highest grid line."""
BARS_WIDTH: Final = 288
BARS_HEIGHT: Final = 84
BAR_WIDTH: Final = 420
_CEILING_DB: Final = 60.0  # above, quantization is not what limits the signal
_OPERATORS: Final = 12

# -- ranges of activations: what was seen, and what the integers represent


def range_plot(evidence: ReportEvidence) -> Plot | None:
    """Bars of activation ranges, on an axis that is linear near zero and logarithmic beyond; None without any."""
    tensors = [t for t in evidence.tensors if t.kind == "activation" and math.isfinite(t.low) and math.isfinite(t.high)]
    if not tensors:
        return None
    ends = [end for t in tensors for end in (t.low, t.high, *(t.chosen or ()))]
    low, high = min(_squash(min(ends)), -0.1), max(_squash(max(ends)), 0.1)

    def y(value: float) -> float:
        return round(TOP + INNER * (high - _squash(value)) / (high - low), 1)

    step = (WIDTH - LEFT - RIGHT) / len(tensors)
    bars = [
        {
            "x": round(LEFT + step * (index + 0.5), 1),
            "seen": (y(t.high), y(t.low)),
            "chosen": None if t.chosen is None else (y(t.chosen[1]), y(t.chosen[0])),
            "title": range_title(t),
        }
        for index, t in enumerate(tensors)
    ]
    clipped = sum(is_clipped(t) for t in tensors)
    cut = f"{clipped} of the chosen ranges cut" if clipped != 1 else "One of the chosen ranges cuts"
    cut = cut if clipped else "None of the chosen ranges cuts"
    return {
        "ticks": [{"at": y(v), "label": f"{v:g}".replace("-", "−")} for v in _decades(min(ends), max(ends))],
        "bars": bars,
        "thickness": round(max(0.8, min(12.0, step * 0.62)), 1),
        "summary": f"{len(tensors)} activations in the order they were observed. {cut} more than 1 % off what was "
        "seen.",
    }


def range_title(tensor: TensorProfile) -> str:
    """The ranges of a tensor as text."""
    seen = f"{tensor.name}: seen {number(tensor.low)} to {number(tensor.high)}"
    if tensor.chosen is None:
        return f"{seen}, not quantized"
    return f"{seen}, represented {number(tensor.chosen[0])} to {number(tensor.chosen[1])}"


def is_clipped(tensor: TensorProfile) -> bool:
    """Whether the chosen range cuts more than a hundredth off what was seen."""
    if tensor.chosen is None:
        return False
    slack = 0.01 * (tensor.high - tensor.low)
    return tensor.chosen[0] > tensor.low + slack or tensor.chosen[1] < tensor.high - slack


def _squash(value: float) -> float:
    return math.asinh(value * 2) / math.log(10)


def _decades(low: float, high: float) -> Iterable[float]:
    top = max(abs(low), abs(high), 1.0)
    every = max(1, math.ceil(math.log10(top) / 3))
    powers = [10.0**e for e in range(0, math.floor(math.log10(top)) + 1, every)]
    yield from (-p for p in reversed(powers) if -p >= low)
    yield 0.0
    yield from (p for p in powers if p <= high)


# -- signal-to-noise ratio by layer, and the nodes at which it falls


def signal_plot(evidence: ReportEvidence, facts: Sequence[NodeFacts]) -> Plot | None:
    """Marks and line of the layers' signal, None without layers."""
    layers = [layer for layer in evidence.layers if not math.isnan(layer.sqnr_db)]
    if not layers:
        return None
    numbers = {fact.node.name: index for index, fact in enumerate(facts)}
    finite = [min(layer.sqnr_db, _CEILING_DB) for layer in layers]
    low = min(0.0, 10 * math.floor(max(min(finite), -20.0) / 10))
    high = max(40.0, 10 * math.ceil(max(finite) / 10))

    def y(db: float) -> float:
        return TOP + INNER * (high - min(max(db, low), high)) / (high - low)

    step = (WIDTH - LEFT - RIGHT) / len(layers)
    marks = []
    for index, layer in enumerate(layers):
        node = numbers.get(layer.node, -1)
        region = facts[node].region if node >= 0 else "terminal"
        title = f"{layer.node or 'input'} → {layer.value}: {decibels(layer.sqnr_db)}"
        x, at = round(LEFT + step * (index + 0.5), 1), round(y(layer.sqnr_db), 1)
        marks.append({"x": x, "y": at, "node": node, "region": region, "title": title})
    worst = min(layers, key=lambda layer: layer.sqnr_db)
    return {
        "ticks": [{"at": round(y(db), 1), "label": f"{db:g} dB"} for db in range(int(low), int(high) + 1, 10)],
        "marks": marks,
        "line": " ".join(f"{mark['x']},{mark['y']}" for mark in marks),
        "radius": max(1.5, min(4.0, step / 2.6)),
        "summary": f"{len(layers)} values in the order they are computed. Lowest: {decibels(worst.sqnr_db)} at "
        f"'{worst.value}'; at the end {decibels(layers[-1].sqnr_db)}.",
    }


def signal_losses(evidence: ReportEvidence, *, count: int = 6) -> list[Plot]:
    """The nodes that lose most signal, from the weakest of their inputs to their output."""
    if evidence.graph is None:
        return []
    signal = {layer.value: layer.sqnr_db for layer in evidence.layers}
    reaching: dict[str, float] = {}
    losses: list[Plot] = []
    for index, node in enumerate(evidence.graph.nodes):
        before = min((reaching.get(name, math.inf) for name in node.inputs), default=math.inf)
        known = [signal[name] for name in node.outputs if name in signal]
        after = min(known) if known else before
        reaching.update((name, signal.get(name, before)) for name in node.outputs)
        if known and node.inputs and min(before, _CEILING_DB) - after > 1.0:
            about = {"node": index, "name": node.name, "op_type": node.op_type}
            losses.append({**about, "before": before, "after": after, "lost": before - after})
    return sorted(losses, key=lambda loss: loss["after"] - min(loss["before"], _CEILING_DB))[:count]


# -- histograms of the tensors most worth a look, with their chosen ranges


def histograms(evidence: ReportEvidence, *, kind: TensorKind, count: int = 6) -> list[Plot]:
    """Histograms of values with the weakest signal, or of weights with most noise."""
    signal = {layer.value: layer.sqnr_db for layer in evidence.layers}
    noise = {t.name: t.sqnr_db if kind == "weight" else signal.get(t.name) for t in evidence.tensors if t.kind == kind}
    tensors = [t for t in evidence.tensors if t.kind == kind and t.bars is not None]
    ranks = {name: math.inf if db is None else db for name, db in noise.items()}
    return [_histogram(t, noise[t.name]) for t in sorted(tensors, key=lambda t: ranks[t.name])[:count]]


def _histogram(tensor: TensorProfile, noise: float | None) -> Plot:
    bars = tensor.bars
    assert bars is not None
    width = BARS_WIDTH / len(bars.counts)
    top = math.log1p(max(bars.counts)) or 1.0
    parts = []
    for index, count in enumerate(bars.counts):
        if count:
            height = (BARS_HEIGHT - 2) * max(math.log1p(count) / top, 0.03)
            x, y = index * width, BARS_HEIGHT - height
            parts.append(f"M{x:.1f} {BARS_HEIGHT}V{y:.1f}h{max(width - 0.8, 0.5):.1f}V{BARS_HEIGHT}z")
    ends = [BARS_WIDTH * (end - bars.low) / (bars.high - bars.low) for end in tensor.chosen or ()]
    label = {"weight": "rounding", "activation": "signal"}[tensor.kind]
    facts = [f"{label} {decibels(noise)}"] if noise is not None else []
    facts += [f"{tensor.scales} scales"] if tensor.scales > 1 else []
    return {
        "name": tensor.name,
        "caption": ", ".join([*facts, tensor.precision or "not quantized"]),
        "path": "".join(parts),
        "low": ends[0] if ends else None,
        "high": ends[1] if ends else None,
        "ends": (number(bars.low), number(bars.high)),
        "summary": range_title(tensor),
    }


# -- time by operator, before and after


def time_plot(times: OpTimes | None) -> Plot | None:
    """Bars of time by operator, longest first, the smallest ones together in the last row; None without times."""
    if times is None or not (times.before or times.after):
        return None
    before, after = (by_key(entries, "op_type") for entries in (times.before, times.after))
    kernels: dict[str, dict[str, None]] = {}
    for entry in times.after:
        kernels.setdefault(entry.op_type, {})[entry.kernel] = None
    names = sorted({**before, **after}, key=lambda op: -max(before[op], after[op]))
    shown, rest = names[:_OPERATORS], names[_OPERATORS:]
    sums = [(op, before[op], after[op], ", ".join(kernels.get(op, ()))) for op in shown]
    if rest:
        sums.append((f"{len(rest)} others", sum(before[op] for op in rest), sum(after[op] for op in rest), ""))
    longest = max((max(b, a) for _, b, a, _ in sums), default=0.0) or 1.0
    threads = {0: "the runtime's own number of threads", 1: "one thread"}.get(times.threads, f"{times.threads} threads")
    runs = f"{times.runs} profiled runs a session"
    return {
        "rows": [
            {
                "op_type": op_type,
                "before": b,
                "after": a,
                "before_width": BAR_WIDTH * b / longest,
                "after_width": BAR_WIDTH * a / longest,
                "ratio": b / a if b and a else None,
                "kernels": ran,
            }
            for op_type, b, a, ran in sums
        ],
        "before": sum(before.values()),
        "after": sum(after.values()),
        "note": f"Medians of {runs}, three fresh ones, {threads}. The profiler adds about a microsecond a kernel.",
    }
