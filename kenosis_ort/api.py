"""The public calls: load, prepare, calibrate, plan, quantize, verify, write, report; one call a stage."""

from __future__ import annotations

import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.fingerprint import model_fingerprint
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import (
    CalibrationError,
    KenosisError,
    NothingToQuantizeError,
    OptionError,
    VerificationError,
    did_you_mean,
)
from kenosis_ort.graph.copying import copy_model
from kenosis_ort.graph.load import LoadedModel, check_not_quantized, load_model
from kenosis_ort.graph.prepare import PreparedModel, prepare
from kenosis_ort.graph.runtime import runtime_limits
from kenosis_ort.graph.save import write_model
from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import UNSET, OutputPolicy, Stages
from kenosis_ort.placement.planner import plan_placement
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from kenosis_ort.quantizer.stock import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    StaticQuantConfig,
    stock_model,
    stock_tensors,
    write_qoperator,
)
from kenosis_ort.report.model import CalibrationSummary, OutputQuality, QuantizationReport
from kenosis_ort.resolve import Progress, Request, resolve
from kenosis_ort.rewrite.fold_batch_norm import fold_batch_norm
from kenosis_ort.verify.fusion import verify_fusion
from kenosis_ort.verify.numerics import check_bias_alignment, compare_outputs
from kenosis_ort.verify.report_model import FusionReport
from kenosis_ort.graph.session import open_session

_log = logging.getLogger(__name__)

_MIN_OPSET = 13  # per-channel DequantizeLinear
_REPAIR_ROUNDS = 3
_KEPT_FEEDS = 4
_KEPT_BYTES = 64 * 2**20


def quantize_static(
    model_input: str | os.PathLike[str] | onnx.ModelProto,
    model_output: str | os.PathLike[str],
    calibration_data_reader: CalibrationDataReader | None = None,
    quant_format: QuantFormat = QuantFormat.QDQ,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: Any = UNSET,
    reduce_range: Any = UNSET,
    activation_type: Any = UNSET,
    weight_type: Any = UNSET,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    calibration_providers: Sequence[Any] | None = None,
    extra_options: Mapping[str, Any] | None = None,
    calibration_cache_path: str | os.PathLike[str] | None = None,
    *,
    target: str = "ort-cpu",
    protect_outputs: OutputPolicy = "auto",
    primary_inputs: Sequence[str] | None = None,
    custom_op_libraries: Sequence[str] = (),
    progress: Progress | None = None,
    verify: bool = True,
    stages: Stages | None = None,
) -> QuantizationReport:
    """Quantizes a float model to INT8 in place of ``onnxruntime.quantization.quantize_static``.

    The parameters up to ``calibration_cache_path`` are stock's, in stock's order and with stock's meaning. Where
    the caller says nothing about data types, this machine decides: uint8 activations and int8 weights per channel
    on x86-64 (7-bit weights where 8-bit products saturate), int8 for both on Arm.

    Args:
        model_input: Path of the float model, or the model itself (not changed).
        model_output: Path to write; written only once the result is known to load.
        calibration_data_reader: Yields feeds (input name to array); read once. May be None with a cache.
        quant_format: QDQ, or QOperator (then written by ONNX Runtime's own quantizer).
        op_types_to_quantize: Operator types to quantize, None for all.
        per_channel: Weight scales by output channel.
        reduce_range: 7-bit weights.
        activation_type: Data type of activations, a ``QuantType``.
        weight_type: Data type of weights, a ``QuantType``.
        nodes_to_quantize: Names of the only nodes to quantize.
        nodes_to_exclude: Names of nodes that stay float, in the runtime too.
        use_external_data_format: Write weights to ``<model_output>.data``; automatic above 2 GiB.
        calibrate_method: How activation ranges follow from the data.
        calibration_providers: Execution providers for calibration, the CPU's by default.
        extra_options: Stock's ``extra_options``; an unknown key is an error.
        calibration_cache_path: Calibration table to reuse, or to write if it does not exist.
        target: Runtime that the result is placed for.
        protect_outputs: What to do with a Conv that computes a graph output: ``"float"``, ``"int8"``, or
            ``"auto"``: float where that costs next to nothing. Gemm and MatMul heads always write float,
            but for ``"int8"``, which quantizes the graph's outputs as stock does.
        primary_inputs: Names of the inputs that carry the data proper; what derives from the others alone stays
            float. None tells them apart by name and shape.
        custom_op_libraries: Libraries with custom operators to register; none is loaded unasked.
        progress: Called with (samples done, samples in all or None) during calibration.
        verify: Read the fusion proof off the runtime's optimized graph and repair what falls short.
        stages: Kenosis stages to switch off, for ablation; ``Stages.none()`` is stock.

    Returns:
        The report: plan, fusion proof, calibration, sizes, notes and warnings.

    Raises:
        KenosisError: One of its subclasses; nothing was written.
    """
    request = resolve(
        model_output=model_output,
        quant_format=quant_format,
        op_types_to_quantize=op_types_to_quantize,
        per_channel=per_channel,
        reduce_range=reduce_range,
        activation_type=activation_type,
        weight_type=weight_type,
        nodes_to_quantize=nodes_to_quantize,
        nodes_to_exclude=nodes_to_exclude,
        use_external_data_format=use_external_data_format,
        calibrate_method=calibrate_method,
        calibration_providers=calibration_providers,
        extra_options=extra_options,
        calibration_cache_path=calibration_cache_path,
        target=target,
        protect_outputs=protect_outputs,
        primary_inputs=primary_inputs,
        custom_op_libraries=custom_op_libraries,
        progress=progress,
        verify=verify,
        stages=stages or Stages(),
    )
    return _run(model_input, request, calibration_data_reader)


