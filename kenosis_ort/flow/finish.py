"""The end of a quantization: compare, warn, write in the format asked for, report."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.accuracy.outputs import OutputComparison, compare_outputs
from kenosis_ort.accuracy.side_by_side import compare_layers
from kenosis_ort.bench.kernel_times import profile_in_fresh_sessions
from kenosis_ort.calibration.feeds import Feed
from kenosis_ort.errors import VerificationError
from kenosis_ort.flow.call import REWRITTEN_ABSOLUTE, REWRITTEN_DB, Call
from kenosis_ort.flow.file_checks import check_biases, check_loads
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.target_options import elsewhere
from kenosis_ort.graph import files, load
from kenosis_ort.graph.outside import weight_bytes
from kenosis_ort.graph.view import GraphView, PreparedModel
from kenosis_ort.options import EXPORT_FORMATS, OPERATOR_FORMATS, Format
from kenosis_ort.passes.contract import Build
from kenosis_ort.placement.cost import NetCosts
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.quantizer import int8_cache
from kenosis_ort.quantizer.fusion_aware import name_made_values
from kenosis_ort.quantizer.stock import QuantType
from kenosis_ort.report.evidence import LayerSignal, LayerTime, OpTimes, ReportEvidence, layer_times
from kenosis_ort.report.facts import CalibrationSummary
from kenosis_ort.report.gathering import gather_evidence
from kenosis_ort.report.quantization_report import QuantizationReport
from kenosis_ort.targets import Target
from kenosis_ort.targets.proof import Cause, ClippingLoss, FusionReport
from kenosis_ort.tuning.promise import LEAST_SQNR_DB
from kenosis_ort.verify import clipping_loss

_log = logging.getLogger(__name__)
_COMPARED_FEEDS = 4
_COMPARED_ROWS = 32
WORTHLESS_DB = 3.0  # half of the signal is noise


def emitted(model: onnx.ModelProto, written: Format) -> onnx.ModelProto:
    """A quantized model in the format asked for.

    Args:
        model: In canonical form. Not changed.
        written: The format.
    """
    if written in OPERATOR_FORMATS:
        from kenosis_ort.formats.to_qop import to_qop  # few calls need what it loads

        return to_qop(model, clip=written == "qop-clip")
    if written not in EXPORT_FORMATS:
        return model
    from kenosis_ort.formats import conventions

    return conventions.to_qonnx(model) if written == "qonnx" else conventions.to_qcdq(model)


def few_of(feeds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Some samples, spread over all of them, with as many rows as are enough to compare outputs on."""
    found: list[Mapping[str, Any]] = []
    rows = 0
    for feed in feeds[:: max(1, -(-len(feeds) // _COMPARED_FEEDS))]:
        if rows < _COMPARED_ROWS:
            found.append(feed)
        rows += max((len(v) for v in feed.values() if isinstance(v, np.ndarray) and v.ndim > 0), default=1)
    return found


def worthless(compared: Sequence[OutputComparison], samples: str, least_db: float = WORTHLESS_DB) -> str | None:
    """Reason why the quantized model is useless on such samples: zeros are closer to an output, or all keep less.

    None where it is not. Integers and texts say nothing, nor does a reference that is zero throughout: its noise has no
    decibels.
    """
    comparable = [c for c in compared if c.floating and not (np.isneginf(c.sqnr_db) and np.isfinite(c.max_abs))]
    bad = min(comparable, key=lambda c: c.sqnr_db, default=None)
    if bad is None or (bad.sqnr_db >= 0 and any(c.sqnr_db >= least_db for c in comparable)):
        return None
    return f"INT8 is worthless here: output '{bad.name}' keeps {bad.sqnr_db:.1f} dB on {samples}"


_SHOWN = 3


def finish(
    call: Call,
    prepared: PreparedModel,
    build: Build,
    feeds: Sequence[Feed],
    samples: int,
) -> QuantizationReport:
    """Writes and reports what was built.

    Args:
        call: What has gathered so far.
        prepared: The float model of the build, read once.
        build: What is to be delivered.
        feeds: Kept samples.
        samples: How many samples were calibrated on.
    """
    request = call.request
    # The proof, where building has not made it yet.
    if build.fusion is None and request.is_proved and build.is_quantized:
        with call.stage("verify"):
            build = replace(build, fusion=request.proof(build.quantized, build.plan))
    call.notes += build.notes
    # Warnings and notes about outputs, precision and cost.
    compared, kind = call.outputs, call.compared_on
    for bad in (c for c in compared if c.sqnr_db < LEAST_SQNR_DB):
        text = f"output '{bad.name}' keeps only {bad.sqnr_db:.1f} dB against the float model on {kind}"
        more = "" if request.widths.are_bytes else "more bits, "
        wide = QuantType.QUInt16
        if wide.tensor_type in request.types.activations and request.activation_type != wide:
            more = f"activation_type=QuantType.{wide.name}, which target '{request.target.name}' takes, "
        call.warnings.append(f"{text}. Fix: {more}calibrate on real data, or exclude nodes (nodes_to_exclude).")
    rows = "has another number of rows than the float model's"
    for c in compared:
        why = "is random, another one on each run of the float model, and was not compared" if c.random else ""
        if c.skipped and not c.random:
            why = f"{rows} on {c.skipped} of {c.samples} samples, and was not compared there"
        call.notes += [f"Output '{c.name}' {why}."] if why else []
    _warn_int8(call, build.fusion)
    if request.target.whole and build.plan:
        _warn_not_whole(call, build)
    call.notes += build.plan.notes
    view = prepared.graph
    call.notes += call.attempt("The cost model", lambda: list(elsewhere(view, build.plan, request.target)), [])
    pieces = build.pieces
    if pieces != 1:
        call.notes.append(
            "Huge model: the runtime's load time grows with the square of the depth, so outputs were not compared, and "
            + (f"it was load-verified in {pieces} pieces." if pieces else "it was load-verified unoptimized.")
        )
    # Evidence for the report, while node names are those of the plan.
    looked_at: Sequence[Feed] = feeds if pieces == 1 else ()
    evidence = call.attempt("The report's picture", lambda: _evidence(call, prepared.proto, build, looked_at), None)
    # The file, checked before it takes its place.
    files.restore_interface(build.quantized, call.loaded.proto)
    fusion = build.fusion
    scales = int8_cache.cache_scales(build.quantized) if request.caches else {}
    with call.stage("write"):
        if build.plan:
            name_made_values(build.quantized, call.loaded.proto)
        if scales:
            int8_cache.open_cache(build.quantized, request.caches)
        written = emitted(build.quantized, request.format)
        if build.plan and request.format not in EXPORT_FORMATS:
            freed = build.plan.largest_pair is None and request.types.largest_pair is not None
            files.mark(written, request.target.name, needs_vnni=freed)
        if fusion is not None and written is not build.quantized and request.format not in EXPORT_FORMATS:
            fusion = request.proof(written)
        call.size_after = files.write_model(
            written,
            request.output,
            external_data=request.use_external_data_format,
            check=lambda path: _check_written(path, build, request, looked_at[:1], pieces),
            warn=call.warnings.append,
        )
    # Facts about the written file, and the report.
    losses: tuple[ClippingLoss, ...] = ()
    if fusion is not None and fusion.clipping() and looked_at:
        losses = call.attempt("The loss without VNNI", lambda: clipping_loss(written, few_of(looked_at)), losses)
    times = None if evidence is None else evidence.times
    none: tuple[LayerTime, ...] = ()
    layers = call.attempt(
        "The times of layers", lambda: layers_of(view, build.plan, request.target, fusion, times), none
    )
    method, observed = build.table.config.method, len(build.table.tensors)
    return report_of(
        call,
        plan=build.plan,
        fusion=fusion,
        calibration=CalibrationSummary(method, samples, observed, call.seconds["calibrate"]),
        outputs=tuple(c for c in compared if c.skipped < max(c.samples, 1)),
        compared_on=kind,
        evidence=evidence,
        layers=layers,
        cache=scales,
        clipping=losses,
    )


def report_of(call: Call, **facts: Any) -> QuantizationReport:
    """The report of what gathered, with facts of the written file by the names that it has for them."""
    request, target = call.request, call.request.target
    taken = None if call.speed is None else call.speed.taken
    passes, trust, notes = tuple(call.passes), call.trust, tuple(call.notes)
    if "float_because" in facts or (taken is not None and not taken.is_planned):  # the file holds nothing of these
        form = "the float model" if taken is None else taken.description
        undone = f"not in the file, which is {form}"
        passes = tuple(replace(p, kept=False, reason=undone) if p.kept else p for p in passes)
        trust = None
        if call.original is not None and form == "the float model":  # the file is the caller's
            notes = tuple(note for note in notes if note not in call.rewriting)
    if trust is not None and trust.verdict == "do not ship":
        call.warnings.append(
            f"The made-up calibration samples do not fit this net: {trust.reason}. Fix: {trust.advice}."
        )
    return QuantizationReport(
        model_input=call.loaded.name,
        model_output=request.output_name,
        target=target.name,
        host=request.host_label,
        unproved="" if target.hooks.prove is not None else target.unasked,
        options=request.choices,
        notes=notes,
        warnings=tuple(call.warnings),
        size_before=call.size_before,
        size_after=call.size_after,
        seconds=call.seconds,
        recipe=replace(request.recipe, speed=call.choice),
        passes=passes,
        speed=call.speed,
        trust=trust,
        fallbacks=tuple(call.fallbacks),
        measure=call.measure,
        versions={"onnxruntime": ort.__version__, "onnx": onnx.__version__, "numpy": np.__version__},
        **facts,
    )


def _check_written(path: Path, build: Build, request: Request, feeds: Sequence[Feed], pieces: int) -> None:
    """Loads the written file; in another format than QDQ it is run beside the model that it was written from.

    QONNX, which no runtime loads, is run as its operators are defined, spelled in ONNX' own.

    Raises:
        VerificationError: It does not load, or computes something else.
    """
    readable = request.format != "qonnx"
    if readable:
        check_loads(path, request, pieces=pieces)
    if request.format in ("qdq", "qcdq") or not request.verify:
        return
    found: onnx.ModelProto | Path = path
    if not readable:
        from kenosis_ort.formats.qonnx_nodes import spell_out

        found = spell_out(load.load_model(path, ask_runtime=False).proto)
    libraries = request.custom_op_libraries
    for output in compare_outputs(build.quantized, found, feeds, custom_op_libraries=libraries):
        if output.floating and output.sqnr_db < REWRITTEN_DB / 2 and output.max_abs > REWRITTEN_ABSOLUTE:
            raise VerificationError(
                f"output '{output.name}' in format '{request.format}' is off by {output.max_abs:.3g} from the same "
                f"model in QDQ form ({output.sqnr_db:.1f} dB)",
                where=request.output_name,
                fix="please report this as a bug of kenosis-ort, with the model",
            )


def compare(call: Call, build: Build, feeds: Sequence[Feed]) -> None:
    """Compares the build's outputs with the original's on held-out samples; on some of those kept if there are none.

    Raises:
        VerificationError: A bias is off its grid, or the model does not run.
    """
    request, call.outputs = call.request, ()
    if request.is_stock or not request.verify or not request.target.loads_in_ort:
        return
    with call.stage("check"):
        check_biases(build.quantized, request)
        evaluator = call.evaluator_of(build)
        if evaluator is not None:
            call.outputs, measured = evaluator.comparison(build.quantized)
            call.measured = None if measured is None else (build, measured)
        elif feeds and build.is_whole:
            call.outputs = call.compared(build.float_model, build.quantized, few_of(feeds))


def _evidence(call: Call, reference: onnx.ModelProto, build: Build, feeds: Sequence[Feed]) -> ReportEvidence | None:
    """Evidence for the report, None where the caller wants none or nothing was planned."""
    request = call.request
    if request.evidence == "none" or not build.plan:
        return None
    with call.stage("evidence"):
        found = gather_evidence(reference, build.quantized, build.table)
        if request.evidence != "full":
            return found
        return with_measurements(
            found,
            reference,
            build.quantized,
            list(feeds),
            baseline=call.loaded.proto,
            threads=request.speed.threads,
            custom_op_libraries=request.custom_op_libraries,
        )


def _warn_int8(call: Call, fusion: FusionReport | None) -> None:
    request = call.request
    if fusion is None or request.is_stock or not request.asks_int8:
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


def layers_of(
    view: GraphView, plan: PlacementPlan, target: Target, fusion: FusionReport | None, times: OpTimes | None = None
) -> tuple[LayerTime, ...]:
    """The layers of a model as planned.

    Args:
        view: The prepared model.
        plan: Its placement.
        target: With the costs of the machine that the file is made for, where it has any.
        fusion: What the runtime made of the file; None where it was not asked.
        times: What was measured; None where nothing was.
    """
    if target.costs is None or not target.costs.shows_times:
        return layer_times(fusion, {}, None, times)
    cost = NetCosts(view, target.costs).estimate(plan)
    between = cost.run_us + sum(cost.borders_us.values())
    return layer_times(fusion, {n.node: (n.op_type, n.planned_us) for n in cost.nodes}, between, times)


_DEEPEST = 4000  # nodes; the runtime's load time grows with the square of the depth
_SIGNAL_FEEDS = 2
_TIMED_S = 10.0  # that the timed runs of both models may take together, give or take one of each
_LARGEST = 1_900_000_000  # bytes; beyond, a model with other outputs does not fit into one message


def with_measurements(
    evidence: ReportEvidence,
    float_model: onnx.ModelProto,
    quantized: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Any]],
    *,
    baseline: onnx.ModelProto | None = None,
    threads: int = 1,
    runs: int = 10,
    custom_op_libraries: Sequence[str] = (),
) -> ReportEvidence:
    """The evidence about one quantization with signal by layer and time by operator.

    Both models run once a feed, for at most two feeds, and a dozen times in each of three sessions.

    Args:
        evidence: What the models and the table hold.
        float_model: The model that was quantized (prepared and rewritten), its weights in memory; not changed.
        quantized: What became of it; not changed.
        feeds: A few real samples; nothing is run without.
        baseline: The float model as the caller gave it, to be timed in place of the prepared one.
        threads: Threads of the sessions.
        runs: Timed runs of a session at most.
        custom_op_libraries: Libraries with custom operators to register.
    """
    if not feeds or not _can_run(float_model) or not _can_run(quantized):
        return evidence
    how: dict[str, Any] = {"threads": threads, "custom_op_libraries": custom_op_libraries}
    layers: tuple[LayerSignal, ...] = ()
    try:
        signal = compare_layers(float_model, quantized, feeds[:_SIGNAL_FEEDS], **how)
        makers = {name: node.name for node in float_model.graph.node for name in node.output}
        layers = tuple(LayerSignal(name, makers.get(name, ""), db) for name, db in signal.items())
    except VerificationError as error:  # e.g. an operator that does not bear a second reader of its output
        _log.warning("signal per layer was not measured: %s", error.what)
    before, after = (
        profile_in_fresh_sessions(model, feeds, runs=runs, budget_s=_TIMED_S / 2, **how)
        for model in (float_model if baseline is None else baseline, quantized)
    )
    return replace(evidence, layers=layers, times=OpTimes(before, after, threads, runs))


def _can_run(model: onnx.ModelProto) -> bool:
    return weight_bytes(model) < _LARGEST and len(model.graph.node) <= _DEEPEST
