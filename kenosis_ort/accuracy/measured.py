"""Measures of outputs as sums by sample, and the intervals of what they say.

Sums that add up are what makes a measure streamable (nothing but a few numbers a sample is kept), independent of the
order of the samples, and open to resampling. Intervals of 95 % say how far a value may be from what many samples would
say.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Outputs = Mapping[str, npt.NDArray[Any]]

_FEW_EVENTS = 10.0  # losses that must be expected at the budget for a count of them to tell it


@dataclass(frozen=True)
class Measured:
    """Value of a measure for one model against the float model.

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
        """Loss against the float model, in the measure's unit; negative for a gain."""
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
        """The loss to hold against a budget.

        Counting tells a loss of half a percent only where some thousand decisions are counted. Where fewer are, the
        expected loss counts if it is larger: eight samples that all agree say next to nothing.
        """
        if self.expected is None or self.counted * budget >= _FEW_EVENTS:
            return self.loss
        return max(self.loss, self._loss_at(self.expected))

    def _loss_at(self, value: float) -> float:
        return self.float_value - value if self.higher_is_better else value - self.float_value


class Measure(ABC):
    """One way to tell how far outputs are from the float model's; sums of a sample add up to those of all.

    Attributes:
        output: Name of the output.
        title: What it is, up to the output, e.g. ``token agreement with the float model in``.
        unit: Unit of the measure's value.
        higher_is_better: True for agreements, whose best is 1; False for errors, whose best is 0.
        independent: Whether the decisions counted are independent of each other, as the pixels of a picture are not.
    """

    output: str
    title: str
    unit: str
    higher_is_better: ClassVar[bool] = True
    independent: bool = False

    @property
    def name(self) -> str:
        """Name of the measure, with the output."""
        return f"{self.title} output '{self.output}'"

    @abstractmethod
    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        """The sums of one sample, shape (k,): of outputs and the float model's outputs by name."""

    def value(self, sums: Float64) -> Float64:
        """The values, shape (...), of sums of shape (..., k): the share that the first is of the second, 1 of none."""
        part, whole = sums[..., 0], sums[..., 1]
        return np.asarray(np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), 1.0))

    def counted(self, sums: Float64) -> int:
        """Number of decisions, pixels or values in sums of shape (k,)."""
        return int(sums[1])

    def details(self, actual: Outputs, expected: Outputs) -> Float64 | None:
        """Statistics of one sample for `expected`, shape (rows, d); None where there are none."""
        del actual, expected
        return None

    def expected(self, details: Sequence[Float64]) -> float | None:
        """Expected value on many samples, where few are enough to estimate it; else None."""
        del details
        return None


def measure_pairs(measures: Sequence[Measure], pairs: Iterable[tuple[Outputs, Outputs]]) -> tuple[Measured, ...]:
    """Measures pairs of outputs and the float model's outputs, one a sample; read once and not kept."""
    parts: list[list[Float64]] = [[] for _ in measures]
    details: list[list[Float64]] = [[] for _ in measures]
    for actual, expected in pairs:
        for measure, sums, collected in zip(measures, parts, details, strict=True):
            sums.append(measure.sums(actual, expected))
            detail = measure.details(actual, expected)
            if detail is not None:
                collected.append(detail)
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
    """The one that lost most; one that is no number counts as lost altogether."""
    return max(measured, key=lambda m: math.inf if math.isnan(m.loss) else m.loss)


Interval = tuple[float, float]

_Z = 1.959964
_DRAWS = 400
LEAST_SAMPLES = 8  # resampling fewer tells of these samples only
LEAST_PARTS = 4
_STUDENT = {3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # 97.5 % by degrees of freedom


def wilson(share: float, count: int) -> Interval:
    """The interval of a share of independent decisions.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).

    Args:
        share: The share seen, 0..1.
        count: Number of decisions, 1 or more.
    """
    spread = _Z * _Z / count
    center = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(min(center - half, share), 0.0), min(max(center + half, share), 1.0)


def quantile(rows: Float64, share: float) -> Any:
    """The quantile of rows at a share (0 to 1), as `np.quantile` along the first axis, which loads numpy.ma."""
    place, between = divmod(share * (len(rows) - 1), 1.0)
    ends = [int(place), min(int(place) + 1, len(rows) - 1)]
    low, high = np.partition(rows, ends, axis=0)[ends]
    return low + (high - low) * between if between < 0.5 else high - (high - low) * (1 - between)


def bootstrap(parts: Float64, value: Callable[[Float64], Float64]) -> Interval | None:
    """The interval of a value of sums over samples, by drawing samples anew; None for fewer than eight.

    Draws are the same on every call. Source: B. Efron, Bootstrap methods, Annals of Statistics 7 (1979), percentiles;
    widened for few samples, of which resampling knows too little of the spread.

    Args:
        parts: Sums by sample, shape (samples, k).
        value: Makes values of shape (...) of sums of shape (..., k).
    """
    count = len(parts)
    if count < LEAST_SAMPLES:
        return None
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_DRAWS)
    values = value(weights @ parts)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = quantile(values, 0.025), quantile(values, 0.975)
    whole = float(value(parts.sum(axis=0)))
    wider = (1.0 + 1.38 / (count - 1)) * math.sqrt(count / (count - 1))  # Student's factor over the normal one
    return whole - wider * max(whole - float(low), 0.0), whole + wider * max(float(high) - whole, 0.0)


def of_parts(value: float, parts: Float64, *, samples: int, scale: float) -> Interval | None:
    """The interval of a value whose parts, of like size, were evaluated by themselves; None for few parts.

    The parts' standard error with Student's factor: exact for means, near for metrics that are no mean. Parts without
    any spread say that nothing was seen to change, which some samples cannot exclude: then as for a share of them.

    Args:
        value: Of all parts.
        parts: What varies by part: the values, or their differences from others on the same samples.
        samples: Number of samples in all parts.
        scale: Size of the values.
    """
    count = len(parts)
    if count < LEAST_PARTS:
        return None
    if np.ptp(parts) == 0.0:
        half = scale * (1.0 - wilson(1.0, samples)[0])
        return value - half, value + half
    half = _STUDENT[min(count - 1, 9)] * float(parts.std(ddof=1)) / math.sqrt(count)
    return value - half, value + half
