"""The facts of one quantization: frozen pure data that goes to JSON, and knows nothing of how it is drawn.

Some parts are there only where the step was made: speed, trust in the calibration, loss by a measure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from kenosis_ort.accuracy.measures import Measured
from kenosis_ort.accuracy.outputs import OutputComparison
from kenosis_ort.calibration.trust_summary import TrustSummary
from kenosis_ort.options import OptionChoice
from kenosis_ort.passes.journal import PassOutcome
from kenosis_ort.passes.recipe import Recipe
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.report.evidence import LayerTime, ReportEvidence, fusion_verdict
from kenosis_ort.storage.data import plain, to_data
from kenosis_ort.targets.proof import ClippingLoss, FusionReport, KernelReport, ProcessorClass

SCHEMA_VERSION = 1
_STAYS: Final = "ttentions stay as products and Softmax"
"""What the notes say of attention layers that did not become one operator."""
OTHER_FORMS = ("dynamic", "weight-only", "float")
"""Names of the forms that are delivered where int8 by a placement plan is slower than the float model."""


@dataclass(frozen=True)
class SpeedCandidate:
    """One form of the model that was considered for delivery.

    Attributes:
        name: Short, e.g. ``int8``.
        description: What it is.
        status: ``taken``, ``slower``, ``undecided``, ``dropped``, ``absent``, ``untimed``, ``spare`` or ``outrun``.
        reason: Why, one sentence.
        ratio: Speed relative to the float model, above 1 is faster; None if it was not timed.
        low: Lower end of the ratio's noise interval.
        high: Its upper end.
        verdict: What the comparison says: ``faster``, ``slower``, ``no difference``, ``too noisy``; empty if not timed.
        milliseconds: Median time of a run.
        seconds: What building, checking and timing it took.
    """

    name: str
    description: str = ""
    status: str = ""
    reason: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = ""
    milliseconds: float | None = None
    seconds: float = 0.0

    @property
    def interval(self) -> str:
        """The ratio's noise interval in brackets, to stand behind the ratio; empty if it is not known."""
        return "" if self.low is None or self.high is None else f" ({self.low:.2f} to {self.high:.2f})"

    @property
    def is_taken(self) -> bool:
        """Whether this is the form that was delivered."""
        return self.status == "taken"

    @property
    def is_planned(self) -> bool:
        """Whether this is planned int8, perhaps with regions left float, and not another form of the model."""
        return self.name not in OTHER_FORMS


@dataclass(frozen=True)
class SpeedSummary:
    """Speed of the result beside the float model, and the candidates that were tried.

    Attributes:
        candidates: The forms considered, in the order they were tried.
        basis: What the decision rests on: ``measured``, ``estimated`` by the cost table, or ``undecided`` where neither
            tells, so that the float model stays; empty where a recipe says what is delivered.
        float_milliseconds: Median time of a run of the float model; None if nothing was timed.
        threads: Threads of the sessions; 0 for the runtime's own choice.
        tune: ``off`` or ``model``.
        notes: What could not be timed, one sentence each.
        seconds: Seconds of all timing.
    """

    candidates: tuple[SpeedCandidate, ...] = ()
    basis: str = ""
    float_milliseconds: float | None = None
    threads: int = 1
    tune: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def taken(self) -> SpeedCandidate | None:
        """The form that was delivered; None if no form is marked as taken."""
        return next((form for form in self.candidates if form.is_taken), None)

    def sentence(self) -> str:
        """The outcome in one sentence, empty if there is none."""
        taken = self.taken
        if taken is None:
            return ""
        return f"{taken.description or taken.name}: {taken.reason}" if taken.reason else taken.description or taken.name


@dataclass(frozen=True)
class MeasureSummary(Measured):
    """Measure of the delivered model beside the float model, on samples that no pass was fitted to.

    Attributes:
        source: Where the samples come from.
        budget: Loss that the caller allowed; None without a budget.
        kept: Whether `loss`, or the expected one if larger and the samples are few, is within `budget`.
    """

    source: str = ""
    budget: float | None = None
    kept: bool | None = None

    @property
    def is_sure(self) -> bool:
        """Whether the samples are enough to tell that the budget is kept, or that it is not."""
        if self.budget is None or self.worst_loss is None or self.best_loss is None:
            return False
        return self.worst_loss <= self.budget if self.kept else self.best_loss > self.budget

    def sentence(self) -> str:
        """Value, interval, and what the float model has, in one sentence."""
        beside = "" if self.float_value in (0.0, 1.0) else f", {self.shown(self.float_value)} in float"
        return (
            f"{self.measure}: {self.shown(self.value)}{self._interval()}{beside}, {self._counted()}on {self.samples} "
            f"{self.source}{'' if self.samples == 1 else 's'}"
        )

    def verdict(self) -> str:
        """Result of the error budget in one sentence, empty if there is none."""
        if self.budget is None or self.kept is None:
            return ""
        head = f"a loss of {self.shown(self.budget)} is allowed: {'kept' if self.kept else 'not kept'}"
        if self.is_sure:
            return head
        if self.worst_loss is None or self.best_loss is None:
            return f"{head}, as far as so few samples tell"
        end = self.worst_loss if self.kept else self.best_loss
        return f"{head}, but {self.samples} samples do not tell it: the loss may be {self.shown(float(f'{end:.2g}'))}"

    def shown(self, value: float) -> str:
        """A value of the measure with its unit."""
        return f"{100 * value:.4g} %" if self.unit.startswith("share") else f"{value:.4g}"

    def _counted(self) -> str:
        of = self.unit.removeprefix("share of ")
        return f"{self.counted} {of} " if of in ("decisions", "tokens") and self.counted != self.samples else ""

    def _interval(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return f" (95 %: {self.shown(self.low).removesuffix(' %')} to {self.shown(self.high)})"


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
class ReportFacts:
    """Facts of one quantization: decisions with reasons, and the kernels that the runtime uses.

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
        outputs: The graph outputs beside the float model's; empty if not measured.
        compared_on: Samples of `outputs`, in words: the caller's, held-out ones, or those that all was fitted to.
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
    compared_on: str = ""
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
        """Samples that the outputs were compared on, with their number, in words."""
        count = max((output.samples for output in self.outputs), default=0)
        return f"{count} {self.compared_on.replace('samples', 'sample', 1) if count == 1 else self.compared_on}"

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

    def to_dict(self) -> dict[str, Any]:
        """The report as data that any JSON writer takes."""
        apart = {"options", "plan", "fusion", "recipe", "measure"}
        found, losses = self.measure, ("loss", "best_loss", "worst_loss")
        return {
            "schema": SCHEMA_VERSION,
            "verdict": self.verdict(),
            **{f.name: to_data(getattr(self, f.name)) for f in fields(self) if f.name not in apart},
            "measure": found and to_data(vars(found) | {name: getattr(found, name) for name in losses}),
            "options": {k: {"value": plain(value), "source": source} for k, (value, source) in self.options.items()},
            "plan": json.loads(self.plan.to_json()),
            "fusion": None if self.fusion is None else self.fusion.to_dict(),
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)
