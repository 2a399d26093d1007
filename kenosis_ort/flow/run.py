"""One quantization from beginning to end: load, prepare, plan, calibrate, quantize, verify, write, report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import onnx

from kenosis_ort.calibration.bodies import Feeds
from kenosis_ort.calibration.feeds import input_specs
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.errors import NothingToQuantizeError, warn_caller
from kenosis_ort.flow.accuracy import improved, laid_out, measured
from kenosis_ort.flow.bodies import NOT_RUN, of_body, with_bodies
from kenosis_ort.flow.cache import CalibrationCache
from kenosis_ort.flow.course import Course
from kenosis_ort.flow.delivery import delivered
from kenosis_ort.flow.finish import compare, finish, is_whole
from kenosis_ort.flow.ladder import WorthlessError, deliver_float, is_the_callers, reason_of, rungs
from kenosis_ort.flow.lay_out import Draft, Layout, draft, draft_of, nothing_to_quantize
from kenosis_ort.flow.names import fit_names
from kenosis_ort.flow.ranges import find_ranges
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.said import said_by_option
from kenosis_ort.flow.samples import KeepingReader, feeds_wanted, with_open_defaults
from kenosis_ort.flow.speed import float_regions
from kenosis_ort.flow.steps import worthless
from kenosis_ort.flow.validation import Validation
from kenosis_ort.flow.workshop import BodyShop, Workshop, is_quantized
from kenosis_ort.graph.bodies import Body, owners
from kenosis_ort.graph.constants import meant_as_defaults
from kenosis_ort.graph.external_data import weight_bytes
from kenosis_ort.graph.load import LoadedModel, load_model
from kenosis_ort.graph.save import check_destination
from kenosis_ort.options import Stages
from kenosis_ort.passes.state import Build
from kenosis_ort.quantizer.stock import CalibrationDataReader
from kenosis_ort.report.model import QuantizationReport
from kenosis_ort.runtime.session import configured
from kenosis_ort.storage.scratch import Scratch, remove_leftovers
from kenosis_ort.storage.writing import room_is_needed

_FEEDS_OF_BODIES = 4096  # bodies are calibrated on kept feeds; their bytes are bounded as well


def run(
    source: str | os.PathLike[str] | onnx.ModelProto, request: Request, reader: CalibrationDataReader | None
) -> QuantizationReport:
    """Quantizes one model.

    Raises:
        KenosisError: One of its subclasses; nothing was written.
    """
    remove_leftovers()
    with (
        Scratch("run"),
        room_is_needed(),
        configured(request.target.session_entries),
    ):  # where none can be made, nothing is begun
        report = _run(source, request, reader)
    for text in report.warnings:
        warn_caller(text)
    return report


def _run(
    source: str | os.PathLike[str] | onnx.ModelProto, request: Request, reader: CalibrationDataReader | None
) -> QuantizationReport:
    start = time.perf_counter()
    check_destination(request.output)
    course = Course(load_model(source, custom_op_libraries=request.custom_op_libraries), request)
    course.size_before = _size(course.loaded)
    course.seconds["load"] = time.perf_counter() - start
    request = course.request = fit_names(course.loaded.proto, request)
    course.warnings += request.complaints
    return _run_qdq(course, reader)


def _run_qdq(first: Course, reader: CalibrationDataReader | None) -> QuantizationReport:
    """Climbs down the ladder until there is a result."""
    request, why = first.request, ""
    first.cache = None if request.cache_path is None else CalibrationCache(request.cache_path)
    is_cached = first.cache is not None and first.cache.table is not None
    if reader is None and not is_cached and request.recipe.synthetic:
        reader = SyntheticReader(first.loaded, samples=request.recipe.synthetic)
    proto, data = first.loaded.proto, None
    if request.eval_reader is not None:
        with first.stage("evaluation data"):
            first.validation = Validation(request.eval_reader, proto)
    if reader is not None:
        keep, meant = _feeds_kept(proto, request), meant_as_defaults(proto)
        data = KeepingReader(reader, input_specs(proto), keep=keep, defaults=meant)
    request = first.request = with_open_defaults(proto, request, data)
    for rung in rungs(request):
        course = first.again(rung.request)
        try:
            return _quantized(course, reader, data)
        except NothingToQuantizeError as error:
            return deliver_float(course, reason_of(error))
        except WorthlessError as error:
            return deliver_float(course, reason_of(error), error.samples)
        except Exception as error:
            if request.is_stock or is_the_callers(error, course, data):
                raise
            why = why or f"{rung.what.lower()} failed: {reason_of(error)}"
            first.tell(rung.what, error, "given up")
        if data is None:
            break  # a cache holds the ranges of one form of the model
        first.cache, data = None, data.again()
    return deliver_float(first, why)


def _feeds_kept(model: onnx.ModelProto, request: Request) -> int:
    """Returns how many feeds are kept at most: bodies of control flow are calibrated on those that are."""
    return _FEEDS_OF_BODIES if any(True for _ in owners(model)) else feeds_wanted(request)


def _quantized(course: Course, reader: CalibrationDataReader | None, data: KeepingReader | None) -> QuantizationReport:
    """Quantizes in one way.

    Raises:
        NothingToQuantizeError: There is nothing to quantize.
        WorthlessError: The result is of no use.
        KenosisError: Or any other exception; nothing was written.
    """
    request = course.request

    def failed(what: str, error: Exception) -> None:
        course.tell(what, error, "left out")

    make = partial(draft, course.loaded, request, course.stage, course.attempt, failed)
    layout, workshop, build = _built(course, make, reader, data)
    request = course.request
    feeds = [] if data is None else data.some(feeds_wanted(request))
    samples = 0 if course.cache is not None and course.cache.is_used else build.table.samples
    compared = compare(course, build, feeds)
    chosen = build
    free = request.stages == Stages() and request.insistence is None  # an ablation is shown as it is
    bad = worthless(compared) if free else None
    if request.dictated is None and is_whole(build):
        timed = (build, bad is None)
        chosen, is_useful = course.attempt(
            "Timing", lambda: delivered(course, layout.workshop.prepared.proto, workshop, build, feeds, bad), timed
        )
        bad = None if is_useful else bad
    if bad is not None:
        raise WorthlessError(bad, samples)
    if chosen is not build:
        compared = compare(course, chosen, feeds)
    known = 0 if course.validation is None else course.validation.shared(feeds)
    if known:
        course.warnings.append(
            f"{known} of {len(feeds)} calibration samples looked at are among the evaluation samples: what is measured "
            "is too good. Fix: pass an eval_reader of samples that nothing is calibrated on."
        )
    course.measure = course.attempt("The measure of what is lost", lambda: measured(course, chosen), None)
    return finish(course, layout.workshop.prepared.proto, chosen, feeds, samples, compared)


def _built(
    course: Course,
    make: Callable[[], Draft],
    reader: CalibrationDataReader | None,
    data: KeepingReader | None,
) -> tuple[Layout, Workshop, Build]:
    """Returns the quantized model after the recipe's passes, the workshop that made it, and the layout it began with.

    Args:
        course: What gathers on the way.
        make: Returns the draft, which is held here alone and only as long as it is needed: it is a model in memory.
        reader: Where samples come from.
        data: The reader around it.

    Raises:
        NothingToQuantizeError: There is nothing to quantize.
    """
    drafted = make()
    request = course.request = drafted.workshop.request
    layout = laid_out(course, drafted, reader, data)
    del drafted
    workshop = layout.workshop
    course.notes += workshop.prepared.notes
    course.notes += [] if request.dictated is not None else said_by_option(request)
    if request.dictated is not None and not request.is_stock:
        course.notes.append(f"Placed as stock does: {request.dictated}.")
    with course.stage("calibrate"):
        table = find_ranges(course, layout, reader, data)
    if workshop.quantizes_bodies:
        workshop = _with_bodies(course, workshop, data)
    with course.stage("plan"):
        nothing: tuple[Mapping[str, str], str] = ({}, "")
        keep_float, note = course.attempt("The cost model", lambda: float_regions(workshop, layout.plan), nothing)
    course.notes += [note] if note else []
    build = workshop.build(table, keep_float)
    if not is_quantized(build.quantized):
        raise nothing_to_quantize(request.dictated or "the ranges leave nothing to quantize")
    feeds = [] if data is None else data.some(feeds_wanted(request))
    if layout.plan.integer_nodes():
        workshop, build = improved(course, workshop, build, feeds)
    return layout, workshop, build


def _with_bodies(course: Course, workshop: Workshop, data: KeepingReader | None) -> Workshop:
    """Returns the workshop with the bodies of control flow quantized."""

    def shop(body: Body, fed: Feeds) -> BodyShop | None:
        """Quantizes a body as a course of its own, since all that is kept of it is how it is made."""
        request = of_body(workshop.request, body)
        inner = Course(LoadedModel(body.model, None, str(body.place)), request)
        try:
            make = partial(draft_of, body.model, request, course.stage, inner.attempt)
            inputs, keep = input_specs(body.model), _feeds_kept(body.model, request)
            _, made, build = _built(inner, make, None, KeepingReader(fed(), inputs, keep=keep))
        except NothingToQuantizeError:
            return None
        course.warnings += [text for text in inner.warnings if text not in course.warnings]
        course.passes += [replace(p, reason=f"{p.reason}; in {body.place}") for p in inner.passes]
        course.notes += [note for note in inner.notes if note.endswith(NOT_RUN)]
        return BodyShop(body, made, build.table, build.keep_float)

    if data is None:
        course.notes.append("Bodies of control flow stay float: there is no sample to run them on.")
        return workshop
    with course.stage("bodies"):
        return course.attempt(
            "The quantization of bodies",
            lambda: with_bodies(workshop, lambda: iter(data.feeds), shop, course.notes),
            workshop,
        )


def _size(loaded: LoadedModel) -> int:
    """Returns the bytes of a model, external data included, before anything is written."""
    if loaded.path is None:
        return int(loaded.proto.ByteSize())
    inline, weights = loaded.path.stat().st_size, weight_bytes(loaded.proto)
    return inline + weights if loaded.is_split else inline
