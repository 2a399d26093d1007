"""How far a quantized candidate is from the float model on calibration samples that no pass was fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from kenosis_ort.accuracy.error import find_uses, output_error
from kenosis_ort.accuracy.metric import Metric, OutputError, call_metric
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.session import open_session

LEAST_FEEDS = 4
_TIE = 1e-3  # weight of the outputs' noise beside a metric, which few samples make coarse

Feed = Mapping[str, Any]
NOISE = "error of the outputs, each by its use"
METRIC = "loss of the caller's metric"


def split_feeds(feeds: Sequence[Feed]) -> tuple[list[Feed], list[Feed]]:
    """Returns the samples to fit passes to, and those to judge by; both empty where there are too few to do both."""
    if len(feeds) < LEAST_FEEDS:
        return [], []
    return [f for i, f in enumerate(feeds) if i % 4 != 3], [f for i, f in enumerate(feeds) if i % 4 == 3]


def least_ratio(samples: int) -> float:
    """Returns what share of the error a change may leave to be kept: few samples must say it louder.

    0.75 for two samples, 0.92 for eight, 0.965 for 32: near the spread of the ratio between two halves of the samples
    of small nets, where one sample differs from another by a factor of two.
    """
    return 0.98 - 0.46 / max(samples, 1)


class Judge:
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
        self.output_error: OutputError = partial(output_error, uses=find_uses(self.reference))
        self._best = 0.0 if metric is None else call_metric(metric, self.reference, self.reference)

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
        outputs = self.outputs(candidate)
        noise = self.output_error(outputs, self.reference)
        if self._metric is None:
            return noise
        return self._best - call_metric(self._metric, outputs, self.reference) + _TIE * min(noise, 1.0)

    def outputs(self, model: Path | onnx.ModelProto) -> list[dict[str, Any]]:
        """Returns the outputs by name, one entry a sample."""
        session = open_session(model, custom_op_libraries=self._libraries, threads=0)
        names = [output.name for output in session.get_outputs()]
        return [dict(zip(names, self._run(session, i), strict=True)) for i in range(len(self.feeds))]

    def _run(self, session: ort.InferenceSession, index: int) -> list[Any]:
        try:
            return list(session.run(None, dict(self.feeds[index])))
        except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
            text = " ".join(str(error).split())[:400]
            where = f"kept sample {index}"
            raise CalibrationError(f"the model fails on a calibration sample: {text}", where=where) from error
