"""Statistics of tensors that grow by a sample at a time: extremes, moving averages, histograms, ranges by channel.

An `Accumulator` knows one tensor, a `Collector` all that are observed, and those that follow from them. What an
accumulator holds is what `TensorStatistics` merge exactly, so that it does not matter how samples are dealt out.

Where histograms stand beside exact ranges, every fifth or eleventh element of a large tensor is counted: binning all of
them takes as long as half of the inference itself, on nets with much activation and little work far longer; so few take
a tenth. The stride divides no dimension of a tensor, so that all channels and positions are counted alike, and what is
picked depends on nothing but the shape.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.derived import Array, Functions
from kenosis_ort.calibration.methods import CalibrationConfig
from kenosis_ort.calibration.statistics import (
    HALF,
    MIN_EXPONENT,
    ChannelRange,
    Counts,
    Extremes,
    Float64,
    Histogram,
    TensorStatistics,
    fold,
)

_LONG_ROW = 512  # elements that a channel has side by side


def channel_ends(end: np.ufunc, array: Array, axis: int) -> Float64:
    """The least or largest value of each channel, NaN where there is one."""
    behind = math.prod(array.shape[axis + 1 :])
    rows = array.reshape(math.prod(array.shape[:axis]), array.shape[axis], behind)
    if behind >= _LONG_ROW or len(rows) == 1:
        found = end.reduce(rows, axis=(0, 2))
    else:  # short rows one by one take ten times longer than samples one upon the other
        found = end.reduce(end.reduce(rows, axis=0), axis=1)
    wide: Float64 = found.astype(np.float64)
    return wide


SeenAs = Mapping[str, Callable[[Array], Array]]
"""By tensor name, what stands for its values: a function of the array of one sample."""

BLOCK = 1 << 16
"""Elements binned at a time, so that the scratch arrays stay in the processor's cache."""
WHOLE_BELOW = 1 << 14
"""A tensor of fewer elements is counted whole beside exact ranges."""
SPARSE_FROM = 1 << 17
"""From so many elements on every eleventh is counted, else every fifth."""
_STRIDES = (5, 7, 11, 13, 17, 19)
_NOTHING: Array = np.empty(0, np.float32)


def exponent_of(magnitude: float) -> int:
    """The smallest exponent (at least -100) with ``magnitude < 2**exponent``."""
    return max(math.frexp(magnitude)[1], MIN_EXPONENT) if magnitude else MIN_EXPONENT


class _Scratch(threading.local):
    """Arrays that a thread works in; made anew for each block, their pages would cost as much as the work."""

    def __init__(self) -> None:
        self.arrays = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int32), np.empty(BLOCK, np.intp)


_SCRATCH = _Scratch()


class HistogramBuilder:
    """Counts values into a growing histogram."""

    def __init__(self) -> None:
        self._exponent = MIN_EXPONENT
        self._counts: Counts = np.zeros(2 * HALF, np.int64)

    def add(self, values: npt.NDArray[np.floating], seen: Extremes) -> None:
        """Adds elements of an array.

        Args:
            values: All or some of them, of any shape, finite.
            seen: The extremes of the array; it has elements.
        """
        exponent = exponent_of(max(-seen.low, seen.high))
        if exponent > self._exponent:
            self._counts = fold(self._counts, exponent - self._exponent)
            self._exponent = exponent
        for block in blocks(values):
            scaled, narrow, index = (scratch[: block.size] for scratch in _SCRATCH.arrays)
            np.multiply(block, np.float32(math.ldexp(HALF, -self._exponent)), out=scaled)
            np.floor(scaled, out=scaled)  # first: a sum would be rounded, and not alike under every exponent
            np.add(scaled, np.float32(HALF), out=scaled)
            np.copyto(narrow, scaled, casting="unsafe")
            np.copyto(index, narrow)  # in two steps that are vectorized each
            self._counts += np.bincount(index, minlength=2 * HALF)

    def finish(self) -> Histogram:
        """The histogram of everything added so far."""
        return Histogram(self._exponent, self._counts)


