"""The verdict: accuracy, speed, size and trust, each with one figure, one sentence and a standing.

Numbers as people read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kenosis_ort.report.explanation import heavy_kernels
from kenosis_ort.report.model import QuantizationReport
from kenosis_ort.report.sections import SpeedCandidate
from kenosis_ort.report.text import format_bytes


def number(value: float | None) -> str:
    """A number with three digits, e.g. ``0.00123``, ``12.3``, ``4.57e+08``."""
    if value is None:
        return "–"
    if math.isnan(value) or math.isinf(value):
        return {"inf": "∞", "-inf": "−∞"}.get(str(value), "not a number")
    if value == 0:
        return "0"
    size = abs(value)
    text = f"{value:.3g}" if size < 1e-4 or size >= 1e6 else f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
    return text.replace("-", "−")


def decibels(value: float | None) -> str:
    """A signal-to-noise ratio, e.g. ``31.2 dB``."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "exact" if value > 0 else "no signal"
    return f"{value:.1f} dB".replace("-", "−")


def milliseconds(value: float | None) -> str:
    """A time, e.g. ``12.3 ms`` or ``8.1 µs``."""
    if value is None:
        return "–"
    return f"{number(value * 1e3)} µs" if value < 0.1 else f"{number(value)} ms"


def factor(value: float | None) -> str:
    """A ratio, e.g. ``1.83×``."""
    return "–" if value is None else f"{value:.2f}×"


def percent(value: float | None) -> str:
    """A share, e.g. ``−12.3 %``."""
    return "–" if value is None else f"{100 * value:+.1f} %".replace("-", "−")


Standing = Literal["good", "watch", "bad", "unknown"]

_CLOSE_DB = 20.0
_WORTHLESS_DB = 10.0


@dataclass(frozen=True)
class Card:
    """One part of the verdict.

    Attributes:
        name: Identifier, also of the section that tells more.
        title: Heading.
        figure: The number.
        sentence: What it means.
        standing: ``good``, ``watch``, ``bad``, or ``unknown`` where nothing was measured.
        label: The standing in words.
        section: Identifier of the section that tells more.
    """

    name: str
    title: str
    figure: str
    sentence: str
    standing: Standing
    label: str
    section: str


def cards(report: QuantizationReport) -> tuple[Card, ...]:
    """The four parts of the verdict."""
    return _accuracy(report), _speed(report), _size(report), _trust(report)


def _accuracy(report: QuantizationReport) -> Card:
    def card(figure: str, sentence: str, standing: Standing, label: str) -> Card:
        return Card("accuracy", "Accuracy", figure, sentence, standing, label, "signal")

    measured = [o for o in report.outputs if not math.isnan(o.sqnr_db)]
    if not report.outputs:
        return card("–", "Outputs were not compared with the float model.", "unknown", "not measured")
    if len(measured) < len(report.outputs):
        return card("–", "An output is not a number.", "bad", "broken")
    worst = min(measured, key=lambda o: o.sqnr_db)
    which = (
        f"output '{worst.name}'" if len(measured) == 1 else f"'{worst.name}', the weakest of {len(measured)} outputs"
    )
    sentence = f"Signal over quantization noise of {which}, on {report.samples_compared}."
    found = report.measure
    if found is not None:
        noise = decibels(worst.sqnr_db)
        parts = ". ".join(text for text in (found.sentence(), found.verdict()) if text)
        sentence = f"{parts[0].upper()}{parts[1:]}. {sentence[:-1]}: {noise}."
        if found.kept is not None:
            standing: Standing = ("good" if found.is_sure else "watch") if found.kept else "bad"
            return card(
                found.shown(found.value), sentence, standing, "budget kept" if found.kept else "budget not kept"
            )
    figure = decibels(worst.sqnr_db) if found is None else found.shown(found.value)
    if worst.sqnr_db < _WORTHLESS_DB:
        return card(figure, sentence, "bad", "little in common with float")
    if worst.sqnr_db < _CLOSE_DB:
        return card(figure, sentence, "watch", "measure your own metric")
    return card(figure, sentence, "good", "close to float")


def _speed(report: QuantizationReport) -> Card:
    if report.is_float:
        return Card("speed", "Speed", "float", report.verdict(), "watch", "the float model", "speed")
    form = None if report.speed is None else report.speed.taken
    if form is not None and form.ratio is not None:
        return _timed(form, "" if report.speed is None else report.speed.basis)
    if report.fusion is None:
        return Card("speed", "Speed", "–", "Neither timed nor verified.", "unknown", "not measured", "speed")
    heavy = heavy_kernels(report.fusion)
    integer = sum(k.integer for k in heavy)
    broken = len(report.left_float())
    sentence = f"{integer} of {len(heavy)} Conv, Gemm and MatMul run on integer kernels; not timed."
    standing: Standing = "watch" if broken else "good" if report.plan else "unknown"
    label = f"{broken} not as planned" if broken else "as planned" if report.plan else "not timed"
    return Card("speed", "Speed", f"{integer}/{len(heavy)}", sentence, standing, label, "speed")


def _timed(form: SpeedCandidate, basis: str) -> Card:
    interval = "" if form.low is None or form.high is None else f" ({form.low:.2f} to {form.high:.2f})"
    own = "" if form.milliseconds is None else f", {milliseconds(form.milliseconds)} a run"
    sentence = f"The float model's time over ours{interval}{own}."
    standing: Standing = "good"
    label = ", ".join(filter(None, (basis, form.verdict)))
    if basis == "estimated" or form.verdict == "too noisy":
        standing = "watch"
    elif form.verdict == "slower":
        standing = "bad"
    return Card("speed", "Speed", factor(form.ratio), sentence, standing, label, "speed")


def _size(report: QuantizationReport) -> Card:
    if not report.size_ratio:
        return Card("size", "Size", "–", "The sizes are not known.", "unknown", "not measured", "files")
    sentence = f"{format_bytes(report.size_before)} before, {format_bytes(report.size_after)} after."
    label, figure = report.size_change, factor(report.size_ratio)
    standing: Standing = "good" if label.endswith("smaller") else "watch"
    return Card("size", "Size", figure, sentence, standing, label, "files")


def _trust(report: QuantizationReport) -> Card:
    calibration = report.calibration
    seen = f"{calibration.samples} samples, {calibration.tensors} tensors, {calibration.method} ranges."
    if report.trust is None:
        figure = str(calibration.samples) if calibration.samples else "–"
        label = "not judged"
        table = (
            f"Ranges from a table: {calibration.tensors} tensors." if calibration.tensors else "Nothing was calibrated."
        )
        sentence = seen if calibration.samples else table
        figure = f"{figure} samples" if calibration.samples else "–"
        return Card("trust", "Calibration", figure, sentence, "unknown", label, "calibration")
    standings: dict[str, Standing] = {"trusted": "good", "usable": "watch", "do not ship": "bad"}
    standing = standings.get(report.trust.verdict, "unknown")
    sentence = report.trust.reason or seen
    return Card("trust", "Calibration", report.trust.verdict.capitalize(), sentence, standing, seen, "calibration")
