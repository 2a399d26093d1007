"""Minima and maxima over samples, with stock's moving average.

Histograms of tensors over samples, of all elements or of a part of them beside exact ranges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.blocked import MOST_PLACES, Blocked, in_order, places
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.histogram import HistogramBuilder, blocks, ends
from kenosis_ort.calibration.statistics import TensorStatistics

Array = npt.NDArray[Any]
Ends = tuple[float, float]

_NOTHING: Array = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Reduction:
    """What MinMax keeps of one tensor on one sample; low is greater than high if it has no element."""

    low: float = math.inf
    high: float = -math.inf
    count: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return self.count == 0 or (math.isfinite(self.low) and math.isfinite(self.high))


def reduce(array: Array) -> Reduction:
    """Reduces an array in one pass over memory. NaN makes both ends NaN."""
    low, high = math.inf, -math.inf
    for block in blocks(array):
        block_low, block_high = ends(block)
        if math.isnan(block_low):
            return Reduction(math.nan, math.nan, array.size)
        low, high = min(low, block_low), max(high, block_high)
    return Reduction(low, high, array.size)


def reduce_and_pick(array: Array, stride: int) -> tuple[Reduction, Array]:
    """The reduction and every ``stride``-th element, taken while it is in the processor's cache.

    Of an array in blocks they are the same elements as of one in order.
    """
    low, high = math.inf, -math.inf
    picked = np.empty(-(-array.size // stride), np.float32)
    where = places(array.shape, stride) if isinstance(array, Blocked) else None
    array, behind, taken = np.asarray(array), 0, 0  # elements up to the end of a block, and those picked of them
    for block in blocks(array):
        block_low, block_high = ends(block)
        if math.isnan(block_low):
            return Reduction(math.nan, math.nan, array.size), _NOTHING
        low, high = min(low, block_low), max(high, block_high)
        start, behind = behind, behind + block.size
        first, taken = taken, -(-behind // stride) if where is None else int(np.searchsorted(where, behind))
        if where is None:
            picked[first:taken] = block[first * stride - start :: stride]
        else:  # any mode but "raise", which would copy
            array.take(where[first:taken], out=picked[first:taken], mode="wrap")
    return Reduction(low, high, array.size), picked


def pick(array: Array, stride: int) -> Array:
    """Every ``stride``-th element, in any order."""
    if isinstance(array, Blocked):
        picked: Array = np.asarray(array).take(places(array.shape, stride), mode="wrap")
        return picked
    return array.reshape(-1)[::stride]


class MinMaxCollector:
    """Ranges of tensors: extremes over all samples, and the moving average if asked for.

    Args:
        dtypes: Numpy types by tensor name.
        config: Settings.
    """

    def __init__(self, dtypes: Mapping[str, str], config: CalibrationConfig) -> None:
        self._dtypes = dtypes
        self._sample: dict[str, Reduction] = {}
        self._count = dict.fromkeys(dtypes, 0)
        self._groups = {
            dtype: _Group(tuple(name for name in dtypes if dtypes[name] == dtype), dtype, config)
            for dtype in sorted(set(dtypes.values()))
        }

    def add(self, name: str, array: Array, ends: Ends | None = None) -> bool:
        return self.take(name, *self.look(array, ends))

    def look(self, array: Array, ends: Ends | None = None) -> tuple[Reduction, Array]:
        """Statistics of a tensor's values; ``ends`` are the least and the largest where they are known."""
        return reduce(array) if ends is None else Reduction(*ends, array.size), _NOTHING

    def take(self, name: str, reduction: Reduction, _: Array) -> bool:
        """Adds what is kept of a tensor's values for the sample at hand; tells whether all are finite."""
        self._sample[name] = reduction
        return reduction.is_finite

    def end_sample(self) -> None:
        nothing = Reduction()
        for group in self._groups.values():
            found = [self._sample.get(name, nothing) for name in group.names]
            group.ranges.add(np.array([r.low for r in found]), np.array([r.high for r in found]))
        for name, reduction in self._sample.items():
            self._count[name] += reduction.count
        self._sample = {}

    def end_chunk(self) -> None:
        for group in self._groups.values():
            group.ranges.close_chunk()

    def statistics(self) -> dict[str, TensorStatistics]:
        out: dict[str, TensorStatistics] = {}
        for dtype, group in self._groups.items():
            ends = zip(group.ranges.low.tolist(), group.ranges.high.tolist(), group.ranges.averages(), strict=True)
            for name, (low, high, averaged) in zip(group.names, ends, strict=True):
                count = self._count[name]
                out[name] = (
                    TensorStatistics(low, high, count, dtype, averaged=averaged)
                    if count
                    else TensorStatistics(0.0, 0.0, 0, dtype)
                )
        return {name: out[name] for name in self._dtypes}


