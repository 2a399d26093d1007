"""Statistics of tensors that grow by a sample at a time: extremes, moving averages, histograms, ranges by channel.

An `Accumulator` knows one tensor, a `Collector` all that are observed, and those that follow from them. What an
accumulator holds is what `TensorStatistics` merge exactly, so that it does not matter how samples are dealt out.

Where histograms stand beside exact ranges, every fifth or eleventh element of a large tensor is counted: binning all of
them takes as long as half of the inference itself, on nets with much activation and little work far longer; so few take
a tenth. The stride divides no dimension of a tensor, so that all channels and positions are counted alike, and what is
picked depends on nothing but the shape.

Activations as the runtime's convolutions lay them out, so that they need not be put in order to be looked at.

Kernels for pictures keep the channels in blocks: those of one block lie side by side at each place. Where such a value
leaves the graph, the runtime puts it in order first, a pass over memory that takes longer than some convolutions.
Extremes do not ask for order, extremes by channel and single elements can be had from either one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from kenosis_ort.calibration.histogram import Extremes, HistogramBuilder, blocks, ends, extremes
from kenosis_ort.calibration.statistics import CalibrationConfig, ChannelRange, Functions, TensorStatistics
from kenosis_ort.graph.walk import attribute_int, read_names
from kenosis_ort.runtime.limits import fact_of_processor
from kenosis_ort.runtime.session import open_session

Float64 = npt.NDArray[np.float64]

_DOMAIN = "com.microsoft.nchwc"
_REORDER = "ReorderOutput"
_BLOCKS = (4, 8, 16, 32)
_LONG_ROW = 512  # elements that a channel has side by side
MOST_PLACES = 1 << 18
"""Elements of one array whose places are kept: 2 MiB."""


class Blocked(np.ndarray[Any, Any]):
    """An array of shape (images, channels / block, height, width, block), all of it in one piece."""


@lru_cache(maxsize=1)
def block_size() -> int:
    """Number of channels of a block on this processor; found out once, see `fact_of_processor`."""
    return fact_of_processor("block", _probed_block_size, lambda size: type(size) is int and size in _BLOCKS)


def _probed_block_size() -> int:
    reorder = helper.make_node("ReorderInput", ["x"], ["y"], domain=_DOMAIN)
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4, 1, 1])
    graph = helper.make_graph([reorder], "block", [x], [onnx.ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=7)
    session = open_session(model, optimize=False)
    (y,) = session.run(None, {"x": np.zeros((1, 4, 1, 1), np.float32)})
    return int(y.shape[1])


def without_reorders(optimized: onnx.ModelProto, names: Collection[str]) -> dict[str, str]:
    """Has an optimized model return values in blocks that it would put in order first.

    Values whose channels do not fill their blocks are put in order as before: what fills up is no value.

    Args:
        optimized: As the runtime writes it; changed.
        names: Outputs that may come in blocks.

    Returns:
        By the name of an output, that of the one that takes its place; without those that stay.
    """
    graph = optimized.graph
    found = {}
    for node in graph.node:
        reorders = node.op_type == _REORDER and node.domain == _DOMAIN and not attribute_int(node, "channels_last", 0)
        if reorders and node.output[0] in names and attribute_int(node, "channels", 1) % block_size() == 0:
            found[node.output[0]] = node.input[0]
    if found:
        uses = Counter(name for node in graph.node for name in set(read_names(node)))
        rest = [n for n in graph.node if n.op_type != _REORDER or n.output[0] not in found or uses[n.output[0]]]
        outputs = dict.fromkeys(found.get(value.name, value.name) for value in graph.output)
        typed = {value.name: value for value in graph.output}
        returned = [typed.get(name) or onnx.ValueInfoProto(name=name) for name in outputs]
        del graph.node[:], graph.output[:]
        graph.node.extend(rest)
        graph.output.extend(returned)
    return found


def as_blocked(array: Array) -> Blocked:
    """Array that the runtime returned in blocks, in its logical shape and type."""
    images, channels, height, width = array.shape
    block = block_size()
    return array.reshape(images, channels // block, height, width, block).view(Blocked)


def in_order(array: Blocked) -> Array:
    """The elements in order, (images, channels, height, width)."""
    images, blocks, height, width, block = array.shape
    plain: Array = np.asarray(array).transpose(0, 1, 4, 2, 3).reshape(images, blocks * block, height, width)
    return plain


@lru_cache(maxsize=64)
def places(shape: tuple[int, ...], stride: int) -> npt.NDArray[np.intp]:
    """Positions in memory of every ``stride``-th element, in the order of memory.

    Args:
        shape: Of the array in blocks.
        stride: Counted in the order that the elements have without blocks.
    """
    images, blocks, height, width, block = shape
    area = height * width
    channel, place = np.divmod(np.arange(0, images * blocks * block * area, stride, dtype=np.intp), area)
    group, inside = np.divmod(channel, block)
    found = np.sort((group * area + place) * block + inside)
    found.flags.writeable = False
    return found


def pick(array: Array, stride: int) -> Array:
    """Every ``stride``-th element, in any order."""
    if isinstance(array, Blocked):
        picked: Array = np.asarray(array).take(places(array.shape, stride), mode="wrap")
        return picked
    return array.reshape(-1)[::stride]


def channel_ends(end: np.ufunc, array: Array, axis: int) -> Float64:
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


Array = npt.NDArray[Any]
SeenAs = Mapping[str, Callable[[Array], Array]]
"""By tensor name, what stands for its values: a function of the array of one sample."""

WHOLE_BELOW = 1 << 14
"""A tensor of fewer elements is counted whole beside exact ranges."""
SPARSE_FROM = 1 << 17
"""From so many elements on every eleventh is counted, else every fifth."""
_STRIDES = (5, 7, 11, 13, 17, 19)
_NOTHING: Array = np.empty(0, np.float32)


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
        if self._counts_all:
            return extremes(array), array
        stride = _stride(array.size)
        if isinstance(array, Blocked) and array.size > stride * MOST_PLACES:
            array = in_order(array)
        if known is not None:
            return known, pick(array, stride)
        return (extremes(array), array) if stride == 1 else extremes_and_some(array, stride)

    def take(self, seen: Extremes, some: Array) -> bool:
        """Adds what `look` returned.

        Returns:
            False if a value is NaN or infinite; the accumulator is of no further use then.
        """
        if self._builder is not None and seen.count and seen.is_finite:
            self._builder.add(some, seen)
        if seen.low <= self._low:  # of two zeros the later one, whatever its sign
            self._low = seen.low
        if seen.high >= self._high:
            self._high = seen.high
        self._count += seen.count
        if self._average is not None:
            self._average.add(seen)
        return seen.is_finite

    def _follow_channels(self, array: Array) -> Extremes | None:
        """Takes the range of each channel into account; returns what follows for the array, None without channels."""
        rank = 4 if isinstance(array, Blocked) else array.ndim
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
        return TensorStatistics(
            low,
            high,
            self._count,
            self._dtype,
            histogram=None if self._builder is None else self._builder.finish(),
            averaged=None if self._average is None else self._average.range,
            channels=self._channels,
        )


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
            of_function = f.of(seen)
            values = some * gated[f.gate_key] if f.times_input else gated[f.gate_key]
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


def extremes_and_some(array: Array, stride: int) -> tuple[Extremes, Array]:
    """The extremes and every ``stride``-th element, taken while it is in the processor's cache.

    Of an array in blocks they are the same elements as of one in order.
    """
    low, high = math.inf, -math.inf
    picked = np.empty(-(-array.size // stride), np.float32)
    where = places(array.shape, stride) if isinstance(array, Blocked) else None
    array, behind, taken = np.asarray(array), 0, 0  # elements up to the end of a block, and those picked of them
    for block in blocks(array):
        block_low, block_high = ends(block)
        if math.isnan(block_low):
            return Extremes(math.nan, math.nan, array.size), _NOTHING
        low, high = min(low, block_low), max(high, block_high)
        start, behind = behind, behind + block.size
        first, taken = taken, -(-behind // stride) if where is None else int(np.searchsorted(where, behind))
        if where is None:
            picked[first:taken] = block[first * stride - start :: stride]
        else:  # any mode but "raise", which would copy
            array.take(where[first:taken], out=picked[first:taken], mode="wrap")
    return Extremes(low, high, array.size), picked


def _stride(size: int) -> int:
    """Stride of the elements that are counted of an array of so many."""
    if size < WHOLE_BELOW:
        return 1
    strides = _STRIDES if size < SPARSE_FROM else _STRIDES[2:]
    return next((s for s in strides if size % s), strides[-1])
