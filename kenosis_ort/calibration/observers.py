"""Observers: they run the float model on one feed at a time and keep statistics of chosen tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.minmax import REDUCTIONS, RangeAccumulator
from kenosis_ort.calibration.session import ObservedModel, run
from kenosis_ort.calibration.stages import StagedModel
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.errors import CalibrationError

Array = npt.NDArray[Any]

_NOTHING = np.array([math.inf, -math.inf, 0.0, 0.0])  # of a tensor without elements, in the order of `REDUCTIONS`


class Observer(Protocol):
    """Collects statistics sample by sample."""

    def observe(self, feed: dict[str, Any], sample: int) -> None:
        """Runs the model on one feed and takes its tensors into account."""

    def close_chunk(self) -> None:
        """Ends a chunk of samples, for the moving average over chunks."""

    def statistics(self) -> dict[str, TensorStatistics]:
        """Returns the statistics so far, by tensor name."""


def non_finite(names: Iterable[str], sample: int) -> CalibrationError:
    """Returns the error for tensors with NaN or infinite values, the first in graph order first."""
    first, *rest = names
    more = f" (and {len(rest)} tensors after it)" if rest else ""
    return CalibrationError(
        f"The float model computes NaN or infinity on the calibration data{more}.",
        where=f"tensor '{first}', sample {sample}",
        fix="Check this sample's preprocessing; where the model means it (a mask of minus infinity), exclude the node.",
    )


def as_array(value: Any) -> Array:
    """Returns a fed value as a numpy array."""
    return np.asarray(value.numpy() if isinstance(value, ort.OrtValue) else value)


class MinMaxObserver:
    """Minima and maxima by reductions inside the graph.

    Args:
        staged: The model, handing out reductions.
        model: The model, to look at a suspect tensor.
        computed: Tensors that nodes compute, in graph order, with their numpy types.
        fed: Graph inputs to observe, with their numpy types.
        config: Settings.
    """

    def __init__(
        self,
        staged: StagedModel,
        model: ObservedModel,
        computed: Mapping[str, str],
        fed: Mapping[str, str],
        config: CalibrationConfig,
    ) -> None:
        self._staged = staged
        self._model = model
        self._computed = list(computed)
        self._fed = list(fed)
        types = {**computed, **fed}
        self._groups = [
            _Group([i for i, name in enumerate(types) if types[name] == dtype], dtype, config)
            for dtype in sorted(set(types.values()))
        ]
        self._types = types
        self._count = np.zeros(len(types), np.int64)
        self._total = np.zeros(len(types), np.float64)

    def observe(self, feed: dict[str, Any], sample: int) -> None:
        reduced = {name: _reduce(as_array(feed[name])) for name in self._fed if name in feed}
        self._staged.run(feed, sample, reduced.update)
        rows = [reduced.get(name, _NOTHING) for name in self._types]
        low, high, mean, size = np.array(rows, np.float64).reshape(-1, len(REDUCTIONS)).T
        occupied = size > 0
        suspect = occupied & ~(np.isfinite(mean) & np.isfinite(low) & np.isfinite(high))
        if suspect.any():
            self._confirm([name for name, bad in zip(self._types, suspect, strict=True) if bad], feed, sample)
        low, high = np.where(occupied, low, np.inf), np.where(occupied, high, -np.inf)
        for group in self._groups:
            group.ranges.add(low[group.members], high[group.members])
        self._count += size.astype(np.int64)
        self._total += np.where(occupied, mean * size, 0.0)

    def _confirm(self, suspects: Sequence[str], feed: dict[str, Any], sample: int) -> None:
        """Raises if a suspect tensor really holds NaN or infinity; its mean alone may have overflowed."""
        computed = [name for name in suspects if name in set(self._computed)]
        bad = [name for name in self._fed if name in set(suspects) and not np.isfinite(as_array(feed[name])).all()]
        if computed:
            values = run(self._model.session(computed), computed, feed, sample)
            bad += [name for name, value in zip(computed, values, strict=True) if not np.isfinite(value).all()]
        if bad:
            raise non_finite(bad, sample)

    def close_chunk(self) -> None:
        for group in self._groups:
            group.ranges.close_chunk()

    def statistics(self) -> dict[str, TensorStatistics]:
        names = list(self._types)
        out: dict[str, TensorStatistics] = {}
        for group in self._groups:
            averages = group.ranges.averages()
            for position, index in enumerate(group.members):
                count = int(self._count[index])
                mean = float(self._total[index]) / count if count else None
                out[names[index]] = TensorStatistics(
                    low=float(group.ranges.low[position]) if count else 0.0,
                    high=float(group.ranges.high[position]) if count else 0.0,
                    count=count,
                    dtype=group.dtype,
                    mean=mean if mean is not None and math.isfinite(mean) else None,
                    averaged=averages[position],
                )
        return {name: out[name] for name in names}


class _Group:
    """The tensors of one element type."""

    def __init__(self, members: list[int], dtype: str, config: CalibrationConfig) -> None:
        self.members = members
        self.dtype = dtype
        self.ranges = RangeAccumulator(
            len(members),
            dtype,
            moving_average=config.moving_average,
            constant=config.averaging_constant,
            symmetric=config.is_symmetric,
        )


def _reduce(array: Array) -> Array:
    if array.size == 0:
        return _NOTHING
    return np.array([array.min(), array.max(), array.mean(dtype=np.float64), array.size], np.float64)


def constant_statistics(array: Array, dtype: str, config: CalibrationConfig) -> TensorStatistics:
    """Returns the statistics of a tensor that never changes."""
    low, high, mean, size = _reduce(array).tolist()
    if size == 0:
        return TensorStatistics(0.0, 0.0, 0, dtype)
    top = max(abs(low), abs(high))
    averaged = (-top, top) if config.is_symmetric else (low, high)
    return TensorStatistics(low, high, int(size), dtype, mean, averaged=averaged if config.moving_average else None)
