"""The steps of a quantization, each a function from plain inputs to plain outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx

from kenosis_ort.accuracy.reference import Reference
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, KenosisError, OptionError, UnsupportedModelError, VerificationError
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import enough
from kenosis_ort.graph.copying import copy_model, copy_with_hollow_weights
from kenosis_ort.graph.prepare import PreparedModel, RewriteError, RewriteResult, prepare
from kenosis_ort.graph.runner import Runner
from kenosis_ort.graph.session import open_session
from kenosis_ort.graph.shapes import drop_stale_value_info, infer_shapes
from kenosis_ort.graph.view import GraphView
from kenosis_ort.placement import magnitudes
from kenosis_ort.placement.planner import Planner
from kenosis_ort.placement.widths import with_widths
from kenosis_ort.plan import How, PlacementPlan, Role
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from kenosis_ort.quantizer.stock import CalibrationDataReader, QuantType, stock_model, stock_tensors
from kenosis_ort.report.model import OutputQuality
from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, PREPARATION, WRITTEN_OPERATORS
from kenosis_ort.runtime.limits import runtime_limits
from kenosis_ort.verify.numerics import OutputComparison, check_bias_alignment, compare_pairs

_log = logging.getLogger(__name__)
T = TypeVar("T")

_MIN_OPSET = 13  # per-channel DequantizeLinear
_NORM_OPSET = 17  # LayerNormalization
_WIDE_OPSET = 21  # QuantizeLinear of 16 and 4 bits, scales by block
_NORM_PARTS = frozenset({"ReduceMean", "LayerNormalization", "SkipLayerNormalization"})
_COMPARED_FEEDS = 4
_COMPARED_ROWS = 32
_POOR_DB = 10.0
_WORTHLESS_DB = 3.0  # half of the signal is noise


Failed = Callable[[str, Exception], None]
"""Is told which optional rewrite failed, and left out for it."""


def raise_again(_: str, error: Exception) -> None:
    """Takes no failure lightly."""
    raise error


def _without_what_fails(
    rewrite: Callable[[frozenset[str]], T], failed: Failed, skipped: frozenset[str] = frozenset()
) -> T:
    """Returns what a step of rewrites makes; one that raises is left out, and the step begins anew."""
    try:
        return rewrite(skipped)
    except RewriteError as error:
        failed(f"The rewrite '{error.name}'", error.cause)
        skipped |= {error.name}
    return _without_what_fails(rewrite, failed, skipped)


def prepare_model(proto: onnx.ModelProto, request: Request, failed: Failed = raise_again) -> PreparedModel:
    """Returns the model that everything after works on; for stock's placement prepared as stock does.

    Args:
        proto: The model as it came. Not changed.
        request: What the caller wants.
        failed: Is told which rewrite failed and was left out.
    """
    return _without_what_fails(partial(_prepare_model, proto, request), failed)


def _prepare_model(proto: onnx.ModelProto, request: Request, skipped: frozenset[str]) -> PreparedModel:
    if request.is_stock:
        return PreparedModel(_stock_model(proto, request))
    limits = runtime_limits()
    plannable = request.dictated is None
    wanted = (*PREPARATION, *(f for f in FLOAT_FORMS if request.rewrites_with(f))) if plannable else ()
    prepare_at = partial(
        prepare,
        proto,
        max_ir=limits.max_ir,
        keep_values=_values_of_the_caller(proto, request),
        keep_inputs=request.open_defaults,
        rewrites=tuple(f for f in wanted if f.__name__ not in skipped),
        custom_op_libraries=request.custom_op_libraries,
    )
    if plannable:
        operators = {node.op_type for node in proto.graph.node}
        best = limits.best_opset(operators)
        least = _NORM_OPSET if operators & _NORM_PARTS and best >= _NORM_OPSET else _MIN_OPSET
        if best >= request.target.min_opset:
            least = max(least, request.target.min_opset)
        bounds = [(least, best), (_MIN_OPSET, best), (_MIN_OPSET, limits.max_opset)]
        if request.needs_wide_types and limits.max_opset >= _WIDE_OPSET:
            bounds.insert(0, (_WIDE_OPSET, max(best, _WIDE_OPSET)))
        return _prepared_at_first(prepare_at, bounds)
    prepared = prepare_at(min_opset=_MIN_OPSET if request.per_channel else 0, max_opset=limits.max_opset)
    return PreparedModel(_stock_model(prepared.proto, request), prepared.notes, prepared.nodes)


def _stock_model(proto: onnx.ModelProto, request: Request) -> onnx.ModelProto:
    """Returns the model as stock prepares it.

    Raises:
        UnsupportedModelError: Stock's preparation fails on it.
    """
    try:
        prepared: onnx.ModelProto = stock_model(
            proto, request.weight_type, request.activation_type, request.extra_options
        )
    except Exception as error:  # ONNX's inference, checker and converter raise classes of their own
        raise UnsupportedModelError(
            f"stock's preparation of the model fails: {' '.join(str(error).split())[:300]}",
            fix="export the model at operator set 13 or later, or leave its placement to kenosis-ort",
        ) from error
    return prepared


def _values_of_the_caller(proto: onnx.ModelProto, request: Request) -> list[str]:
    """Returns the values that rewrites leave alone: the ends of nodes and the tensors that the caller speaks about."""
    said = request.placement_options(request.nodes_to_exclude, request.nodes_to_quantize, {})
    constants = {i.name for i in proto.graph.initializer}
    own = set(said.overrides)
    held = {
        value
        for node in proto.graph.node
        if node.name in said.nodes_to_exclude or request.insists_on(node) or own & set(node.input) & constants
        for value in (*node.input, *node.output)
        if value
    }
    return sorted(own | (held - constants))


def _prepared_at_first(prepare_at: Callable[..., PreparedModel], opsets: Sequence[tuple[int, int]]) -> PreparedModel:
    """Returns the model prepared within the first bounds of the operator set in which all of its nodes exist."""
    (low, high), *others = opsets
    try:
        return prepare_at(min_opset=low, max_opset=high)
    except UnsupportedModelError as error:
        left = [bounds for bounds in others if bounds != (low, high)]
        if not left:
            raise
        _log.info("not at operator sets %d to %d: %s", low, high, error)
        return _prepared_at_first(prepare_at, left)


def rewrite_for_integers(
    prepared: PreparedModel,
    planner: Planner,
    request: Request,
    excluded: Sequence[str],
    failed: Failed = raise_again,
) -> PreparedModel | None:
    """Returns the model in forms that suit integer kernels better, None if there is nothing to rewrite."""
    return _without_what_fails(partial(_rewrite_for_integers, prepared, planner, request, excluded), failed)


def _rewrite_for_integers(
    prepared: PreparedModel, planner: Planner, request: Request, excluded: Sequence[str], skipped: frozenset[str]
) -> PreparedModel | None:
    nodes = planner.integer_candidates() - set(excluded) - planner.held
    model = copy_model(prepared.proto)
    notes: list[str] = []
    merged = dict(prepared.nodes)
    before, changed = _outline(model), False
    forms: tuple[Callable[..., RewriteResult], ...] = (*INTEGER_FORMS, *request.target.own_forms)
    for form in forms:
        written = WRITTEN_OPERATORS.get(form)
        unwanted = request.restricts_types and written is not None and written not in request.op_types
        if request.rewrites_with(form) and not unwanted and form.__name__ not in skipped:
            try:
                result = form(model, nodes=nodes, keep_values=())
            except Exception as error:
                raise RewriteError(form.__name__, error) from error
            notes += result.notes
            merged.update({gone: (by,) if by else () for gone, by in result.merged.items()})
            after = _outline(model)
            if after != before:
                drop_stale_value_info(model)
                infer_shapes(model, custom_op_libraries=request.custom_op_libraries, thorough=False)
                before, changed = after, True
    if not changed:
        return None
    return PreparedModel(model, (*prepared.notes, *notes), merged)


def _outline(
    model: onnx.ModelProto,
) -> tuple[list[tuple[str, str, tuple[str, ...]]], list[tuple[str, tuple[int, ...]]]]:
    """Returns what any change of the graph, or of the shape of a weight, changes."""
    nodes = [(node.name, node.op_type, tuple(node.input)) for node in model.graph.node]
    return nodes, [(tensor.name, tuple(tensor.dims)) for tensor in model.graph.initializer]


def make_planner(
    view: GraphView | None,
    request: Request,
    excluded: Sequence[str],
    named: Sequence[str],
    keep_float: Mapping[str, str],
) -> Planner | None:
    """Returns the planner; None where stock's placement is used."""
    if view is None:
        return None
    return Planner(view, request.target, request.placement_options(excluded, named, keep_float))


