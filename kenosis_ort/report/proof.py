"""What the report reads of the fusion proof, and the proof as it is read back from JSON."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kenosis_ort.graph.operators import Is, having
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.storage.data import of_data


class KernelLike(Protocol):
    """What the report reads of one kernel of the fusion proof."""

    @property
    def node(self) -> str:
        """Name of the source node."""

    @property
    def op_type(self) -> str:
        """Operator type of the source node."""

    @property
    def kernel(self) -> str:
        """Operator that runs it in the runtime's optimized graph, e.g. ``com.microsoft.QLinearConv``."""

    @property
    def integer(self) -> bool:
        """Whether that operator works on quantized data."""

    @property
    def status(self) -> str:
        """``integer``, ``float``, ``absorbed``, ``removed`` or ``other``."""

    @property
    def absorbed(self) -> Sequence[str]:
        """Names of the nodes merged into this one, e.g. its Relu."""

    @property
    def reason(self) -> str:
        """For a float node why it runs in float."""

    @property
    def silently_quantized(self) -> bool:
        """Whether the runtime quantizes the node's float weights by itself at load."""


class FusionLike(Protocol):
    """What the report reads of the fusion proof; `kenosis_ort.verify.FusionReport` is one."""

    @property
    def kernels(self) -> Sequence[KernelLike]:
        """One entry per source compute node."""

    @property
    def runtime(self) -> str:
        """The runtime that was asked."""

    @property
    def runtime_version(self) -> str:
        """Its version."""

    @property
    def overhead(self) -> Mapping[str, int]:
        """Kernels without a source node (layout changes, Q, DQ), counted by type."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the proof as plain data; `RecordedFusion.from_dict` reads it."""


@dataclass(frozen=True)
class RecordedKernel:
    """One kernel of a fusion proof that was read back from JSON; see `KernelLike`."""

    node: str
    op_type: str
    kernel: str
    integer: bool
    status: str
    absorbed: tuple[str, ...] = ()
    reason: str = ""
    silently_quantized: bool = False


@dataclass(frozen=True)
class RecordedFusion:
    """A fusion proof that was read back from JSON; see `FusionLike`."""

    runtime_version: str
    kernels: tuple[RecordedKernel, ...]
    overhead: Mapping[str, int]
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    runtime: str = "onnxruntime"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RecordedFusion:
        """Reads what `FusionLike.to_dict` returned; all of it is kept for `to_dict`."""
        kernels = tuple(of_data(RecordedKernel, kernel) for kernel in raw["kernels"])
        runtime = str(raw.get("runtime", "onnxruntime"))
        return cls(str(raw["runtime_version"]), kernels, dict(raw["overhead"]), copy.deepcopy(dict(raw)), runtime)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that `from_dict` was given."""
        return copy.deepcopy(dict(self.raw))


def heavy_kernels(fusion: FusionLike) -> tuple[KernelLike, ...]:
    """Returns the kernels of the nodes that carry the arithmetic, Conv, Gemm and MatMul, unless computed at load."""
    return tuple(k for k in fusion.kernels if k.op_type in having(Is.HEAVY) and k.status != "removed")


def fusion_verdict(fusion: FusionLike, plan: PlacementPlan | None = None) -> str:
    """Returns the outcome of a fusion proof in one sentence, judged by the plan if there is one."""
    heavy = heavy_kernels(fusion)
    if not heavy:
        return "There is no Conv, Gemm or MatMul to run."
    integer = sum(k.integer for k in heavy)
    text = f"{integer} of {len(heavy)} Conv/Gemm/MatMul run on integer kernels"
    broken = 0 if plan is None else len(left_float(fusion, plan))
    if broken:
        return f"{text}; {broken} planned as integer run in float, see the table."
    if plan is not None and integer < len(heavy):
        return f"{text}; the others stay float as planned."
    return f"{text}."


def left_float(fusion: FusionLike, plan: PlacementPlan) -> tuple[KernelLike, ...]:
    """Returns the nodes that the plan calls integer and the runtime runs in float (empty is the goal)."""
    planned = set(plan.integer_nodes())
    running = ("float", "absorbed")
    return tuple(k for k in fusion.kernels if k.node in planned and not k.integer and k.status in running)
