"""A clock that only fakes move, runners that take made-up time, and a race setup of models that are but a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from kenosis_ort.targets.model import TimedRuntime
from kenosis_ort.tuning.races import RaceSetup
from tests.planning import parse


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


FEED = {"x": np.zeros(1, np.float32)}


def net(name: str) -> onnx.ModelProto:
    """A valid model that carries a name."""
    return parse(f"{name} (float[1] x) => (float[1] y) {{ y = Relu (x) }}")


@dataclass
class FakeStadium:
    """Opens named models whose runs take made-up time; a session keeps its own noise factor.

    Attributes:
        seconds: Time of a run by the model's name; an exception is raised when it is run.
        spread: Of the noise between sessions, as standard deviation of the logarithm.
        load: Seconds to open a session.
    """

    seconds: Mapping[str, float | Exception]
    spread: float = 0.0
    load: float = 0.01
    seed: int = 0
    opened: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.bench = FakeBench({}, load=self.load)

    @property
    def clock(self) -> Callable[[], float]:
        return self.bench.clock

    def open(self, source: str | bytes) -> FakeRunner:
        assert isinstance(source, bytes)
        name = onnx.load_model_from_string(source).graph.name
        self.opened.append(name)
        self.bench.clock.now += self.load
        factor = float(np.exp(self.rng.normal(0, self.spread)))
        bench = FakeBench(lambda *_: self.cost(name) * factor, clock=self.bench.clock, runs=self.bench.runs)
        return FakeRunner(bench, name)

    def cost(self, name: str) -> float:
        """Seconds of a run now."""
        costs = self.seconds[name]
        if isinstance(costs, Exception):
            raise costs
        return costs

    def setup(self, *, feeds: Sequence[Any] = (FEED,), **keywords: Any) -> RaceSetup:
        runtime = TimedRuntime(lambda source, **_: self.open(source))
        return RaceSetup(feeds, clock=self.clock, runtime=replace(runtime, **keywords.pop("runtime", {})), **keywords)


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

    def cost(self, name: str) -> float:
        calm = self.calm[int(self.clock() / 0.05) % len(self.calm)]
        return super().cost(name) * (1.0 if calm else self.slower[name])
