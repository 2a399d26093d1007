"""What became of a pass, for the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kenosis_ort.storage.json_values import finite_or_none, number_or_none


@dataclass(frozen=True)
class PassOutcome:
    """One accuracy pass that was tried.

    Attributes:
        name: Of the pass, as the recipe calls it, e.g. ``equalize``.
        kept: Whether its result was kept; False for one that was undone or found nothing to do.
        error_before: Error on held-out calibration samples before it, in units of `measure`; None if not measured.
        error_after: The same after it.
        measure: What the error is, e.g. ``noise power over signal power of the outputs``.
        reason: Why it was kept, undone or skipped, one sentence.
        seconds: Wall time.
    """

    name: str
    kept: bool
    error_before: float | None = None
    error_after: float | None = None
    measure: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def change(self) -> float | None:
        """Relative change of the error, -0.2 for a fifth less; None if it was not measured."""
        if self.error_before is None or self.error_after is None or not self.error_before:
            return None
        return self.error_after / self.error_before - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {
            "name": self.name,
            "kept": self.kept,
            "error_before": finite_or_none(self.error_before),
            "error_after": finite_or_none(self.error_after),
            "measure": self.measure,
            "reason": self.reason,
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> PassOutcome:
        """Reads what `to_dict` returned."""
        numbers = {key: number_or_none(raw[key]) for key in ("error_before", "error_after")}
        return cls(**{**raw, **numbers})
