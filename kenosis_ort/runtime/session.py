"""Sessions of the runtime, each of which counts itself, its runs and the bytes that it hands out.

What a call costs is what it asks of the runtime. `counted` gathers that for all sessions of the process, by the stage
of the call that `at_stage` names; benchmarks print it and tests hold it below bounds, where a timing would be noise.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime as ort
from typing_extensions import Self

_CPU = ("CPUExecutionProvider",)
_stage: ContextVar[str] = ContextVar("stage", default="")
_entries: ContextVar[Mapping[str, str] | None] = ContextVar("entries", default=None)
_lock = threading.Lock()
_open: list[Counts] = []


@dataclass
class Cost:
    """What was asked of the runtime.

    Attributes:
        sessions: Models loaded.
        runs: Runs of a model.
        copied: Bytes of the arrays that the runs returned.
    """

    sessions: int = 0
    runs: int = 0
    copied: int = 0


@dataclass
class Counts:
    """What a stretch of the program asked of the runtime, by stage; "" for what lies outside of all stages."""

    by_stage: dict[str, Cost] = field(default_factory=dict)

    @property
    def total(self) -> Cost:
        """All stages together."""
        costs = self.by_stage.values()
        return Cost(sum(c.sessions for c in costs), sum(c.runs for c in costs), sum(c.copied for c in costs))


class Session(ort.InferenceSession):  # type: ignore[misc]
    """A session of the runtime that counts itself and its runs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _count(sessions=1)

    def run(self, output_names: Sequence[str] | None, input_feed: Any, run_options: Any = None) -> list[Any]:
        """Runs the model, as `onnxruntime.InferenceSession.run`."""
        results: list[Any] = super().run(output_names, input_feed, run_options)
        if _open:
            _count(runs=1, copied=sum(int(getattr(value, "nbytes", 0)) for value in results))
        return results


def session_options(
    *, threads: int = 1, optimize: bool = True, custom_op_libraries: Sequence[str] = ()
) -> ort.SessionOptions:
    """Returns the options that sessions start from; raises whatever the runtime raises for a library.

    Args:
        threads: Threads inside an operator.
        optimize: At full optimization, as a user's session; False for none.
        custom_op_libraries: Libraries with custom operators to register.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what fails is raised, and need not be printed too
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for library in custom_op_libraries:
        options.register_custom_ops_library(library)
    return options


def write_optimized(options: ort.SessionOptions, path: Path, external_from: int) -> None:
    """Has a session write the model that it makes of its own to a file, and large weights to one beside it.

    Args:
        options: Of the session; changed.
        path: The file.
        external_from: Bytes from which on a weight is large.
    """
    options.optimized_model_filepath = str(path)
    entry = "session.optimized_model_external_initializers_"
    options.add_session_config_entry(f"{entry}file_name", f"{path.stem}.data")
    options.add_session_config_entry(f"{entry}min_size_in_bytes", str(external_from))


class Closing(ABC):
    """A context manager that closes what it is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Gives back what is held."""


def new_session(source: str | bytes, options: ort.SessionOptions, *, providers: Sequence[Any] = ()) -> Session:
    """Opens a session; raises whatever the runtime raises.

    Args:
        source: Path or serialized model.
        options: Of the session.
        providers: Execution providers, the CPU's if there is none.
    """
    for key, value in (_entries.get() or {}).items():
        options.add_session_config_entry(key, value)
    return Session(source, options, providers=list(providers or _CPU))


@contextmanager
def configured(entries: Mapping[str, str]) -> Iterator[None]:
    """Adds configuration entries to all sessions that are opened inside."""
    token = _entries.set(entries)
    try:
        yield
    finally:
        _entries.reset(token)


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts what is asked of the runtime inside; of all threads."""
    counts = Counts()
    with _lock:
        _open.append(counts)
    try:
        yield counts
    finally:
        with _lock:
            _open[:] = [each for each in _open if each is not counts]


@contextmanager
def at_stage(name: str) -> Iterator[None]:
    """Names the stage under which everything inside is counted, but for what a stage inside of it counts."""
    token = _stage.set(name)
    try:
        yield
    finally:
        _stage.reset(token)


def _count(*, sessions: int = 0, runs: int = 0, copied: int = 0) -> None:
    stage = _stage.get()
    with _lock:
        for counts in _open:
            cost = counts.by_stage.setdefault(stage, Cost())
            cost.sessions += sessions
            cost.runs += runs
            cost.copied += copied
