"""Signal-to-noise ratio by layer, and the nodes at which it falls.

Ranges of activations: what was seen and what the integers represent.

What all static plots share: their size and their grid lines.

The plots are few and plain, so they are drawn by hand, geometry here and SVG in the templates: a plotting library would
add tens of megabytes to an installation, and its SVG knows neither the page's colours, light and dark, nor which node
a mark stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kenosis_ort.report.evidence import ReportEvidence, TensorProfile
from kenosis_ort.report.html.cards import decibels, number
from kenosis_ort.report.html.picture import NodeFacts

WIDTH: Final = 960
HEIGHT: Final = 250
LEFT: Final = 56
RIGHT: Final = 16
TOP: Final = 16
BOTTOM: Final = 28
INNER: Final = HEIGHT - TOP - BOTTOM
"""Height between the lowest and the highest grid line."""


@dataclass(frozen=True)
class Tick:
    """A grid line: its place in pixels and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class RangeBar:
    """One tensor of the range plot: middle, what was seen and what is represented, in pixels; None if unknown."""

    x: float
    seen: tuple[float, float]
    chosen: tuple[float, float] | None
    title: str


@dataclass(frozen=True)
class RangePlot:
    """Ranges of activations on an axis that is linear near zero and logarithmic beyond.

    Attributes:
        ticks: Horizontal grid lines.
        bars: One a tensor.
        thickness: Of a bar.
        summary: What a reader who cannot see it should know.
    """

    ticks: tuple[Tick, ...]
    bars: tuple[RangeBar, ...]
    thickness: float
    summary: str


def range_plot(evidence: ReportEvidence) -> RangePlot | None:
    """The plot of activation ranges, None without any."""
    tensors = [t for t in evidence.tensors if t.kind == "activation" and math.isfinite(t.low) and math.isfinite(t.high)]
    if not tensors:
        return None
    ends = [end for t in tensors for end in (t.low, t.high, *(t.chosen or ()))]
    low, high = min(_squash(min(ends)), -0.1), max(_squash(max(ends)), 0.1)

    def y(value: float) -> float:
        return round(TOP + INNER * (high - _squash(value)) / (high - low), 1)

    step = (WIDTH - LEFT - RIGHT) / len(tensors)
    bars = tuple(
        RangeBar(
            round(LEFT + step * (index + 0.5), 1),
            (y(t.high), y(t.low)),
            None if t.chosen is None else (y(t.chosen[1]), y(t.chosen[0])),
            range_title(t),
        )
        for index, t in enumerate(tensors)
    )
    clipped = sum(is_clipped(t) for t in tensors)
    cut = f"{clipped} of the chosen ranges cut" if clipped != 1 else "One of the chosen ranges cuts"
    cut = cut if clipped else "None of the chosen ranges cuts"
    summary = f"{len(tensors)} activations in the order they were observed. {cut} more than 1 % off what was seen."
    ticks = tuple(Tick(y(value), f"{value:g}".replace("-", "−")) for value in _decades(min(ends), max(ends)))
    return RangePlot(ticks, bars, round(max(0.8, min(12.0, step * 0.62)), 1), summary)


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
    """The plot of the layers' signal, None without layers."""
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
        """Loss of signal."""
        return self.before - self.after


def signal_losses(evidence: ReportEvidence, facts: Sequence[NodeFacts], *, count: int = 6) -> tuple[SignalLoss, ...]:
    """The nodes that lose most signal, from the weakest of their inputs to their output."""
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
