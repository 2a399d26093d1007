"""Which colour a node has in the picture: what it became, and whether that was on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kenosis_ort.plan import Kind, NodeDecision
from kenosis_ort.targets.proof import KernelReport

Region = Literal["integer", "moves", "fused", "float", "protected", "other", "terminal"]


@dataclass(frozen=True)
class RegionStyle:
    """How a region is named.

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
    """Returns the region of a node: what the runtime made of it, the plan's word where the runtime was not asked."""
    kept = decision is not None and decision.kind is Kind.FLOAT and decision.rule in _PROTECTED_RULES
    if kernel is not None:
        return _of_kernel(kernel, decision, kept)
    if decision is None:
        return "other"
    if decision.kind is Kind.FLOAT:
        return "protected" if kept else "float"
    return {Kind.INTEGER: "integer", Kind.PASS_THROUGH: "moves", Kind.ABSORBED: "fused"}[decision.kind]  # type: ignore[return-value]


def _of_kernel(kernel: KernelReport, decision: NodeDecision | None, kept: bool) -> Region:
    if kernel.status == "integer":
        return "moves" if decision is not None and decision.kind is Kind.PASS_THROUGH else "integer"
    if kernel.status == "absorbed":
        return "fused"
    if kernel.status == "float":
        return "protected" if kept else "float"
    return "other"
