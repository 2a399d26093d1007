"""The report as rich text: for a terminal, a log or a file; and what all tables and consoles of the package are.

On a `PlainConsole` names from a model cannot do anything: control characters are spelled out.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kenosis_ort.errors import printable
from kenosis_ort.graph.constants import Is, having
from kenosis_ort.report import evidence
from kenosis_ort.storage.data import format_bytes
from kenosis_ort.targets.proof import ClippingLoss, FusionReport, KernelReport

if TYPE_CHECKING:
    from kenosis_ort.calibration.trust_summary import TrustSummary
    from kenosis_ort.passes.journal import PassOutcome
    from kenosis_ort.plan import PlacementPlan
    from kenosis_ort.report.facts import ReportFacts, SpeedCandidate, SpeedSummary

Form: TypeAlias = str | Callable[[Any], str | Text]
"""What a cell of a `table` holds: a format string of the row's object, or a function of it."""
MAX_FLOAT_ROWS = 12
MAX_NAMES = 3
_TRUST_STYLES = {"trusted": "green", "usable": "yellow", "do not ship": "bold red"}
_HEAVY = having(Is.HEAVY)
_UNTRIED = ("spare", "absent", "untimed")


class PlainConsole(Console):
    """A console that spells out control characters and marks of reading order in all that it prints."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, str):
            renderable = printable(renderable)
        elif isinstance(renderable, Text) and printable(renderable.plain) != renderable.plain:
            renderable = renderable.blank_copy(printable(renderable.plain))
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def make_table(
    *headings: str,
    rows: Iterable[Iterable[str | Text]],
    title: str | None = None,
    styles: Iterable[str] = (),
    **settings: Any,
) -> Table:
    """A table for a `PlainConsole`.

    Args:
        headings: Of its columns; one that begins with ``>`` is of numbers, which stand to the right on one line.
        rows: Cells; texts are shown as they are, without markup.
        title: Above it.
        styles: Of the rows; of those beyond none.
        settings: Further ones of ``rich.table.Table``.
    """
    table = Table(
        **{"box": box.SIMPLE_HEAD, "title": title, "title_justify": "left", "title_style": "bold", **settings}
    )
    for heading in headings:
        if heading.startswith(">"):
            table.add_column(heading.removeprefix(">"), justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    for row, style in zip(rows, chain(styles, repeat("")), strict=False):
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row), style=style)
    return table


def cells(row: Any, columns: Mapping[str, Form]) -> list[str | Text]:
    """The cells of a row of `table`."""
    return [form.format(row) if isinstance(form, str) else form(row) for form in columns.values()]


def table(rows: Iterable[Any], columns: Mapping[str, Form], **settings: Any) -> Table:
    """A table of objects, one a row.

    Args:
        rows: The objects.
        columns: By heading what a cell holds, as a format string of the object (``{0.name}``), or a function of it.
        settings: As for `make_table`.
    """
    return make_table(*columns, rows=(cells(row, columns) for row in rows), **settings)


def make_facts(facts: Iterable[tuple[str, str | Text]], *, style: str = "dim") -> Table:
    """Labels and texts in two columns; facts without a text are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=style, no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts:
        if text:
            table.add_row(label, Text(text) if isinstance(text, str) else text)
    return table


def render_report(report: ReportFacts, *, full: bool = False) -> RenderableType:
    """The report for a rich console.

    Args:
        report: What to show.
        full: Show the options, each layer, and every float node by itself instead of `MAX_FLOAT_ROWS` groups by reason.
    """
    blocks: list[RenderableType] = [
        Rule("kenosis-ort", style="dim"),
        _verdict(report.verdict(), good=not (report.fusion is None or report.is_float or report.left_float())),
        _facts(report),
    ]
    if report.fusion is not None:
        blocks.append(_fusion_tables(report.fusion, report.plan, report.clipping, full=full))
    if full and report.layers:
        blocks.append(render_layers(report.layers))
    if report.passes:
        blocks.append(_passes(report.passes))
    if report.speed is not None and report.speed.candidates:
        blocks.append(_candidates(report.speed, full=full))
    if report.trust is not None:
        blocks.append(_trust(report.trust, full=full))
    if full and report.options:
        rows = ((name, str(getattr(value, "name", value)), source) for name, (value, source) in report.options.items())
        blocks.append(make_table("option", "value", "chosen by", rows=rows, title="Options"))
    blocks += _messages("note", report.notes, "cyan")
    blocks += _messages("warning", report.warnings, "yellow")
    if report.seconds:
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in report.seconds.items())
        blocks.append(Text(f"seconds: {stages}; total {report.total_seconds:.2f}", style="dim"))
    return Group(*blocks)


def render_fusion(
    fusion: FusionReport, *, plan: PlacementPlan | None = None, losses: Sequence[ClippingLoss] = (), full: bool = False
) -> RenderableType:
    """A fusion proof for a rich console; compared with the plan if there is one."""
    broken = any(not k.integer for k in fusion.heavy()) if plan is None else bool(fusion.avoidable(plan))
    return Group(
        _verdict(evidence.fusion_verdict(fusion, plan), good=not broken),
        Text(f"asked: {fusion.runtime} {fusion.runtime_version}, all optimizations", style="dim"),
        _fusion_tables(fusion, plan, losses, full=full),
    )


