"""What is tried for accuracy, and the one evaluator that says what is kept.

A pass of your own is a class like those in the files here, made known by `register`: see `docs/extending.md`.
"""

from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, Statistics, WeightPass, changed_weights
from kenosis_ort.passes.registry import PASSES, passes_of, register, registered
from kenosis_ort.passes.settings import between
from kenosis_ort.passes.state import Build, State

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