def make_plan(planner: Planner | None, request: Request, table: CalibrationTable | None = None) -> PlacementPlan:
    """Returns the plan, before calibration without a table; an empty one where stock's placement is used."""
    if planner is None:
        return PlacementPlan(request.target.name)
    said = frozenset(
        request.extra_options.get("TensorQuantOverrides") or ()
    )  # the caller's word on how they are stored
    plan = planner.plan(None if table is None else _ranges(table))
    plan = with_widths(plan, planner.view, request.widths, said)
    refine = request.target.refine
    if refine is None or not _tiled(request):
        return plan
    return refine(plan, planner.view, said)


def _tiled(request: Request) -> bool:
    """Tells whether weights are laid out for the matrix tiles of this machine."""
    types = request.activation_type == QuantType.QUInt8 and request.weight_type == QuantType.QInt8
    options = request.extra_options
    own = request.stages.weights and options.get("WeightSymmetric") is not False and not options.get("MinimumRealRange")
    plain = request.format in ("qdq", "qop")  # other tools expect weights of zero point 0
    return request.types.tiles and types and own and plain and request.speed.tune != "off"


def _ranges(table: CalibrationTable) -> dict[str, tuple[float, float]]:
    return {name: table.range_of(name) for name in table.tensors}


def beyond_scales(view: GraphView | None, plan: PlacementPlan, table: CalibrationTable) -> dict[str, str]:
    """Returns the integer nodes whose magnitudes no float32 scale holds, with the reason."""
    return {} if view is None else magnitudes.beyond_scales(view, plan, _ranges(table))


