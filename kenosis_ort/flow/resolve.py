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
from kenosis_ort.options import EXPORT_FORMATS, KEYWORDS, UNSET, Placement, Speed, Stages, Unset
from kenosis_ort.passes.smooth import DEFAULT_ALPHA
from kenosis_ort.quantizer.stock import (
    QUANTIZABLE_OPS,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    check_installed,
    check_static_quant_arguments,
)
from kenosis_ort.recipe import resolve_recipe
from kenosis_ort.report.quantization_report import OptionChoice
from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, OPTIONAL_FORMS
from kenosis_ort.storage.writing import absolute
from kenosis_ort.targets import DataTypes, Hooks, Target, get_target
from kenosis_ort.targets.profile import HostProfile


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
    request = resolve({**file.options, **fields, **stated, "recipe": file.recipe})
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
_AS_GIVEN = (
    *("use_external_data_format", "verify", "eval_reader", "evidence", "executor", "kv_cache", "max_opset"),
    "on_failure",
)
"""Options that a request has as they are given."""


def resolve(given: Mapping[str, Any]) -> Request:
    """The resolved request.

    Args:
        given: Options of the right types by the names of `kenosis_ort.option_types.OPTIONS`, the fields of groups one
            by one; one that is missing has its default.

    Raises:
        OptionError: An option is unknown or contradicts another.
    """
    # Options in our types: target, recipe, metric, machine, bits.
    o: Any = SimpleNamespace(**{**{name: option.default for name, option in option_types.OPTIONS.items()}, **given})
    speed = Speed(**{name: getattr(o, name) for name in Speed.__dataclass_fields__})
    placement = Placement(**{name: getattr(o, name) for name in Placement.__dataclass_fields__})
    stages = placement.stages or Stages()
    options, complaints = option_types.check_extra_options(o.extra_options)
    quant_format = _quant_format(o.quant_format)
    table = get_target(o.target)
    check_installed(options)
    cooked = resolve_recipe(o.recipe)
    if options.get("SmoothQuant"):
        cooked = replace(cooked, smooth=options.get("SmoothQuantAlpha", DEFAULT_ALPHA))
    if o.accuracy_budget is not None:
        cooked = replace(cooked, mixed_precision=True, accuracy_budget=o.accuracy_budget)
    metric = None if o.metric is None else check_metric(o.metric)
    profile = target_options.profile_for(table, speed)
    types = table.data_types()
    if profile is not None and table.costs is not None:
        table = replace(table, costs=target_options.costs_for(table.costs, profile, speed))
    cooked, widths = target_options.with_bits(cooked, o.weight_bits, o.activation_bits)
    written = target_options.chosen_format(o.format, quant_format)
    # Types, scales and method: by the caller, else by the target, or as stock has them.
    stock = stages == Stages.none()
    weight_default = QuantType.QInt8 if stock else _quant_type(types.weight)
    weight, weight_choice = _choose(_quant_type(o.weight_type), weight_default, stock)
    own_scales = stages.placement and stages.weights and options.get("WeightSymmetric") is not False
    seven_bits = weight is QuantType.QInt8 and types.largest_pair is not None and not (stock or own_scales)
    reduce_value, reduce_choice = _choose(o.reduce_range, seven_bits, stock)  # own scales keep pairs from clipping
    act_default = QuantType.QInt8 if stock else _activation_beside(weight, types)
    act, act_choice = _choose(_quant_type(o.activation_type), act_default, stock)
    by_channel = not stock and types.per_channel and weight in _BY_CHANNEL
    per_channel_value, per_channel_choice = _choose(o.per_channel, by_channel, stock)
    method_default = CalibrationMethod[_METHODS[cooked.ranges]]
    method, method_choice = _choose(o.calibrate_method, CalibrationMethod.MinMax if stock else method_default, stock)
    _check_kinds(quant_format, act, weight)
    # What the target adds and refuses.
    own = {} if stock else target_options.serve(table, types, act, weight, options)
    _check_types(quant_format, act, weight, method)
    target_options.check_format(written, table, widths, per_channel=per_channel_value)
    target_options.check_widths(widths, activation=act, weight=weight, options=options)
    # Rules of kernels that do not count for this result.
    if written in EXPORT_FORMATS or not widths.are_bytes:  # what pays on a runtime is not the question
        hooks = replace(table.hooks, reclass=Hooks.reclass, reclass_integers=Hooks.reclass_integers)
        table = replace(table, hooks=hooks, head_float_share=0.0, costs=None)
    if written in EXPORT_FORMATS:  # nor are its kernels
        table = replace(table, kernel_forms=(), own_forms=())
    options = {**own, **options}
    op_types = tuple(o.op_types_to_quantize or QUANTIZABLE_OPS)
    # Combinations that no placement of ours can have.
    reason = _stock_reason(act, stages, table)
    if reason is not None and not widths.are_bytes:
        raise OptionError(
            f"fewer bits than 8 go with kenosis-ort's own placement, and {reason}",
            where="weight_bits",
            fix="leave the bits at 8, or leave out the option that dictates the placement",
        )
    if reason is not None and options.get("SmoothQuant"):
        raise OptionError(
            f"SmoothQuant goes with kenosis-ort's own placement, and {reason}",
            where="extra_options",
            fix="leave out SmoothQuant, or the option that dictates the placement",
        )
    if o.kv_cache is not None:
        target_options.check_kv_cache(o.kv_cache, written, weights_alone=bool(cooked.weight_only))
    # Who chose each option, for the report.
    chosen = {
        "quant_format": OptionChoice(quant_format, "caller"),
        "format": OptionChoice(written, "caller"),
        "activation_type": act_choice,
        "weight_type": weight_choice,
        "per_channel": per_channel_choice,
        "reduce_range": reduce_choice,
        "calibrate_method": method_choice,
        "protect_outputs": OptionChoice(placement.protect_outputs, "caller"),
        "target": OptionChoice(table.name, "caller"),
        "rewrites": OptionChoice(placement.rewrites, "caller"),
        "recipe": OptionChoice(cooked.to_dict(), "caller"),
        "stages": OptionChoice({k: getattr(stages, k) for k in stages.__dataclass_fields__}, "caller"),
    }
    chosen.update(
        {f"extra_options.{k}": OptionChoice(v, "target default" if k in own else "caller") for k, v in options.items()}
    )
    for name in ("op_types_to_quantize", "nodes_to_quantize", "nodes_to_exclude", "primary_inputs"):
        if value := getattr(o, name):
            chosen[name] = OptionChoice(tuple(value), "caller")
    if profile is not None:
        chosen["host"] = OptionChoice(
            speed.host if isinstance(speed.host, (str, os.PathLike)) else _shipped(profile, table),
            "host default" if speed.host is None else "caller",
        )
    shown = {
        **vars(o),
        **vars(speed),
        "kv_cache": None if o.kv_cache is None else os.fspath(o.kv_cache),
        "custom_op_libraries": tuple(map(str, o.custom_op_libraries)),
        "metric": _name_of(o.metric),
        "eval_reader": _name_of(o.eval_reader),
    }
    chosen.update({n: OptionChoice(shown[n], "caller") for n in _SHOWN if shown[n] != option_types.OPTIONS[n].default})
    return Request(
        output=absolute(o.model_output),
        output_name=os.fspath(o.model_output),
        op_types=op_types,
        per_channel=per_channel_value,
        reduce_range=reduce_value,
        activation_type=act,
        weight_type=weight,
        nodes_to_quantize=tuple(o.nodes_to_quantize or ()),
        nodes_to_exclude=tuple(o.nodes_to_exclude or ()),
        calibrate_method=method,
        calibration_providers=tuple(o.calibration_providers) if o.calibration_providers else None,
        extra_options=options,
        cache_path=None if o.calibration_cache_path is None else absolute(o.calibration_cache_path),
        target=table,
        protect_outputs=placement.protect_outputs,
        primary_inputs=None if placement.primary_inputs is None else tuple(placement.primary_inputs),
        custom_op_libraries=shown["custom_op_libraries"],
        progress=None if o.progress is None else callers_own(o.progress),
        stages=stages,
        rewrites=_chosen_rewrites(placement.rewrites, table),
        types=types,
        stock_reason=reason,
        choices=chosen,
        recipe=cooked,
        metric=metric,
        speed=speed,
        format=written,
        widths=widths,
        **{name: getattr(o, name) for name in _AS_GIVEN},
        complaints=complaints,
        host=profile,
    )


