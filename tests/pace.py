"""The clock of the races in the tests: every session is real and runs, but how long a run took is the test's to say.

Races then end after the fewest rounds there are, and what they decide does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx
import pytest

from kenosis_ort.bench.harness import Runner
from kenosis_ort.tuning.races import RaceSetup

_QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})


@dataclass
class Pace:
    """Seconds of a run by kind of model.

    Attributes:
        int8: Of a model with Q/DQ nodes.
        plain: Of a model with standard operators alone.
        other: Of any other: dynamic quantization, weights alone.
        now: Seconds that runs took so far.
        runs: Runs so far, by kind.
    """

    int8: float = 0.03
    plain: float = 0.06
    other: float = 0.09
    now: float = 0.0
    runs: dict[str, int] = field(default_factory=dict)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes this the clock of all races that say nothing of clock and runner."""
        opened, makes_opener, timed, counted = RaceSetup.open, RaceSetup.opener, RaceSetup.timer, RaceSetup.budget

        def timer(setup: RaceSetup) -> Any:
            return timed.fget(setup) if _is_own(setup) else lambda: self.now  # type: ignore[attr-defined]

        def budget(setup: RaceSetup) -> Any:
            return counted.fget(setup) if _is_own(setup) else setup.clock  # type: ignore[attr-defined]

        def open_runner(setup: RaceSetup, source: str | bytes) -> Runner:
            return opened(setup, source) if _is_own(setup) else _Paced(self, opened(setup, source), _kind(source))

        def opener(setup: RaceSetup, source: str | bytes) -> Callable[[], Runner]:
            made = makes_opener(setup, source)
            if _is_own(setup) or setup.make_opener is None:
                return made
            return lambda: _Paced(self, made(), _kind(source))

        monkeypatch.setattr(RaceSetup, "opener", opener)
        monkeypatch.setattr(RaceSetup, "timer", property(timer))
        monkeypatch.setattr(RaceSetup, "budget", property(budget))
        monkeypatch.setattr(RaceSetup, "open", open_runner)


@dataclass(frozen=True)
class _Paced:
    """A session whose runs take as long as the test says."""

    pace: Pace
    runner: Runner
    kind: str

    def run(self, output_names: None, input_feed: Any) -> Any:
        found = self.runner.run(output_names, input_feed)
        self.pace.now += getattr(self.pace, self.kind)
        self.pace.runs[self.kind] = self.pace.runs.get(self.kind, 0) + 1
        return found


def _is_own(setup: RaceSetup) -> bool:
    stock = setup.open_runner is None or setup.in_calling_thread
    return not stock or setup.stopwatch is not None


def _kind(source: str | bytes) -> str:
    model = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source, load_external_data=False)
    if any(n.op_type in _QDQ for n in model.graph.node):
        return "int8"
    return "other" if any(n.domain == "com.microsoft" for n in model.graph.node) else "plain"
