"""Passes for accuracy, and the one evaluator that decides which results are kept.

A pass of your own is a class like those in the files here, made known by `register`: see `docs/extending.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kenosis_ort.exports import deferred

if TYPE_CHECKING:
    from kenosis_ort.passes.contract import (
        Build,
        Candidate,
        Context,
        Pass,
        Skipped,
        State,
        Statistics,
        WeightPass,
        between,
        changed_weights,
    )
    from kenosis_ort.passes.recipe import PASSES, passes_of, register, registered

_NAMES: Final = {
    "kenosis_ort.passes.contract": "Build Candidate Context Pass Skipped State Statistics WeightPass between "
    "changed_weights",
    "kenosis_ort.passes.recipe": "PASSES passes_of register registered",
}

__all__ = [
    "PASSES",
    "Build",
    "Candidate",
    "Context",
    "Pass",
    "Skipped",
    "State",
    "Statistics",
    "WeightPass",
    "between",
    "changed_weights",
    "passes_of",
    "register",
    "registered",
]

__getattr__ = deferred(__name__, _NAMES)