def quantize(
    model_input: str | os.PathLike[str] | onnx.ModelProto,
    model_output: str | os.PathLike[str],
    quant_config: StaticQuantConfig,
    **extras: Any,
) -> QuantizationReport:
    """Quantizes with a ``StaticQuantConfig``, in place of ``onnxruntime.quantization.quantize``.

    A config cannot say whether a data type was chosen or left at stock's default, so a value equal to stock's
    default counts as left open; to insist on it, call `quantize_static`.

    Args:
        model_input: As `quantize_static`.
        model_output: As `quantize_static`.
        quant_config: Stock's configuration object.
        extras: Keyword-only parameters of `quantize_static`.

    Raises:
        OptionError: Another kind of configuration.
    """
    if not isinstance(quant_config, StaticQuantConfig):
        raise OptionError(
            f"quantize takes a StaticQuantConfig, not {type(quant_config).__name__}",
            where="quant_config",
            fix="for dynamic quantization call onnxruntime.quantization.quantize",
        )
    c = quant_config
    return quantize_static(
        model_input,
        model_output,
        c.calibration_data_reader,
        quant_format=c.quant_format,
        op_types_to_quantize=c.op_types_to_quantize,
        per_channel=c.per_channel or UNSET,
        reduce_range=c.reduce_range or UNSET,
        activation_type=UNSET if c.activation_type == QuantType.QInt8 else c.activation_type,
        weight_type=UNSET if c.weight_type == QuantType.QInt8 else c.weight_type,
        nodes_to_quantize=c.nodes_to_quantize,
        nodes_to_exclude=c.nodes_to_exclude,
        use_external_data_format=c.use_external_data_format,
        calibrate_method=c.calibrate_method,
        calibration_providers=c.calibration_providers,
        extra_options=c.extra_options,
        calibration_cache_path=getattr(c, "calibration_cache_path", None),
        **extras,
    )


