"""One frozen request from the arguments of a call and the options of a recipe file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from kenosis_ort.errors import ArgumentTypeError, did_you_mean, warn_caller
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.resolve import resolve
from kenosis_ort.flow.steps import calibration_config
from kenosis_ort.option_types import check_model, checked_options
from kenosis_ort.options import KEYWORDS, UNSET, Placement, Speed, Stages
from kenosis_ort.quantizer.stock import QuantType
from kenosis_ort.recipe_file import RecipeFile
from kenosis_ort.recipe_file import resolve as resolve_recipe

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
