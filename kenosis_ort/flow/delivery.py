"""What is delivered: the quantized model after tuning, or what is not slower than the float model."""

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
from kenosis_ort.flow.speed import INT8, as_recorded, keep_the_promise, tune, tuned_as_recorded
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.evaluator import Feed
from kenosis_ort.recipe import SpeedChoice
from kenosis_ort.tuning.promise import Fate

_log = logging.getLogger(__name__)

_TIMING_SHARE: Final = 0.2
"""Of the call, for the promise."""
_LEAST_TIMING_S: Final = 2.0
"""For the promise in a shorter call, at most; a race ends as soon as it is clear, and forms that the promise holds
without are not raced for longer than their share."""


def delivered(
    call: Call,
    prepared: onnx.ModelProto,
    builder: Builder,
    build: Build,
    feeds: Sequence[Feed],
    worthless: str | None,
) -> tuple[Build, bool]:
    """Returns what is to be delivered after tuning and timing, and whether it is known to be of use.

    Args:
        call: What has gathered so far.
        prepared: The float model in our forms, before passes moved its biases and weights.
        builder: Of the float model that was quantized.
        build: The int8 result.
        feeds: Kept samples.
        worthless: Why the int8 result is of no use; None where it is.
    """
    wanted = builder.request.speed
    as_it_is = build, worthless is None
    if not wanted.promise and (wanted.tune != "measure" or worthless is not None):
        return as_it_is
    if builder.request.target.time is None:
        call.notes.append(f"Not timed: {builder.request.target.unasked}.")
        return as_it_is
    if builder.request.speed.host is not None and not builder.request.is_for_this_machine:
        call.notes.append("Not timed: the file is laid out for another machine than this one.")
        return as_it_is
    if builder.request.insistence is not None:
        call.notes.append(f"Not timed against the float model: {builder.request.insistence} says what is quantized.")
        return as_it_is
    model = model_fingerprint(call.loaded.proto)
    said = builder.request.recipe.speed
    said = None if said is None or said.model != model else said
    feeds = feeds or made_up(call)
    if not feeds and said is None:
        call.notes.append("Nothing was timed: there is no sample to run the model on.")
        return as_it_is
    notes: tuple[str, ...] = ()
    with call.stage("speed"):
        tuned = build
        if said is not None:
            tuned = tuned_as_recorded(builder, build, said)
        elif wanted.tune == "measure" and build.plan and worthless is None:
            tuned, _, notes = tune(builder, build, feeds)
        nodes = tuple(sorted(tuned.keep_float.keys() - build.keep_float.keys()))
        build = tuned if tuned is build else builder.build(tuned.table, tuned.keep_float)
        if not wanted.promise:
            call.notes += notes
            call.choice = SpeedChoice(model, INT8, nodes)
            return build, True
        original = call.loaded.proto if call.original is not None else prepared
        net = original, prepared, builder, build
        delivery = None if said is None else as_recorded(*net, said, worthless=worthless)
        if delivery is None:
            share = _TIMING_SHARE / (1 - _TIMING_SHARE) * (time.perf_counter() - call.begun)
            budget = max(share, _LEAST_TIMING_S)
            delivery = keep_the_promise(*net, feeds, notes, worthless=worthless, budget_s=budget, challenge_s=share)
    call.speed = delivery.speed
    if delivery.speed is not None and delivery.speed.taken is not None:
        call.choice = SpeedChoice(model, delivery.speed.taken.name, nodes)
    if not delivery.is_int8 and delivery.speed is not None:
        first, taken = delivery.speed.rungs[0], delivery.speed.taken
        if taken is not None and any(rung.fate == Fate.OUTRUN for rung in delivery.speed.rungs):
            call.notes.append(f"Faster than static INT8 here, and delivered: {taken.description}.")
            return delivery.build, True
        call.warnings.append(
            f"INT8 does not pay here: {first.reason}. The file holds: {taken.description if taken else 'float'}. "
            "Fix: nothing, or promise=False to get INT8 all the same."
        )
    return delivery.build, worthless is None or not delivery.is_int8


def made_up(call: Call) -> list[Feed]:
    """Synthetic feed where no sample is at hand; none where its kind cannot be told."""
    try:
        return list(sample_feeds(SyntheticReader(call.loaded, samples=1)))
    except CalibrationError as error:
        _log.info("no sample made up: %s", error)
        return []
