"""One quantization from beginning to end: load, prepare, plan, calibrate, quantize, verify, write, report.

Where a rewrite or what the model computes is the reason of a failure, the same placement without rewrites and passes is
tried, then the float model as it came is delivered. A planner, an emitter or a proof that fails is a defect: an error,
or the float model if the caller wants that.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort import errors
from kenosis_ort.calibration.feeds import input_specs
from kenosis_ort.flow import body_plans, calibrate, finish, fit, improve, speed
from kenosis_ort.flow.builder import Builder, draft, nothing_to_quantize, why_float
from kenosis_ort.flow.call import Call, RewriteMismatchError
from kenosis_ort.flow.file_checks import check_loads
from kenosis_ort.flow.request import EIGHT_BIT, Request, calibration_config
from kenosis_ort.flow.reused_tables import CalibrationCache
from kenosis_ort.flow.samples import KeepingReader, Validation
from kenosis_ort.graph import files, outside
from kenosis_ort.graph.constants import meant_as_defaults
from kenosis_ort.graph.view import PreparedModel
from kenosis_ort.options import Stages
from kenosis_ort.passes.contract import Build, Pass
from kenosis_ort.passes.journal import OF_THE_MODEL, reason_of
from kenosis_ort.passes.order import WEIGHT_PASSES, passes_of
from kenosis_ort.passes.recipe import RECIPES
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer import int8_cache
from kenosis_ort.quantizer.stock import CalibrationDataReader
from kenosis_ort.report.facts import CalibrationSummary
from kenosis_ort.report.quantization_report import QuantizationReport
from kenosis_ort.runtime.session import HERE, WHOLE_LIMIT, Executor, as_array, configured, open_session
from kenosis_ort.storage import writing
from kenosis_ort.tuning.promise import LEAST_SQNR_DB

_CALLERS: Final = (
    errors.CalibrationCacheError,
    errors.ClusterError,
    errors.OptionError,
    errors.ModelLoadError,
    errors.AlreadyQuantizedError,
    errors.OutputError,
)


def without_optional_work(request: Request) -> Request:
    """The request without rewrites and passes."""
    recipe = request.recipe
    plain = replace(RECIPES["plain"], ranges=recipe.ranges, samples=recipe.samples, speed=recipe.speed)
    return replace(request.unrewritten, recipe=plain)


def defect(call: Call, error: Exception) -> Exception:
    """The error for a planner, an emitter or a proof that failed; lack of memory is none, nor a model of no use."""
    if isinstance(error, MemoryError):
        return error
    if isinstance(error, errors.VerificationError):
        try:
            open_session(call.loaded.as_it_came, custom_op_libraries=call.request.custom_op_libraries)
        except errors.VerificationError as refusal:  # the float model loads unoptimized alone
            return errors.ModelLoadError(refusal.what, where=call.loaded.name, fix=refusal.fix)
        why = call.request.stock_reason
        if why is not None or call.request.needs_wide_types:
            asked = "types of other than 8 bits, or scales by block, were asked for"
            made = asked if why is None else f"ONNX Runtime's own quantizer made it: {why}"
            return errors.VerificationError(
                f"{error.what}; {made}",
                where=call.loaded.name,
                fix="leave out the option that asks for it, or update onnxruntime",
            )
    return errors.InternalError(
        f"quantize_static({call.loaded.name}, {call.request.output_name}) failed: {reason_of(error)}",
        where=errors.place_of(error),
        fix="please report this as a bug of kenosis-ort, with the model; on_failure='float' delivers the float model",
    )


def is_the_callers(error: Exception, call: Call) -> bool:
    """Whether an error is about the caller's arguments or data, so that no other form of the model helps."""
    data = call.data
    if isinstance(error, _CALLERS) or writing.is_lack_of_room(error) or (data is not None and data.failure is not None):
        return True
    if not isinstance(error, errors.CalibrationError):
        return False
    return data is None or data.last is None or bool(call.request.calibration_providers) or not _takes(call, data.last)


