"""Parts of a report that are there only where the step was made: accuracy passes, speed, trust in the calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kenosis_ort.storage.json_values import finite_or_none, number_or_none

OTHER_FORMS = ("dynamic", "weight-only", "float")
"""Names of the forms that are delivered where int8 by a placement plan is slower than the float model."""

TrustVerdict = Literal["trusted", "usable", "do not ship"]


@dataclass(frozen=True)
class SpeedRung:
    """One form of the model that was considered for delivery.

    Attributes:
        name: Short, e.g. ``int8``.
        description: What it is.
        fate: ``taken``, ``slower``, ``dropped``, ``absent``, ``untimed``, ``spare`` or ``outrun``.
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

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        numbers = {key: finite_or_none(getattr(self, key)) for key in ("ratio", "low", "high", "milliseconds")}
        return {**vars(self), **numbers}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> SpeedRung:
        """Reads what `to_dict` returned."""
        numbers = {key: number_or_none(raw[key]) for key in ("ratio", "low", "high", "milliseconds")}
        return cls(**{**raw, **numbers})


@dataclass(frozen=True)
class SpeedSummary:
    """How fast the result is beside the float model, and what was tried for it.

    Attributes:
        rungs: The forms considered, in the order they were tried.
        noisy: The machine was too noisy to decide, and the first form was kept for that.
        float_milliseconds: Median time of a run of the float model; None if nothing was timed.
        threads: Threads of the sessions; 0 for the runtime's own choice.
        tune: ``off``, ``model`` or ``measure``.
        notes: What tuning changed or found, one sentence each.
        seconds: What it took, all told.
    """

    rungs: tuple[SpeedRung, ...] = ()
    noisy: bool = False
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

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {
            "rungs": [rung.to_dict() for rung in self.rungs],
            "noisy": self.noisy,
            "float_milliseconds": finite_or_none(self.float_milliseconds),
            "threads": self.threads,
            "tune": self.tune,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> SpeedSummary:
        """Reads what `to_dict` returned."""
        return cls(
            rungs=tuple(SpeedRung.from_dict(rung) for rung in raw["rungs"]),
            noisy=raw["noisy"],
            float_milliseconds=number_or_none(raw["float_milliseconds"]),
            threads=raw["threads"],
            tune=raw["tune"],
            notes=tuple(raw["notes"]),
            seconds=raw["seconds"],
        )


@dataclass(frozen=True)
class TensorTrust:
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

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {**vars(self), "stability": finite_or_none(self.stability)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TensorTrust:
        """Reads what `to_dict` returned."""
        return cls(**{**raw, "stability": number_or_none(raw["stability"])})


@dataclass(frozen=True)
class TrustSummary:
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

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {**vars(self), "tensors": [tensor.to_dict() for tensor in self.tensors]}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TrustSummary:
        """Reads what `to_dict` returned."""
        return cls(**{**raw, "tensors": tuple(TensorTrust.from_dict(tensor) for tensor in raw["tensors"])})