@dataclass
class _Progressing:
    """What gathers on the way to the report."""

    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def _run(
    source: str | os.PathLike[str] | onnx.ModelProto, request: Request, reader: CalibrationDataReader | None
) -> QuantizationReport:
    state = _Progressing()
    with state.stage("load"):
        loaded = load_model(source)
        _check_names(loaded.proto, request)
    if request.quant_format is QuantFormat.QOperator:
        return _run_qoperator(loaded, request, reader, state)
    if not request.is_stock:
        check_not_quantized(loaded.proto)
    with state.stage("prepare"):
        prepared = _prepare(loaded.proto, request)
        state.notes += prepared.notes
    excluded, named = (_renamed(names, prepared) for names in (request.nodes_to_exclude, request.nodes_to_quantize))
    with state.stage("plan"):
        view = GraphView(prepared.proto) if request.dictated is None else None
        plan = _plan(view, request, excluded, named, {}, None)
        if view is not None and not plan.integer_nodes():
            raise _nothing(plan, loaded.name)
        if request.dictated is not None and not request.is_stock:
            state.notes.append(f"stock placement: {request.dictated}")
    tensors = (
        [value for value, _ in plan.quantized_values()]
        if view is not None
        else stock_tensors(prepared.proto, request.op_types)
    )
    tensors = [t for t in tensors if t not in {i.name for i in prepared.proto.graph.initializer}]
    with state.stage("calibrate"):
        table, feeds = _calibrate(prepared.proto, request, reader, tensors, state)
    keep_float: dict[str, str] = {}
    for round_ in range(_REPAIR_ROUNDS + 1):
        with state.stage("quantize"):
            plan = _plan(view, request, excluded, named, keep_float, table)
            if view is not None and not plan.integer_nodes():
                raise _nothing(plan, loaded.name)
            quantized = _quantize(prepared.proto, request, plan, table, excluded, named)
        if not request.verify:
            fusion = None
            break
        with state.stage("verify"):
            fusion = verify_fusion(quantized, plan=plan or None, custom_op_libraries=request.custom_op_libraries)
        avoidable = fusion.avoidable(plan) if plan else ()
        if not avoidable or round_ == _REPAIR_ROUNDS:
            break
        for kernel in avoidable:
            keep_float[kernel.node] = f"the runtime runs it in float ({kernel.reason}); kept float with float weights"
            state.notes.append(f"'{kernel.node}' ({kernel.op_type}) left float after verification: {kernel.reason}")
    _warn_signed(request, fusion, state)
    with state.stage("check"):
        outputs = _check_numerics(prepared.proto, quantized, request, feeds, state)
    with state.stage("write"):
        write_model(
            quantized,
            request.output,
            external_data=request.use_external_data_format,
            check=lambda path: _check_loads(path, request),
        )
    for text in state.warnings:
        warnings.warn(text, stacklevel=3)
    return QuantizationReport(
        model_input=loaded.name,
        model_output=str(request.output),
        target=request.target.name,
        options=request.choices,
        plan=plan,
        fusion=fusion,
        calibration=CalibrationSummary(
            table.config.method, table.samples if reader is not None else 0, len(tensors), state.seconds["calibrate"]
        ),
        notes=tuple(state.notes),
        warnings=tuple(state.warnings),
        size_before=_size(loaded.path) or loaded.proto.ByteSize(),
        size_after=_size(request.output),
        seconds=state.seconds,
        outputs=outputs,
        versions={"onnxruntime": ort.__version__, "onnx": onnx.__version__, "numpy": np.__version__},
    )


def _run_qoperator(
    loaded: LoadedModel, request: Request, reader: CalibrationDataReader | None, state: _Progressing
) -> QuantizationReport:
    """Writes the QOperator format with ONNX Runtime's quantizer, load-verified and atomically."""
    if reader is None and (request.cache_path is None or not request.cache_path.is_file()):
        raise _no_data()
    with state.stage("prepare"):
        prepared = _prepare(loaded.proto, request)
    with state.stage("quantize"), tempfile.TemporaryDirectory(prefix="kenosis_ort.") as folder:
        made = Path(folder) / "model.onnx"
        write_qoperator(
            prepared.proto,
            made,
            reader,
            op_types_to_quantize=list(request.op_types) if request.op_types_named else None,
            per_channel=request.per_channel,
            reduce_range=request.reduce_range,
            activation_type=request.activation_type,
            weight_type=request.weight_type,
            nodes_to_quantize=_renamed(request.nodes_to_quantize, prepared),
            nodes_to_exclude=_renamed(request.nodes_to_exclude, prepared),
            calibrate_method=request.calibrate_method,
            calibration_providers=request.calibration_providers,
            extra_options=dict(request.extra_options),
            calibration_cache_path=request.cache_path,
        )
        quantized = load_model(made).proto
    with state.stage("write"):
        write_model(
            quantized,
            request.output,
            external_data=request.use_external_data_format,
            check=lambda path: _check_loads(path, request),
        )
    method = CalibrationConfig.from_extra_options(request.calibrate_method, request.extra_options).method
    return QuantizationReport(
        model_input=loaded.name,
        model_output=str(request.output),
        target=request.target.name,
        options=request.choices,
        plan=PlacementPlan(request.target.name),
        fusion=None,
        calibration=CalibrationSummary(method, 0, 0, 0.0),
        notes=("QOperator format: written by ONNX Runtime's own quantizer",),
        size_before=_size(loaded.path) or loaded.proto.ByteSize(),
        size_after=_size(request.output),
        seconds=state.seconds,
        versions={"onnxruntime": ort.__version__, "onnx": onnx.__version__, "numpy": np.__version__},
    )


