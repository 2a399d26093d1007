"""Measures of outputs as sums by sample, the caller's own metric, and the budget of what may be lost.

Sums that add up are what makes a measure streamable (nothing but a few numbers a sample is kept), independent of the
order of the samples, and open to resampling. Intervals of 95 % say how far a value may be from what many samples would
say. An error in a metric is reported as the caller's, never swallowed.

A metric is one of

* ``metric(outputs, reference, indices) -> float``. The first two are sequences over the samples of dictionaries from
  output name to array; ``reference`` comes from the float model, ``outputs`` from the model to evaluate. ``indices``
  are the numbers of the samples in the order of the reader they come from, so that labels can be looked up;
* ``metric(outputs, reference) -> float``, the same without them;
* an object with ``update(outputs, reference, index)``, called once a sample with the two dictionaries and the sample's
  number, ``compute() -> float`` and ``reset()``, in the manner of torchmetrics. Nothing is kept for it, however large
  the data is.

**The result is larger for better outputs**, e.g. the accuracy against labels, the share of decisions that agree with
the reference, or a PSNR. The float model's own score is that of ``metric(reference, reference, indices)``.
"""

import copy
import inspect
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import numpy.typing as npt

from kenosis_ort.accuracy.error import Outputs
from kenosis_ort.errors import ArgumentTypeError, OptionError
from kenosis_ort.storage.spool import Spool

_log = logging.getLogger(__name__)
_ROUNDING = 1e-9
_PARTS = 10  # the spread of a metric is that of its values on so many parts of the samples
_LEAST_A_PART = 2
_HOW = (
    "metric(outputs, reference, indices), metric(outputs, reference), or an object with update(outputs, reference, "
    "index), compute() and reset()"
)
_STATEFUL = ("update", "compute", "reset")

OutputError = Callable[[Sequence[Outputs], Sequence[Outputs]], float]
"""0 for equal outputs and larger for worse ones; close to additive over sources of noise."""


class UpdatedMetric(Protocol):
    """A metric that is updated sample by sample."""

    def update(self, outputs: Outputs, reference: Outputs, index: int, /) -> Any:
        """Takes one sample in."""

    def compute(self) -> Any:
        """The score of the samples since the last reset."""

    def reset(self) -> Any:
        """Forgets all samples."""


Metric = Callable[..., Any] | UpdatedMetric


@dataclass(frozen=True)
class Scored:
    """Result of a metric.

    Attributes:
        value: Of all samples.
        parts: Of parts of them, in the order of the samples; empty where they are too few or a part cannot be scored.
    """

    value: float
    parts: tuple[float, ...] = ()


@dataclass(frozen=True)
class CheckedMetric:
    """A metric of the caller's that has a shape we know.

    Attributes:
        metric: What the caller gave.
        takes_indices: Whether it wants to know which samples it sees.
        is_updated: Whether it is updated sample by sample.
    """

    metric: Metric
    takes_indices: bool
    is_updated: bool

    @property
    def name(self) -> str:
        """Its name, for reports and messages."""
        return str(getattr(self.metric, "__name__", type(self.metric).__name__))

    def score(self, pairs: Iterable[tuple[Outputs, Outputs]], indices: Sequence[int]) -> Scored:
        """Score by the metric of pairs of outputs and reference, one a sample.

        Args:
            pairs: Read once, and not stored where the metric is updated by sample. Others get two sequences.
            indices: The samples' numbers.

        Raises:
            OptionError: It raises, or returns no finite number.
        """
        if self.is_updated:
            return self._update(pairs, indices)
        outputs, reference = Spool(), Spool()
        for actual, expected in pairs:
            outputs.append(actual)
            reference.append(expected)
        return self._of_sequences(outputs, reference, indices)

    def score_reference(self, reference: Iterable[Outputs], indices: Sequence[int]) -> Scored:
        """Score of the float model's outputs by the metric; computed once. Raises as `score`."""
        if self.is_updated:
            return self._update(((outputs, outputs) for outputs in reference), indices)
        stored = Spool()
        for outputs in reference:
            stored.append(outputs)
        return self._of_sequences(stored, stored, indices)

    def _of_sequences(self, outputs: Sequence[Outputs], reference: Sequence[Outputs], indices: Sequence[int]) -> Scored:
        value = self._called(lambda: self._call(outputs, reference, indices))
        bounds = part_bounds(len(indices))
        try:
            parts = [
                self._called(lambda a=a, b=b: self._call(outputs[a:b], reference[a:b], indices[a:b]))  # type: ignore[misc]
                for a, b in bounds
            ]
        except OptionError as error:  # e.g. of one class only: the whole was scored, which is what counts
            _log.info("no interval: %s", error)
            parts = []
        return Scored(value, tuple(parts))

    def _call(self, outputs: Sequence[Outputs], reference: Sequence[Outputs], indices: Sequence[int]) -> Any:
        metric = cast("Callable[..., Any]", self.metric)
        return metric(outputs, reference, list(indices)) if self.takes_indices else metric(outputs, reference)

    def _update(self, pairs: Iterable[tuple[Outputs, Outputs]], indices: Sequence[int]) -> Scored:
        whole = cast("UpdatedMetric", self.metric)
        ends = {b for _, b in part_bounds(len(indices))}
        part = _copied(whole) if ends else None
        parts: list[float] = []
        for each in (whole, part):
            if each is not None:
                self._guarded(each.reset)
        for count, ((outputs, reference), index) in enumerate(zip(pairs, indices, strict=True), 1):
            arguments: tuple[Any, ...] = (outputs, reference, index) if self.takes_indices else (outputs, reference)
            self._guarded(lambda arguments=arguments: whole.update(*arguments))  # type: ignore[misc]
            if part is not None:
                try:
                    self._guarded(lambda part=part, arguments=arguments: part.update(*arguments))  # type: ignore[misc]
                    if count in ends:
                        parts.append(self._called(part.compute))
                        part.reset()
                except OptionError as error:
                    _log.info("no interval: %s", error)
                    part, parts = None, []
        value = self._called(whole.compute)
        self._guarded(whole.reset)
        return Scored(value, tuple(parts))

    def _called(self, call: Callable[[], Any]) -> float:
        """A score as a finite number."""
        where = f"metric '{self.name}'"
        result = self._guarded(call)
        try:
            score = float(result)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"the metric returned {type(result).__name__}, not a number",
                where=where,
                fix="return one number, larger for better outputs",
            ) from error
        if not math.isfinite(score):
            raise OptionError(
                f"the metric returned {score}",
                where=where,
                fix="return a finite number for every set of outputs, e.g. 0.0 where nothing was detected",
            )
        return score

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise OptionError(
                f"the metric raised {type(error).__name__}: {error}",
                where=f"metric '{self.name}'",
                fix=f"call it on outputs of the float model: {_HOW}; outputs are dictionaries {{output name: array}}, "
                "one a sample",
            ) from error


