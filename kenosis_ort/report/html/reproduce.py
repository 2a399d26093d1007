"""The call that makes the same model again, as a script.

Which colour a node has in the picture: what it became, and whether that was on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final, Literal

import numpy as np

from kenosis_ort.options import Stages
from kenosis_ort.passes.contract import Pass
from kenosis_ort.plan import Kind, NodeDecision
from kenosis_ort.recipe import RECIPES, Recipe, SpeedChoice
from kenosis_ort.report.model import QuantizationReport
from kenosis_ort.targets.proof import KernelReport

_NOT_A_PATH: Final = ("model '", "the given ModelProto")
"""How messages call a model that came in memory."""
_GIVEN: Final[Mapping[str, str]] = {
    "metric": "the same measure",
    "eval_reader": "the same held-out data, in the same order",
}


def python_call(report: QuantizationReport) -> str:
    """A script that makes the same model; what it cannot hold, as the reader, is the caller's to fill in."""
    script = _Script()
    names = {"reader": "the same calibration data, in the same order"}
    model = repr(report.model_input)
    if report.model_input.startswith(_NOT_A_PATH):
        model, names["model"] = "model", "the same model"
    file = report.recipe_file()
    spelled = {name: script.literal(value) for name, value in file.options.items()}
    for name, what in _GIVEN.items():
        if name in report.options:
            spelled[name], names[name] = name, what
    cache = report.options.get("calibration_cache_path")
    if cache is not None:
        spelled["calibration_cache_path"] = repr(str(cache.value))
    spelled["recipe"] = script.recipe(file.recipe)
    arguments = [model, repr(report.model_output), "reader", *(f"{name}={text}" for name, text in spelled.items())]
    return "\n".join(
        [
            "import kenosis_ort",
            *sorted(script.imports),
            "",
            *(f"{name} = ...  # {what}" for name, what in names.items()),
            "report = kenosis_ort.quantize_static(",
            *(f"    {argument}," for argument in arguments),
            ")",
        ]
    )


class _Script:
    """Writes values as Python and gathers the imports that they need."""

    def __init__(self) -> None:
        self.imports: set[str] = set()

    def literal(self, value: Any) -> str:
        if isinstance(value, Enum):
            self.imports.add(f"from onnxruntime.quantization import {type(value).__name__}")
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, Stages):
            off = [f"{f.name}=False" for f in fields(value) if not getattr(value, f.name)]
            return f"kenosis_ort.Stages({', '.join(off)})"
        if isinstance(value, (SpeedChoice, Pass)):
            self.imports.add(f"from {type(value).__module__} import {type(value).__name__}")
            given = [f"{f.name}={self.literal(getattr(value, f.name))}" for f in fields(value)]
            return f"{type(value).__name__}({', '.join(given)})"
        if isinstance(value, np.ndarray):
            self.imports.add("import numpy")
            return f"numpy.array({value.tolist()!r}, numpy.{value.dtype})"
        if isinstance(value, np.generic):
            return repr(value.item())
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key!r}: {self.literal(entry)}" for key, entry in value.items()) + "}"
        if isinstance(value, (set, frozenset)):
            return "{" + ", ".join(sorted(map(self.literal, value))) + "}"
        if isinstance(value, tuple):
            return "(" + "".join(f"{self.literal(entry)}, " for entry in value).rstrip() + ")"
        return "[" + ", ".join(map(self.literal, value)) + "]" if isinstance(value, list) else repr(value)

    def recipe(self, recipe: Recipe) -> str:
        if RECIPES.get(recipe.name) == recipe:
            return repr(recipe.name)
        usual = Recipe()
        changed = {f.name: getattr(recipe, f.name) for f in fields(Recipe)}
        given = [f"{k}={self.literal(v)}" for k, v in changed.items() if v != getattr(usual, k)]
        return f"kenosis_ort.Recipe({', '.join(given)})"


Region = Literal["integer", "moves", "fused", "float", "protected", "other", "terminal"]


@dataclass(frozen=True)
class RegionStyle:
    """Names of a region.

    Attributes:
        label: In the legend and in tables.
        short: On a node.
        meaning: One sentence for the legend.
    """

    label: str
    short: str
    meaning: str


REGIONS: Final[dict[Region, RegionStyle]] = {
    "integer": RegionStyle("Integer", "int8", "Runs on an integer kernel."),
    "moves": RegionStyle("Pass-through", "moves int8", "Moves quantized bytes; same scale in and out."),
    "fused": RegionStyle("Fused", "fused", "Gone: merged into another node's kernel."),
    "float": RegionStyle("Float", "float", "Runs in float: no integer kernel, or it would not pay."),
    "protected": RegionStyle("Protected", "kept float", "Kept float on purpose, for accuracy or at the caller's wish."),
    "other": RegionStyle("Other", "no data", "Shapes, indices and control flow, or computed at load."),
    "terminal": RegionStyle("Input or output", "", "Where data enters and leaves."),
}

_PROTECTED_RULES: Final = frozenset(
    {"caller-excluded", "caller-op-types", "protected-input", "verified-float", "output-protection"}
)


def region_of(decision: NodeDecision | None, kernel: KernelReport | None) -> Region:
    """Region of a node by its kernel in the runtime, or by the plan where the runtime was not asked."""
    protected = decision is not None and decision.kind is Kind.FLOAT and decision.rule in _PROTECTED_RULES
    if kernel is not None:
        return _of_kernel(kernel, decision, protected)
    if decision is None:
        return "other"
    if decision.kind is Kind.FLOAT:
        return "protected" if protected else "float"
    return {Kind.INTEGER: "integer", Kind.PASS_THROUGH: "moves", Kind.ABSORBED: "fused"}[decision.kind]  # type: ignore[return-value]


def _of_kernel(kernel: KernelReport, decision: NodeDecision | None, protected: bool) -> Region:
    if kernel.status == "integer":
        return "moves" if decision is not None and decision.kind is Kind.PASS_THROUGH else "integer"
    if kernel.status == "absorbed":
        return "fused"
    if kernel.status == "float":
        return "protected" if protected else "float"
    return "other"
