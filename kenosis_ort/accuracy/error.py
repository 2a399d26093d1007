"""Error of quantized outputs, each output measured by its kind.

Noise over signal power is a poor measure of most outputs. Class scores that are all shifted by the same amount pick the
same class; the 85 columns of a detector hold boxes of tens of pixels beside probabilities of thousandths, and a box
matters only where something was found. The kind of an output follows from its numbers: shape, range and sparsity of
what the float model returns.

* *classes*, (batch, n), be it with axes of one behind them, as global pools leave: the mean over a row is taken off,
  as softmax does not see it. Rows that are probabilities are taken as log-odds within 0.0001..0.9999.
* *positions*, three or four axes of which one holds at most 512 columns, some of them sparse scores between 0 and 1:
  each column's noise over its own variance, so that none drowns another, averaged over scores and others by
  themselves; the others (boxes) are weighted by the position's best score.
* *dense*, images, masks, features and states: noise over variance. A mean of the signal is no merit.

Reference: SQNR as the only measure raised YOLOX-Nano by 3.6 dB while its mAP fell by 0.027 (prototype of these passes).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kenosis_ort.accuracy import Array, Float64, Outputs, as_rows, quantile
from kenosis_ort.errors import OptionError

_MOST_COLUMNS = 512
_SPARSE = 0.25  # of its largest value, that most of a score column stays below
_LEAST_PROBABILITY = 1e-4


class Use(str, Enum):
    """Kind of an output."""

    CLASSES = "classes"
    POSITIONS = "positions"
    DENSE = "dense"


class OutputUse(NamedTuple):
    """Measure of one output.

    Attributes:
        use: What it is for.
        axis: Axis of the columns of ``positions``.
        scores: Columns that hold scores, of ``positions``.
        probabilities: Whether ``classes`` are probabilities.
    """

    use: Use
    axis: int = -1
    scores: tuple[int, ...] = ()
    probabilities: bool = False


class _Signal(NamedTuple):
    """Weighted sums over the rows of an output of the float model on one sample, by column.

    Attributes:
        weight: Of all rows together.
        mean: Of the columns.
        spread: Squared differences from the mean.
        rows: Weight of each row; None for 1.
    """

    weight: float
    mean: Float64
    spread: Float64
    rows: Float64 | None


Signals = dict[tuple[int, str], tuple[_Signal, ...]]
"""What `Deviations` found out about a reference, by sample and output, for other outputs beside the same reference."""


class _Moments(NamedTuple):
    """Weighted sums over the rows of one sample, or of several, by column.

    Attributes:
        weight: Of all rows together.
        noise: Squared differences.
        mean: Of the reference.
        spread: Squared differences of the reference from its mean.
    """

    weight: float | Float64
    noise: Float64
    mean: Float64
    spread: Float64


_Parts = tuple[_Moments, ...]
"""What one sample says about an output; nothing where it is empty."""


class _Samples(NamedTuple):
    """Measurements of one output.

    Attributes:
        alike: Numbers of the samples whose shapes are those of the reference.
        full: Of these, in order, the ones that hold something.
        parts: Sums of these, one row a sample.
    """

    alike: frozenset[int]
    full: npt.NDArray[np.intp]
    parts: tuple[_Moments, ...]

    @classmethod
    def of(cls, samples: Sequence[_Parts | None]) -> _Samples:
        """The measurements of all samples, None of one with another shape."""
        full = [number for number, parts in enumerate(samples) if parts]
        rows = zip(*(samples[number] or () for number in full), strict=True)
        parts = tuple(_Moments(*map(np.stack, zip(*of_part, strict=True))) for of_part in rows)
        return cls(frozenset(n for n, parts in enumerate(samples) if parts is not None), np.array(full, np.intp), parts)


def find_uses(reference: Sequence[Outputs]) -> dict[str, OutputUse]:
    """Kind of each floating-point output by name.

    Args:
        reference: The float model's outputs, one entry a feed.
    """
    found = {}
    for name in reference[0] if reference else ():
        arrays = [np.asarray(outputs[name]) for outputs in reference]
        if arrays[0].dtype.kind == "f" and any(a.size for a in arrays):
            found[name] = _use_of([a for a in arrays if a.size])
    return found


def output_error(
    outputs: Sequence[Outputs], reference: Sequence[Outputs], *, uses: Mapping[str, OutputUse] | None = None
) -> float:
    """The error of all outputs, 0 for equal ones, about 1 where nothing is left of the signal.

    The mean over outputs of what `Deviations.by_output` says, so that a model of several heads is as good as its heads.

    Args:
        outputs: What the quantized model returns, one entry a feed.
        reference: What the float model returns.
        uses: From `find_uses`; None finds them out.

    Raises:
        OptionError: An output has another rank than in the reference.
    """
    return Deviations(outputs, reference, uses=uses).error()


class Deviations:
    """Deviations of outputs, gathered by sample, so that the error without one sample is cheap.

    Args:
        outputs: What the quantized model returns, one entry a feed; read once.
        reference: What the float model returns.
        uses: From `find_uses`; None finds them out.
        signals: Filled with what is found out about the reference, which is not found out again.

    Raises:
        OptionError: An output has another rank than in the reference.
    """

    def __init__(
        self,
        outputs: Iterable[Outputs],
        reference: Sequence[Outputs],
        *,
        uses: Mapping[str, OutputUse] | None = None,
        signals: Signals | None = None,
    ) -> None:
        self._uses = find_uses(reference) if uses is None else uses
        self._count = len(reference)
        known: Signals = {} if signals is None else signals
        measured: dict[str, list[_Parts | None]] = {name: [] for name in self._uses}
        for number, (actual, expected) in enumerate(zip(outputs, reference, strict=True)):
            for name, use in self._uses.items():
                measured[name].append(_moments_of(actual, expected, name, use, known, number))
        self._samples = {name: _Samples.of(samples) for name, samples in measured.items()}

    def error(self, *, without: int | None = None) -> float:
        """The error of all outputs, as `output_error`.

        Args:
            without: Number of a sample that is left out.
        """
        found = self.by_output(without=without)
        return float(np.mean(list(found.values()))) if found else 0.0

    def errors_without_each(self) -> tuple[float, ...]:
        """The error without each of the samples in turn; empty for a single one."""
        return tuple(self.error(without=number) for number in range(self._count if self._count > 1 else 0))

    def by_output(self, *, without: int | None = None) -> dict[str, float]:
        """The error of each floating-point output, as `output_error`; constant outputs are left out.

        Samples for which an output has another number of rows than in the reference, since that depends on the data,
        say nothing about it. An output that differs so for all samples has kept nothing: its error is 1.

        Args:
            without: As in `error`.
        """
        found = {}
        for name, use in self._uses.items():
            samples = self._samples[name]
            chosen = samples.full[samples.full != (-1 if without is None else without)]
            if chosen.size:
                error = _error([_merged(part, np.searchsorted(samples.full, chosen)) for part in samples.parts], use)
            else:
                error = np.nan if samples.alike - {without} else 1.0
            if np.isfinite(error):
                found[name] = float(error)
        return found


# ---- what an output is for ------------------------------------------------------------------------------------------


def _use_of(arrays: Sequence[Array]) -> OutputUse:
    first = arrays[0]
    flat = first.ndim >= 2 and first.shape[2:] == (1,) * (first.ndim - 2)  # (batch, n, 1, 1) behind a global pool
    if flat and first.shape[1] > 1 and all(a.shape[1:] == first.shape[1:] for a in arrays):
        rows = np.concatenate([a.reshape(len(a), -1) for a in arrays]).astype(np.float64)
        within = bool(rows.min() >= 0.0 and rows.max() <= 1.0)
        if within and np.allclose(rows.sum(axis=1), 1.0, atol=1e-3):
            return OutputUse(Use.CLASSES, probabilities=True)
        return OutputUse(Use.DENSE if within or first.shape[1] > _MOST_COLUMNS * 4 else Use.CLASSES)
    if first.ndim in (3, 4):
        for axis in (1, -1):
            scores = _score_columns(arrays, axis)
            if scores:
                return OutputUse(Use.POSITIONS, axis=axis, scores=scores)
    return OutputUse(Use.DENSE)


def _score_columns(arrays: Sequence[Array], axis: int) -> tuple[int, ...]:
    """The columns whose values lie between 0 and 1 and are mostly small."""
    count = arrays[0].shape[axis]
    if not 1 < count <= _MOST_COLUMNS or any(a.shape[axis] != count for a in arrays):
        return ()
    if 4 * len(arrays) > sum(a.size for a in arrays) // count:
        return ()
    rows = np.concatenate([as_rows(a, axis) for a in arrays])
    top = rows.max(axis=0)
    found = np.flatnonzero((rows.min(axis=0) >= 0.0) & (top <= 1.0) & (top > 0.0))
    return tuple(int(at) for at in found[quantile(rows[:, found], 0.9) < _SPARSE * top[found]])


# ---- errors ---------------------------------------------------------------------------------------------------------


def _moments_of(
    actual: Outputs, expected: Outputs, name: str, use: OutputUse, known: Signals, number: int
) -> _Parts | None:
    """Measurement of an output on one sample; None where the shapes differ."""
    a, b = np.asarray(actual[name]), np.asarray(expected[name])
    if a.ndim != b.ndim:
        raise OptionError(
            f"output '{name}' has shape {a.shape}, and {b.shape} in the float model",
            fix="compare models of the same outputs",
        )
    if a.shape != b.shape:
        return None
    if not a.size:
        return ()
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    if finite.all():
        columns = _columns(y, use)
        signals = known.get((number, name)) or known.setdefault((number, name), _signals(columns, use))
    else:
        x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
        columns = _columns(y, use)
        signals = _signals(columns, use)
    off = (found - wanted for found, wanted in zip(_columns(x, use), columns, strict=True))
    noise = (_summed(each * each, signal.rows) for each, signal in zip(off, signals, strict=True))
    return tuple(_Moments(s.weight, found, s.mean, s.spread) for s, found in zip(signals, noise, strict=True))


def _columns(values: Float64, use: OutputUse) -> list[Float64]:
    """Arrays of an output that are compared, of shape (rows, columns): of positions the scores, and the others."""
    if use.use is Use.CLASSES:
        rows = values.reshape(len(values), -1)
        rows = _log_odds(rows) if use.probabilities else rows
        return [(rows - rows.mean(axis=-1, keepdims=True)).reshape(-1, 1)]
    if use.use is Use.DENSE:
        return [values.reshape(-1, 1)]
    rows, is_score = as_rows(values, use.axis), np.zeros(values.shape[use.axis], bool)
    is_score[list(use.scores)] = True
    return [rows[:, is_score], rows[:, ~is_score]]


def _log_odds(p: Float64) -> Float64:
    inside = np.clip(p, _LEAST_PROBABILITY, 1.0 - _LEAST_PROBABILITY)
    return np.asarray(np.log(inside / (1.0 - inside)))


def _signals(columns: Sequence[Float64], use: OutputUse) -> tuple[_Signal, ...]:
    if use.use is Use.CLASSES:  # each row has a mean of its own
        return (_Signal(1.0, np.zeros(1), _summed(columns[0] ** 2, None), None),)
    weights = [None, columns[0].max(axis=1)] if use.use is Use.POSITIONS else [None]
    found = []
    for rows, weight in zip(columns, weights, strict=True):
        total = float(len(rows)) if weight is None else float(weight.sum())
        mean = _summed(rows, weight) / total if total > 0.0 else np.zeros(rows.shape[1])
        found.append(_Signal(total, mean, _summed((rows - mean) ** 2, weight), weight))
    return tuple(found)


def _summed(rows: Float64, weight: Float64 | None) -> Float64:
    """Sums over rows by column, in this thread: threads that a product of matrices wakes cost ten times as much."""
    return np.asarray(np.einsum("rc->c", rows) if weight is None else np.einsum("rc,r->c", rows, weight))


def _merged(samples: _Moments, chosen: npt.NDArray[np.intp]) -> _Moments:
    """The sums over all rows of some samples.

    Source: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", The American Statistician 37 (1983).
    """
    weight, noise, means, spread = (np.asarray(of_all)[chosen] for of_all in samples)
    total = float(weight.sum())
    share = weight / total if total > 0.0 else np.zeros(len(weight))
    mean = share @ means
    between = total * (share @ (means - mean) ** 2)
    return _Moments(total, noise.sum(axis=0), mean, spread.sum(axis=0) + between)


def _error(merged: Sequence[_Moments], use: OutputUse) -> float:
    if use.use is not Use.POSITIONS:
        noise, spread = float(merged[0].noise[0]), float(merged[0].spread[0])
        return noise / spread if spread > 0.0 else np.nan
    known = [error for each in merged if not np.isnan(error := _by_column(each))]
    return float(np.mean(known)) if known else np.nan


def _by_column(sums: _Moments) -> float:
    """The mean over columns of noise over variance, columns weighted by how much they vary.

    A column that varies a thousand times less than the others (a class that is not in the picture) is next to noise.
    """
    if not sums.weight > 0.0 or not sums.mean.size:
        return np.nan
    noise, variance = sums.noise / sums.weight, sums.spread / sums.weight
    top = float(variance.max())
    if top <= 0.0:
        return np.nan
    share = np.sqrt(variance / top)
    ratio = noise / np.maximum(variance, 1e-3 * top)
    return float((ratio * share).sum() / share.sum())
