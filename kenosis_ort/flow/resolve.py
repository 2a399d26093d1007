"""One frozen request from the arguments of a call and the options of a recipe file."""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from kenosis_ort import option_types
from kenosis_ort.accuracy.metric import check_metric
from kenosis_ort.errors import ArgumentTypeError, OptionError, callers_own, did_you_mean, warn_caller
from kenosis_ort.flow import target_options
from kenosis_ort.flow.request import Request, calibration_config
from kenosis_ort.options import EXPORT_FORMATS, KEYWORDS, UNSET, OptionChoice, Placement, Speed, Stages, Unset
from kenosis_ort.passes.recipe import resolve_recipe
from kenosis_ort.passes.smooth import DEFAULT_ALPHA
from kenosis_ort.quantizer.fusion_aware import check_installed
from kenosis_ort.quantizer.stock import (
    QUANTIZABLE_OPS,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    check_static_quant_arguments,
)
from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, PREPARATION, USUAL_FORMS
from kenosis_ort.storage.writing import absolute
from kenosis_ort.targets import DataTypes, Hooks, Target, get_target


def request_of(called: Mapping[str, Any], signature: inspect.Signature) -> Request:
    """The request for the arguments of a call, all of them checked as far as that takes no model.

    Args:
        called: The arguments by parameter; keywords that the signature leaves open stand under ``further``.
        signature: That of ``quantize_static``.

    Raises:
        KenosisError: An argument has the wrong type, is unknown, or contradicts another.
    """
    option_types.check_model(called["model_input"])
    for name in called["further"]:
        if name not in KEYWORDS:
            raise ArgumentTypeError(
                f"quantize_static has no parameter '{name}'.{did_you_mean(name, (*signature.parameters, *KEYWORDS))}",
                where=name,
                fix=f"one of its own, or of {', '.join(KEYWORDS)}",
            )
    apart = ("model_input", "calibration_data_reader", "further")
    given = {**{k: v for k, v in called.items() if k not in apart}, **called["further"]}
    whole = given["recipe"] if isinstance(given["recipe"], option_types.RecipeFile) else None
    if isinstance(given["quant_format"], QuantType):
        warn_caller(
            f"quant_format={given['quant_format']} is no QuantFormat and is ignored, as by stock ONNX Runtime. "
            "Fix: leave it out, or pass QuantFormat.QDQ; a type of data is weight_type or activation_type."
        )
        given["quant_format"] = UNSET
    checked = option_types.checked_options({**given, "recipe": "fast"} if whole is not None else given)
    file = option_types.resolve(whole or checked["recipe"])
    # What the call says goes before what the file says, a keyword before the field of a group.
    silent = {name for name, parameter in signature.parameters.items() if parameter.default is called[name] is None}
    stated = {name: value for name, value in checked.items() if name not in silent}
    groups = [group for name in ("speed", "placement") if (group := stated.pop(name, None)) is not None]
    fields = {name: getattr(group, name) for group in groups for name in group.stated}
    request = resolve({**file.options, **fields, **stated, "recipe": file.recipe}, file.host)
    calibration_config(request)  # raises where the method or its settings are wrong
    return request


_METHODS = {"auto": "MinMax", "minmax": "MinMax", "percentile": "Percentile", "entropy": "Entropy"}
_BY_CHANNEL = (QuantType.QInt8, QuantType.QInt16, QuantType.QInt4)  # symmetric types


_SHOWN = (
    *("kv_cache", "max_opset", "use_external_data_format", "custom_op_libraries", "calibration_providers"),
    *("calibration_cache_path", "verify", "on_failure", "metric", "eval_reader"),
    *("tune", "threads", "promise", "sequence_lengths"),
)
"""Options that the report names where they are not at their defaults."""
_NAMES = ("op_types_to_quantize", "nodes_to_quantize", "nodes_to_exclude", "primary_inputs")
"""Lists of names, which it shows where there are any."""


