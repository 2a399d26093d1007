"""Decisions by measuring on this machine: races, the promise, the profile of a machine."""

from kenosis_ort.tuning.promise import Basis, Estimate, Fate, Outcome, Rung, Step, keep_promise
from kenosis_ort.tuning.race import Race, Track, race

__all__ = ["Basis", "Estimate", "Fate", "Outcome", "Race", "Rung", "Step", "Track", "keep_promise", "race"]
