"""Timing models against each other: interleaved, with fresh sessions, and with a verdict that knows the noise."""

from typing import TYPE_CHECKING, Final

from kenosis_ort.exports import deferred

if TYPE_CHECKING:
    from kenosis_ort.bench.benchmark import BenchReport, LeftOut, ModelTiming, bench
    from kenosis_ort.bench.harness import SpeedComparison, Verdict

_NAMES: Final = {
    "kenosis_ort.bench.benchmark": "BenchReport LeftOut ModelTiming bench",
    "kenosis_ort.bench.harness": "SpeedComparison Verdict",
}

__all__ = ["BenchReport", "LeftOut", "ModelTiming", "SpeedComparison", "Verdict", "bench"]

__getattr__ = deferred(__name__, _NAMES)
