"""Cards of the verdict, numbers as people read them, the call that makes the same model, and colours of nodes.

The verdict is accuracy, speed, size and trust, each with one figure, one sentence and a standing. A node's colour says
what it became, and whether that was on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from kenosis_ort.plan import Kind, NodeDecision
from kenosis_ort.report.facts import SpeedCandidate
from kenosis_ort.storage.data import format_bytes, plain
from kenosis_ort.targets.proof import KernelReport

if TYPE_CHECKING:
    from kenosis_ort.report.facts import ReportFacts

_NOT_A_PATH: Final = ("model '", "the given ModelProto")
"""How messages call a model that came in memory."""


def python_call(report: ReportFacts) -> str:
    """A script that makes the same model by the recipe file that stands beside it; data and metric are left open."""
    model, reader = repr(report.model_input), "the same calibration data, in the same order"
    open_names = {"reader": reader}
    if report.model_input.startswith(_NOT_A_PATH):
        model, open_names["model"] = "model", "the same model"
    recipe = Path(report.model_output).with_suffix(".recipe.toml").as_posix()
    arguments = [model, repr(report.model_output), "reader", f"recipe={recipe!r}"]
    for name, what in (("metric", "the same measure"), ("eval_reader", "the same held-out data, in the same order")):
        if name in report.options:
            arguments.append(f"{name}={name}")
            open_names[name] = what
    outside = ("calibration_cache_path", "custom_op_libraries")  # a recipe file holds neither
    arguments += [f"{name}={plain(report.options[name].value)!r}" for name in outside if name in report.options]
    lines = ["import kenosis_ort", "", f"# {recipe} holds the recipe and options below"]
    lines += [f"{name} = ...  # {what}" for name, what in open_names.items()]
    return "\n".join([*lines, "report = kenosis_ort.quantize_static(", *(f"    {each}," for each in arguments), ")"])


Region = Literal["integer", "moves", "fused", "float", "protected", "other", "terminal"]


@dataclass(frozen=True)
class RegionStyle:
    """Names of a region.

    Attributes:
        label: In the legend and in tables.
        meaning: One sentence for the legend.
    """

    label: str
    meaning: str


REGIONS: Final[dict[Region, RegionStyle]] = {
    "integer": RegionStyle("Integer", "Runs on an integer kernel."),
    "moves": RegionStyle("Pass-through", "Moves quantized bytes; same scale in and out."),
    "fused": RegionStyle("Fused", "Gone: merged into another node's kernel."),
    "float": RegionStyle("Float", "Runs in float: no integer kernel, or it would not pay."),
    "protected": RegionStyle("Protected", "Kept float on purpose, for accuracy or at the caller's wish."),
    "other": RegionStyle("Other", "Shapes, indices and control flow, or computed at load."),
    "terminal": RegionStyle("Input or output", "Where data enters and leaves."),
}

_PROTECTED_RULES: Final = frozenset(
    {"caller-excluded", "caller-op-types", "protected-input", "verified-float", "output-protection"}
)


_BY_KIND: Final[Mapping[Kind, Region]] = {Kind.INTEGER: "integer", Kind.PASS_THROUGH: "moves", Kind.ABSORBED: "fused"}


def region_of(decision: NodeDecision | None, kernel: KernelReport | None) -> Region:
    """Region of a node by its kernel in the runtime, or by the plan where the runtime was not asked."""
    kind = None if decision is None else decision.kind
    protected = decision is not None and kind is Kind.FLOAT and decision.rule in _PROTECTED_RULES
    in_float: Region = "protected" if protected else "float"
    if kernel is None:
        return "other" if kind is None else _BY_KIND.get(kind, in_float)
    if kernel.status == "integer":
        return "moves" if kind is Kind.PASS_THROUGH else "integer"
    return "fused" if kernel.status == "absorbed" else in_float if kernel.status == "float" else "other"


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
        section: Identifier of the section that tells more.
        figure: The number.
        sentence: What it means.
        standing: ``good``, ``watch``, ``bad``, or ``unknown`` where nothing was measured.
        label: The standing in words.
    """

    name: str
    title: str
    section: str
    figure: str
    sentence: str
    standing: Standing
    label: str


_Content = tuple[str, str, Standing, str]
"""Figure, sentence, standing and label of a card."""


