"""Puts the page together: data into templates, style and scripts inlined, nothing fetched.

The verdict is cards of accuracy, speed, size and trust, each with one figure, one sentence and a standing.
"""

from __future__ import annotations

import base64
import hashlib
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

import jinja2
from markupsafe import Markup

from kenosis_ort.errors import printable
from kenosis_ort.report.evidence import ReportEvidence, kernels_in_words, processors_line
from kenosis_ort.report.facts import ReportFacts, SpeedCandidate
from kenosis_ort.report.html import picture
from kenosis_ort.report.html.picture import NodeFacts, node_facts
from kenosis_ort.report.html.words import REGIONS, decibels, factor, milliseconds, number, percent
from kenosis_ort.storage.data import format_bytes, plain

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
    own = "" if form.milliseconds is None else f", {milliseconds(form.milliseconds)} a run"
    sentence = f"The float model's time over ours{form.interval}{own}."
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
    facts = node_facts(report.plan, report.fusion, report.layers, shown)
    style, script = _joined(_STYLE), _joined(_SCRIPTS)
    left_float = {kernel.node for kernel in report.left_float()}
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
            picture=_spelled_out(picture.picture_data(report.plan, shown, facts)),
            signal=picture.signal_plot(shown, facts),
            losses=picture.signal_losses(shown),
            broken=[(index, fact) for index, fact in enumerate(facts) if fact.node.name in left_float],
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
    facts = node_facts(report.plan, report.fusion, report.layers, _NO_EVIDENCE)
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
