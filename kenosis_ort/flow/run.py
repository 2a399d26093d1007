"""One quantization from beginning to end: load, prepare, plan, calibrate, quantize, verify, write, report."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Collection, Sequence

import onnx

from kenosis_ort.accuracy.data_free import batch_norm_statistics
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import input_specs, sample_feeds
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, KenosisWarning
from kenosis_ort.flow import steps
from kenosis_ort.flow.course import Course
from kenosis_ort.flow.finish import finish, is_whole
from kenosis_ort.flow.improve import EQUALIZATION_FEEDS, EQUALIZATION_ROWS, Passes
from kenosis_ort.flow.judge import LEAST_FEEDS, Feed, Judge, split_feeds
from kenosis_ort.flow.lay_out import Layout, lay_out, nothing_to_quantize
from kenosis_ort.flow.names import check_names, renamed
from kenosis_ort.flow.qoperator import quantize_to_qoperator
from kenosis_ort.flow.refinement import Refinement
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader, enough
from kenosis_ort.flow.speed import float_regions, keep_the_promise, tune
from kenosis_ort.flow.trust import calibrate_made_up, trust_summary
from kenosis_ort.flow.workshop import Build, Workshop, is_quantized
from kenosis_ort.graph.load import LoadedModel, load_model
from kenosis_ort.graph.prepare import PreparedModel
from kenosis_ort.graph.save import check_destination, weight_bytes, write_model
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.stock import CalibrationDataReader, QuantFormat
from kenosis_ort.report.model import CalibrationSummary, QuantizationReport
from kenosis_ort.verify.pieces import WHOLE_LIMIT

_log = logging.getLogger(__name__)

_COMPARED_FEEDS = 4


def run(
    source: str | os.PathLike[str] | onnx.ModelProto, request: Request, reader: CalibrationDataReader | None
) -> QuantizationReport:
    """Quantizes one model.

    Raises:
        KenosisError: One of its subclasses; nothing was written.
    """
    report = _run(source, request, reader)
    for text in report.warnings:
        warnings.warn(text, KenosisWarning, stacklevel=3)
    return report


def _run(
    source: str | os.PathLike[str] | onnx.ModelProto, request: Request, reader: CalibrationDataReader | None
) -> QuantizationReport:
    start = time.perf_counter()
    check_destination(request.output)
    course = Course(load_model(source), request)
    course.size_before = _size(course.loaded)
    course.seconds["load"] = time.perf_counter() - start
    if request.quant_format is QuantFormat.QOperator:
        check_names(course.loaded.proto, request)
        return _run_qoperator(course, reader)
    return _run_qdq(course, reader)


def _run_qdq(course: Course, reader: CalibrationDataReader | None) -> QuantizationReport:
    request = course.request
    cached = request.cache_path is not None and request.cache_path.exists()
    if reader is None and not cached and request.recipe.synthetic:
        reader = SyntheticReader(course.loaded.proto, samples=request.recipe.synthetic)
    inputs, keep = input_specs(course.loaded.proto), max(request.recipe.samples, _COMPARED_FEEDS)
    data = None if reader is None else KeepingReader(reader, inputs, keep=keep)
    passes = Passes(request)

    def refine(prepared: PreparedModel, nodes: Collection[str]) -> PreparedModel:
        if not passes.change_weights or len(prepared.proto.graph.node) > WHOLE_LIMIT:
            return prepared
        peeked = data.peek(EQUALIZATION_FEEDS) if data is not None and request.cache_path is None else []
        few = enough(peeked, rows=EQUALIZATION_ROWS, least=2)
        known = batch_norm_statistics(course.loaded.proto) if isinstance(reader, SyntheticReader) else {}
        with course.stage("equalize"):
            will_correct = request.cache_path is not None or len(peeked) >= LEAST_FEEDS
            return passes.before_planning(prepared, few, nodes, known=known, add_biases=will_correct)

    layout = lay_out(course.loaded, request, course.stage, refine=refine)
    workshop = layout.workshop
    request = course.request = workshop.request
    course.nothing_integer = layout.nothing_integer
    course.notes += workshop.prepared.notes
    if request.dictated is not None and not request.is_stock:
        course.notes.append(f"Placed as stock does: {request.dictated}.")
    with course.stage("calibrate"):
        table = _calibrate(course, layout, reader, data, passes)
    with course.stage("plan"):
        keep_float, note = float_regions(workshop, layout.plan)
    course.notes += [note] if note else []
    build = workshop.build(table, keep_float)
    if not is_quantized(build.quantized):
        raise nothing_to_quantize(course.loaded.name, request)
    if data is not None and cached:
        data.drain()
    feeds = [] if data is None else data.feeds
    if passes.change_results and request.dictated is None and is_whole(build):
        fit, held_out = split_feeds(feeds)
        if not held_out:
            course.notes.append(
                f"Range choice and correction were not tried: {len(feeds)} calibration samples at hand leave none to "
                f"judge by (at least {LEAST_FEEDS} feeds are needed), and ranges from so few are not stable."
            )
        else:
            with course.stage("accuracy"):
                libraries = request.custom_op_libraries
                judge = Judge(workshop.prepared.proto, held_out, metric=request.metric, custom_op_libraries=libraries)
                is_real = course.trust is None or course.trust.source != "synthetic"
                workshop, build = Refinement(passes, workshop, build, fit, judge, is_real=is_real).run()
    course.passes = tuple(passes.outcomes)
    if (request.dictated is None or layout.nothing_integer) and is_whole(build):
        build = _speed(course, layout.workshop.prepared.proto, workshop, build, feeds)
    return finish(course, layout.workshop.prepared.proto, build, feeds, 0 if cached else table.samples)


def _calibrate(
    course: Course,
    layout: Layout,
    reader: CalibrationDataReader | None,
    data: KeepingReader | None,
    passes: Passes,
) -> CalibrationTable:
    """Returns the ranges; for made-up samples wider ones than seen where that is called for, with the trust in them."""
    workshop, request = layout.workshop, layout.workshop.request
    proto, seen_as = workshop.prepared.proto, workshop.seen_as()
    config = steps.calibration_config(request)
    plain = request.dictated is not None or request.cache_path is not None or config.is_chunked or config.strided
    if plain or data is None or not isinstance(reader, SyntheticReader):
        return steps.calibrate(proto, request, data, layout.tensors, seen_as)
    table, trust = calibrate_made_up(
        course.loaded.proto,
        proto,
        request,
        reader,
        data,
        config=config,
        tensors=layout.tensors,
        seen_as=seen_as,
        weights_changed=any(p.kept for p in passes.outcomes),
    )
    course.trust = trust_summary(trust)
    if course.trust.verdict == "do not ship":
        course.warnings.append(
            f"The made-up calibration samples do not fit this net: {course.trust.reason}. Fix: {course.trust.advice}."
        )
    return table


def _speed(course: Course, prepared: onnx.ModelProto, workshop: Workshop, build: Build, feeds: Sequence[Feed]) -> Build:
    """Returns what is to be delivered after tuning and timing, as far as the request asks for either."""
    wanted = workshop.request.speed
    if not wanted.promise and wanted.tune != "measure":
        return build
    feeds = feeds or _made_up(course)
    if not feeds:
        course.notes.append("Nothing was timed: there is no sample to run the model on.")
        return build
    notes: tuple[str, ...] = ()
    with course.stage("speed"):
        if wanted.tune == "measure" and build.plan:
            tuned, _, notes = tune(workshop, build, feeds)
            build = tuned if tuned is build else workshop.build(tuned.table, tuned.keep_float)
        if not wanted.promise:
            course.notes += notes
            return build
        delivery = keep_the_promise(course.loaded.proto, prepared, workshop, build, feeds, notes)
    course.speed = delivery.speed
    if not delivery.is_int8 and delivery.speed is not None:
        first, taken = delivery.speed.rungs[0], delivery.speed.taken
        course.warnings.append(
            f"INT8 does not pay here: {first.reason}. The file holds: {taken.description if taken else 'float'}. "
            "Fix: nothing, or promise=False to get INT8 all the same."
        )
    return delivery.build


def _made_up(course: Course) -> list[Feed]:
    """Returns a synthetic feed for timing where the ranges came from a cache; none where its kind cannot be told."""
    try:
        return list(sample_feeds(SyntheticReader(course.loaded.proto, samples=1)))
    except CalibrationError as error:
        _log.info("no sample for timing: %s", error)
        return []


def _run_qoperator(course: Course, reader: CalibrationDataReader | None) -> QuantizationReport:
    """Writes the QOperator format with ONNX Runtime's quantizer, load-verified and atomically."""
    request = course.request
    if reader is None and (request.cache_path is None or not request.cache_path.is_file()):
        raise steps.no_data()
    with course.stage("prepare"):
        prepared = steps.prepare_model(course.loaded.proto, request)
    excluded, named = (renamed(names, prepared) for names in (request.nodes_to_exclude, request.nodes_to_quantize))
    with course.stage("quantize"):
        quantized, samples = quantize_to_qoperator(prepared.proto, request, reader, excluded, named)
    with course.stage("write"):
        course.size_after = write_model(
            quantized,
            request.output,
            external_data=request.use_external_data_format,
            check=lambda path: steps.check_loads(path, request),
        )
    course.notes.append("QOperator format: written by ONNX Runtime's own quantizer.")
    method = CalibrationConfig.from_extra_options(request.calibrate_method, request.extra_options).method
    return course.report(PlacementPlan(request.target.name), None, CalibrationSummary(method, samples, 0, 0.0))


def _size(loaded: LoadedModel) -> int:
    """Returns the bytes of a model, external data included, before anything is written."""
    if loaded.path is None:
        return int(loaded.proto.ByteSize())
    inline, weights = loaded.path.stat().st_size, weight_bytes(loaded.proto)
    return inline if inline >= weights else inline + weights
