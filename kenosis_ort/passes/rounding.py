"""Weights rounded so that the layer's output stays; the source: `kenosis_ort.accuracy.rounding`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kenosis_ort.accuracy.rounding import learn_rounding
from kenosis_ort.passes.bias_correction import BiasCorrection, corrected
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, Statistics
from kenosis_ort.passes.state import State


@dataclass(frozen=True)
class LearnedRounding(Pass):
    """Rounded weights with biases corrected for them, beside nearest rounding with its own corrected biases.

    Attributes:
        rounding: ``learned``, or ``nearest`` for the nearest grid point.
    """

    name: ClassVar[str] = "rounding"
    title: ClassVar[str] = "Learned rounding"

    rounding: Literal["nearest", "learned"] = "nearest"

    @property
    def wanted(self) -> bool:
        return self.rounding == "learned"

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        build, base = state.built, state.prepared.proto
        nodes = set(build.plan.integer_nodes())
        nearest = context.quantize(base, build.table, build.keep_float)
        libraries = context.custom_op_libraries
        rounded = learn_rounding(base, nearest.quantized, context.fit, nodes=nodes, custom_op_libraries=libraries)
        made = context.quantize(rounded.model, build.table, build.keep_float)
        if BiasCorrection.name in context.active:
            made = corrected(state, made, context)
        return Candidate(replace(state, build=replace(made, fusion=build.fusion, notes=build.notes)))
