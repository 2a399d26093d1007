"""Signal-to-noise ratio by layer, and the nodes at which it falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kenosis_ort.report.evidence import ReportEvidence
from kenosis_ort.report.html.frame import INNER, LEFT, RIGHT, TOP, WIDTH, Tick
from kenosis_ort.report.html.numbers import decibels
from kenosis_ort.report.html.picture import NodeFacts

_CEILING_DB: Final = 60.0  # above, quantization is not what limits the signal


@dataclass(frozen=True)
class Mark:
    """One mark of a plot: place, node (number in the picture, -1 for none), region, and what it says."""

    x: float
    y: float
    node: int
    region: str
    title: str


@dataclass(frozen=True)
class SignalPlot:
    """Signal-to-noise ratio by layer.

    Attributes:
        ticks: Horizontal grid lines.
        marks: One a value.
        line: Points of the line through the marks.
        radius: Of a mark.
        summary: What a reader who cannot see it should know.
    """

    ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...]
    line: str
    radius: float
    summary: str


def signal_plot(evidence: ReportEvidence, facts: Sequence[NodeFacts]) -> SignalPlot | None:
    """Returns the plot of the layers' signal, None without layers."""
    layers = [layer for layer in evidence.layers if not math.isnan(layer.sqnr_db)]
    if not layers:
        return None
    numbers = {fact.name: index for index, fact in enumerate(facts)}
    finite = [min(layer.sqnr_db, _CEILING_DB) for layer in layers]
    low = min(0.0, 10 * math.floor(max(min(finite), -20.0) / 10))
    high = max(40.0, 10 * math.ceil(max(finite) / 10))

    def y(db: float) -> float:
        return TOP + INNER * (high - min(max(db, low), high)) / (high - low)

    step = (WIDTH - LEFT - RIGHT) / max(len(layers), 1)
    marks = []
    for index, layer in enumerate(layers):
        node = numbers.get(layer.node, -1)
        region = facts[node].region if node >= 0 else "terminal"
        title = f"{layer.node or 'input'} → {layer.value}: {decibels(layer.sqnr_db)}"
        marks.append(Mark(round(LEFT + step * (index + 0.5), 1), round(y(layer.sqnr_db), 1), node, region, title))
    worst = min(layers, key=lambda layer: layer.sqnr_db)
    last = layers[-1]
    summary = (
        f"{len(layers)} values in the order they are computed. Lowest: {decibels(worst.sqnr_db)} at '{worst.value}'; "
        f"at the end {decibels(last.sqnr_db)}."
    )
    ticks = tuple(Tick(round(y(db), 1), f"{db:g} dB") for db in range(int(low), int(high) + 1, 10))
    line = " ".join(f"{mark.x},{mark.y}" for mark in marks)
    return SignalPlot(ticks, tuple(marks), line, max(1.5, min(4.0, step / 2.6)), summary)


@dataclass(frozen=True)
class SignalLoss:
    """A node behind which the signal is much weaker than in front of it, in dB."""

    node: int
    name: str
    op_type: str
    before: float
    after: float

    @property
    def lost(self) -> float:
        """How much weaker."""
        return self.before - self.after


def signal_losses(evidence: ReportEvidence, facts: Sequence[NodeFacts], *, count: int = 6) -> tuple[SignalLoss, ...]:
    """Returns the nodes that lose most signal, from the weakest of their inputs to their output."""
    if evidence.graph is None:
        return ()
    signal = {layer.value: layer.sqnr_db for layer in evidence.layers}
    reaching: dict[str, float] = {}
    losses = []
    for index, node in enumerate(evidence.graph.nodes):
        before = min((reaching.get(name, math.inf) for name in node.inputs), default=math.inf)
        known = [signal[name] for name in node.outputs if name in signal]
        after = min(known) if known else before
        reaching.update((name, signal.get(name, before)) for name in node.outputs)
        if known and node.inputs and min(before, _CEILING_DB) - after > 1.0:
            losses.append(SignalLoss(index, node.name, facts[index].op_type, before, after))
    return tuple(sorted(losses, key=lambda loss: loss.after - min(loss.before, _CEILING_DB))[:count])
