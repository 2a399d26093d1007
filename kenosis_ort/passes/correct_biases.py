"""Biases corrected for the mean error of quantization; the source: `kenosis_ort.accuracy.bias_correction`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kenosis_ort.accuracy.bias_correction import bias_shifts
from kenosis_ort.accuracy.biases import with_shifts
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, Statistics
from kenosis_ort.passes.state import State


@dataclass(frozen=True)
class BiasCorrection(Pass):
    """The mean error of each output channel moves into the layer's bias.

    Attributes:
        bias_correction: Biases corrected for the mean error of quantization.
    """

    name: ClassVar[str] = "bias_correction"
    title: ClassVar[str] = "Bias correction"
    fits_means: ClassVar[bool] = True

    bias_correction: bool = True

    @property
    def wanted(self) -> bool:
        return self.bias_correction

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        return Candidate(corrected(state, context))


def corrected(state: State, context: Context) -> State:
    """Returns a state with the mean error of its layers, against the float model's, moved into the biases."""
    build = state.built
    shifts = bias_shifts(
        state.prepared.proto,
        build.quantized,
        context.fit,
        nodes=set(build.plan.integer_nodes()),
        custom_op_libraries=context.custom_op_libraries,
        float_means=context.float_means,
    )
    shifted = context.with_weights(state, with_shifts(build.float_model, shifts))
    return replace(shifted, uncorrected=build.float_model)


def uncorrected(state: State) -> State:
    """Returns a state with the biases that were there before they were corrected; its build is not made anew."""
    if state.uncorrected is None:
        return state
    return replace(state, build=replace(state.built, float_model=state.uncorrected), uncorrected=None)
