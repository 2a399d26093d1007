"""Delivery: files checked, weights alone, fallbacks, and the form that is written.

The delivered model: the quantized one, or another form that is not slower than the float model.

Recipes that quantize weights alone: in blocks of 4 or 8 bits, activations float; nothing is calibrated or placed.

Files that a quantization reads and writes, checked against each other before any work.

Fallbacks where a quantization fails, and failures that stay errors.

Where a rewrite or what the model computes is the reason, the same placement without rewrites and passes, then the float
model as it came. A planner, an emitter or a proof that fails is a defect: an error, or the float model if the caller
wants that.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.accuracy.metric import Budget
from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.calibration.feeds import sample_feeds
from kenosis_ort.calibration.images import source_files
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import (
    AlreadyQuantizedError,
    CalibrationCacheError,
    CalibrationError,
    ClusterError,
    InternalError,
    KenosisError,
    ModelLoadError,
    OptionError,
    OutputError,
    place_of,
)
from kenosis_ort.flow import steps
from kenosis_ort.flow.accuracy import evaluator_on, measured
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import OF_THE_MODEL, Call
from kenosis_ort.flow.finish import RewriteMismatchError, compare, finish
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader, feeds_wanted
from kenosis_ort.flow.speed import as_recorded, as_requested, keep_the_promise
from kenosis_ort.graph.external_data import external_files
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.graph.model_session import WHOLE_LIMIT, as_array, open_session
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.save import data_file, write_model
from kenosis_ort.options import EXPORT_FORMATS
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.evaluator import Feed, split_feeds
from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
from kenosis_ort.recipe import RECIPES, SpeedChoice
from kenosis_ort.report.quantization_report import CalibrationSummary, QuantizationReport
from kenosis_ort.report.sections import MeasureSummary
from kenosis_ort.storage.writing import check_apart, is_lack_of_room, same_file
from kenosis_ort.tuning.promise import Basis, FormStatus
from kenosis_ort.weights.block_model import BlockModel, nodes_in_blocks, weights_in_blocks

_CALLERS: Final = (
    CalibrationCacheError,
    ClusterError,
    OptionError,
    ModelLoadError,
    AlreadyQuantizedError,
    OutputError,
)


class WorthlessError(KenosisError):
    """The quantized model has nothing in common with the float model.

    Attributes:
        samples: How many samples were calibrated on.
    """

    def __init__(self, why: str, samples: int) -> None:
        super().__init__(why)
        self.samples = samples


def without_optional_work(request: Request) -> Request:
    """The request without rewrites and passes."""
    recipe = request.recipe
    plain = replace(RECIPES["plain"], ranges=recipe.ranges, samples=recipe.samples, speed=recipe.speed)
    return replace(request, rewrites=frozenset(), recipe=plain)


def is_of_the_model(error: Exception) -> bool:
    """Whether an error is about the model, or its form after a rewrite, and not a defect."""
    return isinstance(error, (RewriteMismatchError, *OF_THE_MODEL))


def defect(call: Call, error: Exception) -> Exception:
    """The error for a planner, an emitter or a proof that failed; running out of memory is none of them."""
    if isinstance(error, MemoryError):
        return error
    return InternalError(
        f"quantize_static({call.loaded.name}, {call.request.output_name}) failed: {reason_of(error)}",
        where=place_of(error),
        fix="please report this as a bug of kenosis-ort, with the model; on_failure='float' delivers the float model",
    )


def is_the_callers(error: Exception, call: Call, data: KeepingReader | None) -> bool:
    """Whether an error is about the caller's arguments or data, so that no other form of the model helps."""
    if isinstance(error, _CALLERS) or is_lack_of_room(error) or (data is not None and data.failure is not None):
        return True
    if not isinstance(error, CalibrationError):
        return False
    if data is None or data.last is None or call.request.calibration_providers:
        return True
    return not _takes(call, data.last)


