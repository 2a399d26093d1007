"""Ranges by channel: what a tensor's range becomes when its channels are scaled follows from them, exactly.

A pass that moves scales from one layer to the next changes values whose ranges were collected before. Minima and maxima
by channel scale with the channels; they merge as those of the whole tensor do, and cost next to nothing to collect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.blocked import Blocked
from kenosis_ort.calibration.observer import Array, Collector
from kenosis_ort.calibration.statistics import ChannelRange, TensorStatistics

Float64 = npt.NDArray[np.float64]

_LONG_ROW = 512  # elements that a channel has side by side


@dataclass(frozen=True, eq=False)
class Rescaling:
    """What a change of weights made of the channels of a value: ``(x - shift) * factor``, cut to bounds.

    Attributes:
        axis: Of the channels; negative counts from the end.
        factors: By channel, positive, float64 (channels,).
        shift: By channel, taken off before; 0.0 for none.
        low: Least value of the activations before it; minus infinity without.
        high: Largest value, likewise.
        source: The value that it was before where the change made a new one; "" for the value itself.
    """

    axis: int
    factors: Float64
    shift: Float64 | float = 0.0
    low: float = -math.inf
    high: float = math.inf
    source: str = ""

    def of(self, statistics: TensorStatistics) -> TensorStatistics | None:
        """Returns the statistics of the changed value without a histogram; None where they do not follow.

        Channels beyond those that factors are known for are padding, and stay as they are. A range set by hand or by
        moving average, which is not the one that was seen, keeps its relation to that.
        """
        seen, count = statistics.channels, len(self.factors)
        if seen is None or not statistics.count or not -seen.rank <= self.axis < seen.rank:
            return None
        if self.axis % seen.rank != seen.axis or seen.low.size < count:
            return None
        ends = np.stack([seen.low, seen.high])
        ends[:, :count] = np.clip((ends[:, :count] - self.shift) * self.factors, self.low, self.high)
        low, high = float(ends[0].min()), float(ends[1].max())

        def like(known: tuple[float, float] | None) -> tuple[float, float] | None:
            if known is None:
                return None
            return _in_proportion(known[0], statistics.low, low), _in_proportion(known[1], statistics.high, high)

        return TensorStatistics(
            low,
            high,
            statistics.count,
            statistics.dtype,
            averaged=like(statistics.averaged),
            fixed=like(statistics.fixed),
            channels=replace(seen, low=ends[0], high=ends[1]),
        )


def _in_proportion(known: float, before: float, now: float) -> float:
    return known * (now / before) if before else known + now


def _by_channel(end: np.ufunc, array: Array, axis: int) -> Float64:
    """Returns the least or largest value of each channel, NaN where there is one; in blocks they are of axis 1."""
    if isinstance(array, Blocked):  # line by line: of a channel no two elements lie side by side
        images, blocks, height, width, block = array.shape
        lines = np.asarray(array).reshape(images, blocks, height, width * block)
        line = end.reduce(lines, axis=(0, 2)).reshape(blocks, width, block)
        ends: Float64 = end.reduce(line, axis=1).reshape(-1).astype(np.float64)
        return ends
    behind = math.prod(array.shape[axis + 1 :])
    rows = array.reshape(math.prod(array.shape[:axis]), array.shape[axis], behind)
    if behind >= _LONG_ROW or len(rows) == 1:
        found = end.reduce(rows, axis=(0, 2))
    else:  # short rows one by one take ten times longer than samples one upon the other
        found = end.reduce(end.reduce(rows, axis=0), axis=1)
    wide: Float64 = found.astype(np.float64)
    return wide


class ChannelCollector:
    """Hands tensors on to another collector, and follows the range of each channel of some.

    Args:
        inner: The other collector.
        axes: Axes of the channels by tensor name; those that an array does not have are not followed.
    """

    def __init__(self, inner: Collector, axes: Mapping[str, int]) -> None:
        self._inner = inner
        self._axes = axes
        self._ends: dict[str, ChannelRange | None] = {}

    def add(self, name: str, array: Array, ends: tuple[float, float] | None = None) -> bool:
        axis = self._axes.get(name)
        rank = 4 if isinstance(array, Blocked) else array.ndim
        if axis is not None and array.size and -rank <= axis < rank:
            low, high = (_by_channel(end, array, axis % rank) for end in (np.minimum, np.maximum))
            now = ChannelRange(axis % rank, rank, low, high)
            known = self._ends.get(name, now)
            self._ends[name] = None if known is None else known.merge(now)  # none where their number changes
            ends = float(low.min()), float(high.max())
        return self._inner.add(name, array, ends)

    def end_sample(self) -> None:
        self._inner.end_sample()

    def end_chunk(self) -> None:
        self._inner.end_chunk()

    def statistics(self) -> dict[str, TensorStatistics]:
        found = self._inner.statistics()
        return {name: replace(each, channels=self._ends.get(name)) for name, each in found.items()}
