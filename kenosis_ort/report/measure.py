"""What was lost against the float model, in the unit of what the outputs are for."""

from __future__ import annotations

from dataclasses import dataclass

from kenosis_ort.storage.data import Data


@dataclass(frozen=True)
class MeasureSummary(Data):
    """What was measured of the delivered model beside the float model, on samples that no pass was fitted to.

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
        expected: What `value` can be expected to be on many samples, where that is told better than by counting.
        budget: Loss that the caller allowed; None where nothing was said.
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
        """Returns value, interval, and what the float model has, in one sentence."""
        beside = "" if self.float_value in (0.0, 1.0) else f", {self.shown(self.float_value)} in float"
        return (
            f"{self.measure}: {self.shown(self.value)}{self._interval()}{beside}, {self._counted()}on {self.samples} "
            f"{self.source}{'' if self.samples == 1 else 's'}"
        )

    def verdict(self) -> str:
        """Returns what became of the budget, empty if there is none."""
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
        """Returns a value of the measure with its unit."""
        return f"{100 * value:.4g} %" if self.unit.startswith("share") else f"{value:.4g}"

    def _counted(self) -> str:
        of = self.unit.removeprefix("share of ")
        return f"{self.counted} {of} " if of in ("decisions", "tokens") and self.counted != self.samples else ""

    def _interval(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return f" (95 %: {self.shown(self.low).removesuffix(' %')} to {self.shown(self.high)})"
