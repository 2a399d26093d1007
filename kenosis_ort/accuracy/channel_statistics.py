"""Per-channel statistics of float activations, in one sweep over a few feeds and with next to no memory.

The reductions run inside the graph: over all axes but batch and channel, with ReduceMin, ReduceMax, ReduceMean and
ReduceSumSquare behind each value, joined into one small output a value. So no activation leaves the runtime, and what
is added up over samples is added in float64. Within one sample and channel the runtime sums in float32, whose error is
of the order of 1e-6 of the mean absolute value (tested).

What a model knows about its activations without any data: BatchNormalization's own statistics.

A BatchNormalization's output has mean ``beta`` and deviation ``|gamma|`` by channel on the data that it was trained
on. Taken as normal, that gives ranges for equalization. Source: Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction", ICCV 2019, section 4.1.3.

Running sums over two versions of a tensor, by channel: enough for SQNR, cosine, range and clipping.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
from onnx import helper, numpy_helper

from kenosis_ort.accuracy.error import Array
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, run
from kenosis_ort.errors import CalibrationError, did_you_mean
from kenosis_ort.graph.constants import GraphIndex
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import MAIN_DOMAINS, opset_of, reserve_name

_RESCALED = 0.05  # mean distance of the channels' gains from 1 beyond which they are taken for a rescaling
_LEAST_COUNT = 64  # elements a channel has to have for its gain to mean anything
_EXPLAINED = 0.25  # share of the noise that may be left once it is undone


class ChannelSums:
    """Adds up a float tensor and its quantized version over samples.

    Args:
        low: Least value that the quantized one can hold, None if unknown.
        high: Largest value.
        step: Its step: what lies less than half a step beyond the range is not clipped.
    """

    def __init__(self, low: float | None = None, high: float | None = None, step: float | None = None) -> None:
        half = (step or 0.0) / 2
        self._bounds = None if low is None or high is None else (low - half, high + half)
        self._sums: Float64 | None = None
        self.least, self.largest = float("inf"), float("-inf")
        self.elements = self.clipped = self.odd = 0

    def add(self, reference: Array, actual: Array) -> bool:
        """Adds one sample.

        Args:
            reference: Float tensor; axis 1 are channels where there are two axes or more.
            actual: The other one.

        Returns:
            False, without adding, if the shapes differ.
        """
        if reference.shape != actual.shape:
            return False
        x, y = _by_channel(reference), _by_channel(actual)
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            self.odd += int(finite.size - finite.sum())
            x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
        counts, difference = np.full(x.shape[0], x.shape[1]), x - y
        sums = np.stack([counts, x.sum(1), y.sum(1), _dot(x, x), _dot(x, y), _dot(y, y), _dot(difference, difference)])
        if self._sums is None:
            self._sums = sums
        elif self._sums.shape == sums.shape:
            self._sums += sums
        else:  # the number of channels depends on the sample: one channel for all
            self._sums = self._sums.sum(1, keepdims=True) + sums.sum(1, keepdims=True)
        if x.size:
            self.least, self.largest = min(self.least, float(x.min())), max(self.largest, float(x.max()))
        self.elements += x.size
        if self._bounds is not None:
            self.clipped += int(np.count_nonzero((x < self._bounds[0]) | (x > self._bounds[1])))
        return True

    @property
    def clipping(self) -> float:
        """Share of the float tensor's elements beyond what the quantized one can hold, 0..1."""
        return self.clipped / self.elements if self.elements else 0.0

    @property
    def rms(self) -> float:
        """Root mean square of the float tensor."""
        return 0.0 if self._sums is None or not self.elements else float(np.sqrt(self._sums[3].sum() / self.elements))

    def plain(self) -> tuple[float, float]:
        """SQNR in dB and cosine of the two as they are."""
        if self._sums is None:
            return float("nan"), float("nan")
        _, _, _, xx, xy, yy, dd = self._sums.sum(1)
        norm = float(np.sqrt(xx * yy))
        return _decibel(float(xx), float(dd)), float(xy) / norm if norm > 0 else float("nan")

    def result(self) -> tuple[float, float, bool]:
        """SQNR in dB, cosine, and whether the channels were found rescaled and compared without that.

        Equalization multiplies the channels of inner tensors by constants, and shifts them: no error, but no match.
        """
        if self._sums is None:
            return float("nan"), float("nan"), False
        count, sx, sy, xx, xy, yy, dd = self._sums
        if len(count) < 2 or count.min() < _LEAST_COUNT:
            return (*self.plain(), False)
        n = np.maximum(count, 1)
        vx, vy, cov = xx - sx * sx / n, yy - sy * sy / n, xy - sx * sy / n
        live = (vx > 1e-9 * np.maximum(xx, 1e-300)) & (xx > 1e-6 * xx.max(initial=0.0))
        gains = np.where(live, cov / np.where(live, vx, 1.0), 1.0)
        left = np.where(live & (gains > 0), vy - gains * cov, dd)
        undone = float((left / np.where(gains > 0, gains, 1.0) ** 2).sum())
        weights = np.where(live, xx, 0.0)
        distance = float((weights * np.abs(np.log(np.clip(gains, 1e-6, 1e6)))).sum() / max(weights.sum(), 1e-300))
        if distance > _RESCALED and undone < _EXPLAINED * float(dd.sum()):
            correlation = float(np.sqrt(max(0.0, 1.0 - undone / max(float(vx.sum()), 1e-300))))
            return _decibel(float(vx.sum()), undone), correlation, True
        return (*self.plain(), False)