# -- stages -------------------------------------------------------------------------------------------------------


def _prepare(proto: onnx.ModelProto, request: Request) -> PreparedModel:
    if request.is_stock:
        return PreparedModel(
            stock_model(proto, request.weight_type, request.activation_type, request.extra_options)
        )
    limits = runtime_limits()
    overrides = tuple(request.extra_options.get("TensorQuantOverrides") or ())
    excluded = set(request.nodes_to_exclude)
    held = {n for node in proto.graph.node if node.name in excluded for n in (*node.input, *node.output) if n}
    constants = {i.name for i in proto.graph.initializer}
    prepared = prepare(
        proto,
        min_opset=_MIN_OPSET,
        max_ir=limits.max_ir,
        max_opset=limits.max_opset,
        keep_values=[*overrides, *(held - constants)],
        rewrites=(fold_batch_norm,) if request.stages.placement else (),
        custom_op_libraries=request.custom_op_libraries,
    )
    if request.dictated is None:
        return prepared
    raised = stock_model(prepared.proto, request.weight_type, request.activation_type, request.extra_options)
    return PreparedModel(raised, prepared.notes, prepared.nodes)


def _plan(
    view: GraphView | None,
    request: Request,
    excluded: Sequence[str],
    named: Sequence[str],
    keep_float: Mapping[str, str],
    table: CalibrationTable | None,
) -> PlacementPlan:
    if view is None:
        return PlacementPlan(request.target.name)
    ranges = None if table is None else {name: table.range_of(name) for name in table.tensors}
    return plan_placement(view, request.target, request.placement_options(excluded, named, keep_float), ranges)


def _calibrate(
    proto: onnx.ModelProto,
    request: Request,
    reader: CalibrationDataReader | None,
    tensors: Sequence[str],
    state: _Progressing,
) -> tuple[CalibrationTable, list[dict[str, Any]]]:
    config = CalibrationConfig.from_extra_options(request.calibrate_method, request.extra_options)
    cache = request.cache_path
    if cache is not None and cache.exists():
        table = CalibrationTable.load(cache)
        table.check_matches(model_fingerprint(proto), config)
        missing = [t for t in tensors if t not in table]
        if missing:
            raise CalibrationError(
                f"the calibration cache lacks {len(missing)} tensors, '{missing[0]}' among them",
                where=str(cache),
                fix="delete the cache, or pass the options that it was made with",
            )
        state.notes.append(f"activation ranges come from the cache '{cache}'")
        return table, []
    if reader is None:
        raise _no_data()
    kept = _KeepingReader(reader)
    table = collect(
        proto,
        kept,
        tensors=tensors,
        config=config,
        providers=request.calibration_providers,
        custom_op_libraries=request.custom_op_libraries,
        progress=request.progress,
    )
    if cache is not None:
        table.save(cache)
    return table, kept.feeds


def _quantize(
    proto: onnx.ModelProto,
    request: Request,
    plan: PlacementPlan,
    table: CalibrationTable,
    excluded: Sequence[str],
    named: Sequence[str],
) -> onnx.ModelProto:
    quantizer = FusionAwareQDQQuantizer(
        copy_model(proto),
        request.per_channel,
        request.reduce_range,
        request.weight_type,
        request.activation_type,
        table.to_tensors_data(),
        list(named),
        list(excluded),
        list(request.op_types),
        request.extra_options,
        plan=plan or None,
        stages=request.stages,
    )
    try:
        quantized = quantizer.quantize_model()
        quantizer.model.topological_sort()
    except KenosisError:
        raise
    except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AssertionError) as error:
        if request.is_stock or request.dictated is not None:
            raise OptionError(
                f"stock placement failed: {error}", fix="check extra_options and the named nodes against the model"
            ) from error
        raise
    return quantized


def _check_numerics(
    float_proto: onnx.ModelProto,
    quantized: onnx.ModelProto,
    request: Request,
    feeds: Sequence[dict[str, Any]],
    state: _Progressing,
) -> tuple[OutputQuality, ...]:
    """Compares outputs on calibration samples, and the grids of all int32 biases."""
    if request.is_stock or not request.verify:
        return ()
    problems = check_bias_alignment(quantized)
    if problems and request.dictated is None:
        raise VerificationError(
            f"{len(problems)} int32 biases are off input_scale * weight_scale", where=str(problems[0])
        )
    if not feeds:
        return ()
    compared = compare_outputs(
        float_proto, quantized, feeds, custom_op_libraries=request.custom_op_libraries
    )
    outputs = []
    for c in compared:
        if c.sqnr_db is not None:
            outputs.append(OutputQuality(c.name, c.sqnr_db))
    return tuple(outputs)


