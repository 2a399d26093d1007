"""Histograms of tensors over samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from kenosis_ort.calibration.histogram import HistogramBuilder
from kenosis_ort.calibration.statistics import TensorStatistics

Array = npt.NDArray[Any]


class HistogramCollector:
    """Histograms of all elements; neither samples nor chunks matter to them.

    Args:
        dtypes: Numpy types by tensor name.
    """

    def __init__(self, dtypes: Mapping[str, str]) -> None:
        self._dtypes = dtypes
        self._builders = {name: HistogramBuilder() for name in dtypes}

    def add(self, name: str, array: Array) -> bool:
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
