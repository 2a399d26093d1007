"""Numbers as people read them, and the regions of nodes, each with a colour: what it became, whether on purpose."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kenosis_ort.plan import Kind, NodeDecision
from kenosis_ort.targets.proof import KernelReport

Region = Literal["integer", "moves", "fused", "float", "protected", "other", "terminal"]


@dataclass(frozen=True)
class RegionStyle:
    """Names of a region.

    Attributes:
        label: In the legend and in tables.
        meaning: One sentence for the legend.
    """

    label: str
    meaning: str


REGIONS: Final[dict[Region, RegionStyle]] = {
    "integer": RegionStyle("Integer", "Runs on an integer kernel."),
    "moves": RegionStyle("Pass-through", "Moves quantized bytes; same scale in and out."),
    "fused": RegionStyle("Fused", "Gone: merged into another node's kernel."),
    "float": RegionStyle("Float", "Runs in float: no integer kernel, or it would not pay."),
    "protected": RegionStyle("Protected", "Kept float on purpose, for accuracy or at the caller's wish."),
    "other": RegionStyle("Other", "Shapes, indices and control flow, or computed at load."),
    "terminal": RegionStyle("Input or output", "Where data enters and leaves."),
}


_PROTECTED_RULES: Final = frozenset(
    {"caller-excluded", "caller-op-types", "protected-input", "verified-float", "output-protection"}
)


_BY_KIND: Final[Mapping[Kind, Region]] = {Kind.INTEGER: "integer", Kind.PASS_THROUGH: "moves", Kind.ABSORBED: "fused"}


def region_of(decision: NodeDecision | None, kernel: KernelReport | None) -> Region:
    """Region of a node by its kernel in the runtime, or by the plan where the runtime was not asked."""
    kind = None if decision is None else decision.kind
    protected = decision is not None and kind is Kind.FLOAT and decision.rule in _PROTECTED_RULES
    in_float: Region = "protected" if protected else "float"
    if kernel is None:
        return "other" if kind is None else _BY_KIND.get(kind, in_float)
    if kernel.status == "integer":
        return "moves" if kind is Kind.PASS_THROUGH else "integer"
    return "fused" if kernel.status == "absorbed" else in_float if kernel.status == "float" else "other"


def number(value: float | None) -> str:
    """A number with three digits, e.g. ``0.00123``, ``12.3``, ``4.57e+08``."""
    if value is None:
        return "–"
    if math.isnan(value) or math.isinf(value):
        return {"inf": "∞", "-inf": "−∞"}.get(str(value), "not a number")
    if value == 0:
        return "0"
    size = abs(value)
    text = f"{value:.3g}" if size < 1e-4 or size >= 1e6 else f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
    return text.replace("-", "−")


def decibels(value: float | None) -> str:
    """A signal-to-noise ratio, e.g. ``31.2 dB``."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "exact" if value > 0 else "no signal"
    return f"{value:.1f} dB".replace("-", "−")


def milliseconds(value: float | None) -> str:
    """A time, e.g. ``12.3 ms`` or ``8.1 µs``."""
    if value is None:
        return "–"
    return f"{number(value * 1e3)} µs" if value < 0.1 else f"{number(value)} ms"


def factor(value: float | None) -> str:
    """A ratio, e.g. ``1.83×``."""
    return "–" if value is None else f"{value:.2f}×"


def percent(value: float | None) -> str:
    """A share, e.g. ``−12.3 %``."""
    return "–" if value is None else f"{100 * value:+.1f} %".replace("-", "−")
