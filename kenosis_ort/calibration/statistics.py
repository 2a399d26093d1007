"""What is known about one tensor, what one range follows from it, and what scaled channels make of it.

A pass that moves scales from one layer to the next changes values whose ranges were collected before. Minima and maxima
by channel scale with the channels; they merge as those of the whole tensor do, and cost next to nothing to collect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.histogram import Histogram
from kenosis_ort.calibration.methods import Moments, distribution_moments, entropy_range, percentile_range
from kenosis_ort.errors import CalibrationError

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ChannelRange:
    """Range of each channel of a tensor over all samples, exact.

    Attributes:
        axis: Of the channels, counted from the first.
        rank: Number of axes of the tensor.
        low: Smallest values, float64 (channels,).
        high: Largest values, likewise.
    """

    axis: int
    rank: int
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChannelRange):
            return NotImplemented
        same = np.array_equal(self.low, other.low) and np.array_equal(self.high, other.high)
        return (self.axis, self.rank) == (other.axis, other.rank) and same

    __hash__ = None  # type: ignore[assignment]

    def merge(self, other: ChannelRange) -> ChannelRange | None:
        """The ranges over both data sets; None where the number of channels is not the same."""
        if (self.axis, self.rank, self.low.size) != (other.axis, other.rank, other.low.size):
            return None
        return replace(self, low=np.minimum(self.low, other.low), high=np.maximum(self.high, other.high))


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor over all samples.

    Attributes:
        low: Smallest value seen, exact; of a gate such as ``x * Sigmoid(x)`` the least that it takes over the range of
            ``x`` (`kenosis_ort.calibration.derived`). 0 if no element was seen.
        high: Largest value seen, likewise.
        count: Number of elements seen; 0 for a tensor that was always empty, or where it is not known.
        dtype: ``"float32"`` or ``"float16"``, the tensor's element type.
        histogram: Counts of the values; None for MinMax.
        averaged: Range by moving average, None without.
        fixed: A range that takes the place of the computed one, e.g. from stock's cache file.
        channels: Ranges by channel, of tensors whose channels a pass may scale; None of others.
    """

    low: float
    high: float
    count: int = 0
    dtype: str = "float32"
    histogram: Histogram | None = None
    averaged: tuple[float, float] | None = None
    fixed: tuple[float, float] | None = None
    channels: ChannelRange | None = None

    def range(self, config: CalibrationConfig, name: str = "") -> tuple[float, float]:
        """The range by the method of ``config``, rounded to the tensor's element type.

        Args:
            config: Method and settings.
            name: Name of the tensor, for messages.

        Raises:
            CalibrationError: The method needs a histogram and there is none.
        """
        if self.fixed is not None:
            return self.fixed
        low, high = np.array(self._range(config, name)).astype(self.dtype).tolist()
        return low, high

    def _range(self, config: CalibrationConfig, name: str) -> tuple[float, float]:
        if config.method == "minmax":
            low, high = self.averaged if config.moving_average and self.averaged else (self.low, self.high)
            if config.is_symmetric and not (config.moving_average and self.averaged):
                top = max(abs(low), abs(high))
                return -top, top
            return low, high
        if self.count == 0:
            return 0.0, 0.0
        histogram = self._histogram_or_raise(config, name)
        if config.method == "percentile":
            return percentile_range(
                histogram,
                self.low,
                self.high,
                percentile=config.percentile,
                bins=config.bins,
                symmetric=config.is_symmetric,
            )
        if config.method == "entropy":
            return entropy_range(
                histogram, self.low, self.high, bins=config.bins, quantized_bins=config.num_quantized_bins
            )
        top = max(abs(self.low), abs(self.high))
        return -top, top

    def moments(self, config: CalibrationConfig, name: str = "") -> Moments:
        """Mean and standard deviation as the distribution method defines them."""
        histogram = self._histogram_or_raise(config, name)
        return distribution_moments(histogram, self.low, self.high, bins=config.bins, scenario=config.scenario)

    def _histogram_or_raise(self, config: CalibrationConfig, name: str) -> Histogram:
        if self.histogram is None:
            raise CalibrationError(
                f"The calibration method '{config.method}' needs a histogram, and this table holds none.",
                where=f"tensor '{name}'",
                fix="Collect again with that method.",
            )
        return self.histogram

    def merge(self, other: TensorStatistics, *, weights: tuple[int, int]) -> TensorStatistics:
        """The statistics of both data sets together.

        Args:
            other: Statistics of the same tensor over other samples.
            weights: Number of samples of this and the other, for the moving average.
        """
        low, high = self.low, self.high
        if other.count or not self.count:
            low, high = (min(low, other.low), max(high, other.high)) if self.count else (other.low, other.high)
        histogram = None
        if self.histogram is not None and other.histogram is not None:
            histogram = self.histogram.merge(other.histogram)
        channels = self.channels if not other.count else other.channels if not self.count else None
        if self.channels is not None and other.channels is not None:
            channels = self.channels.merge(other.channels)
        averaged = None
        if self.averaged is not None and other.averaged is not None:
            a, b = weights[0] / sum(weights), weights[1] / sum(weights)
            averaged = (
                a * self.averaged[0] + b * other.averaged[0],
                a * self.averaged[1] + b * other.averaged[1],
            )
        return replace(
            self,
            low=low,
            high=high,
            count=self.count + other.count,
            histogram=histogram,
            averaged=averaged,
            channels=channels,
        )


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
