"""From the arguments of a call, and what a recipe file says beside them, to one frozen request."""

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

_SPEED: Final[Mapping[str, str]] = {
    "tune": "tune",
    "threads": "threads",
    "promise": "promise",
    "host": "host",
    "sequence_lengths": "sequence_lengths",
}
"""Fields of `Speed` by their keywords of `quantize_static`."""
_PLACEMENT: Final[Mapping[str, str]] = {name: name for name in Placement.__dataclass_fields__}
"""Those of `Placement`."""


def request_of(called: Mapping[str, Any], signature: inspect.Signature) -> Request:
    """Returns the request for the arguments of a call, all of them checked as far as that takes no model.

    Args:
        called: The arguments by parameter; keywords that the signature leaves open stand under ``further``.
        signature: That of ``quantize_static``.

    Raises:
        KenosisError: An argument has the wrong type, is unknown, or contradicts another.
    """
    check_model(called["model_input"])
    usual = {**{name: p.default for name, p in signature.parameters.items()}, **KEYWORDS}
    for name in called["further"]:
        if name not in KEYWORDS:
            raise ArgumentTypeError(
                f"quantize_static has no parameter '{name}'.{did_you_mean(name, usual)}",
                where=name,
                fix=f"one of its own, or of {', '.join(KEYWORDS)}",
            )
    apart = ("model_input", "calibration_data_reader", "further")
    said = {**{k: v for k, v in called.items() if k not in apart}, **KEYWORDS, **called["further"]}
    whole = said["recipe"] if isinstance(said["recipe"], RecipeFile) else None
    if isinstance(said["quant_format"], QuantType):
        warn_caller(
            f"quant_format={said['quant_format']} is no QuantFormat and is ignored, as by stock ONNX Runtime. "
            "Fix: leave it out, or pass QuantFormat.QDQ; a type of data is weight_type or activation_type."
        )
        said["quant_format"] = UNSET
    given = checked_options({**said, "recipe": "fast"} if whole is not None else said)
    file = resolve_recipe(whole or given["recipe"])
    said_alone = {name: value for name, value in given.items() if value is not UNSET and value != usual[name]}
    # What the call says goes before what the file says, a keyword before the field of a group.
    speed, placement = given.pop("speed") or Speed(), given.pop("placement") or Placement()
    speed = _grouped(speed, _SPEED, file.options, said_alone)
    placement = _grouped(placement, _PLACEMENT, file.options, said_alone)
    rest = {name: value for name, value in given.items() if name not in (*_SPEED, *_PLACEMENT)}
    held = {name: file.options[name] for name in rest if name in file.options and name not in said_alone}
    chosen = {name: value for name, value in {**rest, **held}.items() if value is not UNSET}
    request = resolve(
        **{**chosen, "recipe": file.recipe},
        **{name: getattr(placement, name) for name in _PLACEMENT if name != "stages"},
        stages=placement.stages or Stages(),
        speed=speed,
    )
    calibration_config(request)  # raises where the method or its settings are wrong
    return request


def _grouped(group: G, keywords: Mapping[str, str], held: Mapping[str, Any], said: Mapping[str, Any]) -> G:
    """Returns a group of options with what a recipe file holds and what keywords say.

    Args:
        group: As the call gives it.
        keywords: The fields by keyword.
        held: Options of the file.
        said: What the call says, by keyword.
    """
    found = {}
    for keyword, name in keywords.items():
        if keyword in said:
            found[name] = said[keyword]
        elif keyword in held and name not in group.stated:
            found[name] = held[keyword]
    return replace(group, **found)
