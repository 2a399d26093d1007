"""Steps of a quantization, and the request that they work on.

The steps of a quantization, each a function from plain inputs to plain outputs.

One frozen request from the arguments of a call and the options of a recipe file.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np
import onnx
from onnx import TensorProto

from kenosis_ort.accuracy.metric import Reference
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import Part
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.cluster.sweep import collect_on
from kenosis_ort.errors import (
    ArgumentTypeError,
    CalibrationError,
    KenosisError,
    OptionError,
    VerificationError,
    did_you_mean,
    warn_caller,
)
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.resolve import resolve
from kenosis_ort.flow.samples import enough
from kenosis_ort.graph.model_session import FeedRunner, open_session
from kenosis_ort.graph.outside import complete, copy_with_hollow_weights, is_outside
from kenosis_ort.graph.product_pairs import store_exactly
from kenosis_ort.graph.view import GraphView
from kenosis_ort.option_types import check_model, checked_options
from kenosis_ort.options import KEYWORDS, UNSET, Placement, Speed, Stages
from kenosis_ort.placement import decisions
from kenosis_ort.placement.eligibility import with_widths
from kenosis_ort.placement.planner import Planner
from kenosis_ort.plan import EdgeRole, How, PlacementPlan
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from kenosis_ort.quantizer.stock import CalibrationDataReader, QuantType, stock_tensors
from kenosis_ort.recipe_file import RecipeFile
from kenosis_ort.recipe_file import resolve as resolve_recipe
from kenosis_ort.report.quantization_report import OutputQuality
from kenosis_ort.verify.numerics import OutputComparison, check_bias_alignment, compare_pairs

G = TypeVar("G", Speed, Placement)
_FIELDS: Final = (*Speed.__dataclass_fields__, *Placement.__dataclass_fields__)


def request_of(called: Mapping[str, Any], signature: inspect.Signature) -> Request:
    """The request for the arguments of a call, all of them checked as far as that takes no model.

    Args:
        called: The arguments by parameter; keywords that the signature leaves open stand under ``further``.
        signature: That of ``quantize_static``.

    Raises:
        KenosisError: An argument has the wrong type, is unknown, or contradicts another.
    """
    check_model(called["model_input"])
    for name in called["further"]:
        if name not in KEYWORDS:
            raise ArgumentTypeError(
                f"quantize_static has no parameter '{name}'.{did_you_mean(name, (*signature.parameters, *KEYWORDS))}",
                where=name,
                fix=f"one of its own, or of {', '.join(KEYWORDS)}",
            )
    apart = ("model_input", "calibration_data_reader", "further")
    given = {**{k: v for k, v in called.items() if k not in apart}, **called["further"]}
    whole = given["recipe"] if isinstance(given["recipe"], RecipeFile) else None
    if isinstance(given["quant_format"], QuantType):
        warn_caller(
            f"quant_format={given['quant_format']} is no QuantFormat and is ignored, as by stock ONNX Runtime. "
            "Fix: leave it out, or pass QuantFormat.QDQ; a type of data is weight_type or activation_type."
        )
        given["quant_format"] = UNSET
    checked = checked_options({**given, "recipe": "fast"} if whole is not None else given)
    file = resolve_recipe(whole or checked["recipe"])
    # What the call says goes before what the file says, a keyword before the field of a group.
    silent = {name for name, parameter in signature.parameters.items() if parameter.default is called[name] is None}
    stated = {name: value for name, value in checked.items() if name not in silent}
    speed = _grouped(stated.pop("speed", Speed()), file.options, stated)
    placement = _grouped(stated.pop("placement", Placement()), file.options, stated)
    chosen = {name: value for name, value in {**file.options, **stated}.items() if name not in _FIELDS}
    request = resolve(
        **{**chosen, "recipe": file.recipe},
        **{name: getattr(placement, name) for name in Placement.__dataclass_fields__ if name != "stages"},
        stages=placement.stages or Stages(),
        speed=speed,
    )
    calibration_config(request)  # raises where the method or its settings are wrong
    return request


def _grouped(group: G, in_file: Mapping[str, Any], stated: Mapping[str, Any]) -> G:
    """A group of options with those of a recipe file and of keywords filled in.

    Args:
        group: As the call gives it.
        in_file: Options of the file.
        stated: What the call says, by keyword; the fields' names.
    """
    names = group.__dataclass_fields__
    found = {name: in_file[name] for name in names if name in in_file and name not in group.stated}
    return replace(group, **{**found, **{name: stated[name] for name in names if name in stated}})


_log = logging.getLogger(__name__)

_COMPARED_FEEDS = 4
_COMPARED_ROWS = 32
_POOR_DB = 10.0
_WORTHLESS_DB = 3.0  # half of the signal is noise


def make_planner(
    view: GraphView | None,
    request: Request,
    excluded: Sequence[str],
    named: Sequence[str],
    keep_float: Mapping[str, str],
    base: Planner | None = None,
) -> Planner | None:
    """The planner; None where stock's placement is used."""
    if view is None:
        return None
    options = request.placement_options(excluded, named, keep_float)
    return Planner(view, request.target, options, partial(_finished, view, request), base)


def _finished(view: GraphView, request: Request, plan: PlacementPlan) -> PlacementPlan:
    """A plan with the widths that the caller wants, and weights as the kernels of the machine like them."""
    explicit = frozenset(
        request.extra_options.get("TensorQuantOverrides") or ()
    )  # the caller's word on how they are stored
    plan = with_widths(plan, view, request.widths, explicit)
    refine, costs = request.target.refine, request.target.costs
    if refine is None or costs is None or not _suits_kernels(request):
        return plan
    return refine(plan, view, explicit, costs=costs)


