"""The observer: runs the float model on one feed at a time and hands every observed tensor to a collector."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.stages import StagedModel
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.session import as_array

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
        """Returns the statistics so far, by tensor name."""


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
    """Returns the inputs that hold NaN or infinity themselves: more telling than what the model makes of them."""
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
    """Returns the names dealt out to as many threads as they are worth, about as much work to each."""
    work = sum(sizes.values()) + _CALL * len(sizes)
    count = max(min(threads, work // _SHARE, len(sizes)), 1)
    shares: list[tuple[int, list[str]]] = [(0, []) for _ in range(count)]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = min(range(count), key=lambda at: shares[at][0])
        held, names = shares[least]
        shares[least] = (held + sizes[name] + _CALL, [*names, name])
    return [names for _, names in shares]


def _processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