def _by_channel(array: Array) -> Float64:
    values = np.asarray(array, dtype=np.float64)
    if values.ndim < 2:
        return values.reshape(1, -1)
    return np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)


def _dot(x: Float64, y: Float64) -> Float64:
    out: Float64 = np.einsum("ij,ij->i", x, y)
    return out


def _decibel(signal: float, noise: float) -> float:
    if noise <= 0:
        return float("inf")
    return float(10 * np.log10(signal / noise)) if signal > 0 else float("-inf")


_log = logging.getLogger(__name__)

Float64 = npt.NDArray[np.float64]
_AXES_ARE_INPUTS = 18  # operator set from which the reductions take their axes as an input
_PARTS = ("ReduceMin", "ReduceMax", "ReduceMean", "ReduceSumSquare")
_MOST_VALUES = 500  # in one session; the time to make one grows with the square of its outputs


@dataclass(frozen=True)
class ChannelStatistics:
    """Statistics of one value, one number a channel, float64 of shape (channels,).

    Attributes:
        low: Least values.
        high: Largest values.
        mean: Means.
        second_moment: Means of the squares.
        sample_means: Means of each sample (index 0 of the value's first axis) by itself, shape (samples, channels);
            of shape (0, channels) where they are not known.
    """

    low: Float64
    high: Float64
    mean: Float64
    second_moment: Float64
    sample_means: Float64

    @property
    def channels(self) -> int:
        return int(self.low.size)

    @property
    def peak(self) -> Float64:
        """Largest absolute values."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


def channel_statistics(
    proto: onnx.ModelProto,
    feeds: Iterable[Mapping[str, Any]],
    values: Mapping[str, int] | Sequence[str],
    *,
    custom_op_libraries: Sequence[str] = (),
    providers: Sequence[Any] = (),
    threads: int = 0,
) -> dict[str, ChannelStatistics]:
    """Runs the float model and returns statistics by channel.

    Args:
        proto: The float model, shapes inferred. Not changed.
        feeds: Samples or batches of them; iterated once for up to 500 values.
        values: Values that nodes of the main graph compute, with the axis of their channels (1 if only names are
            given; negative counts from the end). Axis 0 is the batch.
        custom_op_libraries: Shared libraries of custom operators to register.
        providers: Execution providers, the CPU's by default.
        threads: Threads of the runtime, 0 for its own choice.

    Returns:
        Statistics by value. Values that are not float32 tensors of known rank 2 or more are left out.

    Raises:
        CalibrationError: A value is unknown, there is no feed, the model fails on one or computes NaN or infinity.
    """
    axes = dict(values) if isinstance(values, Mapping) else dict.fromkeys(values, 1)
    ranks = float_ranks(proto)
    made = {name for node in proto.graph.node for name in node.output if name}
    for name in axes:
        if name not in made:
            raise CalibrationError(
                f"A value to observe is computed by no node of the main graph.{did_you_mean(name, made)}",
                where=f"value '{name}'",
            )
    wanted = {n: a % ranks[n] for n, a in axes.items() if ranks.get(n, 0) >= 2 and a % ranks[n] != 0}
    if len(wanted) < len(axes):
        left = sorted(axes.keys() - wanted.keys())
        _log.debug("no statistics by channel for values of unknown type or rank: %s", ", ".join(left))
    if not wanted:
        return {}
    taken = _names(proto)
    samples = list(feeds) if len(wanted) > _MOST_VALUES else feeds
    settings = SessionSettings(tuple(providers), tuple(custom_op_libraries), threads)
    found: dict[str, ChannelStatistics] = {}
    names = list(wanted)
    with ObservedModel(proto, settings) as model:
        for start in range(0, len(names), _MOST_VALUES):
            group = names[start : start + _MOST_VALUES]
            parts = [_Reduced(n, wanted[n], ranks[n]) for n in group]
            found.update(_sweep(model, samples, parts, opset_of(proto), taken))
    return found


@dataclass(frozen=True)
class _Reduced:
    """A value to reduce: its name, the axis of its channels, and its rank."""

    name: str
    axis: int
    rank: int


def _sweep(
    model: ObservedModel, feeds: Iterable[Mapping[str, Any]], parts: Sequence[_Reduced], opset: int, taken: set[str]
) -> dict[str, ChannelStatistics]:
    nodes: list[onnx.NodeProto] = []
    outputs: list[str] = []
    for part in parts:
        outputs.append(reserve_name(f"{part.name}/channels", taken))
        nodes += _reductions(part, outputs[-1], opset, taken)
    session = model.session(outputs, nodes)
    sums = [_Sums() for _ in parts]
    count = 0
    for feed in feeds:
        results = run(session, outputs, dict(feed), count)
        for part, total, result in zip(parts, sums, results, strict=True):
            if not total.add(np.asarray(result), part.rank):
                raise CalibrationError(
                    "The float model computes NaN or infinity on the calibration data.",
                    where=f"value '{part.name}', sample {count}",
                    fix="Check this sample's preprocessing.",
                )
        count += 1
    if not count:
        raise CalibrationError("There is no sample to observe.", fix="Pass at least one feed.")
    return {part.name: total.result() for part, total in zip(parts, sums, strict=True) if total.rows}


def _reductions(part: _Reduced, output: str, opset: int, taken: set[str]) -> list[onnx.NodeProto]:
    """Nodes that compute ``output``: the four parts, each of shape (batch, channels), joined on axis 1."""
    axes = [a for a in range(1, part.rank) if a != part.axis]
    nodes: list[onnx.NodeProto] = []

    def add(op_type: str, inputs: list[str], **attributes: Any) -> str:
        out = reserve_name(f"{output}/{op_type}", taken)
        nodes.append(helper.make_node(op_type, inputs, [out], name=out, **attributes))
        return out

    if not axes:  # what is reduced over nothing is itself
        nodes.append(helper.make_node("Identity", [part.name], [output], name=output))
        return nodes
    if opset >= _AXES_ARE_INPUTS:
        over = add("Constant", [], value=numpy_helper.from_array(np.array(axes, np.int64)))
        reduced = [add(op_type, [part.name, over], keepdims=0) for op_type in _PARTS]
    else:
        reduced = [add(op_type, [part.name], axes=axes, keepdims=0) for op_type in _PARTS]
    sizes = add("Cast", [add("Size", [part.name])], to=onnx.TensorProto.FLOAT)
    elements = add("Cast", [add("Size", [reduced[0]])], to=onnx.TensorProto.FLOAT)
    reduced[3] = add("Div", [reduced[3], add("Div", [sizes, elements])])
    nodes.append(helper.make_node("Concat", reduced, [output], name=output, axis=1))
    return nodes


class _Sums:
    """Running statistics of one value."""

    def __init__(self) -> None:
        self.rows: list[Float64] = []
        self._low: Float64 | None = None
        self._high: Float64 | None = None
        self._squares: Float64 | None = None

    def add(self, joined: npt.NDArray[Any], rank: int) -> bool:
        """Adds one feed's joined reductions; returns False if a number is not finite."""
        if joined.size == 0:
            return True
        real = joined.astype(np.float64)
        low = high = mean = real
        square = real * real
        if rank > 2:
            low, high, mean, square = np.split(real, 4, axis=1)
        self.rows.append(mean)
        least, most, squares = low.min(axis=0), high.max(axis=0), square.sum(axis=0)
        if self._low is None or self._high is None or self._squares is None:
            self._low, self._high, self._squares = least, most, squares
        else:
            self._low, self._high = np.minimum(self._low, least), np.maximum(self._high, most)
            self._squares = self._squares + squares
        return bool(np.isfinite(real).all())

    def result(self) -> ChannelStatistics:
        assert self._low is not None
        assert self._high is not None
        assert self._squares is not None
        means = np.concatenate(self.rows)
        return ChannelStatistics(self._low, self._high, means.mean(axis=0), self._squares / len(means), means)


