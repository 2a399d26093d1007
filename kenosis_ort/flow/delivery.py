"""The delivered model: the quantized one, or another form that is not slower than the float model.

Recipes that quantize weights alone: in blocks of 4 or 8 bits, activations float; nothing is calibrated or placed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import onnx

from kenosis_ort.accuracy.metric import Budget
from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.calibration.feeds import sample_feeds
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, OptionError
from kenosis_ort.flow.accuracy import evaluator_on, measured
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.finish import compare, finish
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader, feeds_wanted
from kenosis_ort.flow.speed import as_recorded, as_requested, keep_the_promise
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.options import EXPORT_FORMATS
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.evaluator import Feed, split_feeds
from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
from kenosis_ort.recipe import SpeedChoice
from kenosis_ort.report.model import QuantizationReport
from kenosis_ort.report.sections import MeasureSummary
from kenosis_ort.tuning.promise import Basis, FormStatus
from kenosis_ort.weights.block_model import BlockModel, nodes_in_blocks, weights_in_blocks

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
    """The build to deliver after timing, and whether it is known to be of use.

    Args:
        call: What has gathered so far.
        prepared: The float model in our forms, before passes moved its biases and weights.
        builder: Of the float model that was quantized.
        build: The int8 result.
        feeds: Kept samples.
        worthless: Why the int8 result is of no use; None where it is.
    """
    request, as_it_is = builder.request, (build, worthless is None)
    explicit = request.explicit_option or request.stock_reason
    # Where nothing can or shall be timed, the integer form is delivered.
    if not request.speed.promise:
        return as_it_is
    if request.target.time is None:
        call.notes.append(f"Not timed: {request.target.unasked}.")
        return as_it_is
    if request.speed.host is not None and not request.is_for_this_machine:
        call.notes.append("Not timed: the file is laid out for another machine than this one.")
        return as_it_is
    if request.format in EXPORT_FORMATS:
        call.notes.append(f"Not timed against the float model: {explicit} says what is quantized.")
        return as_it_is
    model = model_fingerprint(call.loaded.proto)
    recorded = request.recipe.speed
    recorded = None if recorded is None or recorded.model != model else recorded
    feeds = feeds or made_up(call)
    if not feeds and recorded is None:
        call.notes.append("Nothing was timed: there is no sample to run the model on.")
        return as_it_is
    # A form that the caller asked for is only timed; else the first candidate is taken that is not slower.
    original = call.loaded.proto if call.original is not None else prepared
    with call.stage("speed"):
        share = _TIMING_SHARE / (1 - _TIMING_SHARE) * (time.process_time() - call.begun_cpu)
        budget = max(share, _LEAST_TIMING_S)
        if explicit is not None:
            call.speed = as_requested(original, builder, build, feeds, budget_s=budget)
            taken = call.speed.taken
            if taken is not None and taken.verdict == "slower":
                call.warnings.append(
                    f"What {explicit} asks for does not pay here: only {taken.reason}. The file holds it all the same. "
                    "Fix: leave the option out, or promise=False where speed does not matter."
                )
            return as_it_is
        net = original, prepared, builder, build
        delivery = None if recorded is None else as_recorded(*net, recorded, worthless=worthless)
        if delivery is None:
            delivery = keep_the_promise(*net, feeds, worthless=worthless, budget_s=budget)
    call.speed = delivery.speed
    # A note or a warning where another form is delivered.
    first, taken = delivery.speed.candidates[0], delivery.speed.taken
    call.choice = None if taken is None else SpeedChoice(model, taken.name)
    if delivery.is_int8 or taken is None:
        return delivery.build, worthless is None or not delivery.is_int8
    if any(form.status == FormStatus.OUTRUN for form in delivery.speed.candidates):
        call.notes.append(f"Faster than static INT8 here, and delivered: {taken.description}.")
        return delivery.build, True
    pays = "is not known to pay here" if delivery.speed.basis == Basis.UNDECIDED else "does not pay here"
    call.warnings.append(
        f"INT8 {pays}: {first.reason}. The file holds: {taken.description}. "
        "Fix: nothing, or promise=False to get INT8 all the same."
    )
    return delivery.build, True


def made_up(call: Call) -> list[Feed]:
    """Synthetic feed where no sample is at hand; none where its kind is not known."""
    try:
        return list(sample_feeds(SyntheticReader(call.loaded, samples=1)))
    except CalibrationError as error:
        _log.info("no sample made up: %s", error)
        return []


FORM: Final = "weight-only"
_FLOAT: Final = "the recipe quantizes weights of linear layers and embeddings alone"


def weight_only(call: Call, data: KeepingReader | None) -> QuantizationReport:
    """Quantizes the weights of linear layers and embeddings, writes and reports.

    Where the recipe has a budget that 4 bits do not keep, 8 are delivered.

    Args:
        call: What gathers on the way.
        data: Samples that rounding follows; None rounds to nearest.

    Raises:
        OptionError: The target or the format has no such form.
        NothingToQuantizeError: There is no linear layer and no embedding.
    """
    request = call.request
    _check_form(request)
    with call.stage("calibrate"):
        feeds: list[Feed] = [] if data is None else list(data.peek(feeds_wanted(request)))
    fit, held_out = split_feeds(feeds)
    if call.validation is not None:
        fit, held_out = list(feeds), list(call.validation.some())
    if held_out:
        call.evaluator = evaluator_on(call, call.loaded.proto, held_out)
    bits, recipe = request.recipe.weight_only, request.recipe
    made = _made(call, bits, fit or feeds)
    build = _build(call, made)
    call.measure = _measured(call, build)
    if recipe.mixed_precision and bits < 8 and call.measure is not None and call.measure.kept is False:
        call.notes.append(
            f"{bits} bits do not keep the budget of {Budget(recipe.accuracy_budget)}: all weights have 8."
        )
        made = _made(call, 8, fit or feeds)
        build = _build(call, made)
        call.measure = _measured(call, build)
    call.notes += made.notes
    low = sum(layer.bits < 8 for layer in made.layers)
    call.notes.append(
        f"Weights alone: {low} of {len(made.layers)} layers and embeddings have {bits} bits, the others 8; activations "
        "are float."
        if low
        else f"Weights alone: {len(made.layers)} layers and embeddings have 8 bits; activations are float."
    )
    samples = len(feeds)
    if not feeds and (feeds := made_up(call)):
        call.notes.append("Outputs were compared on made-up samples: real ones were not given.")
    return finish(call, call.loaded.proto, build, feeds, samples, compare(call, build, feeds))


def planned_weights(loaded: LoadedModel, request: Request) -> PlacementPlan:
    """Plan of a recipe of weights alone, by node; the bits of the most sensitive layers need samples.

    Raises:
        OptionError: The target or the format has no such form.
        NothingToQuantizeError: There is no linear layer and no embedding.
    """
    _check_form(request)
    model, chosen = nodes_in_blocks(
        loaded.proto, nodes_to_exclude=request.nodes_to_exclude, custom_op_libraries=request.custom_op_libraries
    )
    bits = request.recipe.weight_only
    stored = f"its weights have {bits} bits in blocks, its data are float"
    stored += ", or 8 where samples show that they are worth it" if bits < 8 else ""
    kinds = {True: (Kind.INTEGER, "weights-in-blocks", stored), False: (Kind.FLOAT, "weights-alone", _FLOAT)}
    nodes = tuple(NodeDecision(n.name, n.op_type, *kinds[n.name in chosen]) for n in model.graph.node)
    return PlacementPlan(request.target.name, nodes=nodes)


def _check_form(request: Request) -> None:
    timed = request.target.time
    if timed is None or FORM not in timed.other_forms or request.format != "qdq":
        raise OptionError(
            f"target '{request.target.name}' in format '{request.format}' has no form of weights alone",
            where="recipe",
            fix="target='ort-cpu' with format='qdq', or another recipe",
        )


def _made(call: Call, bits: int, feeds: Sequence[Feed]) -> BlockModel:
    request = call.request
    with call.stage("quantize"):
        return weights_in_blocks(
            call.loaded.proto,
            feeds,
            bits=bits,
            nodes_to_exclude=request.nodes_to_exclude,
            custom_op_libraries=request.custom_op_libraries,
            progress=request.progress,
        )


def _build(call: Call, made: BlockModel) -> Build:
    request = call.request
    prove = request.target.prove if request.verify else None
    fusion = None
    if prove is not None:
        with call.stage("verify"):
            fusion = prove(made.model, custom_op_libraries=request.custom_op_libraries)
    plan = PlacementPlan(request.target.name)
    return Build(call.loaded.proto, CalibrationTable({}), {}, plan, made.model, fusion)


def _measured(call: Call, build: Build) -> MeasureSummary | None:
    return call.attempt("The measure of what is lost", partial(measured, call, build), None)
