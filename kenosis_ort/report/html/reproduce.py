"""The recipe as TOML and the call that makes the same model again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, Final

from kenosis_ort.recipe import RECIPES, Recipe
from kenosis_ort.report.model import OptionChoice, QuantizationReport
from kenosis_ort.storage.json_values import plain

_ENUMS: Final = {
    "quant_format": "QuantFormat",
    "activation_type": "QuantType",
    "weight_type": "QuantType",
    "calibrate_method": "CalibrationMethod",
}
_DEFAULTS: Final[Mapping[str, Any]] = {
    "quant_format": "QDQ",
    "format": "qdq",
    "protect_outputs": "auto",
    "target": "ort-cpu",
    "rewrites": True,
}
_SPOKEN_ELSEWHERE: Final = frozenset({"recipe", "stages"})


def python_call(report: QuantizationReport) -> str:
    """Returns a script that quantizes the model as it was quantized; the reader is the caller's to fill in."""
    said = {
        name: choice
        for name, choice in report.options.items()
        if choice.source == "caller" and name not in _SPOKEN_ELSEWHERE and plain(choice.value) != _DEFAULTS.get(name)
    }
    arguments = [f"    {report.model_input!r},", f"    {report.model_output!r},", "    reader,"]
    arguments += [f"    {name}={_literal(name, choice)}," for name, choice in said.items()]
    if report.recipe is not None:
        arguments.append(f"    recipe={_recipe(report.recipe)},")
    stages = _stages(report.options.get("stages"))
    if stages:
        arguments.append(f"    stages={stages},")
    enums = sorted({_ENUMS[name] for name in said if name in _ENUMS})
    lines = ["import kenosis_ort"]
    if enums:
        lines.append(f"from onnxruntime.quantization import {', '.join(enums)}")
    lines += [
        "",
        "reader = ...  # the same calibration data, in the same order",
        "report = kenosis_ort.quantize_static(",
        *arguments,
        ")",
    ]
    return "\n".join(lines)


def recipe_toml(report: QuantizationReport) -> str:
    """Returns the recipe as TOML, empty if there is none."""
    return "" if report.recipe is None else report.recipe.to_toml().strip()


def _literal(name: str, choice: OptionChoice) -> str:
    value = choice.value
    if name in _ENUMS and isinstance(plain(value), str):
        return f"{_ENUMS[name]}.{plain(value)}"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    return repr(plain(value))


def _recipe(recipe: Recipe) -> str:
    if RECIPES.get(recipe.name) == recipe:
        return repr(recipe.name)
    default = Recipe()
    changed = [f.name for f in fields(Recipe) if getattr(recipe, f.name) != getattr(default, f.name)]
    return f"kenosis_ort.Recipe({', '.join(f'{name}={getattr(recipe, name)!r}' for name in changed)})"


def _stages(choice: OptionChoice | None) -> str:
    """Returns the stages that were switched off as a call, empty if none were."""
    if choice is None:
        return ""
    value = choice.value
    switches = value if isinstance(value, Mapping) else vars(value) if hasattr(value, "__dict__") else {}
    off = [name for name, on in switches.items() if on is False]
    return f"kenosis_ort.Stages({', '.join(f'{name}=False' for name in off)})" if off else ""
