"""A clock that only fakes move, and runners that take made-up time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeRunner:
    bench: FakeBench
    name: str
    ran: int = 0

    def run(self, output_names: None, input_feed: Any) -> Any:
        self.ran += 1
        self.bench.runs.append((self.name, input_feed))
        self.bench.clock.now += self.bench.cost(self.name, self.ran)


@dataclass
class FakeBench:
    """Opens runners and records what is done with them.

    ``seconds`` is the time of a run by name, or what tells it by name and number of the run within its session.
    """

    seconds: Mapping[str, float] | Callable[[str, int], float]
    load: float = 0.0
    clock: FakeClock = field(default_factory=FakeClock)
    opened: list[str] = field(default_factory=list)
    runs: list[tuple[str, Any]] = field(default_factory=list)

    def cost(self, name: str, ran: int) -> float:
        return self.seconds[name] if isinstance(self.seconds, Mapping) else self.seconds(name, ran)

    def open(self, name: str) -> FakeRunner:
        self.opened.append(name)
        self.clock.now += self.load
        return FakeRunner(self, name)
