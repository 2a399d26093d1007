"""The type and range of every option of `kenosis_ort.quantize_static`, checked before anything is read.

What a name means (a node, a target, a rewrite) is not told here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, get_args

import onnx

from kenosis_ort.checks import (
    MOST_THREADS,
    Check,
    choice,
    either,
    flag,
    function,
    instance,
    mapping,
    or_none,
    path,
    real,
    several,
    whole,
    word,
    wrong_type,
)
from kenosis_ort.cluster.client import as_cluster
from kenosis_ort.errors import ArgumentTypeError, did_you_mean, unknown_name
from kenosis_ort.options import UNSET, Evidence, Failure, Format, OutputPolicy, Placement, Speed, Stages, Tuning, host
from kenosis_ort.recipe import Recipe


def or_unset(check: Check) -> Check:
    """Returns a check that lets `kenosis_ort.options.UNSET` pass."""
    return lambda name, value: value if value is UNSET else check(name, value)


def _provider(name: str, value: Any) -> Any:
    """Returns an execution provider: its name, or a pair of name and options."""
    named = isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[1], Mapping)
    if isinstance(value[0] if named else value, str):
        return value
    raise wrong_type(name, value, "the name of an execution provider, or a pair of it and a dictionary of options")


def _recipe(name: str, value: Any) -> Any:
    if isinstance(value, Recipe):
        return value
    if isinstance(value, (str, os.PathLike)):
        return path(name, value)
    raise wrong_type(name, value, "a recipe's name, a Recipe, or the path of a .toml file")


def _reader(name: str, value: Any) -> Any:
    """Returns a source of feeds; what it yields is checked when it is read."""
    iterated = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    if callable(getattr(value, "get_next", None)) or iterated:
        return value
    raise wrong_type(name, value, "a CalibrationDataReader, or an iterable of feeds")


def _metric(name: str, value: Any) -> Any:
    """Returns what may be a metric; its arguments are looked at later."""
    if callable(value) or hasattr(value, "update"):
        return value
    raise wrong_type(name, value, "a function, or an object with update(), compute() and reset()")


_FLAGS: Final = (
    *("ActivationSymmetric", "ActivationRestrictedAsymmetric", "AddQDQPairToWeight", "CalibMovingAverage"),
    *("CalibTensorRangeSymmetric", "DedicatedQDQPair", "EnableSubgraph", "ForceQuantizeNoInputCheck"),
    *("MatMulConstBOnly", "QDQDisableWeightAdjustForInt32Bias", "QDQKeepRemovableActivations", "QuantizeBias"),
    *("SmoothQuant", "SmoothQuantFolding", "UseQDQContribOps", "WeightSymmetric", "extra.Sigmoid.nnapi"),
)
EXTRA_OPTION_CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        **dict.fromkeys(_FLAGS, flag),
        "BlockSize": whole,
        "CalibMaxIntermediateOutputs": whole,
        "CalibMovingAverageConstant": partial(real, least=0, most=1),
        "CalibPercentile": partial(real, least=0, most=100),
        "CalibStridedMinMax": whole,
        "DefaultTensorType": whole,
        "MinimumRealRange": partial(real, least=0),
        "OpTypesToExcludeOutputQuantization": several,
        "QDQOpTypePerChannelSupportToAxis": partial(mapping, each=partial(whole, least=-16)),
        "SmoothQuantAlpha": partial(real, least=0, most=1),
        "TensorQuantOverrides": mapping,
        "scenario": word,
    }
)
"""Every key that stock's quantizer reads from ``extra_options`` (1.31) with its check; None leaves any of them open."""


def check_extra_options(extra_options: Mapping[str, Any] | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a copy of ``extra_options`` without its unknown keys, and a warning about each of those.

    Raises:
        OptionError: An unknown key within `strict_names`.
    """
    options = dict(extra_options or {})
    complaints = [
        unknown_name(
            f"unknown extra_options key '{key}'.{did_you_mean(str(key), EXTRA_OPTION_CHECKS)}",
            where="extra_options",
            fix="remove it or correct its spelling.",
        )
        for key in options
        if key not in EXTRA_OPTION_CHECKS
    ]
    return {k: v for k, v in options.items() if k in EXTRA_OPTION_CHECKS}, tuple(complaints)


def _extra_options(name: str, value: Any) -> dict[str, Any]:
    found = {}
    for key, entry in mapping(name, value).items():
        check = EXTRA_OPTION_CHECKS.get(key)
        if check is None or (entry is None and check is flag):
            found[key] = entry  # None is stock's False
        elif entry is not None:
            found[key] = check(f"{name}[{key!r}]", entry)
    return found


OPTION_CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "model_output": path,
        "op_types_to_quantize": or_none(several),
        "per_channel": or_unset(flag),
        "reduce_range": or_unset(flag),
        "nodes_to_quantize": or_none(several),
        "nodes_to_exclude": or_none(several),
        "use_external_data_format": or_unset(flag),
        "calibration_providers": or_none(partial(several, each=_provider, what="execution providers")),
        "extra_options": or_none(_extra_options),
        "calibration_cache_path": or_none(path),
        "format": or_none(partial(choice, among=get_args(Format))),
        **dict.fromkeys(("weight_bits", "activation_bits"), or_none(partial(whole, least=2, most=8))),
        "protect_outputs": or_unset(partial(choice, among=get_args(OutputPolicy))),
        "primary_inputs": or_unset(or_none(several)),
        "custom_op_libraries": or_unset(partial(several, each=path, what="paths")),
        "progress": or_none(function),
        "verify": or_unset(flag),
        "stages": or_unset(or_none(partial(instance, of=Stages, what="a kenosis_ort.Stages"))),
        "rewrites": or_unset(either(flag, several)),
        "recipe": _recipe,
        "metric": or_none(_metric),
        "eval_reader": or_none(_reader),
        "accuracy_budget": or_none(partial(real, least=0, most=1)),
        "speed": or_none(partial(instance, of=Speed, what="a kenosis_ort.Speed")),
        "placement": or_none(partial(instance, of=Placement, what="a kenosis_ort.Placement")),
        "tune": or_unset(partial(choice, among=get_args(Tuning))),
        "threads": or_unset(partial(whole, most=MOST_THREADS)),
        "promise": or_unset(flag),
        "host": or_unset(host),
        "executor": lambda _, value: as_cluster(value),
        "sequence_lengths": or_unset(partial(several, each=partial(whole, least=1), what="whole numbers")),
        "max_opset": or_unset(or_none(partial(whole, least=13))),
        "kv_cache": or_none(path),
        "evidence": partial(choice, among=get_args(Evidence)),
        "on_failure": partial(choice, among=get_args(Failure)),
    }
)
"""Checks of `kenosis_ort.quantize_static`'s options, but for data types, format, method and target,
which are checked where those are known."""


def check_model(value: Any) -> None:
    """Checks that something can be a model at all.

    Raises:
        ArgumentTypeError: It is neither a path nor a ModelProto.
    """
    if isinstance(value, onnx.ModelProto):
        return
    if not isinstance(value, (str, os.PathLike)):
        kind = type(value).__name__
        raise ArgumentTypeError(
            f"the model must be a path or an onnx.ModelProto, not {kind}", where="model_input", fix="pass one of them"
        )
    path("model_input", value)


def checked_options(said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of `kenosis_ort.quantize_static` in Python's own types.

    Raises:
        OptionError: One is of the wrong type (then also a TypeError) or out of range.
    """
    return {name: OPTION_CHECKS[name](name, value) if name in OPTION_CHECKS else value for name, value in said.items()}
