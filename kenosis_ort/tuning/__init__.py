"""Decisions by measuring on this machine: races, the search over moves, the promise, and a cache of what they found."""

from kenosis_ort.tuning.cache import CacheKey, TuningCache, options_digest
from kenosis_ort.tuning.machine import Machine, machine_fingerprint, this_machine
from kenosis_ort.tuning.moves import Move, SearchResult, Stage, Trial, recall
from kenosis_ort.tuning.promise import Fate, Outcome, Rung, Step, keep_promise
from kenosis_ort.tuning.race import Race, Standing, Track, race
from kenosis_ort.tuning.search import search

__all__ = [
    "CacheKey",
    "Fate",
    "Machine",
    "Move",
    "Outcome",
    "Race",
    "Rung",
    "SearchResult",
    "Stage",
    "Standing",
    "Step",
    "Track",
    "Trial",
    "TuningCache",
    "keep_promise",
    "machine_fingerprint",
    "options_digest",
    "race",
    "recall",
    "search",
    "this_machine",
]
