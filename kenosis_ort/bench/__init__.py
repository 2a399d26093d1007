"""Timing models against each other: interleaved, with fresh sessions, and with a verdict that knows the noise."""

from kenosis_ort.bench.model import BenchReport, LeftOut, ModelTiming
from kenosis_ort.bench.noise import Comparison, Verdict
from kenosis_ort.bench.run import bench

__all__ = ["BenchReport", "Comparison", "LeftOut", "ModelTiming", "Verdict", "bench"]