def _takes(call: Call, feed: Mapping[str, Any]) -> bool:
    """Whether the float model as it came runs on a feed, and makes no NaN or infinity of what holds some."""
    try:
        session = open_session(call.loaded.as_it_came, custom_op_libraries=call.request.custom_op_libraries)
        outputs = [as_array(o) for o in session.run(None, dict(feed))]
    except Exception:  # the runtime raises several unrelated classes; whichever it is, the feed is not taken
        return False
    weights = (
        outside.array_in(tensor) for tensor in call.loaded.proto.graph.initializer if tensor.data_type in _FLOATS
    )
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
    request, loaded, source = call.request, call.loaded, call.loaded.as_it_came
    with call.stage("write"):
        call.size_after = files.write_model(
            loaded.proto,
            request.output,
            external_data=request.use_external_data_format,
            check=lambda path: check_loads(path, request, pieces=int(len(loaded.proto.graph.node) <= WHOLE_LIMIT)),
            content=None if loaded.is_split or isinstance(source, onnx.ModelProto) else source.read_bytes(),
            warn=call.warnings.append,
        )
    call.warnings.append(f"The file holds the float model as it came: {why}. Fix: {fix}.")
    call.fallbacks.append(f"The float model as it came: {why}.")
    if request.caches:
        call.warnings.append("The cache of the file is float, as in the float model. Fix: feed it so.")
    seconds = call.seconds.get("calibrate", 0.0)
    calibration = CalibrationSummary(calibration_config(request).method, samples, 0, seconds)
    plan = PlacementPlan(request.target.name)
    return finish.report_of(call, plan=plan, fusion=None, calibration=calibration, float_because=why)


_EFFECTS: Final[Mapping[str, str]] = {
    "AddQDQPairToWeight": "weights stay float in the file, behind Q and DQ, and become integers when it is loaded",
    "BlockSize": "weights have a scale a block; linear layers read float data, for which their kernels are made",
    "DedicatedQDQPair": "every node that reads a quantized value has a Q and DQ of its own",
    "MinimumRealRange": "no range is narrower",
    "OpTypesToExcludeOutputQuantization": "the outputs of these operators carry no Q; what needs one stays float",
    "QDQKeepRemovableActivations": "Relu and Clip stay in the file, as always",
    "QDQOpTypePerChannelSupportToAxis": "weights of a MatMul by channel have their scales along this axis",
    "TensorQuantOverrides": "these tensors have the types and parameters given; nodes that no kernel fits run in float",
    "UseQDQContribOps": "Q and DQ are those of com.microsoft",
}


def option_notes(request: Request) -> list[str]:
    """A note for each option that affects the placement, with its effect."""
    explicit = request.given_extra_options
    effects = {f"extra_options['{key}']": effect for key, effect in _EFFECTS.items() if explicit.get(key)}
    if explicit.get("QuantizeBias", True) is False:
        effects["extra_options['QuantizeBias']"] = "biases stay float; Gemm has no integer kernel with one"
    if explicit.get("ForceQuantizeNoInputCheck"):
        effects["extra_options['ForceQuantizeNoInputCheck']"] = (
            "beside a list of operators it adds nothing"
            if request.op_types_named
            else "operators that move bytes are quantized behind float nodes too"
        )
    nothing = "it leaves out nothing that would be quantized, so it says nothing"
    if request.op_types_named:
        only = "no other operators are quantized"
        effects["op_types_to_quantize"] = only if request.restricts_types else nothing
    if request.nodes_to_quantize:
        only = "these nodes are quantized and no others"
        effects["nodes_to_quantize"] = nothing if request.names_all_nodes else only
    for option, kind, why in (
        ("activation_type", request.activation_type, _why_float(request, request.activation_type.name, "activations")),
        ("weight_type", request.weight_type, _why_float(request, request.weight_type.name, "weights")),
    ):
        if kind not in EIGHT_BIT:
            effects[f"{option}=QuantType.{kind.name}"] = f"Q and DQ are placed as for 8 bits{why}"
    return [f"{option}: {effect}." for option, effect in effects.items()]


def _why_float(request: Request, kind: str, of: str) -> str:
    """Note on the measured result of a data type other than 8 bits in the runtime, empty where there is none."""
    bits = "int16" if kind.endswith("16") else "int4"
    known = request.target.precisions.get(f"{bits}-{of}" if bits == "int16" else "int4-conv")
    return "" if known is None else f"; {known}"


def run(
    source: str | os.PathLike[str] | onnx.ModelProto, request: Request, reader: CalibrationDataReader | None
) -> QuantizationReport:
    """Quantizes one model.

    Raises:
        KenosisError: One of its subclasses; nothing was written.
    """
    with (
        writing.Scratch("run"),  # where none can be made, nothing is begun
        writing.room_is_needed(),
        configured(request.target.session_entries),
    ):
        files.check_destination(request.output)
        with _executor_of(request) as executor, fit.opened(source, request) as call:
            call.executor = executor
            if call.loaded.path is not None and writing.same_file(call.loaded.path, request.output):
                call.warnings.append(
                    "The output is the float model's own file, which is replaced, as by stock ONNX Runtime. "
                    "Fix: nothing, or name another file as the output, to keep the float model."
                )
            report = _run_qdq(call, reader)
    for text in report.warnings:
        errors.warn_caller(text)
    return report


