"""Decisions by measuring on this machine: races, the promise, the profile of a machine."""

from kenosis_ort.tuning.promise import Basis, Estimate, Form, FormStatus, keep_promise
from kenosis_ort.tuning.races import Race, RaceSetup, race

__all__ = ["Basis", "Estimate", "Form", "FormStatus", "Race", "RaceSetup", "keep_promise", "race"]
