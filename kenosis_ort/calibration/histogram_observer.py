"""The observer of the histogram methods: tensors leave the runtime one sample at a time and are binned at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kenosis_ort.calibration.histogram import HistogramBuilder
from kenosis_ort.calibration.observers import as_array, non_finite
from kenosis_ort.calibration.stages import StagedModel
from kenosis_ort.calibration.statistics import TensorStatistics


class HistogramObserver:
    """Histograms of all elements of the observed tensors.

    Args:
        staged: The model, handing out whole tensors.
        computed: Tensors that nodes compute, with their numpy types.
        fed: Graph inputs to observe, with their numpy types.
        threads: Number of threads that bin; 0 for one a processor.
    """

    def __init__(
        self, staged: StagedModel, computed: Mapping[str, str], fed: Mapping[str, str], *, threads: int
    ) -> None:
        self._staged = staged
        self._fed = list(fed)
        self._dtypes = {**computed, **fed}
        self._builders = {name: HistogramBuilder() for name in self._dtypes}
        self._threads = threads or _processors()

    def observe(self, feed: dict[str, Any], sample: int) -> None:
        def take(arrays: dict[str, Any]) -> None:
            bad = self._bin(arrays)
            if bad:
                raise non_finite(bad, sample)

        take({name: as_array(feed[name]) for name in self._fed if name in feed})
        self._staged.run(feed, sample, take)

    def _bin(self, arrays: dict[str, Any]) -> list[str]:
        """Bins arrays, several at a time; returns the names of those with NaN or infinity, in order."""
        names = sorted(arrays, key=lambda name: -arrays[name].size)
        if self._threads == 1 or len(names) < 2:
            fine = [self._builders[name].add(arrays[name]) for name in names]
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                fine = list(pool.map(lambda name: self._builders[name].add(arrays[name]), names))
        broken = {name for name, good in zip(names, fine, strict=True) if not good}
        return [name for name in arrays if name in broken]

    def close_chunk(self) -> None:
        """Does nothing: histograms do not depend on chunks."""

    def statistics(self) -> dict[str, TensorStatistics]:
        out: dict[str, TensorStatistics] = {}
        for name, builder in self._builders.items():
            if builder.count:
                out[name] = TensorStatistics(
                    low=builder.low,
                    high=builder.high,
                    count=builder.count,
                    dtype=self._dtypes[name],
                    mean=builder.total / builder.count,
                    histogram=builder.finish(),
                )
            else:
                out[name] = TensorStatistics(0.0, 0.0, 0, self._dtypes[name], histogram=builder.finish())
        return out


def _processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