def _takes(call: Call, feed: Mapping[str, Any]) -> bool:
    """Whether the float model as it came runs on a feed, and makes no NaN or infinity of what holds some."""
    try:
        source = call.loaded.path or call.loaded.proto
        session = open_session(source, custom_op_libraries=call.request.custom_op_libraries)
        outputs = [as_array(o) for o in session.run(None, dict(feed))]
    except Exception:  # the runtime raises several unrelated classes; whichever it is, the feed is not taken
        return False
    weights = (array_in(tensor) for tensor in call.loaded.proto.graph.initializer if tensor.data_type in _FLOATS)
    return _are_finite(outputs) or (_are_finite(map(as_array, feed.values())) and _are_finite(weights))


_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)


def _are_finite(arrays: Iterable[Any]) -> bool:
    return all(a.dtype.kind not in "fc" or bool(np.isfinite(a).all()) for a in arrays)


def deliver_float(
    call: Call, why: str, samples: int = 0, fix: str = "nothing, or deploy the float model itself"
) -> QuantizationReport:
    """Writes the float model as it came and reports why.

    Args:
        call: What has gathered so far.
        why: Why there is no quantized form, without a full stop.
        samples: How many samples were calibrated on.
        fix: What the caller can do about it.
    """
    request, loaded = call.request, call.loaded
    with call.stage("write"):
        call.size_after = write_model(
            loaded.proto,
            request.output,
            external_data=request.use_external_data_format,
            check=lambda path: steps.check_loads(
                path, request, pieces=int(len(loaded.proto.graph.node) <= WHOLE_LIMIT)
            ),
            content=loaded.path.read_bytes() if loaded.path is not None and not loaded.is_split else None,
            warn=call.warnings.append,
        )
    call.warnings.append(f"The file holds the float model as it came: {why}. Fix: {fix}.")
    call.fallbacks.append(f"The float model as it came: {why}.")
    if request.caches:
        call.warnings.append("The cache of the file is float, as in the float model. Fix: feed it so.")
    seconds = call.seconds.get("calibrate", 0.0)
    calibration = CalibrationSummary(str(request.choices["calibrate_method"].value), samples, 0, seconds)
    return call.report(PlacementPlan(request.target.name), None, calibration, float_because=why)


def reason_of(error: Exception) -> str:
    """Message of an error, without a full stop."""
    text = error.what if isinstance(error, KenosisError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300].rstrip(".")


OUTPUT = "the output"
MODEL = "the float model"


def check_files(
    model: Path | None,
    output: Path,
    *,
    cache: Path | None = None,
    written: Sequence[tuple[str, Path]] = (),
    read: Sequence[tuple[str, Path]] = (),
    reader: Any = None,
    in_place: bool = True,
) -> None:
    """Checks that no file to be written is one that is read, or written as something else.

    Args:
        model: The float model's file; None for a model in memory.
        output: The quantized model.
        cache: The calibration cache, which is read if it exists and written if not.
        written: What else is written: what it is, and where.
        read: What else is read.
        reader: The calibration data reader; files that it is known to read are not written over.
        in_place: Whether the output may take the float model's place, as stock's may.

    Raises:
        OutputError: Two are the same file.
    """
    outputs = [(OUTPUT, output), ("the output's external data", data_file(output)), *written]
    inputs = [*read, *(("the calibration data", file) for file in source_files(reader))]
    if cache is not None:
        (inputs if os.path.exists(cache) else outputs).append(("the calibration cache", cache))
    if model is not None:
        data = external_files(model) if any(os.path.exists(path) for _, path in outputs) else []
        if in_place and same_file(model, output):
            data = [file for file in data if not same_file(file, data_file(output))]
            check_apart(outputs[1:], [(MODEL, model)])
        else:
            inputs.append((MODEL, model))
        inputs += [("the float model's external data", file) for file in data]
    check_apart(outputs, inputs)


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
