"""`bench`: from models and feeds to a result, frozen pure data, and its report as rich text."""

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kenosis_ort import errors
from kenosis_ort.bench import harness
from kenosis_ort.calibration.feeds import sample_feeds
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.checks import MOST_THREADS, real, whole
from kenosis_ort.graph.load import parse_model
from kenosis_ort.report.text import make_table, to_text
from kenosis_ort.runtime.session import open_session
from kenosis_ort.storage.data import format_bytes, to_data
from kenosis_ort.storage.writing import Scratch

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
    verdict: harness.Verdict
    load_ms: float
    size: int


class LeftOut(NamedTuple):
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

    def compare(self, name: str, reference: str | None = None) -> harness.SpeedComparison:
        """Compares any two of the timed models.

        Args:
            name: The model in question.
            reference: The model that it is compared to; None for the baseline.

        Raises:
            OptionError: There is no such model in the report.
        """
        return harness.compare(self._named(self.baseline if reference is None else reference), self._named(name))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"schema": SCHEMA_VERSION, **to_data(self)}

    def to_json(self, *, indent: int | None = 1) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return to_text(render_bench(self))

    def _named(self, name: str) -> tuple[float, ...]:
        if name not in self.by_name:
            raise errors.OptionError(
                f"no model '{name}' was timed.{errors.did_you_mean(name, self.by_name)}",
                fix=f"the report holds: {', '.join(self.by_name)}",
            )
        return self.by_name[name].round_ms


_STYLES = {
    harness.Verdict.FASTER: "green",
    harness.Verdict.SLOWER: "red",
    harness.Verdict.SAME: "",
    harness.Verdict.NOISY: "yellow",
}


def render_bench(report: BenchReport) -> RenderableType:
    """The report for a rich console."""
    threads = {0: "all threads", 1: "one thread"}.get(report.threads, f"{report.threads} threads")
    facts = (
        f"onnxruntime {report.runtime_version}, {threads}, {report.rounds} of {report.rounds_asked} rounds with fresh "
        f"sessions in random order, {report.seconds:.1f} s. Speed: median over the rounds of the time of "
        f"{report.baseline} by the own time, above 1 is faster; noise: where that median lies with "
        f"{harness.CONFIDENCE:.0%} confidence."
    )
    resources = ((t.name, _number(t.runs_per_second), _number(t.load_ms), format_bytes(t.size)) for t in report.models)
    return Group(
        _speeds(report),
        make_table("model", ">runs/s", ">load ms", ">size", rows=resources),
        Text(facts, style="dim"),
        *(Text.assemble(("left out: ", "red"), f"{gone.name}: {gone.reason}") for gone in report.left_out),
        *(Text.assemble(("note: ", "cyan"), note) for note in report.notes),
    )


def _speeds(report: BenchReport) -> Table:
    rows = []
    for timing in report.models:
        times = [_number(value) for value in (timing.p50_ms, timing.p95_ms, timing.p99_ms)]
        is_baseline = timing.name == report.baseline
        noise = "" if is_baseline else f"{timing.ratio_low:.2f}..{timing.ratio_high:.2f}"
        verdict = "baseline" if is_baseline else Text(str(timing.verdict), style=_STYLES[timing.verdict])
        rows.append((timing.name, *times, f"{timing.ratio:.2f}x", noise, verdict))
    return make_table("model", ">p50 ms", ">p95 ms", ">p99 ms", ">speed", ">noise", "verdict", rows=rows)


