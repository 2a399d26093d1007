"""Puts the page together: data into templates, style and scripts inlined, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import jinja2
from markupsafe import Markup

from kenosis_ort.errors import printable
from kenosis_ort.report.evidence import ReportEvidence, kernels_in_words, processors_line
from kenosis_ort.report.html import picture
from kenosis_ort.report.html.cards import REGIONS, cards, decibels, factor, milliseconds, number, percent, python_call
from kenosis_ort.report.html.picture import NodeFacts, node_facts
from kenosis_ort.storage.data import format_bytes, plain

if TYPE_CHECKING:
    from kenosis_ort.report.facts import ReportFacts

_STYLE: Final = ("tokens.css", "page.css", "parts.css", "print.css")
_SCRIPTS: Final = ("data.js", "plot.js", "canvas.js", "view.js", "graph.js", "panel.js", "tables.js", "main.js")
_NO_EVIDENCE: Final = ReportEvidence()


def render_html(report: ReportFacts, toml: str) -> str:
    """The report as one HTML page; sections without data are left out.

    Names in a model are input from outside: all of them are escaped, and the page's security policy allows no
    script, style, image or connection but the page's own.

    Args:
        report: The facts.
        toml: The recipe file that makes the same model again.
    """
    shown = report.evidence or _NO_EVIDENCE
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
            picture=_spelled_out(picture.picture_data(report, shown, facts)),
            signal=picture.signal_plot(shown, facts),
            losses=picture.signal_losses(shown, facts),
            broken=_broken(report, facts),
            slowest=_slowest(facts),
            ranges=picture.range_plot(shown),
            activation_bars=picture.histograms(shown, kind="activation"),
            weight_bars=picture.histograms(shown, kind="weight"),
            times=picture.time_plot(shown.times),
            kernels=kernels_in_words(report.layers),
            frame=picture,
            toml=toml.strip(),
            call=python_call(report),
            style=style,
            script=script,
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
    )


def render_notebook(report: ReportFacts) -> str:
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


def _broken(report: ReportFacts, facts: tuple[NodeFacts, ...]) -> list[tuple[int, NodeFacts]]:
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
