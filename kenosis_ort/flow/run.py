"""One quantization from beginning to end: load, prepare, plan, calibrate, quantize, verify, write, report."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.bench.evidence import gather_evidence
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import sample_feeds
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.errors import CalibrationError, KenosisWarning, VerificationError
from kenosis_ort.flow import steps
from kenosis_ort.flow.improve import EQUALIZATION_FEEDS, Passes
from kenosis_ort.flow.judge import Feed, Judge, split_feeds
from kenosis_ort.flow.lay_out import lay_out, nothing_to_quantize
from kenosis_ort.flow.names import check_names, renamed
from kenosis_ort.flow.qoperator import quantize_to_qoperator
from kenosis_ort.flow.refinement import Refinement
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.flow.speed import keep_the_promise, tune
from kenosis_ort.flow.workshop import Build, Workshop, insists_on_int8, is_quantized
from kenosis_ort.graph.load import LoadedModel, load_model
from kenosis_ort.graph.prepare import PreparedModel
from kenosis_ort.graph.save import check_destination, weight_bytes, write_model
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.stock import CalibrationDataReader, QuantFormat
from kenosis_ort.report.evidence import ReportEvidence
from kenosis_ort.report.model import CalibrationSummary, OutputQuality, QuantizationReport
from kenosis_ort.report.sections import PassOutcome, SpeedSummary
from kenosis_ort.verify.pieces import WHOLE_LIMIT
from kenosis_ort.verify.report_model import Cause, FusionReport

_log = logging.getLogger(__name__)

_COMPARED_FEEDS = 4


@dataclass
class _Course:
    """What gathers on the way to the report."""

    loaded: LoadedModel
    request: Request
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    nothing_integer: bool = False
    passes: tuple[PassOutcome, ...] = ()
    speed: SpeedSummary | None = None
    size_before: int = 0
    size_after: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def report(
        self,
        plan: PlacementPlan,
        fusion: FusionReport | None,
        calibration: CalibrationSummary,
        outputs: tuple[OutputQuality, ...] = (),
    ) -> QuantizationReport:
        return QuantizationReport(
            model_input=self.loaded.name,
            model_output=str(self.request.output),
            target=self.request.target.name,
            options=self.request.choices,
            plan=plan,
            fusion=fusion,
            calibration=calibration,
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
            size_before=self.size_before,
            size_after=self.size_after,
            seconds=self.seconds,
            outputs=outputs,
            recipe=self.request.recipe,
            passes=self.passes,
            speed=self.speed,
            versions={"onnxruntime": ort.__version__, "onnx": onnx.__version__, "numpy": np.__version__},
        )


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
    course = _Course(load_model(source), request)
    course.size_before = _size(course.loaded)
    course.seconds["load"] = time.perf_counter() - start
    if request.quant_format is QuantFormat.QOperator:
        check_names(course.loaded.proto, request)
        return _run_qoperator(course, reader)
    return _run_qdq(course, reader)


def _run_qdq(course: _Course, reader: CalibrationDataReader | None) -> QuantizationReport:
    request = course.request
    cached = request.cache_path is not None and request.cache_path.exists()
    data = None if reader is None else KeepingReader(reader, keep=max(request.recipe.samples, _COMPARED_FEEDS))
    passes = Passes(request)

    def refine(prepared: PreparedModel, nodes: Collection[str]) -> PreparedModel:
        if not passes.change_weights or len(prepared.proto.graph.node) > WHOLE_LIMIT:
            return prepared
        few = data.peek(EQUALIZATION_FEEDS) if data is not None and request.cache_path is None else []
        with course.stage("equalize"):
            return passes.before_planning(prepared, few, nodes)

    layout = lay_out(course.loaded, request, course.stage, refine=refine)
    workshop = layout.workshop
    request = course.request = workshop.request
    course.nothing_integer = layout.nothing_integer
    course.notes += workshop.prepared.notes
    if request.dictated is not None and not request.is_stock:
        course.notes.append(f"Placed as stock does: {request.dictated}.")
    with course.stage("calibrate"):
        table = steps.calibrate(workshop.prepared.proto, request, data, layout.tensors, workshop.seen_as())
    build = workshop.build(table)
    if not is_quantized(build.quantized):
        raise nothing_to_quantize(course.loaded.name, request)
    if data is not None and cached:
        data.drain()
    feeds = [] if data is None else data.feeds
    if passes.change_results and request.dictated is None and _is_whole(build):
        fit, held_out = split_feeds(feeds)
        if held_out:
            with course.stage("accuracy"):
                libraries = request.custom_op_libraries
                judge = Judge(workshop.prepared.proto, held_out, metric=request.metric, custom_op_libraries=libraries)
                workshop, build = Refinement(passes, workshop, build, fit, judge).run()
    course.passes = tuple(passes.outcomes)
    if (request.dictated is None or layout.nothing_integer) and _is_whole(build):
        build = _speed(course, workshop, build, feeds)
    return _finish(course, build, feeds, 0 if cached else table.samples)


def _speed(course: _Course, workshop: Workshop, build: Build, feeds: Sequence[Feed]) -> Build:
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
        delivery = keep_the_promise(course.loaded.proto, workshop, build, feeds, notes)
    course.speed = delivery.speed
    if not delivery.is_int8 and delivery.speed is not None:
        first, taken = delivery.speed.rungs[0], delivery.speed.taken
        course.warnings.append(
            f"INT8 does not pay here: {first.reason}. The file holds: {taken.description if taken else 'float'}. "
            "Fix: nothing, or promise=False to get INT8 all the same."
        )
    return delivery.build


def _made_up(course: _Course) -> list[Feed]:
    """Returns a synthetic feed for timing where the ranges came from a cache; none where its kind cannot be told."""
    try:
        return list(sample_feeds(SyntheticReader(course.loaded.proto, samples=1)))
    except CalibrationError as error:
        _log.info("no sample for timing: %s", error)
        return []


def _is_whole(build: Build) -> bool:
    """Tells whether the model is small enough to be run as a whole."""
    return _pieces(build) == 1


def _pieces(build: Build) -> int:
    return build.fusion.pieces if build.fusion is not None else int(len(build.quantized.graph.node) <= WHOLE_LIMIT)


def _finish(course: _Course, build: Build, feeds: Sequence[Feed], samples: int) -> QuantizationReport:
    """Checks, writes and reports what was built."""
    request = course.request
    course.notes += build.notes
    _warn_int8(course, build.fusion)
    pieces = _pieces(build)
    if pieces != 1:
        course.notes.append(
            "Huge model: the runtime's load time grows with the square of the depth, so outputs were not compared, and "
            + (f"it was load-verified in {pieces} pieces." if pieces else "it was load-verified unoptimized.")
        )
    with course.stage("check"):
        outputs = _check(course, build.float_model, build.quantized, feeds if pieces == 1 else ())
    with course.stage("write"):
        course.size_after = write_model(
            build.quantized,
            request.output,
            external_data=request.use_external_data_format,
            check=lambda path: steps.check_loads(path, request, pieces=pieces),
        )
    evidence = _evidence(course, build, feeds if pieces == 1 else ())
    table = build.table
    observed = len(table.tensors)
    calibration = CalibrationSummary(table.config.method, samples, observed, course.seconds["calibrate"])
    return replace(course.report(build.plan, build.fusion, calibration, outputs), evidence=evidence)


def _evidence(course: _Course, build: Build, feeds: Sequence[Feed]) -> ReportEvidence | None:
    """Returns what the picture in the report shows."""
    request = course.request
    if request.evidence == "none" or not build.plan:
        return None
    full = request.evidence == "full"
    with course.stage("evidence"):
        return gather_evidence(
            build.float_model,
            build.quantized,
            table=build.table,
            feeds=list(feeds),
            baseline=course.loaded.proto,
            layers=full,
            times=full,
            threads=request.speed.threads,
            custom_op_libraries=request.custom_op_libraries,
        )


def _check(
    course: _Course, float_proto: onnx.ModelProto, quantized: onnx.ModelProto, feeds: Sequence[Feed]
) -> tuple[OutputQuality, ...]:
    request = course.request
    if request.is_stock or not request.verify:
        return ()
    compared = steps.check_numerics(float_proto, quantized, request, feeds)
    for bad in steps.worthless(compared):
        if course.nothing_integer:  # no speed to gain, and the outputs are wrong
            raise VerificationError(
                f"output '{bad.name}' keeps only {bad.sqnr_db:.1f} dB, and {request.dictated}",
                where=course.loaded.name,
                fix="deploy the float model",
            )
        text = f"output '{bad.name}' keeps only {bad.sqnr_db:.1f} dB against the float model on calibration samples"
        course.warnings.append(f"{text}. Fix: calibrate on real data, or exclude nodes (nodes_to_exclude).")
    return steps.qualities(compared)


def _run_qoperator(course: _Course, reader: CalibrationDataReader | None) -> QuantizationReport:
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


def _warn_int8(course: _Course, fusion: FusionReport | None) -> None:
    request = course.request
    if fusion is None or request.is_stock or not insists_on_int8(request):
        return
    convs = [k.node for k in fusion.float_nodes() if k.op_type == "Conv" and k.cause is Cause.SIGNED_BRANCH]
    if convs:
        count = f"{len(convs)} Conv{'s' if len(convs) > 1 else ''}"
        shown = ", ".join(f"'{n}'" for n in convs[:3]) + (", ..." if len(convs) > 3 else "")
        course.warnings.append(
            f"activation_type=QInt8: the runtime runs {count} in float on this machine ({shown}), because "
            "int8 values with several consumers have no integer kernels on x86-64. "
            "Fix: activation_type=QuantType.QUInt8, or leave it out."
        )


def _size(loaded: LoadedModel) -> int:
    """Returns the bytes of a model, external data included, before anything is written."""
    if loaded.path is None:
        return int(loaded.proto.ByteSize())
    inline, weights = loaded.path.stat().st_size, weight_bytes(loaded.proto)
    return inline if inline >= weights else inline + weights