class Accumulator:
    """Statistics of one tensor over the samples so far.

    Args:
        dtype: Its numpy type.
        config: What to keep.
        axis: Of the channels whose ranges are kept too; None for none. An array that lacks it is not looked at so.
    """

    def __init__(self, dtype: str, config: CalibrationConfig, axis: int | None = None) -> None:
        self._dtype, self._axis = dtype, axis
        self._low, self._high, self._count = math.inf, -math.inf, 0
        self._counts_all = config.uses_histogram
        self._builder = HistogramBuilder() if config.keeps_histogram else None
        averages = config.moving_average and not config.uses_histogram
        self._average = _MovingAverage(dtype, config) if averages else None
        self._channels: ChannelRange | None = None

    def look(self, array: Array) -> tuple[Extremes, Array]:
        """The extremes of the tensor's values on one sample, and those of its elements that are counted."""
        known = self._follow_channels(array)
        if self._builder is None:
            return known or extremes(array), _NOTHING
        stride = 1 if self._counts_all else _stride(array.size)
        if known is not None and not self._counts_all:
            return known, array.reshape(-1)[::stride]
        return extremes_and_some(array, stride)

    def take(self, seen: Extremes, some: Array) -> bool:
        """Adds what `look` returned.

        Returns:
            False if a value is NaN or infinite; the accumulator is of no further use then.
        """
        finite = math.isfinite(seen.low) and math.isfinite(seen.high)
        if self._builder is not None and seen.count and finite:
            self._builder.add(some, seen)
        if seen.low <= self._low:  # of two zeros the later one, whatever its sign
            self._low = seen.low
        if seen.high >= self._high:
            self._high = seen.high
        self._count += seen.count
        if self._average is not None:
            self._average.add(seen)
        return finite or not seen.count

    def _follow_channels(self, array: Array) -> Extremes | None:
        """Takes the range of each channel into account; returns what follows for the array, None without channels."""
        rank = array.ndim
        if self._axis is None or not array.size or not -rank <= self._axis < rank:
            return None
        low, high = (channel_ends(end, array, self._axis % rank) for end in (np.minimum, np.maximum))
        now = ChannelRange(self._axis % rank, rank, low, high)
        self._channels = now if self._channels is None else self._channels.merge(now)
        if self._channels is None:  # their number changes: there are no ranges by channel
            self._axis = None
        return Extremes(float(low.min()), float(high.max()), array.size)

    def end_chunk(self) -> None:
        """Ends a chunk of samples."""
        if self._average is not None:
            self._average.end_chunk()

    def statistics(self) -> TensorStatistics:
        """The statistics so far."""
        low, high = (self._low, self._high) if self._count else (0.0, 0.0)
        histogram = None if self._builder is None else self._builder.finish()
        averaged = None if self._average is None else self._average.range
        return TensorStatistics(low, high, self._count, self._dtype, histogram, averaged, channels=self._channels)


class Collector:
    """Accumulators by tensor name, with the values that are functions of others.

    Args:
        dtypes: Numpy types by tensor name.
        config: What to keep.
        axes: Axes of the channels by tensor name, of tensors whose range is kept by channel too.
        functions: By the name of an observed tensor, its functions by their own names.
        seen_as: What stands for the values of some; for those of tensors with functions element by element.
    """

    def __init__(
        self,
        dtypes: Mapping[str, str],
        config: CalibrationConfig,
        axes: Mapping[str, int] = MappingProxyType({}),
        functions: Functions = MappingProxyType({}),
        seen_as: SeenAs = MappingProxyType({}),
    ) -> None:
        self._tensors = {name: Accumulator(dtype, config, axes.get(name)) for name, dtype in dtypes.items()}
        self._functions, self._seen_as = functions, seen_as

    def add(self, name: str, array: Array) -> bool:
        """Adds a tensor's values on one sample; called for several tensors at a time.

        Returns:
            False if a value, or one that follows from it, is NaN or infinite.
        """
        own, functions, seen_as = self._tensors[name], self._functions.get(name, {}), self._seen_as.get(name)
        if seen_as is not None and not functions:
            array, seen_as = seen_as(array), None
        seen, some = own.look(array)
        if not seen.count:
            return own.take(seen, some)
        gates = {f.gate_key: f for f in functions.values()}
        gated = {key: f.gate(some) for key, f in gates.items()}
        finite = True
        for made, f in functions.items():
            of_function, values = f.of(seen), gated[f.gate_key]
            values = some * values if f.times_input else values
            values = np.clip(values, of_function.low, of_function.high)  # they are rounded apart
            finite &= self._tensors[made].take(of_function, values)
        if seen_as is not None:
            low, high = seen_as(np.array([seen.low, seen.high], np.float32)).tolist()
            seen, some = Extremes(low, high, seen.count), seen_as(some)
        return own.take(seen, some) and finite

    def end_chunk(self) -> None:
        """Ends a chunk of samples."""
        for each in self._tensors.values():
            each.end_chunk()

    def statistics(self) -> dict[str, TensorStatistics]:
        """The statistics so far, by tensor name."""
        return {name: each.statistics() for name, each in self._tensors.items()}