def to_text(renderable: RenderableType, *, width: int = 110) -> str:
    """A rendering as plain text without escape codes or control characters."""
    buffer = io.StringIO()
    console = PlainConsole(file=buffer, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in buffer.getvalue().split("\n")[:-1]) + "\n"


def listed(nodes: Sequence[KernelReport | evidence.Explanation]) -> str:
    """Nodes by how many there are of each operator, with the first names."""
    operators = ", ".join(f"{count} {kind}" for kind, count in _by_count(Counter(node.op_type for node in nodes)))
    return f"{operators}: {', '.join(n.node for n in nodes[:MAX_NAMES])}{', ...' if len(nodes) > MAX_NAMES else ''}"


def _verdict(sentence: str, *, good: bool) -> Text:
    return Text(sentence, style="bold green" if good else "bold yellow")


def _facts(report: ReportFacts) -> Table:
    calibration, fusion = report.calibration, report.fusion
    taken = None if report.speed is None else report.speed.taken
    facts: list[tuple[str, str | Text]] = [("model", f"{report.model_input} -> {report.model_output}")]
    if report.size_before and report.size_after:
        sizes = f"{format_bytes(report.size_before)} -> {format_bytes(report.size_after)}"
        facts.append(("size", f"{sizes} ({report.size_change})"))
    counts = f"{_count(calibration.samples, 'sample')}, {_count(calibration.tensors, 'tensor')}"
    facts += [
        ("calibration", f"{calibration.method}, {counts}, {calibration.seconds:.2f} s"),
        ("attention", report.attention()),
        ("cache", report.int8_cache()),
    ]
    if report.trust is not None:
        facts.append(("trust", Text(report.trust.verdict, style=_TRUST_STYLES.get(report.trust.verdict, ""))))
    if report.speed is not None and taken is not None and taken.ratio is not None:
        how = ", ".join(filter(None, (report.speed.basis, taken.verdict)))
        facts.append(("speed", f"{_speed(taken)} of the float model, {how}"))
    asked = "not proved" if report.unproved else "not asked"
    runtime = asked if fusion is None else f"{fusion.runtime} {fusion.runtime_version}"
    facts += [
        ("recipe", "" if report.recipe is None else report.recipe.name),
        ("target", f"{report.target} ({runtime})"),
        ("laid out for", report.host),
        ("kernels", evidence.kernels_in_words(report.layers)),
    ]
    if report.measure is not None:
        style = "green" if report.measure.kept and report.measure.is_sure else "yellow"
        facts += [("measure", report.measure.sentence()), ("budget", Text(report.measure.verdict(), style=style))]
    if report.outputs:
        signal = ", ".join(f"{o.name} {o.sqnr_db:.1f} dB" for o in report.outputs)
        facts.append(("outputs", f"{signal} against float, on {report.samples_compared}"))
    return make_facts(facts)


def _fusion_tables(
    fusion: FusionReport, plan: PlacementPlan | None, losses: Sequence[ClippingLoss], *, full: bool
) -> RenderableType:
    blocks: list[RenderableType] = [_kernel_table(fusion)]
    if fusion.overhead:
        extra = ", ".join(f"{count} {kind}" for kind, count in _by_count(fusion.overhead))
        blocks.append(Text(f"added by the runtime: {extra}", style="dim"))
    if line := evidence.processors_line(fusion, losses):
        blocks.append(Text(line, style="yellow" if fusion.clipping() else "dim"))
    if silent := [k.node for k in fusion.silently_quantized()]:
        blocks.append(Text(f"float weights that the runtime quantizes by itself: {', '.join(silent)}", style="yellow"))
    if floats := fusion.float_nodes():
        planned = set() if plan is None else {k.node for k in fusion.avoidable(plan)}
        ranked = sorted(floats, key=lambda k: (k.node not in planned, k.op_type not in _HEAVY))
        each = ((_why(k.node in planned, k.reason), f"{k.op_type}: {k.node}") for k in ranked)
        blocks.append(_float_table(each) if full else _float_groups(floats, planned))
    return Group(*blocks)


def _kernel_table(fusion: FusionReport) -> Table:
    """One row per (source operator, kernel): how many, integer or float, what they absorbed."""
    op_types = {k.node: k.op_type for k in fusion.kernels}
    groups: dict[tuple[str, str, bool], list[KernelReport]] = {}
    for k in fusion.kernels:
        if k.status in ("integer", "float"):
            groups.setdefault((k.op_type, k.kernel, k.integer), []).append(k)
    rows = []
    for key in sorted(groups, key=lambda key: (key[0] not in _HEAVY, not key[2], -len(groups[key]), key)):
        op_type, kernel, integer = key
        taken_in = Counter(op_types.get(node, node) for k in groups[key] for node in k.absorbed)
        data = Text("integer", style="green") if integer else Text("float", style="yellow")
        absorbed = ", ".join(f"{count} {kind}" for kind, count in _by_count(taken_in))
        rows.append((op_type, str(len(groups[key])), kernel, data, absorbed))
    title = "Kernels in the runtime's optimized graph"
    return make_table("operator", ">count", "kernel", "data", "absorbed", rows=rows, title=title)