class _Group:
    """The tensors of one element type."""

    def __init__(self, names: tuple[str, ...], dtype: str, config: CalibrationConfig) -> None:
        self.names = names
        self.ranges = RangeAccumulator(
            len(names),
            dtype,
            moving_average=config.moving_average,
            constant=config.averaging_constant,
            symmetric=config.is_symmetric,
        )


def constant_statistics(array: Array, dtype: str, config: CalibrationConfig) -> TensorStatistics:
    """The statistics of a tensor that never changes."""
    collector = MinMaxCollector({"": dtype}, config)
    collector.add("", array)
    collector.end_sample()
    collector.end_chunk()
    return collector.statistics()[""]


class RangeAccumulator:
    """Follows minima and maxima of tensors of one element type over samples and chunks.

    The arithmetic of the moving average is done in the tensors' own type and in stock's order of summation, so
    that the result is stock's bit for bit.

    Args:
        size: Number of tensors.
        dtype: Their element type.
        moving_average: Whether a chunk's range is the mean of its samples' minima and maxima.
        constant: Weight of a newer chunk in the moving average over chunks.
        symmetric: Whether a chunk's range is made symmetric before it is merged.
    """

    def __init__(
        self, size: int, dtype: npt.DTypeLike, *, moving_average: bool, constant: float, symmetric: bool
    ) -> None:
        self._dtype = np.dtype(dtype)
        self._moving_average = moving_average
        self._constant = constant
        self._symmetric = symmetric
        self.low = np.full(size, np.inf, self._dtype)
        self.high = np.full(size, -np.inf, self._dtype)
        self._rows: list[tuple[Array, Array]] = []
        self._average: tuple[Array, Array] | None = None

    def add(self, low: Array, high: Array) -> None:
        """Adds one sample.

        Args:
            low: Minima, one a tensor; greater than ``high`` for an empty tensor.
            high: Maxima, one a tensor.
        """
        np.minimum(self.low, low, out=self.low)
        np.maximum(self.high, high, out=self.high)
        if self._moving_average:
            empty = low > high
            self._rows.append(
                (np.where(empty, np.nan, low).astype(self._dtype), np.where(empty, np.nan, high).astype(self._dtype))
            )

    def close_chunk(self) -> None:
        """Merges the samples since the last call into the moving average."""
        if not self._rows:
            return
        low, high = (_mean_of_columns([row[i] for row in self._rows]) for i in (0, 1))
        self._rows = []
        if self._symmetric:
            high = np.maximum(np.abs(low), np.abs(high))
            low = -high
        if self._average is None:
            self._average = (low, high)
        else:
            self._average = (self._blend(self._average[0], low), self._blend(self._average[1], high))

    def _blend(self, old: Array, new: Array) -> Array:
        constant = np.asarray(self._constant, self._dtype)
        blended = old + constant * (new - old)
        out: Array = np.where(np.isnan(old), new, np.where(np.isnan(new), old, blended))
        return out

    def averages(self) -> list[tuple[float, float] | None]:
        """The moving average of each tensor, None where there is none."""
        if self._average is None:
            return [None] * self.low.size
        pairs = zip(*(side.tolist() for side in self._average), strict=True)
        return [None if np.isnan(a) else (a, b) for a, b in pairs]