def make_plan(planner: Planner | None, request: Request, table: CalibrationTable | None = None) -> PlacementPlan:
    """The plan, before calibration without a table; an empty one where stock's placement is used."""
    if planner is None:
        return PlacementPlan(request.target.name)
    return planner.plan(None if table is None else _ranges(table))


def _suits_kernels(request: Request) -> bool:
    """Whether weights are stored as the kernels of the machine like them best."""
    types = request.activation_type == QuantType.QUInt8 and request.weight_type == QuantType.QInt8
    options = request.extra_options
    own = request.stages.weights and options.get("WeightSymmetric") is not False and not options.get("MinimumRealRange")
    plain = request.format in ("qdq", "qop")  # other tools expect weights of zero point 0
    return types and own and plain and request.speed.tune != "off"


def _ranges(table: CalibrationTable) -> dict[str, tuple[float, float]]:
    return {name: table.range_of(name) for name in table.tensors}


def beyond_scales(view: GraphView | None, plan: PlacementPlan, table: CalibrationTable) -> dict[str, str]:
    """The integer nodes whose magnitudes no float32 scale holds, with the reason."""
    return {} if view is None else decisions.beyond_scales(view, plan, _ranges(table))


def tensors_to_observe(proto: onnx.ModelProto, request: Request, plan: PlacementPlan) -> list[str]:
    """The activations whose ranges are needed."""
    if not plan:
        return stock_tensors(proto, request.op_types)
    constants = {i.name for i in proto.graph.initializer}
    return [value for value, _ in plan.quantized_values() if value not in constants]


def calibration_config(request: Request) -> CalibrationConfig:
    """Configuration of the calibration."""
    config = CalibrationConfig.from_extra_options(request.calibrate_method, request.extra_options)
    planned = request.stock_reason is None
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
    part: Part = MappingProxyType({}),
    channels: Mapping[str, int] = MappingProxyType({}),
    keep: int = 0,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> CalibrationTable:
    """The table of the samples; ``defaults`` as in `collect_on`, what comes before as in `collect`."""
    if reader is None:
        raise no_data()
    config = calibration_config(request)
    run = collect
    if request.executor is not None and config.depends_on_order:
        warn_caller("A moving average depends on the order of the samples: it is calibrated here, not on the executor.")
    elif request.executor is not None:
        run = partial(collect_on, request.executor, defaults=defaults)
    return run(
        proto,
        reader,
        tensors=tensors,
        config=config,
        providers=request.calibration_providers or (),
        custom_op_libraries=request.custom_op_libraries,
        progress=request.progress,
        seen_as=seen_as,
        part=part,
        channels=channels,
        keep=keep,
    )


def no_data() -> CalibrationError:
    """The error for a call without reader and cache."""
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
    """The quantized model, nodes in topological order."""
    own = {d.edge.value for d in plan.decisions if d.role is EdgeRole.WEIGHT and d.how is How.OWN}
    proto = proto if plan else complete(proto)  # stock reads all weights
    weights = {t.name: t for t in proto.graph.initializer if t.name in own or is_outside(t)}
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
        types = request.types  # what came quantized keeps its scales
        if types.largest_pair is not None and TensorProto.UINT8 in types.weights and not request.is_stock:
            store_exactly(quantized.graph, {t.name for t in proto.graph.initializer})
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
    """Some samples, spread over all of them, that are enough to compare outputs on."""
    return enough(feeds[:: max(1, -(-len(feeds) // _COMPARED_FEEDS))], rows=_COMPARED_ROWS, least=1)


def check_biases(quantized: onnx.ModelProto, request: Request) -> None:
    """Checks the grids of all int32 biases.

    Raises:
        VerificationError: One is off.
    """
    problems = check_bias_alignment(quantized)
    if problems and request.stock_reason is None:
        raise VerificationError(f"{len(problems)} int32 biases are off their grid", where=str(problems[0]))


def compared_to(
    reference: Reference, model: onnx.ModelProto, feeds: Sequence[Mapping[str, Any]], request: Request
) -> tuple[OutputComparison, ...]:
    """A model's outputs beside the float model's.

    Raises:
        VerificationError: One of them does not run.
    """
    with FeedRunner(model, custom_op_libraries=request.custom_op_libraries) as runner:
        pairs = zip(reference.outputs(feeds), map(runner.run, feeds), strict=True)
        return compare_pairs(reference.names, pairs, reference.random(feeds[0]))


def poor(compared: Sequence[OutputComparison]) -> list[OutputComparison]:
    """The outputs that have little in common with the float model's."""
    return [c for c in compared if c.sqnr_db < _POOR_DB]


def worthless(compared: Sequence[OutputComparison]) -> str | None:
    """Reason why the quantized model is useless: zeros are closer to the float model's output; else None.

    Integers and texts say nothing, nor does a reference that is zero throughout: its noise has no decibels.
    """
    comparable = [c for c in compared if c.floating and not (np.isneginf(c.sqnr_db) and np.isfinite(c.max_abs))]
    bad = min(comparable, key=lambda c: c.sqnr_db, default=None)
    if bad is None or (bad.sqnr_db >= 0 and any(c.sqnr_db >= _WORTHLESS_DB for c in comparable)):
        return None
    return f"INT8 is worthless here: output '{bad.name}' keeps {bad.sqnr_db:.1f} dB on calibration samples"


def qualities(compared: Sequence[OutputComparison]) -> tuple[OutputQuality, ...]:
    """The comparison as the report shows it."""
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