def _number(value: float) -> str:
    """Three significant digits without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.{2 if value >= 1 else 3 if value >= 0.1 else 4}f}"


_log = logging.getLogger(__name__)

_SYNTHETIC_FEEDS = 8
_REASON_LIMIT = 600


@errors.last_gate
def bench(
    models: harness.Models,
    feeds: Iterable[Mapping[str, Any]] | None = None,
    *,
    threads: int = 1,
    rounds: int = 15,
    budget_s: float = 20.0,
    warmup: int = 3,
    custom_op_libraries: Sequence[str] = (),
    baseline: int | str = 0,
    seed: int = 0,
    progress: Callable[[int, int | None], None] | None = None,
) -> BenchReport:
    """Times models against each other on the CPU, with stock sessions at full optimization.

    In every round each model gets a fresh session and one block of runs, in random order, so that what slows the
    machine down hits all alike. A ratio is the median over the rounds of (baseline's median / own median); its
    verdict knows the noise. All blocks of a round take the same feed; the rounds take turns through the feeds.

    Args:
        models: Paths, serialized models or ModelProto objects: one, a sequence, or a mapping from the name to use in
            the report. Nothing is changed.
        feeds: Arrays by input name: a sequence of feeds, or a calibration data reader. At most ``rounds`` are used.
            None: made up after the baseline model's inputs, as `SyntheticReader` does.
        threads: Threads of a session; 0 for the runtime's own choice.
        rounds: Rounds at most. With fewer than 6 the verdict is ``too noisy``.
        budget_s: Seconds for all of it: rounds are left out when they would not fit any more. The first one is made
            in any case.
        warmup: Runs before each block that do not count; one at least.
        custom_op_libraries: Shared libraries with custom operators to register.
        baseline: Place (from 0) or name of the model that ratios refer to.
        seed: Of the order and of made-up feeds.
        progress: Called with (rounds done, rounds at most) after each round.

    Returns:
        The report, with a model that does not load or run named and left out.

    Raises:
        VerificationError: The baseline, or the only model, does not load or run.
        OptionError: An option is out of range, there is no model, or the models take different inputs.
        CalibrationError: The feeds are missing, do not fit a model, or cannot be made up.
    """
    begin = time.perf_counter()
    whole("threads", threads, most=MOST_THREADS)
    whole("rounds", rounds, least=1)
    whole("warmup", warmup)
    real("budget_s", budget_s, above=0)
    named = harness.named_models(models)
    base = _find_baseline([*named], baseline)
    with Scratch("bench") as scratch:
        field_ = _Field(named, base, threads, tuple(map(str, custom_op_libraries)), scratch)
        taken = field_.feeds(feeds, rounds, seed)
        # Rounds over all models that load, within the budget.
        timings = harness.time_interleaved(
            list(field_.opened),
            field_.session,
            taken,
            harness.Schedule(rounds, begin + budget_s, warmup, seed),
            must_run=base,
            progress=None if progress is None else errors.callers_own(progress),
        )
        # Models that failed, and notes on few rounds.
        for name, reason in timings.failed.items():
            field_.leave_out(name, reason)
        if timings.rounds < rounds:
            field_.notes.append(f"the budget of {budget_s:g} s was over after {timings.rounds} of {rounds} rounds")
        if timings.rounds < harness.LEAST_ROUNDS and len(timings.blocks) > 1:
            field_.notes.append(f"fewer than {harness.LEAST_ROUNDS} rounds are too few for a verdict")
        return BenchReport(
            models=tuple(
                _timing(name, timings, base, harness.size_of(opened)) for name, opened in field_.opened.items()
            ),
            baseline=base,
            left_out=tuple(field_.left_out),
            threads=threads,
            rounds=timings.rounds,
            rounds_asked=rounds,
            warmup=warmup,
            seconds=time.perf_counter() - begin,
            seed=seed,
            runtime_version=ort.__version__,
            notes=tuple(field_.notes),
        )


class _Field:
    """The models that take part.

    Args:
        named: The models by name.
        baseline: Name of the model that has to run.
        threads: Threads of a session.
        libraries: Libraries with custom operators.
        scratch: A temporary folder.

    Attributes:
        opened: Path or bytes by name, of the models that load.
        left_out: The others.
        notes: For the report.

    Raises:
        VerificationError: The baseline does not load.
        OptionError: The models take different inputs.
    """

    def __init__(
        self,
        named: Mapping[str, harness.Model],
        baseline: str,
        threads: int,
        libraries: tuple[str, ...],
        scratch: Path,
    ) -> None:
        self._named, self._baseline, self._threads, self._libraries = named, baseline, threads, libraries
        self.opened: dict[str, str | bytes] = {}
        self.left_out: list[LeftOut] = []
        self.notes: list[str] = []
        self._inputs: dict[str, harness.Inputs] = {}
        for name in sorted(named, key=lambda name: name != baseline):
            self._admit(name, scratch / f"model{len(self.opened)}")
        self.opened = {name: self.opened[name] for name in named if name in self.opened}
        harness.check_same(self._inputs)

    def _admit(self, name: str, folder: Path) -> None:
        """Loads a model once and reads its inputs; leaves it out if it does not load."""
        try:
            self.opened[name] = harness.opened(self._named[name], folder, name)
            self._inputs[name] = harness.declared_inputs(self.session(name))
        except errors.KenosisError as error:
            self.leave_out(name, error.what)

    def session(self, name: str) -> ort.InferenceSession:
        """A fresh session."""
        return open_session(
            self.opened[name], custom_op_libraries=self._libraries, threads=self._threads, spinning=True
        )

    def leave_out(self, name: str, reason: str) -> None:
        """Takes a model out; raises VerificationError for the baseline."""
        _log.info("%s is left out: %s", name, reason)
        self.opened.pop(name, None)
        self.left_out.append(LeftOut(name, " ".join(reason.split())[:_REASON_LIMIT]))
        if name == self._baseline:
            which = "the model" if len(self._named) == 1 else "the baseline model"
            raise errors.VerificationError(
                f"{which} cannot be timed: {self.left_out[-1].reason}",
                where=name,
                fix="check the model in onnxruntime alone; if it uses custom operators give custom_op_libraries",
            )

    def feeds(self, given: Iterable[Mapping[str, Any]] | None, rounds: int, seed: int) -> list[dict[str, Any]]:
        """The feeds to use, checked against all models."""
        required, _ = self._inputs[self._baseline]
        if given is None and not required:
            return [{}]
        reader: Any = given
        if given is None:
            source = self._named[self._baseline]
            model = parse_model(source) if isinstance(source, bytes) else source
            reader = SyntheticReader(model, samples=_SYNTHETIC_FEEDS, seed=seed, custom_op_libraries=self._libraries)
            self.notes.extend(f"made-up data: {assumption}" for assumption in reader.assumptions)
        feeds = list(itertools.islice(sample_feeds(reader), rounds))
        if not feeds:
            raise errors.CalibrationError("There is no feed to run the models with.", fix="Give at least one feed.")
        found = [harness.checked(feeds, name, taken) for name, taken in self._inputs.items()]
        return found[0]


def _timing(name: str, timings: harness.Timings, baseline: str, size: int) -> ModelTiming:
    """The figures of one model."""
    blocks = timings.blocks[name]
    runs = np.concatenate([block.runs for block in blocks])
    medians = timings.round_ms(name)
    against = harness.compare(timings.round_ms(baseline), medians)
    p50, p95, p99 = (float(value) * 1e3 for value in np.percentile(runs, (50, 95, 99)))
    return ModelTiming(
        name=name,
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        runs_per_second=float(len(runs) / max(runs.sum(), 1e-9)),
        runs=len(runs),
        round_ms=medians,
        ratio=against.ratio,
        ratio_low=against.low,
        ratio_high=against.high,
        verdict=against.verdict,
        load_ms=timings.load_seconds(name) * 1e3,
        size=size,
    )


def _find_baseline(names: Sequence[str], baseline: int | str) -> str:
    if isinstance(baseline, str):
        if baseline in names:
            return baseline
        what = f"no model is called '{baseline}'.{errors.did_you_mean(baseline, names)}"
        raise errors.OptionError(what, where="baseline", fix=f"one of {list(names)}")
    if not 0 <= baseline < len(names):
        raise errors.OptionError(
            f"there is no model at place {baseline}", where="baseline", fix=f"give 0 to {len(names) - 1}, or a name"
        )
    return names[baseline]
