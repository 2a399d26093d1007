"""Time by operator type, before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kenosis_ort.report.evidence import OpTime, OpTimes

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
        """How many times faster; None where one side is missing."""
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
    """Returns the bars of time by operator, None without times."""
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