def _check_loads(path: Path, request: Request) -> None:
    open_session(path, custom_op_libraries=request.custom_op_libraries)


def _warn_signed(request: Request, fusion: FusionReport | None, state: _Progressing) -> None:
    """Warns where the caller insists on int8 activations on x86-64 and the runtime runs Convs in float for it."""
    if request.host.activation_signed or request.activation_type != QuantType.QInt8 or fusion is None:
        return
    convs = [k.node for k in fusion.float_nodes() if k.op_type == "Conv"]
    if convs and not request.is_stock:
        shown = ", ".join(f"'{n}'" for n in convs[:3])
        state.warnings.append(
            f"activation_type=QInt8: the runtime runs {len(convs)} Convs in float ({shown}{', ...' if len(convs) > 3 else ''}), "
            "because int8 values with several consumers have no integer kernels on x86-64. "
            "Fix: activation_type=QuantType.QUInt8, or leave it out."
        )


# -- checks and small parts -----------------------------------------------------------------------------------------


def _check_names(proto: onnx.ModelProto, request: Request) -> None:
    known = {node.name for node in proto.graph.node}
    types = {node.op_type for node in proto.graph.node}
    for option, names in (
        ("nodes_to_quantize", request.nodes_to_quantize),
        ("nodes_to_exclude", request.nodes_to_exclude),
    ):
        for name in names:
            if name not in known:
                raise OptionError(
                    f"{option} names '{name}', which is no node of the model.{did_you_mean(name, known)}",
                    where=option,
                    fix="use node names as in the model",
                )
    if request.op_types_named and not types & set(request.op_types):
        unknown = request.op_types[0]
        raise OptionError(
            f"op_types_to_quantize names '{unknown}', which is no operator of the model."
            f"{did_you_mean(unknown, types)}",
            where="op_types_to_quantize",
            fix=f"the model has {sorted(types)}",
        )


def _renamed(names: Sequence[str], prepared: PreparedModel) -> list[str]:
    """Returns the caller's node names as they are in the prepared model."""
    found: dict[str, None] = {}
    for name in names:
        found[name] = None
        found.update(dict.fromkeys(n for n in prepared.nodes.get(name, ()) if n.startswith(name)))
    return list(found)


def _nothing(plan: PlacementPlan, name: str) -> NothingToQuantizeError:
    heavy = [n for n in plan.nodes if n.op_type in ("Conv", "Gemm", "MatMul")]
    why = f"'{heavy[0].node}' ({heavy[0].op_type}): {heavy[0].reason}" if heavy else "it has no Conv, Gemm or MatMul"
    return NothingToQuantizeError(
        f"no node of the model can run in integer; {why}",
        where=name,
        fix="name the operators in op_types_to_quantize to have them quantized regardless",
    )


def _no_data() -> CalibrationError:
    return CalibrationError(
        "neither calibration_data_reader nor an existing calibration_cache_path was given",
        fix="pass a reader (ArrayReader, ImageFolderReader, SyntheticReader or your own)",
    )


class _KeepingReader(CalibrationDataReader):  # type: ignore[misc]
    """Hands a reader's feeds on and keeps the first few for the comparison with the float model."""

    def __init__(self, reader: CalibrationDataReader) -> None:
        self.reader = reader
        self.feeds: list[dict[str, Any]] = []
        self._room = _KEPT_BYTES

    def get_next(self) -> dict[str, Any] | None:
        feed: dict[str, Any] | None = self.reader.get_next()
        if isinstance(feed, Mapping) and len(self.feeds) < _KEPT_FEEDS:
            size = sum(int(getattr(v, "nbytes", 0)) for v in feed.values())
            if size <= self._room:
                self._room -= size
                self.feeds.append({k: np.array(v) if isinstance(v, np.ndarray) else v for k, v in feed.items()})
        return feed

    def __len__(self) -> int:
        return len(self.reader)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.reader.set_range(start_index=start_index, end_index=end_index)


def _size(path: Path | None) -> int:
    if path is None or not path.is_file():
        return 0
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.is_file() else 0)
