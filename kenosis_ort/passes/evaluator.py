"""How far a quantized candidate is from the float model on calibration samples that no pass was fitted to."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from kenosis_ort.accuracy.error import find_uses, output_error
from kenosis_ort.accuracy.metric import Metric, OutputError, call_metric
from kenosis_ort.accuracy.runner import Runner
from kenosis_ort.errors import CalibrationError, VerificationError
from kenosis_ort.graph.session import repeats

LEAST_FEEDS = 4
LEAST_HELD_OUT = 4  # samples that a change of ranges or weights is evaluated on
_FEW_FEEDS = 32
_TIE = 1e-3  # weight of the outputs' noise beside a metric, which few samples make coarse

Feed = Mapping[str, Any]
NOISE = "error of the outputs, each by its use"
METRIC = "loss of the caller's metric"


def split_feeds(feeds: Sequence[Feed]) -> tuple[list[Feed], list[Feed]]:
    """Returns the samples to fit passes to, and those to evaluate on; both empty where there are too few to do both.

    Every fourth is held out; of fewer than 32 every second: two samples of a small net differ by 30 dB.
    """
    if len(feeds) < LEAST_FEEDS:
        return [], []
    every = 2 if len(feeds) < _FEW_FEEDS else 4
    fit = [f for i, f in enumerate(feeds) if i % every != every - 1]
    return fit, list(feeds[every - 1 :: every])


def least_ratio(samples: int) -> float:
    """Returns what share of the error a change may leave to be kept: few samples must say it louder.

    0.75 for two samples, 0.92 for eight, 0.965 for 32: near the spread of the ratio between two halves of the samples
    of small nets, where one sample differs from another by a factor of two.
    """
    return 0.98 - 0.46 / max(samples, 1)


@dataclass(frozen=True)
class Score:
    """How far a candidate is off.

    Attributes:
        error: On all samples.
        without: On all but one, for each; empty for a single sample, or with a metric of the caller's.
    """

    error: float
    without: tuple[float, ...]

    def is_better(self, other: Score) -> bool:
        """Tells whether the error is less, and not only because of one sample."""
        return self.error < other.error and all(a < b for a, b in zip(self.without, other.without, strict=True))

    def beats(self, other: Score) -> bool:
        """Tells whether it is better by more than so few samples would say by chance."""
        return self.is_better(other) and self.error < other.error * least_ratio(max(len(self.without), 1))


class Evaluator:
    """Runs candidates on held-out samples and compares them with the float model, which runs once.

    Args:
        original: The reference: the float model as it came.
        feeds: The held-out samples.
        metric: The caller's own measure; None compares outputs.
        custom_op_libraries: Libraries with custom operators to register.
    """

    def __init__(
        self,
        original: Path | onnx.ModelProto,
        feeds: Sequence[Feed],
        *,
        metric: Metric | None = None,
        custom_op_libraries: Sequence[str] = (),
    ) -> None:
        self.feeds = list(feeds)
        self._metric = metric
        self._libraries = tuple(custom_op_libraries)
        self.reference = self.outputs(original)
        again = self._outputs(original, self.feeds[:1])
        uses = find_uses(self.reference)
        uses = {name: use for name, use in uses.items() if repeats(self.reference[0][name], again[0][name])}
        self.output_error: OutputError = partial(output_error, uses=uses)
        self._best = call_metric(metric, self.reference, self.reference) if metric is not None and self.feeds else 0.0

    def halved(self) -> tuple[list[Feed], Evaluator]:
        """Returns every other of its samples, and the evaluator of the rest; for two samples or more, no metric."""
        rest = copy.copy(self)
        rest.feeds, rest.reference = self.feeds[1::2], self.reference[1::2]
        return self.feeds[::2], rest

    @property
    def float_merit(self) -> float:
        """The `merit` of the float model."""
        return 1.0 if self._metric is None else self._best

    def merit(self, candidate: onnx.ModelProto) -> float:
        """Returns what a budget is about, larger for better: the caller's metric, or 1 less the error; raises so."""
        outputs = self.outputs(candidate)
        if self._metric is None:
            return 1.0 - self.output_error(outputs, self.reference)
        return call_metric(self._metric, outputs, self.reference)

    @property
    def measure(self) -> str:
        """What `error` returns, in words."""
        return NOISE if self._metric is None else METRIC

    def error(self, candidate: onnx.ModelProto) -> float:
        """Returns the error of a candidate: 0 for the float model's outputs, larger for worse ones.

        Raises:
            OptionError: The metric raises or returns no finite number.
            CalibrationError: The candidate fails on a sample.
        """
        return self.score(candidate).error

    def score(self, candidate: onnx.ModelProto) -> Score:
        """Returns the error of a candidate with what it is without each sample; raises as `error`."""
        outputs = self.outputs(candidate)
        noise = self.output_error(outputs, self.reference)
        if self._metric is not None:
            lost = self._best - call_metric(self._metric, outputs, self.reference)
            return Score(lost + _TIE * min(noise, 1.0), ())
        count = len(outputs) if len(outputs) > 1 else 0
        return Score(noise, tuple(self._without(outputs, i) for i in range(count)))

    def _without(self, outputs: Sequence[Mapping[str, Any]], index: int) -> float:
        kept = [i for i in range(len(outputs)) if i != index]
        return self.output_error([outputs[i] for i in kept], [self.reference[i] for i in kept])

    def outputs(self, model: Path | onnx.ModelProto) -> list[dict[str, Any]]:
        """Returns the outputs by name, one entry a sample; raises as `error`."""
        return self._outputs(model, self.feeds)

    def _outputs(self, model: Path | onnx.ModelProto, feeds: Sequence[Feed]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if not feeds:
            return found
        with Runner(model, threads=0, custom_op_libraries=self._libraries) as runner:
            try:
                found += map(runner.run, feeds)
            except VerificationError as error:
                raise CalibrationError(error.what, where=f"held-out sample {len(found)}", fix=error.fix) from error
        return found
