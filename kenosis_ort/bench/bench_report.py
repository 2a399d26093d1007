"""The result of a benchmark: frozen pure data.

The benchmark's report as rich text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kenosis_ort.bench.harness import CONFIDENCE, SpeedComparison, Verdict, compare
from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.report.text import format_bytes
from kenosis_ort.storage.data import to_data

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ModelTiming:
    """One model's figures.

    Attributes:
        name: What the report calls it.
        p50_ms: Median time of a run over all timed runs, in milliseconds.
        p95_ms: 95th percentile of them.
        p99_ms: 99th percentile of them.
        runs_per_second: Mean throughput: timed runs by their total time.
        runs: Number of timed runs.
        round_ms: Median time of a run by round, in milliseconds; what ratios are made of.
        ratio: Speed relative to the baseline, see `SpeedComparison`; 1 for the baseline.
        ratio_low: Lower end of the ratio's noise interval.
        ratio_high: Its upper end.
        verdict: Whether it is faster than the baseline.
        load_ms: Median time to load it and make a session, in milliseconds.
        size: Bytes on disk or, for a model in memory, serialized; with external data.
    """

    name: str
    p50_ms: float
    p95_ms: float
    p99_ms: float
    runs_per_second: float
    runs: int
    round_ms: tuple[float, ...]
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: Verdict
    load_ms: float
    size: int


@dataclass(frozen=True)
class LeftOut:
    """A model that could not be timed: its name and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class BenchReport:
    """Result of `kenosis_ort.bench`.

    Attributes:
        models: The models that were timed, in the order given.
        baseline: Name of the model that the ratios refer to.
        left_out: Models that do not load or run.
        threads: Threads of a session; 0 for the runtime's own choice.
        rounds: Rounds that were made; each timed every model once.
        rounds_asked: Rounds that were asked for.
        warmup: Runs before each block that do not count.
        seconds: Seconds of the whole benchmark.
        seed: Of the order.
        runtime_version: Version of onnxruntime.
        notes: What else there is to know, one sentence each.
    """

    models: tuple[ModelTiming, ...]
    baseline: str
    left_out: tuple[LeftOut, ...]
    threads: int
    rounds: int
    rounds_asked: int
    warmup: int
    seconds: float
    seed: int
    runtime_version: str
    notes: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, ModelTiming]:
        """The timed models by name."""
        return {timing.name: timing for timing in self.models}

    def compare(self, name: str, reference: str | None = None) -> SpeedComparison:
        """Compares any two of the timed models.

        Args:
            name: The model in question.
            reference: The model that it is compared to; None for the baseline.

        Raises:
            OptionError: There is no such model in the report.
        """
        return compare(self._named(self.baseline if reference is None else reference), self._named(name))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"schema": SCHEMA_VERSION, **to_data(self)}

    def to_json(self, *, indent: int | None = 1) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        from kenosis_ort.report.text import to_text

        return to_text(render_bench(self))

    def _named(self, name: str) -> tuple[float, ...]:
        if name not in self.by_name:
            raise OptionError(
                f"no model '{name}' was timed.{did_you_mean(name, self.by_name)}",
                fix=f"the report holds: {', '.join(self.by_name)}",
            )
        return self.by_name[name].round_ms


_STYLES = {Verdict.FASTER: "green", Verdict.SLOWER: "red", Verdict.SAME: "", Verdict.NOISY: "yellow"}


def render_bench(report: BenchReport) -> RenderableType:
    """The report for a rich console."""
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
    table = _table("runs/s", "load ms", "size")
    for timing in report.models:
        table.add_row(
            Text(timing.name), _number(timing.runs_per_second), _number(timing.load_ms), format_bytes(timing.size)
        )
    return table


def _table(*headings: str) -> Table:
    """A table with a column for the model's name and one for each kind of number."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("model", overflow="fold", min_width=12)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _number(value: float) -> str:
    """Three significant digits without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.{2 if value >= 1 else 3 if value >= 0.1 else 4}f}"
