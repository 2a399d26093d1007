"""Measures by family: agreement of decisions, overlap of masks and label maps, relative error.

Decisions are the largest class score, the token at each position, yes or no at one half. Masks are what is above one
half, label maps the classes. The relative error remains where nothing is decided by the output, or nobody can tell.

Measures are sums by sample, with the intervals of what they say. Sums that add up are what makes a measure streamable
(nothing but a few numbers a sample is kept), independent of the order of the samples, and open to resampling. Intervals
of 95 % say how far a value may be from what many samples would say.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kenosis_ort.accuracy import Array, Float64, Outputs, as_rows, quantile

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


_LEAST_PROBABILITY = 1e-9
THRESHOLD = 0.5  # score from which on something was found


@dataclass(frozen=True)
class TokenAgreement(Measure):
    """Share of positions of a sequence whose largest score is at the same place as the float model's."""

    output: str

    title = "token agreement with the float model in"
    unit = "share of tokens"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = _rows(actual[self.output]), _rows(expected[self.output])
        same = int((_winners(a) == _winners(b)).sum()) if a.shape == b.shape else 0
        return np.array([same, max(len(a), len(b))], np.float64)


@dataclass(frozen=True)
class ClassAgreement(TokenAgreement):
    """Share of rows of which the same class has the largest score.

    Attributes:
        logarithms: Whether scores are made logarithms for `expected`: they are probabilities.
    """

    logarithms: bool = False

    title = "top-1 agreement with the float model in"
    unit = "share of decisions"
    independent = True

    def details(self, actual: Outputs, expected: Outputs) -> Float64 | None:
        """Margin between the two best classes by row, and the noise on their difference."""
        a, b = (_rows(o[self.output]) for o in (actual, expected))
        if self.logarithms:
            a, b = (np.log(np.maximum(rows, _LEAST_PROBABILITY)) for rows in (a, b))
        if a.shape != b.shape or b.shape[1] < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return None
        order = np.argsort(-b, axis=1, kind="stable")[:, :2]
        at, first, second = np.arange(len(b)), order[:, 0], order[:, 1]
        noise = a - b
        return np.stack([b[at, first] - b[at, second], noise[at, second] - noise[at, first]], axis=1)

    def expected(self, details: Sequence[Float64]) -> float | None:
        """The agreement that follows from margins and noise.

        Another class wins where noise on the difference of the two best scores exceeds their margin. The noise is
        taken as normal with the root mean square seen over all rows, so that samples of which none flips tell apart
        losses far below one over their number.
        """
        if not details:
            return None
        margin, noise = np.concatenate(details).T
        spread = math.sqrt(float(np.mean(noise**2)))
        if spread == 0.0:
            return 1.0
        return 1.0 - float(np.mean([0.5 * math.erfc(m / (spread * math.sqrt(2.0))) for m in margin]))


@dataclass(frozen=True)
class SameTokens(Measure):
    """Share of integers that are the same as the float model's."""

    output: str

    title = "token agreement with the float model in"
    unit = "share of tokens"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = (self.decided(outputs[self.output]) for outputs in (actual, expected))
        same = int((a == b).sum()) if a.shape == b.shape else 0
        return np.array([same, max(a.size, b.size)], np.float64)

    @staticmethod
    def decided(values: Array) -> Array:
        """Part of an output's values that is compared."""
        return values


@dataclass(frozen=True)
class YesOrNo(SameTokens):
    """Share of values on the same side of one half as the float model's."""

    title = "agreement with the float model at 0.5 in"
    unit = "share of decisions"
    independent = True

    @staticmethod
    def decided(values: Array) -> Array:
        return np.asarray(values >= 0.5)


@dataclass(frozen=True)
class RelativeError(Measure):
    """Root mean square of the error over that of the signal about its mean.

    An amplitude, as a reader takes "half a percent off" to mean, and no power: 0.005 is 46 dB, not 23.
    """

    output: str
    higher_is_better: ClassVar[bool] = False

    title = "relative error of"
    unit = "share of the signal's root mean square"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = (np.asarray(o[self.output], np.float64).ravel() for o in (actual, expected))
        finite = np.isfinite(b)
        if a.shape != b.shape:
            a = np.zeros_like(b)
        a, b = a[finite], b[finite]
        a = np.where(np.isfinite(a), a, 0.0)
        return np.array([((a - b) ** 2).sum(), b.size, b.sum(), (b**2).sum()], np.float64)

    def value(self, sums: Float64) -> Float64:
        noise, count, total, power = (sums[..., i] for i in range(4))
        variance = power - total**2 / np.maximum(count, 1.0)
        sure = variance > 1e-12 * power
        return np.asarray(np.where(sure, np.sqrt(noise / np.where(sure, variance, 1.0)), np.where(noise > 0, 1.0, 0.0)))


@dataclass(frozen=True)
class MaskOverlap(Measure):
    """Intersection over union of the pixels above one half; 1 where there are none in either."""

    output: str

    title = f"mask IoU with the float model at {THRESHOLD:g} in"
    unit = "intersection over union"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = (np.asarray(o[self.output]) >= THRESHOLD for o in (actual, expected))
        if a.shape != b.shape:
            return np.array([0, a.sum() + b.sum(), max(a.size, b.size)], np.float64)
        return np.array([(a & b).sum(), (a | b).sum(), a.size], np.float64)

    def counted(self, sums: Float64) -> int:
        return int(sums[2])


@dataclass(frozen=True)
class ClassOverlap(Measure):
    """Intersection over union of each class of a label map, the mean over the classes that occur in either.

    Attributes:
        output: Scores with the classes along an axis, or labels.
        axis: That axis; None for labels.
        classes: Number of classes; labels beyond count as the last.
    """

    output: str
    axis: int | None
    classes: int

    title = "class IoU with the float model in"
    unit = "mean intersection over union"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = (self._labels(o[self.output]) for o in (actual, expected))
        own, other = (np.bincount(x, minlength=self.classes) for x in (a, b))
        same = a[a == b] if len(a) == len(b) else a[:0]
        both = np.bincount(same, minlength=self.classes)
        return np.concatenate([both, own + other - both, [len(b)]]).astype(np.float64)

    def value(self, sums: Float64) -> Float64:
        both, either = sums[..., : self.classes], sums[..., self.classes : 2 * self.classes]
        occurs = either > 0
        overlap = np.where(occurs, both / np.where(occurs, either, 1.0), 0.0)
        count = occurs.sum(axis=-1)
        return np.asarray(np.where(count > 0, overlap.sum(axis=-1) / np.maximum(count, 1), 1.0))

    def counted(self, sums: Float64) -> int:
        return int(sums[-1])

    def _labels(self, array: Array) -> Array:
        labels = np.asarray(array) if self.axis is None else np.asarray(array).argmax(axis=self.axis)
        return np.asarray(np.clip(labels, 0, self.classes - 1).ravel(), np.int64)


def without_ones(array: Array) -> Array:
    """Scores with the classes last: behind the second axis, axes of one element at the end are left out."""
    while array.ndim > 2 and array.shape[-1] == 1:
        array = array[..., 0]
    return array


def _rows(array: Array) -> Float64:
    """Scores as (rows, classes)."""
    return as_rows(without_ones(array), -1)


def _winners(rows: Float64) -> Float64:
    """The place of the largest score of each row; -1 where one is no number."""
    return np.asarray(np.where(np.isnan(rows).any(axis=1), -1, rows.argmax(axis=1)))
