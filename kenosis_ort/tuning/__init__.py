"""Decisions by measuring on this machine: races, the promise, the profile of a machine."""

from kenosis_ort.tuning.promise import Basis, Estimate, Form, FormStatus, Outcome, Step, keep_promise
from kenosis_ort.tuning.races import Race, RaceSetup, race

__all__ = ["Basis", "Estimate", "Form", "FormStatus", "Outcome", "Race", "RaceSetup", "Step", "keep_promise", "race"]
