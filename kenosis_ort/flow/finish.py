"""The end of a quantization: warn, compare, write, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from kenosis_ort.bench.op_times import gather_evidence
from kenosis_ort.errors import VerificationError
from kenosis_ort.flow import steps
from kenosis_ort.flow.builder import is_quantized, requests_int8
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.emission import emitted
from kenosis_ort.flow.host_profile import elsewhere
from kenosis_ort.flow.layouts import layers_of
from kenosis_ort.flow.request import Request
from kenosis_ort.formats.qonnx_nodes import spell_out
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.model_session import WHOLE_LIMIT
from kenosis_ort.graph.save import mark, restore_interface, write_model
from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import EXPORT_FORMATS
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.evaluator import Feed
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.quantizer.editor import name_made_values
from kenosis_ort.quantizer.int8_cache import cache_scales, open_cache
from kenosis_ort.quantizer.stock import QuantType
from kenosis_ort.report.evidence import LayerTime, ReportEvidence
from kenosis_ort.report.quantization_report import CalibrationSummary, QuantizationReport
from kenosis_ort.targets.proof import Cause, ClippingLoss, FusionReport
from kenosis_ort.verify.numerics import OutputComparison, compare_outputs
from kenosis_ort.verify.processors import clipping_loss

_SHOWN = 3
_REWRITTEN_DB = 30.0  # the runtime's own LRN is off by three digits
_REWRITTEN_ABSOLUTE = 1e-6  # where the output is zero, or next to it


def finish(
    call: Call,
    reference: onnx.ModelProto,
    build: Build,
    feeds: Sequence[Feed],
    samples: int,
    compared: Sequence[OutputComparison],
) -> QuantizationReport:
    """Writes and reports what was built.

    Args:
        call: What has gathered so far.
        reference: The prepared float model before passes moved its biases and weights, for the report's picture.
        build: What is to be delivered.
        feeds: Kept samples.
        samples: How many samples were calibrated on.
        compared: The build's outputs beside the original's.
    """
    request = call.request
    # The proof, where building has not made it yet.
    if build.fusion is None and request.is_proved and is_quantized(build.quantized):
        with call.stage("verify"):
            build = replace(build, fusion=_proof(build.quantized, build.plan, request))
    call.notes += build.notes
    # Warnings and notes about outputs, precision and cost.
    for bad in steps.poor(compared):
        text = f"output '{bad.name}' keeps only {bad.sqnr_db:.1f} dB against the float model on calibration samples"
        more = "" if request.widths.are_bytes else "more bits, "
        wide = QuantType.QUInt16
        if wide.tensor_type in request.types.activations and request.activation_type != wide:
            more = f"activation_type=QuantType.{wide.name}, which target '{request.target.name}' takes, "
        call.warnings.append(f"{text}. Fix: {more}calibrate on real data, or exclude nodes (nodes_to_exclude).")
    call.notes += [
        f"Output '{c.name}' is random, another one on each run of the float model, and was not compared."
        for c in compared
        if c.random
    ]
    call.notes += [
        f"Output '{c.name}' has another number of rows than the float model's on {c.skipped} of {c.samples} samples, "
        "and was not compared there."
        for c in compared
        if c.skipped and not c.random
    ]
    _warn_int8(call, build.fusion)
    if request.target.whole and build.plan:
        _warn_not_whole(call, build)
    call.notes += build.plan.notes
    view = GraphView(build.float_model)
    call.notes += call.attempt("The cost model", lambda: list(elsewhere(view, build.plan, request.target)), [])
    pieces = _pieces(build)
    if pieces != 1:
        call.notes.append(
            "Huge model: the runtime's load time grows with the square of the depth, so outputs were not compared, and "
            + (f"it was load-verified in {pieces} pieces." if pieces else "it was load-verified unoptimized.")
        )
    # Evidence for the report, while node names are those of the plan.
    evidence = call.attempt(
        "The report's picture", lambda: _evidence(call, reference, build, feeds if pieces == 1 else ()), None
    )
    # The file, checked before it takes its place.
    restore_interface(build.quantized, call.loaded.proto)
    fusion = build.fusion
    scales = cache_scales(build.quantized) if request.caches else {}
    with call.stage("write"):
        if build.plan:
            name_made_values(build.quantized, call.loaded.proto)
        if scales:
            open_cache(build.quantized, request.caches)
        written = emitted(build.quantized, request.format)
        if build.plan and request.format not in EXPORT_FORMATS:
            freed = build.plan.largest_pair is None and request.types.largest_pair is not None
            mark(written, request.target.name, needs_vnni=freed)
        if fusion is not None and written is not build.quantized and request.format not in EXPORT_FORMATS:
            fusion = _proof(written, None, request)
        call.size_after = write_model(
            written,
            request.output,
            external_data=request.use_external_data_format,
            check=lambda path: _check_written(path, build, request, feeds[:1] if pieces == 1 else (), pieces),
            warn=call.warnings.append,
        )
    # Facts about the written file, and the report.
    clips = fusion is not None and fusion.clipping() and feeds and pieces == 1
    losses: tuple[ClippingLoss, ...] = ()
    if clips:
        losses = call.attempt("The loss without VNNI", lambda: clipping_loss(written, steps.few_of(feeds)), losses)
    times = None if evidence is None else evidence.times
    none: tuple[LayerTime, ...] = ()
    layers = call.attempt(
        "The times of layers", lambda: layers_of(view, build.plan, request.target, fusion, times), none
    )
    table = build.table
    observed = len(table.tensors)
    calibration = CalibrationSummary(table.config.method, samples, observed, call.seconds["calibrate"])
    return call.report(
        build.plan,
        fusion,
        calibration,
        steps.qualities(compared),
        evidence=evidence,
        layers=layers,
        cache=scales,
        clipping=losses,
    )


def _check_written(path: Path, build: Build, request: Request, feeds: Sequence[Feed], pieces: int) -> None:
    """Loads the written file; in another format than QDQ it is run beside the model that it was written from.

    QONNX, which no runtime loads, is run as its operators are defined, spelled in ONNX' own.

    Raises:
        VerificationError: It does not load, or computes something else.
    """
    readable = request.format != "qonnx"
    if readable:
        steps.check_loads(path, request, pieces=pieces)
    if request.format in ("qdq", "qcdq") or not request.verify:
        return
    found: onnx.ModelProto | Path = path if readable else spell_out(load_model(path, ask_runtime=False).proto)
    libraries = request.custom_op_libraries
    for output in compare_outputs(build.quantized, found, feeds, custom_op_libraries=libraries):
        if output.floating and output.sqnr_db < _REWRITTEN_DB / 2 and output.max_abs > _REWRITTEN_ABSOLUTE:
            raise VerificationError(
                f"output '{output.name}' in format '{request.format}' is off by {output.max_abs:.3g} from the same "
                f"model in QDQ form ({output.sqnr_db:.1f} dB)",
                where=request.output_name,
                fix="please report this as a bug of kenosis-ort, with the model",
            )


def _proof(model: onnx.ModelProto, plan: PlacementPlan | None, request: Request) -> FusionReport | None:
    prove = request.target.prove
    return None if prove is None else prove(model, plan=plan or None, custom_op_libraries=request.custom_op_libraries)


def compare(call: Call, build: Build, feeds: Sequence[Feed]) -> tuple[OutputComparison, ...]:
    """The build's outputs beside the original's on held-out samples; on some of those kept if there are none.

    Raises:
        VerificationError: A bias is off its grid, or the model does not run.
    """
    request = call.request
    if request.is_stock or not request.verify or not request.target.loads_in_ort:
        return ()
    with call.stage("check"):
        steps.check_biases(build.quantized, request)
        if not feeds or not is_whole(build):
            return ()
        if call.evaluator is None or call.validation is not None:
            return steps.compared_to(call.reference(build.float_model), build.quantized, steps.few_of(feeds), request)
        compared, measured = call.evaluator.comparison(build.quantized)
        call.measured = None if measured is None else (build, measured)
        return compared


class RewriteMismatchError(VerificationError):
    """A rewritten float model computes something else than the original."""


def check_rewritten(call: Call, rewritten: onnx.ModelProto, feed: Feed) -> None:
    """Checks that a rewritten float model computes what the original does.

    Raises:
        RewriteMismatchError: It does not.
        VerificationError: It does not run.
    """
    if call.original is None:
        return
    for found in steps.compared_to(call.reference(rewritten), rewritten, [feed], call.request):
        if found.skipped and not found.random:
            raise RewriteMismatchError(
                f"the rewritten float model returns another number of rows in output '{found.name}'",
                where=call.loaded.name,
            )
        if found.floating and found.sqnr_db < _REWRITTEN_DB and found.max_abs > _REWRITTEN_ABSOLUTE:
            raise RewriteMismatchError(
                f"the rewritten float model is off by {found.max_abs:.3g} in output '{found.name}' "
                f"({found.sqnr_db:.1f} dB)",
                where=call.loaded.name,
            )


def _evidence(call: Call, reference: onnx.ModelProto, build: Build, feeds: Sequence[Feed]) -> ReportEvidence | None:
    """Evidence for the report, None where the caller wants none or nothing was planned."""
    request = call.request
    if request.evidence == "none" or not build.plan:
        return None
    full = request.evidence == "full"
    with call.stage("evidence"):
        return gather_evidence(
            reference,
            build.quantized,
            table=build.table,
            feeds=list(feeds),
            baseline=call.loaded.proto,
            layers=full,
            times=full,
            threads=request.speed.threads,
            custom_op_libraries=request.custom_op_libraries,
        )


def _warn_int8(call: Call, fusion: FusionReport | None) -> None:
    request = call.request
    if fusion is None or request.is_stock or not requests_int8(request):
        return
    convs = [k for k in fusion.float_nodes() if k.op_type == "Conv" and k.cause is Cause.SIGNED_BRANCH]
    if convs:
        count = f"{len(convs)} Conv{'s' if len(convs) > 1 else ''}"
        shown = ", ".join(f"'{k.node}'" for k in convs[:3]) + (", ..." if len(convs) > 3 else "")
        call.warnings.append(
            f"activation_type=QInt8: the runtime runs {count} in float on this machine ({shown}), because "
            f"{convs[0].reason}. Fix: activation_type=QuantType.QUInt8, or leave it out."
        )


def _warn_not_whole(call: Call, build: Build) -> None:
    """Warns of nodes that another runtime executes, each of which costs two transfers."""
    if build.fusion is not None:
        found = [(k.op_type, k.node, k.reason) for k in build.fusion.float_nodes()]
    else:
        without_kernel = {"unsupported-op", *(r.id for r in call.request.target.rules)}
        nodes = [n for n in build.plan.nodes if n.kind is Kind.FLOAT and n.rule in without_kernel]
        found = [(n.op_type, n.node, n.reason) for n in nodes]
    if found:
        shown = "; ".join(f"{op_type} '{node}' ({reason})" for op_type, node, reason in found[:_SHOWN])
        count = f"{len(found)} nodes do" if len(found) > 1 else "1 node does"
        more = "; and more" if len(found) > _SHOWN else ""
        call.warnings.append(
            f"{count} not run on integers on target '{call.request.target.name}': {shown}{more}. "
            "Fix: write them with operators that it has (kenosis-ort targets), or let them run beside it."
        )


def is_whole(build: Build) -> bool:
    """Whether the model is small enough to be run as a whole."""
    return _pieces(build) == 1


def _pieces(build: Build) -> int:
    return build.fusion.pieces if build.fusion is not None else int(len(build.quantized.graph.node) <= WHOLE_LIMIT)
