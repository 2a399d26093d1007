"""What became of a pass, for the report."""

from __future__ import annotations

from dataclasses import dataclass

from kenosis_ort.storage.data import Data


@dataclass(frozen=True)
class PassOutcome(Data):
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
