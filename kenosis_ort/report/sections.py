"""Parts of a report that are there only where the step was made: accuracy passes, speed, trust in the calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kenosis_ort.storage.data import Data

OTHER_FORMS = ("dynamic", "weight-only", "float")
"""Names of the forms that are delivered where int8 by a placement plan is slower than the float model."""

TrustVerdict = Literal["trusted", "usable", "do not ship"]


@dataclass(frozen=True)
class SpeedRung(Data):
    """One form of the model that was considered for delivery.

    Attributes:
        name: Short, e.g. ``int8``.
        description: What it is.
        fate: ``taken``, ``slower``, ``undecided``, ``dropped``, ``absent``, ``untimed``, ``spare`` or ``outrun``.
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
    fate: str = ""
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
        return self.fate == "taken"

    @property
    def is_planned(self) -> bool:
        """Whether this is planned int8, perhaps with regions left float, and not another form of the model."""
        return self.name not in OTHER_FORMS


@dataclass(frozen=True)
class SpeedSummary(Data):
    """How fast the result is beside the float model, and what was tried for it.

    Attributes:
        rungs: The forms considered, in the order they were tried.
        basis: What the decision rests on: ``measured``, ``estimated`` by the cost table, or ``undecided`` where neither
            tells, so that the float model stays; empty where a recipe says what is delivered.
        float_milliseconds: Median time of a run of the float model; None if nothing was timed.
        threads: Threads of the sessions; 0 for the runtime's own choice.
        tune: ``off`` or ``model``.
        notes: What could not be timed, one sentence each.
        seconds: What it took, all told.
    """

    rungs: tuple[SpeedRung, ...] = ()
    basis: str = ""
    float_milliseconds: float | None = None
    threads: int = 1
    tune: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def taken(self) -> SpeedRung | None:
        """The form that was delivered; None if no form is marked as taken."""
        return next((rung for rung in self.rungs if rung.is_taken), None)

    def sentence(self) -> str:
        """Returns the outcome in one sentence, empty if there is none."""
        taken = self.taken
        if taken is None:
            return ""
        return f"{taken.description or taken.name}: {taken.reason}" if taken.reason else taken.description or taken.name


@dataclass(frozen=True)
class TensorTrust(Data):
    """How far the range of one tensor can be relied on.

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
class TrustSummary(Data):
    """How far the calibration can be relied on.

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