def float_ranks(proto: onnx.ModelProto) -> dict[str, int]:
    """The ranks of the values that nodes compute and that are known to be float32 tensors."""
    ranks = {}
    for value in (*proto.graph.value_info, *proto.graph.output):
        tensor = value.type.tensor_type
        if tensor.elem_type == onnx.TensorProto.FLOAT and tensor.HasField("shape"):
            ranks[value.name] = len(tensor.shape.dim)
    return ranks


def _names(proto: onnx.ModelProto) -> set[str]:
    graph = proto.graph
    names = {v.name for v in (*graph.input, *graph.output, *graph.initializer)}
    for node in graph.node:
        names.update((node.name, *node.input, *node.output))
    return names


def batch_norm_statistics(model: onnx.ModelProto, *, deviations: float = 4.0) -> dict[str, ChannelStatistics]:
    """Statistics of the outputs of BatchNormalization nodes.

    Folding gives the layer in front the name of that output, so the statistics are those of the folded layer.

    Args:
        model: The float model before its BatchNormalization is folded.
        deviations: How many deviations from the mean count as the range: 3 to 4 for accuracy, more clips less.

    Returns:
        Statistics by value, without sample means.
    """
    index = GraphIndex(model)
    found = {}
    for node in index.nodes:
        if node.op_type != "BatchNormalization" or node.domain not in MAIN_DOMAINS:
            continue
        if any(index.constant(name) is None for name in node.input[1:3]):
            continue
        gamma, beta = (array_in(index.constants[name]).astype(np.float64).reshape(-1) for name in node.input[1:3])
        reach = deviations * np.abs(gamma)
        none = np.zeros((0, beta.size))
        found[str(node.output[0])] = ChannelStatistics(beta - reach, beta + reach, beta, beta**2 + gamma**2, none)
    return found