def tensors_to_observe(proto: onnx.ModelProto, request: Request, plan: PlacementPlan) -> list[str]:
    """Returns the activations whose ranges are needed."""
    if not plan:
        return stock_tensors(proto, request.op_types)
    constants = {i.name for i in proto.graph.initializer}
    return [value for value, _ in plan.quantized_values() if value not in constants]


def calibration_config(request: Request) -> CalibrationConfig:
    """Returns how to collect statistics."""
    config = CalibrationConfig.from_extra_options(request.calibrate_method, request.extra_options)
    planned = request.dictated is None
    config = replace(config, bit_exact=not planned)  # stock's placement gets stock's very ranges
    if planned and request.chooses_ranges and config.method == "minmax":
        config = replace(config, sketch=True)
    return config


def calibrate(
    proto: onnx.ModelProto,
    request: Request,
    reader: CalibrationDataReader | None,
    tensors: Sequence[str],
    seen_as: Mapping[str, Callable[[Any], Any]],
) -> CalibrationTable:
    """Returns the table of the samples; ``seen_as`` as in `collect`."""
    if reader is None:
        raise no_data()
    return collect(
        proto,
        reader,
        tensors=tensors,
        config=calibration_config(request),
        providers=request.calibration_providers,
        custom_op_libraries=request.custom_op_libraries,
        progress=request.progress,
        seen_as=seen_as,
    )


def no_data() -> CalibrationError:
    """Returns the error for a call without reader and cache."""
    return CalibrationError(
        "neither calibration_data_reader nor an existing calibration_cache_path was given",
        fix="pass a reader (ArrayReader, ImageFolderReader, SyntheticReader or your own), or recipe='data-free'",
    )


