"""The observer: runs the float model on one feed at a time and hands every observed tensor to a collector.

Samples in parts: some that get statistics of their own, and some that run through a large model together.

Ranges by channel: what a tensor's range becomes when its channels are scaled follows from them, exactly.

A pass that moves scales from one layer to the next changes values whose ranges were collected before. Minima and maxima
by channel scale with the channels; they merge as those of the whole tensor do, and cost next to nothing to collect.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.blocked import Blocked
from kenosis_ort.calibration.stages import StagedModel
from kenosis_ort.calibration.statistics import ChannelRange, TensorStatistics
from kenosis_ort.errors import CalibrationError
from kenosis_ort.runtime.session import as_array
from kenosis_ort.storage.spool import Spool

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
        """The statistics of the changed value without a histogram; None where they do not follow.

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
    """The least or largest value of each channel, NaN where there is one; in blocks they are of axis 1."""
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


class Bundle:
    """What is to run through a model of many weights together.

    Attributes:
        feeds: What it runs on.
        numbers: Of the samples that these are of, for messages.
        chosen: Whether each is of the part.
    """

    def __init__(self) -> None:
        self.feeds = Spool()
        self.numbers: list[int] = []
        self.chosen: list[bool] = []

    def append(self, feed: dict[str, Any], number: int, chosen: bool) -> None:
        """Puts one at the end."""
        self.feeds.append(feed)
        self.numbers.append(number)
        self.chosen.append(chosen)

    @property
    def samples(self) -> int:
        """How many samples they are of."""
        return len(set(self.numbers))


class Parted:
    """Collects from some samples apart from the others; together they are what one collector would have, exactly.

    Args:
        chosen: For the samples of the part.
        others: For the rest.

    Attributes:
        is_chosen: What comes next is of the part.
    """

    def __init__(self, chosen: Collector, others: Collector) -> None:
        self.chosen, self._others = chosen, others
        self.is_chosen = False

    @property
    def _now(self) -> Collector:
        return self.chosen if self.is_chosen else self._others

    def add(self, name: str, array: Array, ends: tuple[float, float] | None = None) -> bool:
        return self._now.add(name, array, ends)

    def end_sample(self) -> None:
        self._now.end_sample()

    def end_chunk(self) -> None:
        self.chosen.end_chunk()
        self._others.end_chunk()

    def statistics(self) -> dict[str, TensorStatistics]:
        others = self._others.statistics()
        return {n: s.merge(others[n], weights=(1, 1)) for n, s in self.chosen.statistics().items()}


Array = npt.NDArray[Any]

_SHARE = 1 << 18  # elements below which a thread of its own costs more than it saves
_CALL = 1 << 12  # elements that take as long as calling a collector does


class Collector(Protocol):
    """Keeps statistics of tensors; knows nothing of where they come from."""

    def add(self, name: str, array: Array, ends: tuple[float, float] | None = None) -> bool:
        """Adds a tensor's values for the sample at hand; called for several tensors at a time.

        Args:
            name: The tensor.
            array: Its values.
            ends: The least and the largest of them, where they are known already.

        Returns:
            False if a value is NaN or infinite.
        """

    def end_sample(self) -> None:
        """Ends a sample; of one that comes in several parts, a part, where the order of samples does not matter."""

    def end_chunk(self) -> None:
        """Ends a chunk of samples."""

    def statistics(self) -> dict[str, TensorStatistics]:
        """The statistics so far, by tensor name."""


class Observer:
    """Runs the model and feeds a collector.

    Args:
        staged: The model.
        fed: Graph inputs to observe.
        collector: Takes the tensors.
        threads: Number of threads that work on tensors; 0 for one a processor.
        seen_as: By tensor name, what stands for its values.
    """

    def __init__(
        self,
        staged: StagedModel,
        fed: Iterable[str],
        collector: Collector,
        *,
        threads: int,
        seen_as: Mapping[str, Callable[[Array], Array]] = MappingProxyType({}),
    ) -> None:
        self._staged = staged
        self._fed = tuple(fed)
        self._collector = collector
        self._threads = threads or _processors()
        self._seen_as = seen_as

    def observe(self, feed: dict[str, Any], sample: int) -> None:
        """Takes one sample into account.

        Raises:
            CalibrationError: The model fails on it, or computes NaN or infinity.
        """

        def take(arrays: dict[str, Array]) -> None:
            broken = self._add(arrays)
            if broken:
                raise _non_finite(_broken_inputs(feed) or broken, sample)

        take({name: as_array(feed[name]) for name in self._fed if name in feed})
        self._staged.run(feed, sample, take)
        self._collector.end_sample()

    def observe_all(self, feeds: Sequence[dict[str, Any]], numbers: Sequence[int], turn: Callable[[int], None]) -> None:
        """Takes several samples into account, part by part of the model.

        Args:
            feeds: The samples.
            numbers: Their indexes, for messages.
            turn: Called with a place in ``feeds`` before the collector gets values of that sample.

        Raises:
            CalibrationError: The model fails on one, or computes NaN or infinity.
        """

        def take(place: int, arrays: dict[str, Array]) -> None:
            turn(place)
            broken = self._add(arrays)
            if broken:
                raise _non_finite(_broken_inputs(feeds[place]) or broken, numbers[place])
            self._collector.end_sample()

        for place, feed in enumerate(feeds):
            take(place, {name: as_array(feed[name]) for name in self._fed if name in feed})
        self._staged.run_all(feeds, numbers, take)

    def _add(self, arrays: dict[str, Array]) -> list[str]:
        """Adds arrays, several at a time; returns the names of those with NaN or infinity, in order."""
        shares = _shares({name: array.size for name, array in arrays.items()}, self._threads)

        def take(names: list[str]) -> list[str]:
            return [name for name in names if not self._take(name, arrays[name])]

        others = [self._pool.submit(take, names) for names in shares[1:]]
        broken = {*take(shares[0]), *(name for other in others for name in other.result())}
        return [name for name in arrays if name in broken]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """Threads beside the caller's; they end with the observer."""
        return ThreadPoolExecutor(self._threads - 1, initializer=np.seterr, initargs=("ignore",))  # as the caller's

    def _take(self, name: str, array: Array) -> bool:
        seen = self._seen_as.get(name)
        return self._collector.add(name, array if seen is None else seen(array))


def _broken_inputs(feed: dict[str, Any]) -> list[str]:
    """The inputs that hold NaN or infinity themselves: more telling than what the model makes of them."""
    arrays = {name: as_array(value) for name, value in feed.items()}
    return [name for name, a in arrays.items() if a.dtype.kind == "f" and not np.isfinite(a).all()]


def _non_finite(names: list[str], sample: int) -> CalibrationError:
    more = f" (and {len(names) - 1} tensors after it)" if len(names) > 1 else ""
    return CalibrationError(
        f"The float model computes NaN or infinity on the calibration data{more}.",
        where=f"tensor '{names[0]}', sample {sample}",
        fix="Check this sample's preprocessing; where the model means it (a mask of minus infinity), exclude the node.",
    )


def _shares(sizes: Mapping[str, int], threads: int) -> list[list[str]]:
    """The names dealt out to as many threads as they are worth, about as much work to each."""
    work = sum(sizes.values()) + _CALL * len(sizes)
    count = max(min(threads, work // _SHARE, len(sizes)), 1)
    shares: list[tuple[int, list[str]]] = [(0, []) for _ in range(count)]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = min(range(count), key=lambda at: shares[at][0])
        load, names = shares[least]
        shares[least] = (load + sizes[name] + _CALL, [*names, name])
    return [names for _, names in shares]


def _processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
