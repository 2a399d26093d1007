"""The benchmark's report as rich text."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kenosis_ort.bench.model import BenchReport
from kenosis_ort.bench.noise import CONFIDENCE, Verdict
from kenosis_ort.report.text import format_bytes

_STYLES = {Verdict.FASTER: "green", Verdict.SLOWER: "red", Verdict.SAME: "", Verdict.NOISY: "yellow"}


def render_bench(report: BenchReport) -> RenderableType:
    """Returns the report for a rich console."""
    threads = {0: "all threads", 1: "one thread"}.get(report.threads, f"{report.threads} threads")
    facts = (
        f"onnxruntime {report.runtime_version}, {threads}, {report.rounds} of {report.rounds_asked} rounds with fresh "
        f"sessions in random order, {report.seconds:.1f} s. Speed: median over the rounds of the time of "
        f"{report.baseline} by the own time, above 1 is faster; noise: where that median lies with "
        f"{CONFIDENCE:.0%} confidence."
    )
    return Group(
        _speeds(report),
        _resources(report),
        Text(facts, style="dim"),
        *(Text.assemble(("left out: ", "red"), f"{gone.name}: {gone.reason}") for gone in report.left_out),
        *(Text.assemble(("note: ", "cyan"), note) for note in report.notes),
    )


def _speeds(report: BenchReport) -> Table:
    table = _table("p50 ms", "p95 ms", "p99 ms", "speed", "noise")
    table.add_column("verdict", no_wrap=True)
    for timing in report.models:
        times = [_number(value) for value in (timing.p50_ms, timing.p95_ms, timing.p99_ms)]
        is_baseline = timing.name == report.baseline
        noise = "" if is_baseline else f"{timing.ratio_low:.2f}..{timing.ratio_high:.2f}"
        verdict = Text("baseline") if is_baseline else Text(str(timing.verdict), style=_STYLES[timing.verdict])
        table.add_row(Text(timing.name), *times, f"{timing.ratio:.2f}x", noise, verdict)
    return table


def _resources(report: BenchReport) -> Table:
    memory = any(timing.peak_memory is not None for timing in report.models)
    table = _table("runs/s", "load ms", "size", *(["peak memory"] if memory else []))
    for timing in report.models:
        peak = "-" if timing.peak_memory is None else format_bytes(timing.peak_memory)
        numbers = [_number(timing.runs_per_second), _number(timing.load_ms), format_bytes(timing.size)]
        table.add_row(Text(timing.name), *numbers, *([peak] if memory else []))
    return table


def _table(*headings: str) -> Table:
    """Returns a table with a column for the model's name and one for each kind of number."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("model", overflow="fold", min_width=12)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _number(value: float) -> str:
    """Returns three significant digits without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.{2 if value >= 1 else 3 if value >= 0.1 else 4}f}"
