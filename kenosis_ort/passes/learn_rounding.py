"""Weights rounded so that the layer's output stays; the source: `kenosis_ort.accuracy.rounding`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kenosis_ort.accuracy.rounding import learn_rounding
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, Statistics
from kenosis_ort.passes.correct_biases import BiasCorrection, corrected
from kenosis_ort.passes.state import State


@dataclass(frozen=True)
class LearnedRounding(Pass):
    """Rounded weights with biases corrected for them, beside nearest rounding with its own corrected biases.

    Attributes:
        rounding: Weights to the nearest grid point, or to the one that keeps the layer's output (``learned``).
    """

    name: ClassVar[str] = "rounding"
    title: ClassVar[str] = "Learned rounding"

    rounding: Literal["nearest", "learned"] = "nearest"

    @property
    def wanted(self) -> bool:
        return self.rounding == "learned"

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        base = state.prepared.proto
        nodes = set(state.built.plan.integer_nodes())
        nearest = context.with_weights(state, base).built.quantized
        rounded = learn_rounding(
            base,
            nearest,
            context.fit,
            nodes=nodes,
            custom_op_libraries=context.custom_op_libraries,
            executor=context.executor,
        )
        changed = context.with_weights(state, rounded.model)
        return Candidate(corrected(changed, context) if BiasCorrection.name in context.active else changed)
