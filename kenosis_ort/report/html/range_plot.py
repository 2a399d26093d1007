"""Ranges of activations: what was seen and what the integers represent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kenosis_ort.report.evidence import ReportEvidence, TensorProfile
from kenosis_ort.report.html.frame import INNER, LEFT, RIGHT, TOP, WIDTH, Tick
from kenosis_ort.report.html.numbers import number


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
    """Returns the plot of activation ranges, None without any."""
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
    """Returns the ranges of a tensor as text."""
    seen = f"{tensor.name}: seen {number(tensor.low)} to {number(tensor.high)}"
    if tensor.chosen is None:
        return f"{seen}, not quantized"
    return f"{seen}, represented {number(tensor.chosen[0])} to {number(tensor.chosen[1])}"


def is_clipped(tensor: TensorProfile) -> bool:
    """Tells whether the chosen range cuts more than a hundredth off what was seen."""
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
