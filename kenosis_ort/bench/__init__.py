"""Timing models against each other: interleaved, with fresh sessions, and with a verdict that knows the noise."""

from kenosis_ort.bench.benchmark import BenchReport, LeftOut, ModelTiming, bench
from kenosis_ort.bench.harness import SpeedComparison, Verdict

__all__ = ["BenchReport", "LeftOut", "ModelTiming", "SpeedComparison", "Verdict", "bench"]
