"""The list of passes: their order is that in which they run, those before calibration first."""

from __future__ import annotations

from typing import Any, Final

from kenosis_ort.passes.bias_correction import BiasCorrection
from kenosis_ort.passes.contract import Pass
from kenosis_ort.passes.equalization import Equalization
from kenosis_ort.passes.mixed_precision import MixedPrecision
from kenosis_ort.passes.range_choice import RangeChoice
from kenosis_ort.passes.rounding import LearnedRounding
from kenosis_ort.passes.smooth_quant import SmoothQuant

PASSES: Final[tuple[type[Pass], ...]] = (
    Equalization,
    SmoothQuant,
    RangeChoice,
    BiasCorrection,
    LearnedRounding,
    MixedPrecision,
)


def passes_of(recipe: Any) -> tuple[Pass, ...]:
    """Returns the passes that a recipe asks for, in order."""
    found = (kind.of(recipe) for kind in PASSES)
    return tuple(each for each in found if each.wanted)
