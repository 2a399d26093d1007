"""The report of one quantization: frozen pure data that goes to JSON; renderers only format it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from kenosis_ort.accuracy.outputs import OutputComparison
from kenosis_ort.option_types import IN_FILE, RecipeFile, value_of
from kenosis_ort.options import OptionChoice, Stages
from kenosis_ort.passes.recipe import Recipe
from kenosis_ort.passes.runner import PassOutcome
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.report.evidence import LayerTime, ReportEvidence, fusion_verdict
from kenosis_ort.report.sections import MeasureSummary, SpeedSummary, TrustSummary
from kenosis_ort.storage.data import plain, to_data
from kenosis_ort.storage.writing import check_apart, write_text
from kenosis_ort.targets import DEFAULT_TARGET
from kenosis_ort.targets.proof import ClippingLoss, FusionReport, KernelReport, ProcessorClass

SCHEMA_VERSION = 1


HOST_CHOICES: Final = ("activation_type", "weight_type", "per_channel", "reduce_range", "host")
"""Options that this machine decides where none is given."""
_USUAL: Final[Mapping[str, Any]] = {
    "quant_format": "QDQ",
    "format": "qdq",
    "protect_outputs": "auto",
    "target": DEFAULT_TARGET,
    "rewrites": True,
    "stages": dict.fromkeys(Stages.__dataclass_fields__, True),
}


_STAYS: Final = "ttentions stay as products and Softmax"
"""What the notes say of attention layers that did not become one operator."""


@dataclass(frozen=True)
class CalibrationSummary:
    """Source of the activation ranges.

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
class QuantizationReport:
    """Result of `quantize_static`: decisions with reasons, and the kernels that the runtime uses.

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
        outputs: The graph outputs beside the float model's on calibration samples; empty if not measured.
        versions: Versions of the packages that took part.
        recipe: What was done for accuracy; None where the placement is stock's.
        passes: The accuracy passes that were tried, in order.
        speed: Speed beside the float model and what was tried for it; None if nothing was.
        trust: How far the calibration can be relied on; None if it was not assessed.
        measure: What was lost against the float model, in the unit of what the outputs are for; None if not measured.
        evidence: Graph, histograms, signal per layer and time per operator; None if they were not gathered.
        fallbacks: What was delivered in place of what was asked, and why, one sentence each; the last is of the file.
        float_because: Why the file holds the float model as it came; empty where it does not.
        host: The machine that the file is laid out for, in words; empty where that makes no difference.
        unproved: Why the target's runtime was not asked; empty where it was, or the caller switched the proof off.
        cache: Scales of an int8 cache by the names of its inputs and outputs; empty where the cache is float.
        layers: Kernel, path and time of each layer that has a kernel of its own.
        clipping: What clipped products cost each output on processors without VNNI; empty where none clip.
    """

    model_input: str
    model_output: str
    target: str
    options: Mapping[str, OptionChoice]
    plan: PlacementPlan
    fusion: FusionReport | None
    calibration: CalibrationSummary
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    size_before: int = 0
    size_after: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    outputs: tuple[OutputComparison, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    recipe: Recipe | None = None
    passes: tuple[PassOutcome, ...] = ()
    speed: SpeedSummary | None = None
    trust: TrustSummary | None = None
    measure: MeasureSummary | None = None
    evidence: ReportEvidence | None = field(default=None, repr=False)
    float_because: str = ""
    fallbacks: tuple[str, ...] = ()
    unproved: str = ""
    host: str = ""
    cache: Mapping[str, float] = field(default_factory=dict)
    layers: tuple[LayerTime, ...] = field(default=(), repr=False)
    clipping: tuple[ClippingLoss, ...] = ()

    @property
    def size_ratio(self) -> float:
        """Float size over quantized size; 0 if unknown."""
        return self.size_before / self.size_after if self.size_after else 0.0

    @property
    def size_change(self) -> str:
        """The change of the size in words, e.g. ``3.80x smaller``, ``1.22x larger``; "" if unknown."""
        ratio = self.size_ratio
        if not ratio:
            return ""
        factor = f"{max(ratio, 1 / ratio):.2f}x"
        return "the same size" if factor == "1.00x" else f"{factor} {'smaller' if ratio > 1 else 'larger'}"

    @property
    def samples_compared(self) -> str:
        """Samples that the outputs were compared on, in words."""
        return "calibration samples" if self.calibration.samples or self.calibration.tensors else "made-up samples"

    @property
    def total_seconds(self) -> float:
        """Wall time of all stages."""
        return sum(self.seconds.values())

    @property
    def is_float(self) -> bool:
        """Whether the file holds a float model: nothing could be quantized, or INT8 is worthless or slower here."""
        taken = None if self.speed is None else self.speed.taken
        return bool(self.float_because) or (taken is not None and taken.name == "float")

    def left_float(self) -> tuple[KernelReport, ...]:
        """The nodes that the plan calls integer and the runtime runs in float (empty is the goal)."""
        return () if self.fusion is None else self.fusion.avoidable(self.plan)

    @property
    def processors(self) -> tuple[ProcessorClass, ...]:
        """Results of the file on each class of x86-64 processors; empty without a proof on their runtime."""
        return () if self.fusion is None else self.fusion.processors

    def attention(self) -> str:
        """Number of attention layers that are one operator, and why others are not; "" where there are none."""
        fused = sum(node.op_type == "Attention" for node in self.plan.nodes)
        stay = [note for note in self.notes if _STAYS in note]
        if not fused:
            return " ".join(stay)
        layers = (
            "1 attention layer is one operator" if fused == 1 else f"{fused} attention layers are one operator each"
        )
        return f"{layers}. {' '.join(stay)}".rstrip()

    def int8_cache(self) -> str:
        """Form of the int8 cache in the file; "" where the cache is float, or there is none."""
        if not self.cache:
            return ""
        least, most = min(self.cache.values()), max(self.cache.values())
        return f"{len(self.cache)} inputs and outputs are int8, scales {least:.3g} to {most:.3g}, in the metadata."

    def verdict(self) -> str:
        """The outcome in one sentence."""
        if self.float_because:
            return f"Delivered: the float model as it came, because {self.float_because}."
        taken = None if self.speed is None else self.speed.taken
        if self.speed is not None and taken is not None and not taken.is_planned:
            first = self.speed.candidates[0]
            if first.status == "outrun":
                return f"Delivered: {taken.description}, the fastest form here: {taken.reason}."
            return f"Delivered: {taken.description}, because INT8 as planned is {first.reason or first.status}."
        if self.fusion is None and self.unproved:
            return f"Quantized; not proved: {self.unproved}."
        if self.fusion is None:
            return "Quantized, without a fusion proof."
        estimated = self.speed is not None and self.speed.basis == "estimated"
        besides = " That it is not slower than the float model is estimated, not measured." if estimated else ""
        return fusion_verdict(self.fusion, self.plan) + besides

    def __repr__(self) -> str:
        sizes = f"{self.size_before} -> {self.size_after} bytes"
        return f"<QuantizationReport {self.model_output!r}: {self.verdict()} {sizes}, {self.total_seconds:.2f} s>"

    def __str__(self) -> str:
        from kenosis_ort.report.text import render_report, to_text  # loads rich

        return to_text(render_report(self))

    def _repr_html_(self) -> str:
        from kenosis_ort.report.html.page import render_notebook

        return render_notebook(self)

    def to_html(self) -> str:
        """The report as one HTML page that needs no network and no other file."""
        from kenosis_ort.report.html.page import render_html

        return render_html(self)

    def recipe_file(self) -> RecipeFile:
        """Recipe file that makes the same model again from the same data: the recipe, and the options of this call.

        What this machine decided is fixed; where nothing was timed, nothing is timed the next time either.
        """
        options: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for name, (value, source) in self.options.items():
            key = name.removeprefix("extra_options.")
            if key != name:
                extra.update({key: value} if source == "caller" else {})
            elif name in IN_FILE and (source == "caller" or name in HOST_CHOICES) and plain(value) != _USUAL.get(name):
                options[name] = value_of(name, value)
        if self.recipe is None or self.recipe.speed is None:
            options["promise"] = False
        if extra:
            options["extra_options"] = extra
        return RecipeFile(self.recipe or Recipe(), options)

    def save_recipe(self, path: str | os.PathLike[str]) -> None:
        """Writes `recipe_file`, which ``quantize_static(..., recipe=path)`` reads.

        Raises:
            OutputError: The file cannot be written.
        """
        self.recipe_file().save(path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_html` to a file.

        Raises:
            OutputError: The file cannot be written, or is one of the models.
        """
        models = (("the float model", self.model_input), ("the quantized model", self.model_output))
        check_apart([("the report", Path(path))], [(role, Path(name)) for role, name in models])
        write_text(path, self.to_html(), "the report")

    def to_dict(self) -> dict[str, Any]:
        """The report as data that any JSON writer takes."""
        apart = {"options", "plan", "fusion", "recipe"}
        return {
            "schema": SCHEMA_VERSION,
            "verdict": self.verdict(),
            **{f.name: to_data(getattr(self, f.name)) for f in fields(self) if f.name not in apart},
            "options": {k: {"value": plain(value), "source": source} for k, (value, source) in self.options.items()},
            "plan": json.loads(self.plan.to_json()),
            "fusion": None if self.fusion is None else self.fusion.to_dict(),
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)