def resolve(given: Mapping[str, Any], recorded: str | None = None) -> Request:
    """The resolved request.

    Args:
        given: Options of the right types by the names of `kenosis_ort.option_types.OPTIONS`, the fields of groups one
            by one; one that is missing has its default.
        recorded: The profile by which a recipe's file was laid out, where its caller named none.

    Raises:
        OptionError: An option is unknown or contradicts another.
    """
    # Options by name: at first as they are given, in the end as the request has them.
    o: Any = SimpleNamespace(**{**{name: option.default for name, option in option_types.OPTIONS.items()}, **given})
    o.speed = Speed(**{name: getattr(o, name) for name in Speed.__dataclass_fields__})
    placement = Placement(**{name: getattr(o, name) for name in Placement.__dataclass_fields__})
    shown = {**vars(o), **vars(o.speed), **vars(placement)}
    o.stages = placement.stages or Stages()
    stock = o.stages == Stages.none()
    o.extra_options, o.complaints = option_types.check_extra_options(o.extra_options)
    if isinstance(o.quant_format, str):
        o.quant_format = QuantFormat.__members__.get(o.quant_format, o.quant_format)
    o.target = get_target(o.target)
    check_installed(o.extra_options)
    # Recipe, machine, bits, format.
    o.recipe = resolve_recipe(o.recipe)
    if o.extra_options.get("SmoothQuant"):
        o.recipe = replace(o.recipe, smooth=o.extra_options.get("SmoothQuantAlpha", DEFAULT_ALPHA))
    if o.accuracy_budget is not None:
        o.recipe = replace(o.recipe, mixed_precision=True, accuracy_budget=o.accuracy_budget)
    o.metric = None if o.metric is None else check_metric(o.metric)
    o.host, o.types = target_options.profile_for(o.target, o.speed, recorded), o.target.data_types()
    if o.host is not None and o.target.costs is not None:
        o.target = replace(o.target, costs=target_options.costs_for(o.target.costs, o.host, o.speed))
    o.recipe, o.widths = target_options.with_bits(o.recipe, o.weight_bits, o.activation_bits)
    o.format = target_options.chosen_format(o.format, o.quant_format)
    # Types, scales and method: by the caller, else by the target, or as stock has them.
    chosen: dict[str, OptionChoice] = {}

    def choose(name: str, default: Any) -> Any:
        value = _quant_type(getattr(o, name)) if name.endswith("_type") else getattr(o, name)
        if isinstance(value, Unset):
            chosen[name] = OptionChoice(default, "stock default" if stock else "host default")
        else:
            chosen[name] = OptionChoice(value, "caller")
        setattr(o, name, chosen[name].value)
        return chosen[name].value

    int8 = QuantType.QInt8
    weight = choose("weight_type", int8 if stock else _quant_type(o.types.weight))
    choose("activation_type", int8 if stock else _activation_beside(weight, o.types))
    choose("per_channel", not stock and o.types.per_channel and weight in _BY_CHANNEL)
    own_scales = o.stages.placement and o.stages.weights and o.extra_options.get("WeightSymmetric") is not False
    may_clip = weight is int8 and o.types.largest_pair is not None
    choose("reduce_range", may_clip and not (stock or own_scales))  # own scales keep pairs from clipping
    choose("calibrate_method", CalibrationMethod["MinMax" if stock else _METHODS[o.recipe.ranges]])
    _check_kinds(o.quant_format, o.activation_type, weight)
    # What the target adds; rules of its kernels that do not count for this result.
    types = o.types, o.activation_type, weight
    own = {} if stock else target_options.serve(o.target, *types, o.extra_options)
    o.extra_options = {**own, **o.extra_options}
    if o.format in EXPORT_FORMATS or not o.widths.are_bytes:  # what pays on a runtime is not the question
        hooks = replace(o.target.hooks, reclass=Hooks.reclass, reclass_integers=Hooks.reclass_integers)
        o.target = replace(o.target, hooks=hooks, head_float_share=0.0, costs=None)
    if o.format in EXPORT_FORMATS:  # nor are its kernels
        o.target = replace(o.target, kernel_forms=(), own_forms=())
    o.stock_reason = _stock_reason(o.activation_type, o.stages, o.target)
    # Who chose each option, for the report.
    shown |= {
        "quant_format": o.quant_format,
        "format": o.format,
        "target": o.target.name,
        "recipe": o.recipe.to_dict(),
        "stages": {name: getattr(o.stages, name) for name in Stages.__dataclass_fields__},
        "kv_cache": None if o.kv_cache is None else os.fspath(o.kv_cache),
        "custom_op_libraries": tuple(map(str, o.custom_op_libraries)),
        "metric": _name_of(shown["metric"]),
        "eval_reader": _name_of(o.eval_reader),
        **{name: tuple(getattr(placement, name, getattr(o, name)) or ()) for name in _NAMES},
    }
    in_report = (
        *("quant_format", "format", "activation_type", "weight_type", "per_channel", "reduce_range"),
        *("calibrate_method", "protect_outputs", "target", "rewrites", "recipe", "stages"),
    )
    o.choices = {name: chosen.get(name) or OptionChoice(shown[name], "caller") for name in in_report}
    for key, value in o.extra_options.items():
        o.choices[f"extra_options.{key}"] = OptionChoice(value, "target default" if key in own else "caller")
    o.choices |= {name: OptionChoice(shown[name], "caller") for name in _NAMES if shown[name]}
    if o.host is not None:
        host = o.speed.host
        shipped = o.host.name if o.host in o.target.profiles else None  # so that it can be asked for again
        named = host if isinstance(host, (str, os.PathLike)) else shipped
        unsaid = OptionChoice(named, "recipe" if o.host.name == recorded else "host default")
        o.choices["host"] = unsaid if host is None else OptionChoice(named, "caller")
    differ = [name for name in _SHOWN if shown[name] != option_types.OPTIONS[name].default]
    o.choices |= {name: OptionChoice(shown[name], "caller") for name in differ}
    # The request, and combinations that it cannot have.
    o.output, o.output_name = absolute(o.model_output), os.fspath(o.model_output)
    o.op_types = tuple(o.op_types_to_quantize or QUANTIZABLE_OPS)
    o.nodes_to_quantize, o.nodes_to_exclude = shown["nodes_to_quantize"], shown["nodes_to_exclude"]
    o.primary_inputs = None if placement.primary_inputs is None else shown["primary_inputs"]
    o.protect_outputs, o.custom_op_libraries = placement.protect_outputs, shown["custom_op_libraries"]
    o.calibration_providers = tuple(o.calibration_providers) if o.calibration_providers else None
    o.cache_path = None if o.calibration_cache_path is None else absolute(o.calibration_cache_path)
    o.progress = None if o.progress is None else callers_own(o.progress)
    o.preparation = PREPARATION
    named = _chosen_rewrites(placement.rewrites, o.target)
    o.float_forms, o.integer_forms = (
        tuple(form for form in forms if form.__name__ in named)
        for forms in (FLOAT_FORMS, (*INTEGER_FORMS, *o.target.own_forms))
    )
    request = Request(**{name: getattr(o, name) for name in Request.__dataclass_fields__ if hasattr(o, name)})
    _check_types(request)
    target_options.check_combinations(request)
    return request