def _executor_of(request: Request) -> AbstractContextManager[Executor]:
    """Executor of the passes' work.

    Raises:
        ClusterError: The caller's cluster cannot do it.
    """
    if request.executor is None:
        return nullcontext(HERE)
    from kenosis_ort.cluster.executor import ClusterExecutor  # loads asyncio

    request.executor.check(request.custom_op_libraries)
    return ClusterExecutor(request.executor)


def _run_qdq(first: Call, reader: CalibrationDataReader | None) -> QuantizationReport:
    """Quantizes; without rewrites and passes where these fail, and not at all where the model cannot be."""
    request, proto, why = first.request, first.loaded.proto, ""
    first.cache = None if request.cache_path is None else CalibrationCache(request.cache_path)
    # Where samples come from: the reader, made-up data, or those that the cache holds.
    known = None if first.cache is None else first.cache.table
    if reader is None and known is None and request.recipe.synthetic:
        from kenosis_ort.calibration.synthetic.reader import SyntheticReader  # few calls make samples up

        reader = SyntheticReader(first.loaded, samples=request.recipe.synthetic)
    if request.eval_reader is not None:
        with first.stage("evaluation data"):
            first.validation = Validation(request.eval_reader, proto)
    source = reader
    if reader is None and known is not None and known.cached is not None and len(known.cached):
        source = known.cached.samples
    if source is not None:
        keep, meant = request.most_feeds(proto), meant_as_defaults(proto)
        first.data = KeepingReader(source, input_specs(proto), keep=keep, defaults=meant, is_whole=reader is not None)
        first.notes += first.data.notes
        _check_numbers(request, first.data)
    # Two attempts: as asked for, then without rewrites and passes; else the float model.
    request = first.request = fit.with_open_defaults(proto, request, first.data)
    attempts = [request, without_optional_work(request)]
    while attempts:
        attempted = attempts.pop(0)
        call = first.again(attempted, _passes_for(attempted))
        try:
            return _weights_alone(call) if request.recipe.weight_only else _quantized(call)
        except errors.NothingToQuantizeError as error:
            return deliver_float(call, reason_of(error))
        except Exception as error:
            if request.is_stock or is_the_callers(error, call):
                raise
            if isinstance(error, errors.RuntimeEndedError):
                first.tell("The proof", error)
                request = replace(attempted, verify=False, speed=replace(attempted.speed, promise=False))
                attempts = [request, without_optional_work(request)]
            elif not isinstance(error, (RewriteMismatchError, *OF_THE_MODEL)):  # a defect
                if request.on_failure == "error":
                    raise defect(first, error) from error
                report_it = "please report this as a bug of kenosis-ort, with the model"
                return deliver_float(first, f"quantization failed: {reason_of(error)}", fix=report_it)
            else:
                why = why or f"quantization failed: {reason_of(error)}"
                if first.data is None or request.stock_reason is not None or attempted is not request:
                    break  # a cache holds the ranges of one form of the model
                first.tell("Rewriting and improving the model", error)
                first.fallbacks.append(f"Placement without rewrites and passes: {reason_of(error)}.")
                first.cache = None
        first.data = None if first.data is None else first.data.again()
    return deliver_float(first, why)


def _check_numbers(request: Request, data: KeepingReader) -> None:
    """Refuses a metric that asks for numbers of samples where samples have none."""
    asks = request.metric is not None and request.metric.takes_indices and request.eval_reader is None
    if asks and not data.is_whole:
        raise errors.OptionError(
            "the metric looks labels up by the number of a sample, and samples of a calibration table have none",
            where="metric",
            fix="pass an eval_reader, or the calibration reader beside the table",
        )


def _weights_alone(call: Call) -> QuantizationReport:
    """Quantizes weights of linear layers and embeddings in blocks; activations stay float, and nothing is placed."""
    build, feeds, given = improve.weight_only(call)
    finish.compare(call, build, feeds)
    return finish.finish(call, PreparedModel(call.loaded.proto), build, feeds, given)


