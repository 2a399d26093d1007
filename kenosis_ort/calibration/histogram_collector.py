"""Histograms of tensors over samples, of all elements or of a part of them beside exact ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from kenosis_ort.calibration.blocked import MOST_PLACES, Blocked, in_order
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.histogram import HistogramBuilder
from kenosis_ort.calibration.minmax import Ends, MinMaxCollector, Reduction, pick, reduce, reduce_and_pick
from kenosis_ort.calibration.statistics import TensorStatistics

Array = npt.NDArray[Any]

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
        """Returns what is kept of a tensor's values; ``ends`` are the least and the largest where they are known."""
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
    """Returns how far apart the elements are that are counted of an array of so many."""
    if size < WHOLE_BELOW:
        return 1
    strides = _STRIDES if size < SPARSE_FROM else _STRIDES[2:]
    return next((s for s in strides if size % s), strides[-1])