def cards(report: ReportFacts) -> tuple[Card, ...]:
    """The four parts of the verdict."""
    return (
        Card("accuracy", "Accuracy", "signal", *_accuracy(report)),
        Card("speed", "Speed", "speed", *_speed(report)),
        Card("size", "Size", "files", *_size(report)),
        Card("trust", "Calibration", "calibration", *_trust(report)),
    )


def _accuracy(report: ReportFacts) -> _Content:
    measured = [o for o in report.outputs if not math.isnan(o.sqnr_db)]
    if not report.outputs:
        return "–", "Outputs were not compared with the float model.", "unknown", "not measured"
    if len(measured) < len(report.outputs):
        return "–", "An output is not a number.", "bad", "broken"
    worst = min(measured, key=lambda o: o.sqnr_db)
    which = (
        f"output '{worst.name}'" if len(measured) == 1 else f"'{worst.name}', the weakest of {len(measured)} outputs"
    )
    sentence = f"Signal over quantization noise of {which}, on {report.samples_compared}."
    found, figure = report.measure, decibels(worst.sqnr_db)
    if found is not None:
        parts = ". ".join(text for text in (found.sentence(), found.verdict()) if text)
        sentence = f"{parts[0].upper()}{parts[1:]}. {sentence[:-1]}: {figure}."
        figure = found.shown(found.value)
        if found.kept is not None:
            standing: Standing = ("good" if found.is_sure else "watch") if found.kept else "bad"
            return figure, sentence, standing, "budget kept" if found.kept else "budget not kept"
    if worst.sqnr_db < _WORTHLESS_DB:
        return figure, sentence, "bad", "little in common with float"
    if worst.sqnr_db < _CLOSE_DB:
        return figure, sentence, "watch", "measure your own metric"
    return figure, sentence, "good", "close to float"


def _speed(report: ReportFacts) -> _Content:
    if report.is_float:
        return "float", report.verdict(), "watch", "the float model"
    form = None if report.speed is None else report.speed.taken
    if form is not None and form.ratio is not None:
        return _timed(form, "" if report.speed is None else report.speed.basis)
    if report.fusion is None:
        return "–", "Neither timed nor verified.", "unknown", "not measured"
    heavy = report.fusion.heavy()
    integer = sum(k.integer for k in heavy)
    broken = len(report.left_float())
    sentence = f"{integer} of {len(heavy)} Conv, Gemm and MatMul run on integer kernels; not timed."
    standing: Standing = "watch" if broken else "good" if report.plan else "unknown"
    label = f"{broken} not as planned" if broken else "as planned" if report.plan else "not timed"
    return f"{integer}/{len(heavy)}", sentence, standing, label


def _timed(form: SpeedCandidate, basis: str) -> _Content:
    interval = "" if form.low is None or form.high is None else f" ({form.low:.2f} to {form.high:.2f})"
    own = "" if form.milliseconds is None else f", {milliseconds(form.milliseconds)} a run"
    sentence = f"The float model's time over ours{interval}{own}."
    unsure = basis == "estimated" or form.verdict == "too noisy"
    standing: Standing = "watch" if unsure else "bad" if form.verdict == "slower" else "good"
    return factor(form.ratio), sentence, standing, ", ".join(filter(None, (basis, form.verdict)))


def _size(report: ReportFacts) -> _Content:
    if not report.size_ratio:
        return "–", "The sizes are not known.", "unknown", "not measured"
    sentence = f"{format_bytes(report.size_before)} before, {format_bytes(report.size_after)} after."
    standing: Standing = "good" if report.size_change.endswith("smaller") else "watch"
    return factor(report.size_ratio), sentence, standing, report.size_change


def _trust(report: ReportFacts) -> _Content:
    calibration, trust = report.calibration, report.trust
    seen = f"{calibration.samples} samples, {calibration.tensors} tensors, {calibration.method} ranges."
    if trust is None and calibration.samples:
        return f"{calibration.samples} samples", seen, "unknown", "not judged"
    if trust is None:
        from_table = f"Ranges from a table: {calibration.tensors} tensors."
        return "–", from_table if calibration.tensors else "Nothing was calibrated.", "unknown", "not judged"
    standings: dict[str, Standing] = {"trusted": "good", "usable": "watch", "do not ship": "bad"}
    return trust.verdict.capitalize(), trust.reason or seen, standings.get(trust.verdict, "unknown"), seen