def _chosen_rewrites(passed: bool | Sequence[str], target: Target) -> frozenset[str]:
    known = {rule.__name__ for forms in (FLOAT_FORMS, INTEGER_FORMS, target.own_forms) for rule in forms}
    if isinstance(passed, bool):
        return _suited_rewrites(target) if passed else frozenset()
    for name in passed:
        if name not in known:
            raise OptionError(
                f"rewrites names '{name}', which is no rewrite.{did_you_mean(str(name), known)}",
                where="rewrites",
                fix=f"True, False or some of {sorted(known)}",
            )
    return frozenset(passed)


def _suited_rewrites(target: Target) -> frozenset[str]:
    """The names of the rewrites that pay on a target."""
    plain = [rule.__name__ for rule in USUAL_FORMS]
    float_forms = plain if target.float_forms is None else target.float_forms
    integer = [rule.__name__ for rule in INTEGER_FORMS]
    own = (rule.__name__ for rule in target.own_forms)
    return frozenset({*float_forms, *own, *(integer if target.kernel_forms is None else target.kernel_forms)})


def _name_of(given: Any) -> str | None:
    """Name of a caller's object in the report."""
    return None if given is None else str(getattr(given, "__name__", type(given).__name__))


def _activation_beside(weight: Any, types: DataTypes) -> Any:
    """The type of activations where the caller says nothing; there is no int8 beside uint8 weights."""
    unsigned = weight == QuantType.QUInt8 and QuantType.QUInt8.tensor_type in types.activations
    return QuantType.QUInt8 if unsigned else _quant_type(types.activation)


def _quant_type(passed: Any) -> Any:
    """The ``QuantType`` for a raw ONNX element type, which stock accepts too; other values as they are."""
    if isinstance(passed, int) and not isinstance(passed, bool):
        return next((q for q in QuantType if q.tensor_type == passed), passed)
    return passed


def _check_kinds(quant_format: Any, activation: Any, weight: Any) -> None:
    for name, value, kind in (
        ("quant_format", quant_format, QuantFormat),
        ("activation_type", activation, QuantType),
        ("weight_type", weight, QuantType),
    ):
        if not isinstance(value, kind):
            raise OptionError(
                f"{name}={value!r} is not a {kind.__name__}",
                where=name,
                fix=f"one of {', '.join(f'{kind.__name__}.{m.name}' for m in kind)}",
            )


def _check_types(request: Request) -> None:
    activation, weight, method = request.activation_type, request.weight_type, request.calibrate_method
    if QuantType.QFLOAT8E4M3FN in (activation, weight) and getattr(method, "name", method) != "Distribution":
        raise OptionError(
            "Only Distribution calibration method is supported for float quantization.",
            where="calibrate_method",
            fix="pass calibrate_method=CalibrationMethod.Distribution",
        )
    try:
        check_static_quant_arguments(request.choices["quant_format"].value, activation, weight)
    except ValueError as error:
        raise OptionError(
            str(error), where="activation_type, weight_type", fix="leave both out, or pass weight_type=QuantType.QInt8"
        ) from error


def _stock_reason(activation: QuantType, stages: Stages, target: Target) -> str | None:
    """Reason why stock's own placement is used, None where the plan decides."""
    if not stages.placement:
        return "the placement stage is switched off"
    if activation is QuantType.QFLOAT8E4M3FN:
        return target.precisions.get("float8", "8-bit floating point is placed by ONNX Runtime's own quantizer")
    return None