def _mean_of_columns(rows: list[Array]) -> Array:
    """Mean over the rows that are not NaN, NaN for a column of nothing else, summed along contiguous memory."""
    columns = np.ascontiguousarray(np.stack(rows).T)
    present = ~np.isnan(columns).all(axis=1)
    out = np.full(columns.shape[0], np.nan, columns.dtype)
    out[present] = np.nanmean(columns[present], axis=1)
    return out


WHOLE_BELOW = 1 << 14
"""A tensor of fewer elements is counted whole by a `SketchCollector`."""
SPARSE_FROM = 1 << 17
"""From so many elements on every eleventh is counted, else every fifth."""
_STRIDES = (5, 7, 11, 13, 17, 19)


class HistogramCollector:
    """Histograms of all elements; neither samples nor chunks matter to them.

    Args:
        dtypes: Numpy types by tensor name.
    """

    def __init__(self, dtypes: Mapping[str, str]) -> None:
        self._dtypes = dtypes
        self._builders = {name: HistogramBuilder() for name in dtypes}

    def add(self, name: str, array: Array, _: Ends | None = None) -> bool:
        return self._builders[name].add(array)

    def end_sample(self) -> None:
        """Does nothing."""

    def end_chunk(self) -> None:
        """Does nothing."""

    def statistics(self) -> dict[str, TensorStatistics]:
        return {name: self._finish(name, builder) for name, builder in self._builders.items()}

    def _finish(self, name: str, builder: HistogramBuilder) -> TensorStatistics:
        dtype, histogram = self._dtypes[name], builder.finish()
        if not builder.count:
            return TensorStatistics(0.0, 0.0, 0, dtype, histogram)
        return TensorStatistics(builder.low, builder.high, builder.count, dtype, histogram)


class SketchCollector:
    """Exact ranges as by MinMax, and histograms of every fifth or eleventh element of large tensors.

    Binning all elements takes as long as half of the inference itself, on nets with much activation and little work
    far longer; so few take a tenth. The stride divides no dimension of a tensor, so that all channels and positions are
    counted alike, and what is picked depends on nothing but the shape.

    Args:
        dtypes: Numpy types by tensor name.
        config: Settings of the ranges.
    """

    def __init__(self, dtypes: Mapping[str, str], config: CalibrationConfig) -> None:
        self._ranges = MinMaxCollector(dtypes, config)
        self._builders = {name: HistogramBuilder() for name in dtypes}

    def add(self, name: str, array: Array, ends: Ends | None = None) -> bool:
        return self.take(name, *self.look(array, ends))

    def look(self, array: Array, ends: Ends | None = None) -> tuple[Reduction, Array]:
        """Statistics of a tensor's values; ``ends`` are the least and the largest where they are known."""
        stride = _stride(array.size)
        if isinstance(array, Blocked) and array.size > stride * MOST_PLACES:
            array = in_order(array)
        if ends is not None:
            return Reduction(*ends, array.size), pick(array, stride)
        return (reduce(array), array) if stride == 1 else reduce_and_pick(array, stride)

    def take(self, name: str, reduction: Reduction, some: Array) -> bool:
        """Adds what is kept of a tensor's values for the sample at hand; tells whether all are finite."""
        if reduction.count and reduction.is_finite:
            self._builders[name].add_part(some, reduction.low, reduction.high)
        return self._ranges.take(name, reduction, some)

    def end_sample(self) -> None:
        self._ranges.end_sample()

    def end_chunk(self) -> None:
        self._ranges.end_chunk()

    def statistics(self) -> dict[str, TensorStatistics]:
        found = self._ranges.statistics()
        return {name: replace(found[name], histogram=builder.finish()) for name, builder in self._builders.items()}


def _stride(size: int) -> int:
    """Stride of the elements that are counted of an array of so many."""
    if size < WHOLE_BELOW:
        return 1
    strides = _STRIDES if size < SPARSE_FROM else _STRIDES[2:]
    return next((s for s in strides if size % s), strides[-1])
