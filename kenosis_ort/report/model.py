"""The report of one quantization: frozen pure data that round-trips JSON; renderers only format it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

from kenosis_ort.plan import PlacementPlan

SCHEMA_VERSION = 1
HEAVY_OP_TYPES = frozenset({"Conv", "Gemm", "MatMul"})

OptionSource = Literal["caller", "host default", "stock default"]


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
    def runtime_version(self) -> str:
        """Version of the ONNX Runtime that was asked."""

    @property
    def overhead(self) -> Mapping[str, int]:
        """Kernels without a source node (layout changes, Q, DQ), counted by type."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the proof as plain data; `RecordedFusion.from_dict` reads it."""


class OptionChoice(NamedTuple):
    """An option's value and who chose it."""

    value: Any
    source: OptionSource


@dataclass(frozen=True)
class CalibrationSummary:
    """How the activation ranges were obtained.

    Attributes:
        method: ``minmax``, ``entropy``, ``percentile`` or ``distribution``.
        samples: Number of feeds that were run (0 if the ranges came from a cache).
        tensors: Number of tensors with statistics.
        seconds: Wall time.
    """

    method: str
    samples: int
    tensors: int
    seconds: float


@dataclass(frozen=True)
class OutputQuality:
    """How close one graph output is to the float model's on calibration samples.

    Attributes:
        name: Name of the graph output.
        sqnr_db: Signal power over quantization noise power in dB; ``inf`` for identical outputs.
    """

    name: str
    sqnr_db: float


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

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RecordedFusion:
        """Reads what `FusionLike.to_dict` returned; all of it is kept for `to_dict`."""
        kernels = tuple(
            RecordedKernel(
                node=k["node"],
                op_type=k["op_type"],
                kernel=k["kernel"],
                integer=k["integer"],
                status=k["status"],
                absorbed=tuple(k["absorbed"]),
                reason=k["reason"],
                silently_quantized=k["silently_quantized"],
            )
            for k in raw["kernels"]
        )
        return cls(str(raw["runtime_version"]), kernels, dict(raw["overhead"]), copy.deepcopy(dict(raw)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that `from_dict` was given."""
        return copy.deepcopy(dict(self.raw))


def heavy_kernels(fusion: FusionLike) -> tuple[KernelLike, ...]:
    """Returns the kernels of the nodes that carry the arithmetic, Conv, Gemm and MatMul, unless computed at load."""
    return tuple(k for k in fusion.kernels if k.op_type in HEAVY_OP_TYPES and k.status != "removed")


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


@dataclass(frozen=True)
class QuantizationReport:
    """What `quantize_static` did, why, and what the runtime made of it.

    Attributes:
        model_input: The model as the caller named it; ``<ModelProto>`` for one in memory.
        model_output: The file that was written.
        target: Name of the runtime table, e.g. ``"ort-cpu"``.
        options: Every option with its value and who chose it.
        plan: The placement plan that was performed.
        fusion: The fusion proof; None when verification was switched off.
        calibration: How the ranges were obtained.
        notes: What was done on the way and is worth knowing (opset raised, nodes folded, ...).
        warnings: What the caller should look at.
        size_before: Bytes of the float model, external data included.
        size_after: Bytes of the quantized model, external data included.
        seconds: Wall time per stage, in order.
        outputs: Signal-to-noise ratio per graph output on calibration samples; empty if not measured.
        versions: Versions of the packages that took part.
    """

    model_input: str
    model_output: str
    target: str
    options: Mapping[str, OptionChoice]
    plan: PlacementPlan
    fusion: FusionLike | None
    calibration: CalibrationSummary
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    size_before: int = 0
    size_after: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    outputs: tuple[OutputQuality, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_ratio(self) -> float:
        """Float size over quantized size; 0 if unknown."""
        return self.size_before / self.size_after if self.size_after else 0.0

    @property
    def total_seconds(self) -> float:
        """Wall time of all stages."""
        return sum(self.seconds.values())

    def left_float(self) -> tuple[KernelLike, ...]:
        """Returns the nodes that the plan calls integer and the runtime runs in float (empty is the goal)."""
        return () if self.fusion is None else left_float(self.fusion, self.plan)

    def verdict(self) -> str:
        """Returns the outcome in one sentence."""
        if self.fusion is None:
            return "Quantized; the fusion proof was switched off."
        return fusion_verdict(self.fusion, self.plan)

    def __repr__(self) -> str:
        sizes = f"{self.size_before} -> {self.size_after} bytes"
        return f"<QuantizationReport {self.model_output!r}: {self.verdict()} {sizes}, {self.total_seconds:.2f} s>"

    def __str__(self) -> str:
        from kenosis_ort.report.text import render_report, to_text  # the renderer knows the data, not the reverse

        return to_text(render_report(self))

    def to_dict(self, *, include_plan: bool = True) -> dict[str, Any]:
        """Returns the report as data that any JSON writer takes.

        Args:
            include_plan: Whether the placement plan (one entry per edge, the bulk of the data) goes in too.
        """
        return {
            "schema": SCHEMA_VERSION,
            "verdict": self.verdict(),
            "model_input": self.model_input,
            "model_output": self.model_output,
            "target": self.target,
            "options": {k: {"value": _plain(value), "source": source} for k, (value, source) in self.options.items()},
            "plan": json.loads(self.plan.to_json()) if include_plan else None,
            "fusion": None if self.fusion is None else self.fusion.to_dict(),
            "calibration": vars(self.calibration).copy(),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "size_before": self.size_before,
            "size_after": self.size_after,
            "seconds": dict(self.seconds),
            "outputs": [{"name": o.name, "sqnr_db": _finite(o.sqnr_db)} for o in self.outputs],
            "versions": dict(self.versions),
        }

    def to_json(self, *, include_plan: bool = True) -> str:
        """Returns `to_dict` as JSON text."""
        return json.dumps(self.to_dict(include_plan=include_plan), indent=1, allow_nan=False)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> QuantizationReport:
        """Reads what `to_dict` returned. Options come back as plain data, the fusion proof as `RecordedFusion`.

        Raises:
            ValueError: Written by another schema version.
        """
        if raw.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"quantization report of schema {raw.get('schema')}, this version reads {SCHEMA_VERSION}")
        plan = raw["plan"]
        fusion = raw["fusion"]
        return cls(
            model_input=raw["model_input"],
            model_output=raw["model_output"],
            target=raw["target"],
            options={k: OptionChoice(o["value"], o["source"]) for k, o in raw["options"].items()},
            plan=PlacementPlan(target=raw["target"]) if plan is None else PlacementPlan.from_json(json.dumps(plan)),
            fusion=None if fusion is None else RecordedFusion.from_dict(fusion),
            calibration=CalibrationSummary(**raw["calibration"]),
            notes=tuple(raw["notes"]),
            warnings=tuple(raw["warnings"]),
            size_before=raw["size_before"],
            size_after=raw["size_after"],
            seconds=dict(raw["seconds"]),
            outputs=tuple(OutputQuality(o["name"], float(o["sqnr_db"])) for o in raw["outputs"]),
            versions=dict(raw["versions"]),
        )

    @classmethod
    def from_json(cls, text: str) -> QuantizationReport:
        """Reads what `to_json` returned."""
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not a quantization report: the JSON text does not hold an object")
        return cls.from_dict(raw)


def _finite(number: float) -> float | str:
    """Returns ``number``, or its name where JSON has no such number; ``float()`` reads both."""
    return number if abs(number) < float("inf") else str(number)


def _plain(value: object) -> Any:
    """Returns an option's value as JSON data; objects without a plain form by their text."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(_plain(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(v) for v in value), key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return type(value).__name__ if callable(value) else str(value)
