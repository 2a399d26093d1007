"""The table of options of `kenosis_ort.quantize_static`: type and range, and how files and the shell spell them.

What a name means (a node, a target, a rewrite) is not decided here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Final, get_args

import onnx

from kenosis_ort.checks import (
    Check,
    choice,
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
from kenosis_ort.options import FIELDS, UNSET, Evidence, Failure, Format, Placement, Speed
from kenosis_ort.quantizer.stock import CalibrationMethod, QuantFormat, QuantType
from kenosis_ort.recipe import Recipe
from kenosis_ort.targets import DEFAULT_TARGET


@dataclass(frozen=True)
class Option:
    """One option of `kenosis_ort.quantize_static`.

    Attributes:
        check: The value in Python's own types, or an error that names the option; not asked about `UNSET`.
        default: What holds where nobody gives it; `UNSET` where target and machine decide.
        in_file: A recipe file may hold it.
        words: Its values by their words in files and on the command line; empty where they stand for themselves.
    """

    check: Check
    default: Any = None
    in_file: bool = True
    words: Mapping[str, Enum] = field(default_factory=dict)


def _provider(name: str, value: Any) -> Any:
    """An execution provider: its name, or a pair of name and options."""
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
    """A source of feeds; what it yields is checked when it is read."""
    iterated = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    if callable(getattr(value, "get_next", None)) or iterated:
        return value
    raise wrong_type(name, value, "a CalibrationDataReader, or an iterable of feeds")


def _metric(name: str, value: Any) -> Any:
    """A callable that may be a metric; its arguments are checked later."""
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
    """A copy of ``extra_options`` without its unknown keys, and a warning about each of those.

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


def as_given(_: str, value: Any) -> Any:
    """The value as it is: what it may be is told where data types, formats, methods and targets are known."""
    return value


TYPES: Final[Mapping[str, Enum]] = {kind.name.removeprefix("Q").lower(): kind for kind in QuantType}
"""Words for data types: ``uint8`` for ``QuantType.QUInt8``."""
_NAMES: Final = or_none(several)
_WIDTH: Final = Option(or_none(partial(whole, least=2, most=8)))
OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(
    {
        # stock's
        "model_output": Option(path, in_file=False),
        "quant_format": Option(as_given, QuantFormat.QDQ, words={kind.name.lower(): kind for kind in QuantFormat}),
        "op_types_to_quantize": Option(_NAMES),
        "per_channel": Option(flag, UNSET),
        "reduce_range": Option(flag, UNSET),
        "activation_type": Option(as_given, UNSET, words=TYPES),
        "weight_type": Option(as_given, UNSET, words=TYPES),
        "nodes_to_quantize": Option(_NAMES),
        "nodes_to_exclude": Option(_NAMES),
        "use_external_data_format": Option(flag, False),
        "calibrate_method": Option(as_given, UNSET, words={kind.name.lower(): kind for kind in CalibrationMethod}),
        "calibration_providers": Option(or_none(partial(several, each=_provider, what="execution providers"))),
        "extra_options": Option(or_none(_extra_options)),
        "calibration_cache_path": Option(or_none(path), in_file=False),
        # ours
        "recipe": Option(_recipe, "fast", in_file=False),
        "accuracy_budget": Option(or_none(partial(real, least=0, most=1)), in_file=False),
        "metric": Option(or_none(_metric), in_file=False),
        "eval_reader": Option(or_none(_reader), in_file=False),
        "target": Option(as_given, DEFAULT_TARGET),
        "format": Option(or_none(partial(choice, among=get_args(Format)))),
        "speed": Option(or_none(partial(instance, of=Speed, what="a kenosis_ort.Speed")), in_file=False),
        "placement": Option(or_none(partial(instance, of=Placement, what="a kenosis_ort.Placement")), in_file=False),
        "custom_op_libraries": Option(partial(several, each=path, what="paths"), (), in_file=False),  # they run code
        "progress": Option(or_none(function), in_file=False),
        # further keywords
        "verify": Option(flag, True),
        "evidence": Option(partial(choice, among=get_args(Evidence)), "light", in_file=False),
        "executor": Option(lambda _, value: as_cluster(value), in_file=False),
        "kv_cache": Option(or_none(path)),
        "on_failure": Option(partial(choice, among=get_args(Failure)), "error"),
        "weight_bits": _WIDTH,
        "activation_bits": _WIDTH,
        "max_opset": Option(or_none(partial(whole, least=13))),
        **{name: Option(check, getattr(Placement, name, getattr(Speed, name, None))) for name, check in FIELDS.items()},
    }
)
"""Options of `kenosis_ort.quantize_static` by name: all but the model and the reader."""
IN_FILE: Final = tuple(sorted(name for name, option in OPTIONS.items() if option.in_file))
"""Names of the options that a recipe file may hold; the others stand elsewhere in it, or belong to one run."""


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


def checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `kenosis_ort.quantize_static` in Python's own types, without those that are `UNSET`.

    Raises:
        OptionError: One is of the wrong type (then also a TypeError) or out of range.
    """
    return {name: OPTIONS[name].check(name, value) for name, value in given.items() if value is not UNSET}