def _shipped(profile: HostProfile, target: Target) -> str | None:
    """The profile's name where it comes with the target, so that it can be asked for again."""
    return profile.name if profile in target.profiles else None


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
    plain = [rule.__name__ for rule in FLOAT_FORMS if rule not in OPTIONAL_FORMS]
    float_forms = plain if target.float_forms is None else target.float_forms
    integer = [rule.__name__ for rule in INTEGER_FORMS]
    own = (rule.__name__ for rule in target.own_forms)
    return frozenset({*float_forms, *own, *(integer if target.kernel_forms is None else target.kernel_forms)})


def _choose(passed: Any, default: Any, stock: bool) -> tuple[Any, OptionChoice]:
    if passed is UNSET or isinstance(passed, Unset):
        return default, OptionChoice(default, "stock default" if stock else "host default")
    return passed, OptionChoice(passed, "caller")


def _name_of(given: Any) -> str | None:
    """Name of a caller's object in the report."""
    return None if given is None else str(getattr(given, "__name__", type(given).__name__))


def _quant_format(passed: Any) -> Any:
    """The ``QuantFormat`` of that name; other values as they are."""
    return QuantFormat[passed] if isinstance(passed, str) and passed in QuantFormat.__members__ else passed


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


def _check_types(quant_format: Any, activation: Any, weight: Any, method: Any) -> None:
    float8 = QuantType.QFLOAT8E4M3FN
    if float8 in (activation, weight) and getattr(method, "name", method) != "Distribution":
        raise OptionError(
            "Only Distribution calibration method is supported for float quantization.",
            where="calibrate_method",
            fix="pass calibrate_method=CalibrationMethod.Distribution",
        )
    try:
        check_static_quant_arguments(quant_format, activation, weight)
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
