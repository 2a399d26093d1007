"""Biases corrected for the mean error of quantization; the source: `kenosis_ort.accuracy.bias_correction`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kenosis_ort.accuracy.bias_correction import bias_shifts
from kenosis_ort.accuracy.biases import with_shifts
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, Statistics
from kenosis_ort.passes.state import Build, State


@dataclass(frozen=True)
class BiasCorrection(Pass):
    """The mean error of each output channel moves into the layer's bias.

    Attributes:
        bias_correction: Whether it is tried.
    """

    name: ClassVar[str] = "bias_correction"
    title: ClassVar[str] = "Bias correction"
    fits_means: ClassVar[bool] = True

    bias_correction: bool = True

    @property
    def wanted(self) -> bool:
        return self.bias_correction

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        made = corrected(state, state.built, context)
        return Candidate(replace(state, build=made))


def corrected(state: State, build: Build, context: Context) -> Build:
    """Returns a build with the mean error of its layers, against the float model's, moved into the biases."""
    shifts = bias_shifts(
        state.prepared.proto,
        build.quantized,
        context.fit,
        nodes=set(build.plan.integer_nodes()),
        custom_op_libraries=context.custom_op_libraries,
    )
    made = context.quantize(with_shifts(build.float_model, shifts), build.table, build.keep_float)
    return replace(made, fusion=state.built.fusion, notes=state.built.notes)
