"""Parts of a report that are there only where the step was made: speed, trust in the calibration, loss by a measure."""

from dataclasses import dataclass
from typing import Literal

OTHER_FORMS = ("dynamic", "weight-only", "float")
"""Names of the forms that are delivered where int8 by a placement plan is slower than the float model."""

TrustVerdict = Literal["trusted", "usable", "do not ship"]


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
class TensorTrust:
    """Trust in the range of one tensor.

    Attributes:
        tensor: Name of the tensor.
        how: How the range was found, e.g. ``seen in the data`` or ``BatchNormalization statistics``.
        stability: 0 to 1: agreement of the ranges across seeds or parts of the data; None if not measured.
        reason: What is wrong with it, one sentence; empty where nothing is.
    """

    tensor: str
    how: str = ""
    stability: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class TrustSummary:
    """Trust in the calibration.

    Attributes:
        verdict: ``trusted``, ``usable`` or ``do not ship``.
        reason: Why, one sentence.
        source: Where the data came from, e.g. ``caller``, ``synthetic``, ``mixed`` or ``cache``.
        advice: What the caller should supply, e.g. ten real samples; empty where nothing is needed.
        tensors: The tensors, those that led to the verdict first.
    """

    verdict: TrustVerdict
    reason: str = ""
    source: str = ""
    advice: str = ""
    tensors: tuple[TensorTrust, ...] = ()


@dataclass(frozen=True)
class MeasureSummary:
    """Measure of the delivered model beside the float model, on samples that no pass was fitted to.

    Attributes:
        measure: What it is, e.g. ``top-1 agreement with the float model in output 'logits'``.
        unit: What one stands for, e.g. ``share of decisions``.
        value: Of the delivered model.
        float_value: Of the float model: 1 for agreements, 0 for errors, what it scores for a metric of the caller's.
        loss: What was lost, in the same unit; negative for a gain.
        samples: Number of samples.
        counted: Decisions, pixels, boxes or numbers in them.
        source: Where the samples come from.
        low: Lower end of the 95 % interval of `value`; None where the samples tell none.
        high: Its upper end.
        best_loss: Lower end of the 95 % interval of `loss`.
        worst_loss: Its upper end.
        expected: Expected `value` on many samples, where that is a better estimate than counting.
        budget: Loss that the caller allowed; None without a budget.
        kept: Whether `loss`, or the expected one if larger and the samples are few, is within `budget`.
    """

    measure: str
    unit: str
    value: float
    float_value: float
    loss: float
    samples: int
    counted: int
    source: str
    low: float | None = None
    high: float | None = None
    best_loss: float | None = None
    worst_loss: float | None = None
    expected: float | None = None
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