def quantize_model(
    proto: onnx.ModelProto,
    request: Request,
    plan: PlacementPlan,
    table: CalibrationTable,
    excluded: Sequence[str],
    named: Sequence[str],
) -> onnx.ModelProto:
    """Returns the quantized model, nodes in topological order."""
    own = {d.edge.value for d in plan.decisions if d.role is Role.WEIGHT and d.how is How.OWN}
    weights = {t.name: t for t in proto.graph.initializer if t.name in own}
    try:
        quantizer = FusionAwareQDQQuantizer(
            copy_with_hollow_weights(proto, weights.keys()),
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
            weights=weights,
        )
        quantized = quantizer.quantize_model()
        quantizer.model.topological_sort()
    except KenosisError:
        raise
    except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError, AssertionError) as error:
        if plan:
            raise
        raise OptionError(
            f"stock placement failed: {error}", fix="check extra_options and the named nodes against the model"
        ) from error
    return quantized


def few_of(feeds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns some samples, spread over all of them, that are enough to compare outputs on."""
    return enough(feeds[:: max(1, -(-len(feeds) // _COMPARED_FEEDS))], rows=_COMPARED_ROWS, least=1)


def check_biases(quantized: onnx.ModelProto, request: Request) -> None:
    """Checks the grids of all int32 biases.

    Raises:
        VerificationError: One is off.
    """
    problems = check_bias_alignment(quantized)
    if problems and request.dictated is None:
        raise VerificationError(f"{len(problems)} int32 biases are off their grid", where=str(problems[0]))


def compared_to(
    reference: Reference, model: onnx.ModelProto, feeds: Sequence[Mapping[str, Any]], request: Request
) -> tuple[OutputComparison, ...]:
    """Returns a model's outputs beside the float model's.

    Raises:
        VerificationError: One of them does not run.
    """
    with Runner(model, custom_op_libraries=request.custom_op_libraries) as runner:
        pairs = zip(reference.outputs(feeds), map(runner.run, feeds), strict=True)
        return compare_pairs(reference.names, pairs, reference.random(feeds[0]))


def poor(compared: Sequence[OutputComparison]) -> list[OutputComparison]:
    """Returns the outputs that have little in common with the float model's."""
    return [c for c in compared if c.sqnr_db < _POOR_DB]


def worthless(compared: Sequence[OutputComparison]) -> str | None:
    """Returns why nobody can want the quantized model: zeros are closer to the float model's output; else None.

    Integers and texts say nothing, nor does a reference that is zero throughout: its noise has no decibels.
    """
    told = [c for c in compared if c.floating and not (np.isneginf(c.sqnr_db) and np.isfinite(c.max_abs))]
    bad = min(told, key=lambda c: c.sqnr_db, default=None)
    if bad is None or (bad.sqnr_db >= 0 and any(c.sqnr_db >= _WORTHLESS_DB for c in told)):
        return None
    return f"INT8 is worthless here: output '{bad.name}' keeps {bad.sqnr_db:.1f} dB on calibration samples"


def qualities(compared: Sequence[OutputComparison]) -> tuple[OutputQuality, ...]:
    """Returns the comparison as the report shows it."""
    return tuple(OutputQuality(c.name, c.sqnr_db) for c in compared if c.skipped < max(c.samples, 1))


def check_loads(path: Path, request: Request, *, pieces: int = 1) -> None:
    """Loads the written file in a fresh session; one that stock onnxruntime does not load is checked alone.

    The runtime's load time grows with the square of the depth. A huge model that the fusion proof has loaded in
    pieces is not loaded once more but checked for consistency; one without a proof is loaded unoptimized.

    Args:
        path: The file.
        request: For the custom operators.
        pieces: Into how many pieces the fusion proof cut the model; 0 without a proof of a huge model.

    Raises:
        VerificationError: The runtime refuses it.
    """
    if pieces <= 1 and request.target.loads_in_ort:
        open_session(path, custom_op_libraries=request.custom_op_libraries, optimize=pieces == 1)
        return
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:  # stricter than the runtime, e.g. about outputs without a shape
        _log.info("not consistent to the letter: %s", error)
        if not request.target.loads_in_ort:
            raise VerificationError(f"the file is not consistent: {error}", where=str(path)) from error
        open_session(path, custom_op_libraries=request.custom_op_libraries, optimize=False)
