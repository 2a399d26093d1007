"""The clock of the races in the tests: every session is real and runs, but how long a run took is the test's to say.

Races then end after the fewest rounds there are, and what they decide does not depend on the machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import onnx

from kenosis_ort.runtime.session import Runner
from kenosis_ort.targets.model import TimedRuntime

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

    def timed(self, runtime: TimedRuntime) -> TimedRuntime:
        """How a runtime is timed: by this clock, where its sessions run in the thread that calls them."""
        if not runtime.in_calling_thread or runtime.clock is not None:
            return runtime

        def opener(source: str | bytes, **options: Any) -> Callable[[], Runner]:
            open_again = partial(runtime.open, source, **options)
            made = open_again if runtime.opener is None else runtime.opener(source, **options)
            return lambda: _Paced(self, made(), _kind(source))

        return replace(runtime, opener=opener, clock=lambda: self.now)


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


def _kind(source: str | bytes) -> str:
    model = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source, load_external_data=False)
    if any(n.op_type in _QDQ for n in model.graph.node):
        return "int8"
    return "other" if any(n.domain == "com.microsoft" for n in model.graph.node) else "plain"
