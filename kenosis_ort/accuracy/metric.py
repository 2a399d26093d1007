"""The caller's own metric, and the budget of what may be lost. An error in a metric is the caller's, never swallowed.

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

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kenosis_ort.accuracy import Outputs
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


class _Collected:
    """A metric that is called on sequences, in the manner of one that is updated.

    Args:
        metric: What is called on outputs and reference.
        takes_indices: It wants the samples' numbers too.
    """

    def __init__(self, metric: Callable[..., Any], takes_indices: bool) -> None:
        self._metric, self._takes_indices = metric, takes_indices
        self.reset()

    def update(self, outputs: Outputs, reference: Outputs, index: int = 0) -> None:
        self._outputs.append(outputs)
        self._reference.append(reference)
        self._indices.append(index)

    def compute(self) -> Any:
        further = (self._indices,) if self._takes_indices else ()
        return self._metric(self._outputs, self._reference, *further)

    def reset(self) -> None:
        self._outputs, self._reference = Spool(), Spool()
        self._indices: list[int] = []

    def __deepcopy__(self, _: Any) -> _Collected:
        return _Collected(self._metric, self._takes_indices)


@dataclass(frozen=True)
class CheckedMetric:
    """A metric of the caller's that has a shape we know.

    Attributes:
        metric: What is updated sample by sample.
        takes_indices: Whether it wants to know which samples it sees.
        name: Its name, for reports and messages.
    """

    metric: UpdatedMetric
    takes_indices: bool
    name: str

    def score(self, pairs: Iterable[tuple[Outputs, Outputs]], indices: Sequence[int]) -> Scored:
        """Score by the metric of pairs of outputs and reference, one a sample.

        Args:
            pairs: Read once, and not stored where the metric is updated by sample. Others get two sequences.
            indices: The samples' numbers.

        Raises:
            OptionError: It raises, or returns no finite number.
        """
        whole, ends = self.metric, {b for _, b in part_bounds(len(indices))}
        part = _copied(whole) if ends else None
        parts: list[float] = []
        for each in (whole, part):
            if each is not None:
                self._guarded(each.reset)
        for count, (pair, index) in enumerate(zip(pairs, indices, strict=True), 1):
            arguments: tuple[Any, ...] = (*pair, index) if self.takes_indices else pair
            self._guarded(lambda arguments=arguments: whole.update(*arguments))  # type: ignore[misc]
            if part is not None:
                try:
                    self._guarded(lambda part=part, arguments=arguments: part.update(*arguments))  # type: ignore[misc]
                    if count in ends:
                        parts.append(self._called(part.compute))
                        part.reset()
                except OptionError as error:  # e.g. of one class only: the whole is scored, which is what counts
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
        return CheckedMetric(metric, takes, _name(metric))
    if not callable(metric):
        kind = type(metric).__name__
        raise _refused(f"metric={metric!r} is a {kind}, which cannot be called", f"pass {_HOW}")
    takes = _takes_third(metric, "the metric", ("indices", "index"))
    return CheckedMetric(_Collected(metric, takes), takes, _name(metric))


def _name(metric: Any) -> str:
    return str(getattr(metric, "__name__", type(metric).__name__))


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


def is_within(loss: float, budget: float) -> bool:
    """Whether a loss is within a budget, both in the score's own unit, but for rounding."""
    return loss <= budget * (1 + _ROUNDING) + _ROUNDING
