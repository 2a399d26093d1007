"""What a measure is: sums by sample that add up, and a value of the sums.

Sums that add up are what makes a measure streamable (nothing but a few numbers a sample is kept), independent of the
order of the samples, and open to resampling.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kenosis_ort.accuracy.measures.interval import bootstrap, wilson

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Outputs = Mapping[str, Array]

_FEW_EVENTS = 10.0  # losses that must be expected at the budget for a count of them to tell it


@dataclass(frozen=True)
class Measured:
    """What was measured of one model against the float model.

    Attributes:
        measure: What it is, e.g. ``top-1 agreement with the float model``.
        unit: What one stands for, e.g. ``share of decisions``.
        value: Of the model.
        float_value: Of the float model: 1 for agreements, 0 for errors, what it scored for a metric of the caller's.
        samples: Samples it was measured on.
        counted: Decisions, pixels, boxes or numbers in them that the value is a share of.
        low: Lower end of the 95 % interval of `value`; None where the samples are too few, or tell none.
        high: Its upper end.
        higher_is_better: Whether `value` falls where the model gets worse.
        expected: What `value` can be expected to be on many samples, where that is known better than by counting.
    """

    measure: str
    unit: str
    value: float
    float_value: float
    samples: int
    counted: int
    low: float | None = None
    high: float | None = None
    higher_is_better: bool = True
    expected: float | None = None

    @property
    def loss(self) -> float:
        """What was lost against the float model, in the measure's unit; negative for a gain."""
        return self._loss_at(self.value)

    @property
    def worst_loss(self) -> float | None:
        """The loss at the bad end of the interval; None without one."""
        end = self.low if self.higher_is_better else self.high
        return None if end is None else self._loss_at(end)

    @property
    def best_loss(self) -> float | None:
        """The loss at the good end of the interval; None without one."""
        end = self.high if self.higher_is_better else self.low
        return None if end is None else self._loss_at(end)

    def loss_for(self, budget: float) -> float:
        """Returns the loss to hold against a budget.

        Counting tells a loss of half a percent only where some thousand decisions are counted. Where fewer are, the
        expected loss counts if it is larger: eight samples that all agree say next to nothing.
        """
        if self.expected is None or self.counted * budget >= _FEW_EVENTS:
            return self.loss
        return max(self.loss, self._loss_at(self.expected))

    def _loss_at(self, value: float) -> float:
        return self.float_value - value if self.higher_is_better else value - self.float_value


class Measure(ABC):
    """One way to tell how far outputs are from the float model's.

    Attributes:
        higher_is_better: True for agreements, whose best is 1; False for errors, whose best is 0.
    """

    higher_is_better: ClassVar[bool] = True

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is, with the output."""

    @property
    @abstractmethod
    def unit(self) -> str:
        """What one stands for."""

    @property
    def independent(self) -> bool:
        """Whether the decisions counted are independent of each other, as the pixels of a picture are not."""
        return False

    @abstractmethod
    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        """Returns the sums of one sample, shape (k,): of outputs and the float model's outputs by name."""

    @abstractmethod
    def value(self, sums: Float64) -> Float64:
        """Returns the values, shape (...), of sums of shape (..., k)."""

    def counted(self, sums: Float64) -> int:
        """Returns how many decisions, pixels or numbers are in sums of shape (k,)."""
        return int(sums[1])

    def details(self, actual: Outputs, expected: Outputs) -> Float64 | None:
        """Returns what `expected` needs to know of one sample, shape (rows, d); None where it tells nothing."""
        del actual, expected
        return None

    def expected(self, details: Sequence[Float64]) -> float | None:
        """Returns the value to be expected on many samples, where it can be told from few; else None."""
        del details
        return None


def measure_pairs(measures: Sequence[Measure], pairs: Iterable[tuple[Outputs, Outputs]]) -> tuple[Measured, ...]:
    """Measures pairs of outputs and the float model's outputs, one a sample; read once and not kept."""
    parts: list[list[Float64]] = [[] for _ in measures]
    details: list[list[Float64]] = [[] for _ in measures]
    for actual, expected in pairs:
        for measure, sums, told in zip(measures, parts, details, strict=True):
            sums.append(measure.sums(actual, expected))
            detail = measure.details(actual, expected)
            if detail is not None:
                told.append(detail)
    if not parts or not parts[0]:
        return ()
    return tuple(_measured(m, np.stack(p), d) for m, p, d in zip(measures, parts, details, strict=True))


def _measured(measure: Measure, parts: Float64, details: Sequence[Float64]) -> Measured:
    total = parts.sum(axis=0)
    value, counted = float(measure.value(total)), measure.counted(total)
    interval = wilson(value, counted) if measure.independent and counted else bootstrap(parts, measure.value)
    return Measured(
        measure=measure.name,
        unit=measure.unit,
        value=value,
        float_value=1.0 if measure.higher_is_better else 0.0,
        samples=len(parts),
        counted=counted,
        low=None if interval is None else max(interval[0], 0.0),
        high=None if interval is None else min(interval[1], 1.0 if measure.higher_is_better else math.inf),
        higher_is_better=measure.higher_is_better,
        expected=measure.expected(details),
    )


def worst(measured: Sequence[Measured]) -> Measured:
    """Returns the one that lost most; one that is no number counts as lost altogether."""
    return max(measured, key=lambda m: math.inf if math.isnan(m.loss) else m.loss)


def share(sums: Float64) -> Float64:
    """Returns the first of the sums over the second; 1 where there is nothing to count."""
    part, whole = sums[..., 0], sums[..., 1]
    return np.asarray(np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), 1.0))