def _quantized(call: Call) -> QuantizationReport:
    """Quantizes in one way; a result that is of no use gives way to the float model.

    Raises:
        NothingToQuantizeError: There is nothing to quantize.
        KenosisError: Or any other exception; nothing was written.
    """
    request = call.request
    builder, planned = _built(call, partial(draft, call.loaded.proto, request, call))
    build, feeds, wanted = planned, call.feeds, request.feeds_wanted
    call.notes += [note for note in (call.data.notes if call.data is not None else ()) if note not in call.notes]
    samples = 0 if call.cache is not None and call.cache.is_used else build.table.samples
    finish.compare(call, build, feeds)
    free = request.stages == Stages() and request.explicit_option is None  # an ablation is shown as it is
    bad, poor = (
        finish.worthless(call.outputs, call.compared_on, least) if free else None
        for least in (finish.WORTHLESS_DB, LEAST_SQNR_DB)
    )
    if poor is not None:
        build = call.attempt("Leaving nodes float", partial(improve.with_float_nodes, call, builder, planned), planned)
        if build is not planned:
            finish.compare(call, build, feeds)
            bad = bad and finish.worthless(call.outputs, call.compared_on, LEAST_SQNR_DB)
    chosen = build
    if (request.stock_reason is None or request.stages.placement) and build.is_whole:
        timed = (build, bad is None)
        chosen, is_useful = call.attempt("Timing", lambda: speed.delivered(call, builder, build, feeds, bad), timed)
        bad = None if is_useful else bad
    if bad is not None:
        return deliver_float(call, bad, samples)
    if request.caches and not int8_cache.cache_scales(chosen.quantized):  # another form than planned int8
        chosen = replace(chosen, quantized=outside.copy_model(chosen.quantized))
        int8_cache.quantize_cache(chosen.quantized, int8_cache.with_scales(request.caches, chosen.table.range_of))
    if chosen is not build:
        finish.compare(call, chosen, feeds)
    elif build is not planned:
        call.notes.append(f"With all nodes in integers {poor}: those that lose most are float.")
    known = 0 if call.validation is None else call.validation.shared(feeds)
    if known:
        call.warnings.append(
            f"{known} of {len(feeds)} calibration samples looked at are among the evaluation samples: what is measured "
            "is too good. Fix: pass an eval_reader of samples that nothing is calibrated on."
        )
    further = [] if call.data is None or request.executor is not None else call.data.feeds[wanted:]
    call.measure = call.attempt("The measure of what is lost", lambda: improve.measured(call, chosen, further), None)
    return finish.finish(call, builder.prepared, chosen, feeds, samples)


def _built(call: Call, make: Callable[[], Builder]) -> tuple[Builder, Build]:
    """The quantized model after the recipe's passes, and the builder that made it.

    Args:
        call: What gathers on the way.
        make: Returns the draft, which is held here alone and only as long as it is needed: it is a model in memory.

    Raises:
        NothingToQuantizeError: There is nothing to quantize.
    """
    drafted, request = make(), call.request
    builder = drafted.for_integers()
    with call.stage("calibrate"):
        table = calibrate.find_ranges(call, drafted, builder, WEIGHT_PASSES)
    trial = None
    if builder.quantizes_bodies and call.data is not None:
        make_trial = partial(body_plans.trial_of_bodies, call, builder, table, drafted.prepared.proto)
        with call.stage("bodies"):
            trial = call.attempt("The trial of bodies", make_trial, None)
        del make_trial
    builder, table = improve.with_weight_passes(call, drafted, builder, table)
    del drafted
    plan = builder.plan
    call.rewriting = tuple(builder.prepared.notes)
    call.notes += call.rewriting
    call.notes += [] if request.stock_reason is not None else option_notes(request)
    if request.stock_reason is not None and not request.is_stock:
        call.notes.append(f"Placed as stock does: {request.stock_reason}.")
    builder = body_plans.with_bodies(call, builder, _built)
    with call.stage("plan"):
        nothing: tuple[Mapping[str, str], str] = ({}, "")
        keep_float, note = call.attempt("The cost model", lambda: speed.float_regions(builder, plan), nothing)
    call.notes += [note] if note else []
    build = builder.build(table, keep_float)
    if not build.is_quantized:
        if keep_float and keep_float.keys() >= set(plan.integer_nodes()):
            raise errors.NothingToQuantizeError(note, fix="deploy the float model")
        raise nothing_to_quantize(
            request.stock_reason or why_float(builder.planned(keep_float, table), " outside of bodies")
        )
    if plan.integer_nodes():
        marks = len(call.passes), len(call.notes), len(call.warnings)
        before, none = builder, dict[str, str]()
        builder, build = improve.improved(call, before, build)
        costly = call.attempt("The trial of bodies", partial(trial.costly, builder, build), none) if trial else none
        if costly:  # what passes found beside the noise of these bodies is found anew without it
            del call.passes[marks[0] :], call.notes[marks[1] :], call.warnings[marks[2] :]
            before = body_plans.without_bodies(call, before, costly)
            builder, build = improve.improved(call, before, before.build(table, keep_float))
        if not build.is_quantized:
            raise nothing_to_quantize("with the ranges that were chosen every node stays float")
    return builder, build


def _passes_for(request: Request) -> tuple[Pass, ...]:
    """The passes that a request asks for, in order."""
    if not request.target.loads_in_ort:
        return ()  # their changes are evaluated there
    return tuple(p for p in passes_of(request.recipe) if request.chooses_ranges or not p.chooses_ranges)