def part_bounds(count: int) -> list[tuple[int, int]]:
    """The bounds of the parts of so many samples that a metric is scored on by themselves."""
    parts = min(_PARTS, count // _LEAST_A_PART)
    edges = [count * i // parts for i in range(parts + 1)] if parts else []
    return list(itertools.pairwise(edges))


def check_metric(metric: Any) -> CheckedMetric:
    """A metric whose shape is known.

    Raises:
        ArgumentTypeError: It is a class, cannot be called and is no object to update, or takes other arguments.
    """
    if isinstance(metric, type):
        raise _refused(f"metric={metric.__name__} is a class", f"pass an object of it: {_HOW}")
    found = [name for name in _STATEFUL if callable(getattr(metric, name, None))]
    if "update" in found and "compute" in found:
        if "reset" not in found:
            raise _refused("the metric has update() and compute(), but no reset()", "add reset()")
        takes = _takes_third(metric.update, "update()", ("index", "indices"))
        return CheckedMetric(metric, takes, is_updated=True)
    if not callable(metric):
        kind = type(metric).__name__
        raise _refused(f"metric={metric!r} is a {kind}, which cannot be called", f"pass {_HOW}")
    return CheckedMetric(metric, _takes_third(metric, "the metric", ("indices", "index")), is_updated=False)


def _takes_third(call: Callable[..., Any], what: str, names: tuple[str, ...]) -> bool:
    """Whether a callable wants a third argument; one of two with further defaults does not, unless it says so."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # of C code that does not tell
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in positional)
    most = math.inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    needed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if least > 3 or most < 2 or needed:
        listed = ", ".join(str(p) for p in parameters)
        raise _refused(f"{what} takes ({listed}), which is not what it is called with", f"make it {_HOW}")
    return least == 3 or (most >= 3 and len(positional) >= 3 and positional[2].name in names)


def _refused(what: str, fix: str) -> ArgumentTypeError:
    return ArgumentTypeError(what, where="metric", fix=fix)


def _copied(metric: UpdatedMetric) -> UpdatedMetric | None:
    """A metric like this one, to score parts with; None where it cannot be copied."""
    try:
        return copy.deepcopy(metric)
    except Exception as error:  # the caller's classes may raise anything
        _log.info("no interval: the metric cannot be copied: %s", error)
        return None


@dataclass(frozen=True)
class Budget:
    """Largest loss of the float model's score.

    Attributes:
        loss: Largest loss, in the score's own unit, e.g. 0.005.
    """

    loss: float = 0.005

    def __post_init__(self) -> None:
        if not (math.isfinite(self.loss) and self.loss >= 0):
            raise OptionError(
                f"accuracy_budget={self.loss} is not a loss that can be allowed",
                where="accuracy_budget",
                fix="give a finite number from 0 up, e.g. 0.005",
            )

    def holds(self, loss: float) -> bool:
        """Whether a loss is within the budget."""
        return loss <= self.loss * (1 + _ROUNDING) + _ROUNDING

    def __str__(self) -> str:
        return f"{self.loss:g}"


Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

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
    low, high = np.quantile(values, (0.025, 0.975))
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
