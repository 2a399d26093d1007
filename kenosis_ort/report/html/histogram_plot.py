"""Histograms of the tensors most worth a look, with their chosen ranges."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kenosis_ort.report.evidence import ReportEvidence, TensorKind, TensorProfile
from kenosis_ort.report.html.numbers import decibels, number
from kenosis_ort.report.html.range_plot import range_title

BARS_WIDTH: Final = 288
BARS_HEIGHT: Final = 84


@dataclass(frozen=True)
class HistogramPlot:
    """A histogram with the chosen range.

    Attributes:
        name: Of the tensor.
        caption: What there is to know in numbers.
        path: SVG path of the bars, logarithmic heights.
        low: Pixels from the left to the lower end of the chosen range; None if not quantized.
        high: To the upper end.
        ends: Labels of the left and right end.
        summary: What a reader who cannot see it should know.
    """

    name: str
    caption: str
    path: str
    low: float | None
    high: float | None
    ends: tuple[str, str]
    summary: str


def histograms(evidence: ReportEvidence, *, kind: TensorKind, count: int = 6) -> tuple[HistogramPlot, ...]:
    """Returns the histograms most worth a look: of values with the weakest signal, of weights with most noise."""
    signal = {layer.value: layer.sqnr_db for layer in evidence.layers}
    tensors = [t for t in evidence.tensors if t.kind == kind and t.bars is not None]
    infinite = math.inf

    def rank(tensor: TensorProfile) -> float:
        if tensor.kind == "weight":
            return infinite if tensor.sqnr_db is None else tensor.sqnr_db
        return signal.get(tensor.name, infinite)

    return tuple(_histogram(t, signal.get(t.name)) for t in sorted(tensors, key=rank)[:count])


def _histogram(tensor: TensorProfile, signal: float | None) -> HistogramPlot:
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
    span = bars.high - bars.low
    chosen = tensor.chosen
    ends = (None, None) if chosen is None else tuple(BARS_WIDTH * (end - bars.low) / span for end in chosen)
    noise = tensor.sqnr_db if tensor.kind == "weight" else signal
    label = {"weight": "rounding", "activation": "signal"}[tensor.kind]
    facts = [f"{label} {decibels(noise)}"] if noise is not None else []
    if tensor.scales > 1:
        facts.append(f"{tensor.scales} scales")
    facts.append(tensor.precision or "not quantized")
    return HistogramPlot(
        name=tensor.name,
        caption=", ".join(facts),
        path="".join(parts),
        low=ends[0],
        high=ends[1],
        ends=(number(bars.low), number(bars.high)),
        summary=range_title(tensor),
    )
