"""What is delivered: the quantized model, or what is not slower than the float model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

import onnx

from kenosis_ort.calibration.feeds import sample_feeds
from kenosis_ort.calibration.fingerprint import model_fingerprint
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.errors import CalibrationError
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.speed import as_recorded, as_said, keep_the_promise
from kenosis_ort.options import EXPORT_FORMATS
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.evaluator import Feed
from kenosis_ort.recipe import SpeedChoice
from kenosis_ort.tuning.promise import Basis, Fate

_log = logging.getLogger(__name__)

_TIMING_SHARE: Final = 0.2
"""Of the call, for the promise."""
_LEAST_TIMING_S: Final = 2.0
"""For the promise in a shorter call, at most; a race ends as soon as it is clear."""


def delivered(
    call: Call,
    prepared: onnx.ModelProto,
    builder: Builder,
    build: Build,
    feeds: Sequence[Feed],
    worthless: str | None,
) -> tuple[Build, bool]:
    """Returns what is to be delivered after timing, and whether it is known to be of use.

    Args:
        call: What has gathered so far.
        prepared: The float model in our forms, before passes moved its biases and weights.
        builder: Of the float model that was quantized.
        build: The int8 result.
        feeds: Kept samples.
        worthless: Why the int8 result is of no use; None where it is.
    """
    request, as_it_is = builder.request, (build, worthless is None)
    said = request.insistence or request.dictated
    if not request.speed.promise:
        return as_it_is
    if request.target.time is None:
        call.notes.append(f"Not timed: {request.target.unasked}.")
        return as_it_is
    if request.speed.host is not None and not request.is_for_this_machine:
        call.notes.append("Not timed: the file is laid out for another machine than this one.")
        return as_it_is
    if request.format in EXPORT_FORMATS:
        call.notes.append(f"Not timed against the float model: {said} says what is quantized.")
        return as_it_is
    model = model_fingerprint(call.loaded.proto)
    recorded = request.recipe.speed
    recorded = None if recorded is None or recorded.model != model else recorded
    feeds = feeds or made_up(call)
    if not feeds and recorded is None:
        call.notes.append("Nothing was timed: there is no sample to run the model on.")
        return as_it_is
    original = call.loaded.proto if call.original is not None else prepared
    with call.stage("speed"):
        share = _TIMING_SHARE / (1 - _TIMING_SHARE) * (time.process_time() - call.begun_cpu)
        budget = max(share, _LEAST_TIMING_S)
        if said is not None:
            call.speed = as_said(original, builder, build, feeds, budget_s=budget)
            taken = call.speed.taken
            if taken is not None and taken.verdict == "slower":
                call.warnings.append(
                    f"What {said} asks for does not pay here: only {taken.reason}. The file holds it all the same. "
                    "Fix: leave the option out, or promise=False where speed does not matter."
                )
            return as_it_is
        net = original, prepared, builder, build
        delivery = None if recorded is None else as_recorded(*net, recorded, worthless=worthless)
        if delivery is None:
            delivery = keep_the_promise(*net, feeds, worthless=worthless, budget_s=budget)
    call.speed = delivery.speed
    first, taken = delivery.speed.rungs[0], delivery.speed.taken
    call.choice = None if taken is None else SpeedChoice(model, taken.name)
    if delivery.is_int8 or taken is None:
        return delivery.build, worthless is None or not delivery.is_int8
    if any(rung.fate == Fate.OUTRUN for rung in delivery.speed.rungs):
        call.notes.append(f"Faster than static INT8 here, and delivered: {taken.description}.")
        return delivery.build, True
    pays = "is not known to pay here" if delivery.speed.basis == Basis.UNDECIDED else "does not pay here"
    call.warnings.append(
        f"INT8 {pays}: {first.reason}. The file holds: {taken.description}. "
        "Fix: nothing, or promise=False to get INT8 all the same."
    )
    return delivery.build, True


def made_up(call: Call) -> list[Feed]:
    """Synthetic feed where no sample is at hand; none where its kind cannot be told."""
    try:
        return list(sample_feeds(SyntheticReader(call.loaded, samples=1)))
    except CalibrationError as error:
        _log.info("no sample made up: %s", error)
        return []
