"""Counts of what a call asks of the runtime: sessions, runs, and bytes that runs return.

`counted` gathers them for all sessions of the process, by the stage of the call that `at_stage` names; benchmarks print
them and tests hold them below bounds, where a timing would be noise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_stage: ContextVar[str] = ContextVar("stage", default="")
_lock = threading.Lock()
_open: list[Counts] = []


@dataclass
class Cost:
    """Counts of sessions and runs of the runtime.

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
    """Counts of sessions and runs in a part of the program, by stage; "" for those outside of all stages."""

    by_stage: dict[str, Cost] = field(default_factory=dict)

    @property
    def total(self) -> Cost:
        """All stages together."""
        costs = self.by_stage.values()
        return Cost(sum(c.sessions for c in costs), sum(c.runs for c in costs), sum(c.copied for c in costs))


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


def count(*, sessions: int = 0, runs: int = 0, results: Sequence[object] = ()) -> None:
    """Adds to what is counted at present, under the stage of this moment."""
    if not _open:
        return
    stage = _stage.get()
    copied = sum(int(getattr(value, "nbytes", 0)) for value in results)
    with _lock:
        for counts in _open:
            cost = counts.by_stage.setdefault(stage, Cost())
            cost.sessions += sessions
            cost.runs += runs
            cost.copied += copied
