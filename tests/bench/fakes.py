"""Models that are but a name, on a clock that only they move: runners that take made-up time, and a setup of races."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from kenosis_ort.targets.model import TimedRuntime
from kenosis_ort.tuning.races import RaceSetup
from tests.planning import parse

FEED = {"x": np.zeros(1, np.float32)}


def net(name: str) -> onnx.ModelProto:
    """A valid model that carries a name."""
    return parse(f"{name} (float[1] x) => (float[1] y) {{ y = Relu (x) }}")


@dataclass
class FakeRunner:
    bench: FakeBench
    name: str
    factor: float = 1.0
    ran: int = 0

    def run(self, output_names: None, input_feed: Any) -> Any:
        self.ran += 1
        self.bench.runs.append((self.name, input_feed))
        self.bench.now += self.bench.cost(self.name, self.ran) * self.factor


@dataclass
class FakeBench:
    """Opens runners and records what is done with them; a session keeps its own noise factor.

    Attributes:
        seconds: Time of a run by name, or what tells it by name and number of the run within its session; an exception
            is raised when it is run.
        load: Seconds to open a session.
        spread: Of the noise between sessions, as standard deviation of the logarithm.
    """

    seconds: Mapping[str, float | Exception] | Callable[[str, int], float]
    load: float = 0.0
    spread: float = 0.0
    seed: int = 0
    now: float = 1000.0
    opened: list[str] = field(default_factory=list)
    runs: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def clock(self) -> float:
        return self.now

    def cost(self, name: str, ran: int) -> float:
        """Seconds of a run now."""
        found = self.seconds[name] if isinstance(self.seconds, Mapping) else self.seconds(name, ran)
        if isinstance(found, Exception):
            raise found
        return found

    def open(self, name: str) -> FakeRunner:
        self.opened.append(name)
        self.now += self.load
        return FakeRunner(self, name, float(np.exp(self.rng.normal(0, self.spread))))


@dataclass
class FakeStadium(FakeBench):
    """Opens named models."""

    load: float = 0.01

    def opened_of(self, source: str | bytes) -> FakeRunner:
        assert isinstance(source, bytes)
        return self.open(onnx.load_model_from_string(source).graph.name)

    def setup(self, *, feeds: Sequence[Any] = (FEED,), **keywords: Any) -> RaceSetup:
        runtime = replace(TimedRuntime(lambda source, **_: self.opened_of(source)), **keywords.pop("runtime", {}))
        return RaceSetup(feeds, clock=self.clock, runtime=runtime, **keywords)


@dataclass
class Disturbed(FakeStadium):
    """A machine that something else disturbs for half of the time, a twentieth of a second at once.

    Attributes:
        slower: By how much, by the model's name.
    """

    slower: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calm = self.rng.random(4096) < 1 / 2

    def cost(self, name: str, ran: int) -> float:
        calm = self.calm[int(self.now / 0.05) % len(self.calm)]
        return super().cost(name, ran) * (1.0 if calm else self.slower[name])