def _float_groups(floats: Sequence[KernelReport], planned: set[str]) -> RenderableType:
    """The float nodes, one row a reason: those planned as integer first, then by weight and number."""
    groups: dict[tuple[bool, str], list[KernelReport]] = {}
    for k in floats:
        groups.setdefault((k.node in planned, k.reason), []).append(k)
    heavy = {key: any(k.op_type in _HEAVY for k in kernels) for key, kernels in groups.items()}
    ranked = sorted(groups.items(), key=lambda group: (not group[0][0], not heavy[group[0]], -len(group[1])))
    hidden = sum(len(kernels) for _, kernels in ranked[MAX_FLOAT_ROWS:])
    table = _float_table([(_why(*key), listed(kernels)) for key, kernels in ranked[:MAX_FLOAT_ROWS]])
    return Group(table, Text(f"and {_count(hidden, 'node')} more", style="dim")) if hidden else table


def _float_table(rows: Iterable[tuple[Text, str]]) -> Table:
    table = make_table("why", "nodes", rows=rows, title="Nodes that run in float", expand=True)
    table.columns[0].ratio, table.columns[1].ratio = 3, 2
    return table


def _why(broken: bool, reason: str) -> Text:
    return Text.assemble(("planned as integer: ", "red") if broken else "", reason)


def render_layers(layers: Iterable[evidence.LayerTime]) -> Table:
    """The layers with kernel and times as a table for a rich console."""
    rows = (
        (
            *(x.node, x.op_type, x.kernel.rpartition(".")[2], x.path),
            *("" if us is None else f"{us:,.1f} us" for us in (x.estimated_us, x.measured_us)),
        )
        for x in layers
    )
    headings = ("layer", "operator", "kernel", "path", ">estimated", ">measured")
    return make_table(*headings, rows=rows, title="Layers")


def _passes(passes: Sequence[PassOutcome]) -> Table:
    """The accuracy passes that were tried."""
    rows = []
    for outcome in passes:
        state = "kept" if outcome.kept else "skipped" if outcome.error_after is None else "undone"
        measured = outcome.error_before is not None and outcome.error_after is not None
        error = f"{outcome.error_before:.3g} -> {outcome.error_after:.3g}" if measured else ""
        change = "" if outcome.change is None else f"{100 * outcome.change:+.1f} %"
        style = "green" if outcome.kept else "dim"
        rows.append((outcome.name, Text(state, style=style), error, change, outcome.reason))
    return make_table("pass", "outcome", ">error", ">change", "why", rows=rows, title="Accuracy passes")


def _candidates(speed: SpeedSummary, *, full: bool) -> RenderableType:
    """The forms of the model that were considered; without ``full`` those below the one taken are only counted."""
    shown = [form for form in speed.candidates if full or form.status not in _UNTRIED]
    rows = []
    for form in shown:
        style = "green" if form.is_taken else "yellow" if form.status in ("slower", "undecided", "dropped") else "dim"
        outcome = Text(form.status, style=style)
        rows.append((form.description or form.name, outcome, _speed(form), form.reason))
    title = ", ".join(filter(None, ("Speed", speed.basis)))
    blocks: list[RenderableType] = [make_table("form", "outcome", ">speed", "why", rows=rows, title=title)]
    hidden = len(speed.candidates) - len(shown)
    if hidden:
        blocks.append(Text(f"and {_count(hidden, 'form')} that did not have to be tried", style="dim"))
    return Group(*(blocks if shown else blocks[1:]), *(Text(note, style="dim") for note in speed.notes))


def _speed(form: SpeedCandidate) -> str:
    return "" if form.ratio is None else f"{form.ratio:.2f}x{form.interval}"


def _trust(trust: TrustSummary, *, full: bool) -> RenderableType:
    """Trust in the calibration, with the doubtful tensors."""
    style = _TRUST_STYLES.get(trust.verdict, "")
    blocks: list[RenderableType] = [
        Text.assemble(("calibration: ", "bold"), (trust.verdict, style), f" {trust.reason}")
    ]
    if trust.advice:
        blocks.append(Text(f"what would help: {trust.advice}"))
    doubtful = [tensor for tensor in trust.tensors if tensor.reason]
    shown = doubtful if full else doubtful[:MAX_FLOAT_ROWS]
    blocks += [Text(f"  {tensor.tensor}: {tensor.reason}", style="dim") for tensor in shown]
    hidden = 0 if full else len(doubtful) - MAX_FLOAT_ROWS
    if hidden > 0:
        blocks.append(Text(f"  and {_count(hidden, 'tensor')} more", style="dim"))
    return Group(*blocks)


def _messages(kind: str, messages: Iterable[str], style: str) -> list[RenderableType]:
    return [Text.assemble((f"{kind}: ", style), message) for message in messages]


def _by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