class _MovingAverage:
    """Range of one tensor by moving average, in its own type and stock's order of summation: stock's bit for bit.

    A chunk's range is the mean of its samples' minima and maxima, made symmetric where that is asked for.
    """

    def __init__(self, dtype: str, config: CalibrationConfig) -> None:
        self._dtype = np.dtype(dtype)
        self._constant = np.asarray(config.averaging_constant, self._dtype)
        self._symmetric = config.is_symmetric
        self._samples: list[tuple[float, float]] = []
        self._range: Array | None = None

    def add(self, seen: Extremes) -> None:
        """Adds one sample, of which an empty tensor is left out of the mean."""
        self._samples.append((seen.low, seen.high) if seen.count else (math.nan, math.nan))

    def end_chunk(self) -> None:
        """Merges the samples since the last call."""
        columns = np.ascontiguousarray(np.array(self._samples).T, self._dtype)
        self._samples = []
        if np.isnan(columns).all():
            return
        now = np.nanmean(columns, axis=1)
        if self._symmetric:
            top = np.maximum(np.abs(now[0]), np.abs(now[1]))
            now = np.array([-top, top])
        self._range = now if self._range is None else self._range + self._constant * (now - self._range)

    @property
    def range(self) -> tuple[float, float] | None:
        """The range so far, None before a chunk with an element has ended."""
        if self._range is None:
            return None
        low, high = self._range.tolist()
        return low, high


def ends(values: npt.NDArray[np.floating]) -> tuple[float, float]:
    """The least and the largest value of an array that has some; NaN in both where there is one."""
    return float(np.minimum.reduce(values, axis=None)), float(np.maximum.reduce(values, axis=None))


def blocks(values: npt.NDArray[np.floating]) -> Iterator[npt.NDArray[np.float32]]:
    """Yields the elements of an array, `BLOCK` at a time, as flat float32 arrays."""
    flat = np.asarray(values).reshape(-1)
    for start in range(0, flat.size, BLOCK):
        yield flat[start : start + BLOCK].astype(np.float32, copy=False)


def extremes(array: Array) -> Extremes:
    """The extremes of an array, in one pass over memory."""
    return extremes_and_some(array, 1)[0]


def extremes_and_some(array: Array, stride: int) -> tuple[Extremes, Array]:
    """The extremes and every ``stride``-th element, taken while it is in the processor's cache; of 1 the array."""
    low, high = math.inf, -math.inf
    picked = array if stride == 1 else np.empty(-(-array.size // stride), np.float32)
    behind = taken = 0  # elements up to the end of a block, and those picked of them
    for block in blocks(array):
        block_low, block_high = ends(block)
        if math.isnan(block_low):
            return Extremes(math.nan, math.nan, array.size), _NOTHING
        low, high = min(low, block_low), max(high, block_high)
        if stride > 1:
            start, behind = behind, behind + block.size
            first, taken = taken, -(-behind // stride)
            picked[first:taken] = block[first * stride - start :: stride]
    return Extremes(low, high, array.size), picked


def _stride(size: int) -> int:
    """Stride of the elements that are counted of an array of so many."""
    if size < WHOLE_BELOW:
        return 1
    strides = _STRIDES if size < SPARSE_FROM else _STRIDES[2:]
    return next((s for s in strides if size % s), strides[-1])
