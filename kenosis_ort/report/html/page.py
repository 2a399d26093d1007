"""Puts the page together: data into templates, style and scripts inlined, nothing fetched.

Time by operator type, before and after.

Histograms of the tensors most worth a look, with their chosen ranges.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import jinja2
from markupsafe import Markup

from kenosis_ort.errors import printable
from kenosis_ort.report.evidence import OpTime, OpTimes, ReportEvidence, TensorKind, TensorProfile, kernels_in_words
from kenosis_ort.report.explanation import processors_line
from kenosis_ort.report.html import plots
from kenosis_ort.report.html.cards import REGIONS, cards, decibels, factor, milliseconds, number, percent, python_call
from kenosis_ort.report.html.picture import NodeFacts, node_facts, picture_data
from kenosis_ort.report.html.plots import range_plot, range_title, signal_losses, signal_plot
from kenosis_ort.report.quantization_report import QuantizationReport
from kenosis_ort.report.text import format_bytes
from kenosis_ort.storage.data import plain

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
    """The histograms most worth a look: of values with the weakest signal, of weights with most noise."""
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


BAR_WIDTH: Final = 420
_OPERATORS: Final = 12


@dataclass(frozen=True)
class TimeRow:
    """Time of one operator type before and after, in milliseconds and in pixels, and the kernels that ran."""

    op_type: str
    before: float
    after: float
    before_width: float
    after_width: float
    kernels: str

    @property
    def ratio(self) -> float | None:
        """Ratio of the times; None where one is missing."""
        return self.before / self.after if self.before and self.after else None


@dataclass(frozen=True)
class TimePlot:
    """Times by operator type, longest first.

    Attributes:
        rows: The operators; the smallest ones together in the last row.
        before: Sum of all, milliseconds.
        after: The same of the quantized model.
        note: How it was measured.
    """

    rows: tuple[TimeRow, ...]
    before: float
    after: float
    note: str


def time_plot(times: OpTimes | None) -> TimePlot | None:
    """The bars of time by operator, None without times."""
    if times is None or not (times.before or times.after):
        return None
    before, after = _by_operator(times.before), _by_operator(times.after)
    kernels: dict[str, dict[str, None]] = {}
    for entry in times.after:
        kernels.setdefault(entry.op_type, {})[entry.kernel] = None
    names = sorted({*before, *after}, key=lambda op: -max(before.get(op, 0.0), after.get(op, 0.0)))
    shown, rest = names[:_OPERATORS], names[_OPERATORS:]
    sums = [(op, before.get(op, 0.0), after.get(op, 0.0), ", ".join(kernels.get(op, {}))) for op in shown]
    if rest:
        sums.append(
            (f"{len(rest)} others", sum(before.get(op, 0.0) for op in rest), sum(after.get(op, 0.0) for op in rest), "")
        )
    longest = max((max(b, a) for _, b, a, _ in sums), default=0.0) or 1.0
    rows = tuple(TimeRow(op, b, a, BAR_WIDTH * b / longest, BAR_WIDTH * a / longest, k) for op, b, a, k in sums)
    threads = {0: "the runtime's own number of threads", 1: "one thread"}.get(times.threads, f"{times.threads} threads")
    runs = f"{times.runs} profiled runs a session"
    note = f"Medians of {runs}, three fresh ones, {threads}. The profiler adds about a microsecond a kernel."
    return TimePlot(rows, sum(before.values()), sum(after.values()), note)


def _by_operator(times: Iterable[OpTime]) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in times:
        found[entry.op_type] = found.get(entry.op_type, 0.0) + entry.milliseconds
    return found


_STYLE: Final = ("tokens.css", "page.css", "parts.css", "print.css")
_SCRIPTS: Final = ("data.js", "plot.js", "canvas.js", "view.js", "graph.js", "panel.js", "tables.js", "main.js")
_NO_EVIDENCE: Final = ReportEvidence()


def render_html(report: QuantizationReport, *, evidence: ReportEvidence | None = None) -> str:
    """The report as one HTML page; sections without data are left out.

    Names in a model are input from outside: all of them are escaped, and the page's security policy allows no
    script, style, image or connection but the page's own.

    Args:
        report: What to show.
        evidence: Takes the place of the report's own evidence.
    """
    shown = evidence or report.evidence or _NO_EVIDENCE
    facts = node_facts(report, shown)
    style, script = _joined(_STYLE), _joined(_SCRIPTS)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            evidence=shown,
            facts=facts,
            cards=cards(report),
            processors="" if report.fusion is None else processors_line(report.fusion, report.clipping),
            regions=REGIONS,
            counts=_counts(facts),
            picture=_spelled_out(picture_data(report, shown, facts)),
            signal=signal_plot(shown, facts),
            losses=signal_losses(shown, facts),
            broken=_broken(report, facts),
            slowest=_slowest(facts),
            ranges=range_plot(shown),
            activation_bars=histograms(shown, kind="activation"),
            weight_bars=histograms(shown, kind="weight"),
            times=time_plot(shown.times),
            kernels=kernels_in_words(report.layers),
            frame=plots,
            bars_width=BARS_WIDTH,
            bars_height=BARS_HEIGHT,
            bar_width=BAR_WIDTH,
            toml=report.recipe_file().to_toml().strip(),
            call=python_call(report),
            style=style,
            script=script,
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
    )


def render_notebook(report: QuantizationReport) -> str:
    """The verdict as a fragment for a notebook: no scripts, its own few styles."""
    facts = node_facts(report, _NO_EVIDENCE)
    left = [fact for fact in facts if fact.region in ("float", "protected")]
    return (
        _environment()
        .get_template("notebook.html.j2")
        .render(report=report, cards=cards(report), counts=_counts(facts), regions=REGIONS, left=left)
    )


def _counts(facts: tuple[NodeFacts, ...]) -> dict[str, int]:
    """Number of nodes of each region, empty ones left out."""
    counts = {region: sum(fact.region == region for fact in facts) for region in REGIONS}
    return {region: count for region, count in counts.items() if count}


def _broken(report: QuantizationReport, facts: tuple[NodeFacts, ...]) -> list[tuple[int, NodeFacts]]:
    """The nodes that the plan calls integer and the runtime runs in float, with their numbers."""
    names = {kernel.node for kernel in report.left_float()}
    return [(index, fact) for index, fact in enumerate(facts) if fact.name in names]


def _slowest(facts: tuple[NodeFacts, ...], count: int = 6) -> list[tuple[int, NodeFacts]]:
    """The nodes that take most time in the quantized model, with their numbers."""
    timed = [(index, fact) for index, fact in enumerate(facts) if fact.after_ms]
    return sorted(timed, key=lambda entry: -(entry[1].after_ms or 0.0))[:count]


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kenosis_ort.report.html", "templates"),
        autoescape=True,
        finalize=_finalized,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number,
        decibels=decibels,
        milliseconds=milliseconds,
        factor=factor,
        percent=percent,
        bytes=format_bytes,
        option=_option,
        sentence=_sentence,
    )
    return environment


def _finalized(value: Any) -> Any:
    """A value as the page shows it, without control characters; what is markup already stays."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _spelled_out(data: Any) -> Any:
    """JSON data with the control characters in all of its texts spelled out."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {printable(key) if isinstance(key, str) else key: _spelled_out(value) for key, value in data.items()}
    return [_spelled_out(value) for value in data] if isinstance(data, (list, tuple)) else data


def _option(value: Any) -> str:
    """An option's value as text."""
    shown = plain(value)
    if isinstance(shown, dict):
        return ", ".join(f"{key}={_option(entry)}" for key, entry in shown.items()) or "none"
    if isinstance(shown, list):
        return ", ".join(_option(entry) for entry in shown) or "none"
    if isinstance(shown, bool):
        return "yes" if shown else "no"
    return "none" if shown is None else str(shown)


def _sentence(text: str) -> str:
    """A reason with a capital at the start, where it starts with a plain word."""
    word = text.split(" ", 1)[0]
    return text[0].upper() + text[1:] if word.isalpha() and word.islower() else text


@cache
def _joined(names: tuple[str, ...]) -> str:
    """Files of ``static/`` as one text. The scripts share one module scope, so nothing is global."""
    folder = files("kenosis_ort.report.html").joinpath("static")
    return "\n" + "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
