"""Layers with weights (Conv, ConvTranspose, Gemm, MatMul) as passes see them, and pairs of them that share scales.

Weights are output channel, input channel, kernel tap.

Only positively homogeneous operators lie between the layers of a pair. If every operator between two layers maps
``t * x`` to ``t * y`` for each channel by itself and each ``t > 0``, then output channel ``c`` of the first layer may
be multiplied by ``t[c]`` and input channel ``c`` of the second be divided by it, and the net computes what it did.
Relu, LeakyRelu, PRelu and pooling are such operators; Clip is one as long as no channel gets to a bound other than 0 on
one side of the change only.

`LinkNoise` predicts how noisy the second layer will be once its input and its weights are quantized.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.statistics import ChannelStatistics
from kenosis_ort.graph.constants import LAYERS, Is, having, what
from kenosis_ort.graph.view import GraphView, further_outputs, ir, optional
from kenosis_ort.graph.walk import MAIN_DOMAINS

Float64 = npt.NDArray[np.float64]

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_FLOAT32 = onnx.TensorProto.FLOAT


@dataclass(frozen=True)
class Weights:
    """Layout of the weights of a layer in memory.

    Attributes:
        name: Name of the layer's node.
        operator: Conv, ConvTranspose, Gemm or MatMul.
        shape: Shape of the weights as stored.
        groups: Groups of channels, 1 but for convolutions.
        transposed: Whether the weights are stored with output channels first (Conv, Gemm with transB).
    """

    name: str
    operator: str
    shape: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def is_convolution(self) -> bool:
        return self.operator in _CONVOLUTIONS

    @property
    def taps(self) -> int:
        """Elements of the kernel, 1 for Gemm and MatMul."""
        return math.prod(self.shape[2:]) if self.is_convolution else 1

    @property
    def channels_out(self) -> int:
        if self.operator == "ConvTranspose":
            return self.shape[1] * self.groups
        return self.shape[0] if self.transposed else self.shape[1]

    @property
    def channels_in(self) -> int:
        if self.operator == "Conv":
            return self.shape[1] * self.groups
        return self.shape[1] if self.transposed else self.shape[0]

    @property
    def channel_axis(self) -> int:
        """Axis of the channels in its data input and its output."""
        return 1 if self.is_convolution or self.operator == "Gemm" else -1

    def canonical(self, stored: npt.NDArray[np.generic]) -> Float64:
        """Weights as float64 of shape (output channels, input channels of the group, taps)."""
        real = np.asarray(stored, np.float64)
        if self.operator == "ConvTranspose":
            grouped = real.reshape(self.groups, self.shape[0] // self.groups, self.shape[1], self.taps)
            return np.asarray(grouped.transpose(0, 2, 1, 3).reshape(self.channels_out, -1, self.taps))
        if self.operator == "Conv":
            return real.reshape(self.shape[0], self.shape[1], self.taps)
        rows = real if self.transposed else real.T
        return rows.reshape(self.channels_out, self.channels_in, 1)

    def stored(self, canonical: Float64) -> npt.NDArray[np.float32]:
        """Canonical weights as they are stored, rounded to float32."""
        if self.operator == "ConvTranspose":
            per_group = self.shape[0] // self.groups
            back = canonical.reshape(self.groups, self.shape[1], per_group, self.taps).transpose(0, 2, 1, 3)
        elif self.operator == "Conv" or self.transposed:
            back = canonical
        else:
            back = canonical[:, :, 0].T
        return np.ascontiguousarray(back.reshape(self.shape), np.float32)

    def by_group(self, per_input: Float64) -> Float64:
        """Spreads one number an input channel to shape (output channels, input channels of the group)."""
        rows = per_input.reshape(self.groups, -1)
        return np.repeat(rows, self.channels_out // self.groups, axis=0)


@dataclass(frozen=True)
class Layer(Weights):
    """A node with constant float32 weights, affine in its data input.

    Attributes:
        node: The node.
        weight: Its weights.
        bias: Its constant bias, None without one. A MatMul's Add is not looked at.
    """

    node: ir.Node
    weight: ir.Value
    bias: ir.Value | None

    @property
    def data(self) -> str:
        """Name of the value that the weights multiply."""
        value = self.node.inputs[0]
        return "" if value is None else value.name or ""

    @property
    def output(self) -> ir.Value:
        """The value that the node writes."""
        return self.node.outputs[0]

    @property
    def weights(self) -> Weights:
        """The plain data of the layer, for another process."""
        return Weights(**{entry.name: getattr(self, entry.name) for entry in fields(Weights)})


def layer_of(node: ir.Node, graph: GraphView) -> Layer | None:
    """A node as a layer, None where it has no constant float32 weights on input 1."""
    operator, attributes = node.op_type, node.attributes
    if operator not in LAYERS or node.domain not in MAIN_DOMAINS:
        return None
    value = optional(node, 1)
    weight = graph.constant(value)
    if value is None or weight is None or weight.data_type != _FLOAT32:
        return None
    shape = tuple(weight.dims)
    convolution, gemm = operator in _CONVOLUTIONS, operator == "Gemm"
    if (
        (len(shape) < 3 if convolution else len(shape) != 2)
        or 0 in shape
        or (gemm and attributes.get_int("transA", 0) != 0)
    ):
        return None
    groups = attributes.get_int("group", 1) if convolution else 1
    if groups < 1 or shape[0] % groups:
        return None
    bias = optional(node, 2) if operator != "MatMul" else None
    if bias is not None and graph.constant(bias) is None:
        return None
    transposed = operator == "Conv" or (gemm and bool(attributes.get_int("transB", 0)))
    return Layer(node.name or "", operator, shape, groups, transposed, node, value, bias)


def layers(graph: GraphView, nodes: Collection[str] | None = None) -> Iterator[Layer]:
    """Yields the layers of the main graph in graph order, all or those of these names."""
    for node in graph.nodes:
        if (nodes is None or node.name in nodes) and (found := layer_of(node, graph)) is not None:
            yield found


def bias_of(layer: Layer, graph: GraphView) -> ir.Value | None:
    """The constant that shifts the output channels of a layer alone, None if there is none.

    A MatMul's is that of the Add which alone reads it.
    """
    if layer.operator != "MatMul":
        return _by_channel(graph, layer.bias, layer.channels_out)
    readers = graph.readers(layer.output) if graph.is_private(layer.output) else ()
    return _added(readers[0], layer, graph) if readers and readers[0].op_type == "Add" else None


def _added(node: ir.Node, layer: Layer, graph: GraphView) -> ir.Value | None:
    """The constant that an Add puts on the output channels of a MatMul, None if it is another kind of Add."""
    other = next((operand for operand in node.inputs if operand is not layer.output), None)
    return _by_channel(graph, other, layer.channels_out)


def _by_channel(graph: GraphView, value: ir.Value | None, channels: int) -> ir.Value | None:
    """A constant that one node reads and that holds a number for each of the channels, which are its last axis."""
    tensor = graph.constant(value)
    if value is None or tensor is None or tensor.data_type != _FLOAT32 or not graph.is_read_once(value):
        return None
    return value if math.prod(tensor.dims) == channels and list(tensor.dims)[-1:] in ([channels], []) else None


def weights_of(graph: GraphView, layer: Layer) -> Float64:
    """Canonical weights of a layer as they are now."""
    return layer.canonical(graph.content(layer.weight))


Bounds = tuple[float, float]

_HOMOGENEOUS = having(Is.POOL) | {"Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "Clip", "Flatten", "Reshape"}


class Link(NamedTuple):
    """A pair of layers between which scales can move.

    Attributes:
        first: The layer that writes the channels.
        second: The layer that reads them.
        path: The nodes between them, in order.
        offset: The constant that an Add behind a MatMul puts on its output channels, None without one.
        bounds: Bounds of the Clips between them; infinite without.
        clipped: Output of the last Clip, "" without one.
        repeat: Input channels of the second layer that stem from one channel (behind a Flatten), else 1.
    """

    first: Layer
    second: Layer
    path: tuple[ir.Node, ...]
    offset: ir.Value | None
    bounds: Bounds
    clipped: str
    repeat: int

    @property
    def value(self) -> str:
        """The value that the second layer reads."""
        return self.second.data

    @property
    def values(self) -> tuple[str, ...]:
        """All values between the layers whose channels are scaled."""
        return tuple(node.outputs[0].name or "" for node in (self.first.node, *self.path))

    @property
    def axes(self) -> dict[str, int]:
        """Axis of the channels of each of `values`."""
        axis, found = self.first.channel_axis, {self.values[0]: self.first.channel_axis}
        for node, value in zip(self.path, self.values[1:], strict=True):
            axis = -1 if node.op_type in ("Flatten", "Reshape") else axis
            found[value] = axis
        return found

    @property
    def has_clip(self) -> bool:
        """Whether a bound other than 0 stands between the layers."""
        return any(math.isfinite(b) and b != 0.0 for b in self.bounds)

    @property
    def is_relu(self) -> bool:
        """Whether nothing but one Relu or Clip from 0 stands between the layers."""
        acts = [n for n in self.path if n.op_type not in ("Identity", "Dropout")]
        return (
            len(acts) == 1
            and acts[0].op_type in ("Relu", "Clip")
            and (acts[0].op_type == "Relu" or self.bounds[0] == 0.0)
        )


def find_links(graph: GraphView, *, nodes: Collection[str] | None = None) -> tuple[Link, ...]:
    """Every link of the main graph.

    Values between the layers have one reader each, are no outputs, and no body of control flow reads them; the
    weights and biases concerned are read once.

    Args:
        graph: The model, shapes inferred; values that it keeps are left alone.
        nodes: Names of the layers to look at, None for all.
    """
    known = {layer.name: layer for layer in layers(graph)}
    found = []
    for layer in known.values():
        if (nodes is None or layer.name in nodes) and _is_free(graph, layer):
            link = _follow(layer, known, graph)
            if link is not None and (nodes is None or link.second.name in nodes) and _is_free(graph, link.second):
                found.append(link)
    return tuple(found)


def _is_free(graph: GraphView, layer: Layer) -> bool:
    return graph.is_read_once(layer.weight) and (layer.bias is None or bias_of(layer, graph) is layer.bias)


def _follow(first: Layer, known: dict[str, Layer], graph: GraphView) -> Link | None:
    """The link from a layer to the next one; None where something on the way forbids it."""
    value, offset, clipped, path = first.output, None, "", list[ir.Node]()
    low, high, repeat, is_flat = -math.inf, math.inf, 1, not first.is_convolution  # flat: channels are the last axis
    while graph.is_private(value):
        (node,) = graph.readers(value)
        if node.domain not in MAIN_DOMAINS:
            return None
        second = known.get(node.name or "")
        if second is not None:
            fits = node.inputs[0] is value and second.is_convolution != is_flat
            fits = fits and second.channels_in == first.channels_out * repeat
            return Link(first, second, tuple(path), offset, (low, high), clipped, repeat) if fits else None
        if further_outputs(node):
            return None
        if node.op_type == "Add" and first.operator == "MatMul" and not path:
            offset = _added(node, first, graph)
            if offset is None:
                return None
        elif node.op_type not in _HOMOGENEOUS or node.inputs[0] is not value or (is_flat and Is.POOL in what(node)):
            return None  # a pool never leaves the last axis alone
        elif node.op_type == "Clip":
            bounds = _bounds(node, graph)
            if bounds is None:
                return None
            low, high, clipped = max(low, bounds[0]), min(high, bounds[1]), node.outputs[0].name or ""
        elif node.op_type == "PRelu" and graph.constant(node.inputs[1]) is None:
            return None
        elif node.op_type in ("Flatten", "Reshape"):
            repeat, is_flat = 0 if is_flat else _flattened(node, first.channels_out, graph), True
            if not repeat:
                return None
        path.append(node)
        value = node.outputs[0]
    return None


def _bounds(node: ir.Node, graph: GraphView) -> Bounds | None:
    """The bounds of a Clip, infinite for none; None where they are not constant, or 0 lies beyond them."""
    found = graph.activation_bounds(node)
    if found is None:
        return None
    low, high = (-math.inf if found[0] is None else found[0]), (math.inf if found[1] is None else found[1])
    return (low, high) if low <= 0.0 <= high and low < high else None


def _flattened(node: ir.Node, channels: int, graph: GraphView) -> int:
    """Number of features of a flattened value that stem from one channel, 0 if it is not flattened like that."""
    before, after = graph.dims(node.inputs[0]) or (), graph.dims(node.outputs[0]) or ()
    if len(before) < 3 or len(after) != 2 or before[1] != channels:
        return 0
    if node.op_type == "Flatten" and node.attributes.get_int("axis", 1) != 1:
        return 0
    sizes = [size for size in before[2:] if size is not None]
    spread = math.prod(sizes) if len(sizes) == len(before) - 2 else 0
    return spread if spread and after[1] == channels * spread else 0


_LEVELS = 127  # largest integer of a weight
HEADROOM = 1.25
"""By how much unseen data may exceed the range seen before a grown channel becomes the largest."""
LARGEST_FACTOR = 64.0
"""Largest ratio between the factors of two channels; channels more dead than that stay near dead."""


class LinkNoise:
    """Predicted noise to signal ratio of the second layer's outputs, added up over its output channels.

    Args:
        link: The two layers.
        observed: Statistics of what the second layer reads, by channel of the first.
        second: Canonical weights of the second layer.
        per_channel: Whether weights get a scale by output channel.
    """

    def __init__(self, link: Link, observed: ChannelStatistics, second: Float64, per_channel: bool) -> None:
        layer = link.second
        self._repeat, self._layer, self._per_channel = link.repeat, layer, per_channel
        self._low, self._high = np.minimum(observed.low, 0.0), np.maximum(observed.high, 0.0)
        self._power = np.repeat(observed.second_moment, link.repeat)
        squares = (second**2).sum(axis=2)
        signal = (squares * layer.by_group(self._power)).sum(axis=1)
        floor = max(float(signal.max(initial=0.0)) * 1e-6, float(np.finfo(np.float64).tiny))
        self._importance = 1.0 / np.maximum(signal, floor)
        self._columns = _by_input(layer, squares * self._importance[:, None], np.add)
        self._largest = np.abs(second).max(axis=2)
        rows = np.maximum(self._largest.max(axis=1, keepdims=True), float(np.finfo(np.float64).tiny))
        relative = self._largest / (rows if per_channel else rows.max())
        self._relative = _fold(_by_input(layer, relative, np.maximum), link.repeat, np.maximum)
        self._range = np.maximum(self._high - self._low, 0.0)

    def factors(self, a: float, b: float) -> Float64:
        """Factors ``D^-a * r^b`` that leave the largest channel as it is; dead channels keep theirs.

        Args:
            a: Exponent of the activation's range.
            b: Exponent of the largest relative weight that reads the channel.
        """
        top = float(self._range.max(initial=0.0))
        if top <= 0.0:
            return np.ones_like(self._range)
        seen = np.maximum(self._range, top / LARGEST_FACTOR)
        seen = np.where(seen < top / HEADROOM, seen * HEADROOM, np.maximum(seen, top / HEADROOM))
        column = np.maximum(self._relative, 1.0 / LARGEST_FACTOR)
        raw = (seen / top) ** -a * column**b
        scaled = raw * top / float((raw * np.minimum(seen, top)).max())
        return np.asarray(np.where(self._range > 0.0, scaled, 1.0))

    @np.errstate(over="ignore")  # a net whose values grow without end is left alone: no noise is below infinity
    def of(self, factors: Float64) -> float:
        """The predicted noise for factors, infinity where it overflows."""
        inputs = np.repeat(factors, self._repeat)
        step = (float((self._high * factors).max()) - float((self._low * factors).min())) / 255.0
        rounding = step**2 / 12.0 * float((self._columns / inputs**2).sum())
        groups = self._layer.groups
        by_group = self._largest.reshape(groups, -1, self._largest.shape[1])  # no copy of the factors by output channel
        largest = (by_group / inputs.reshape(groups, 1, -1)).max(axis=2).reshape(-1)
        if not self._per_channel:
            largest = np.full_like(largest, largest.max())
        power = (self._power * inputs**2).reshape(groups, -1).sum(axis=1) * self._layer.taps
        power = np.repeat(power, largest.size // groups)
        weights = float(((largest / _LEVELS) ** 2 / 12.0 * power * self._importance).sum())
        return rounding + weights


def _by_input(layer: Layer, per_weight: Float64, join: np.ufunc) -> Float64:
    """Joins (output channels, input channels of the group) over output channels; returns (input channels,)."""
    grouped = per_weight.reshape(layer.groups, -1, per_weight.shape[1])
    joined: Float64 = join.reduce(grouped, axis=1).reshape(-1)
    return joined


def _fold(per_input: Float64, repeat: int, join: np.ufunc) -> Float64:
    folded: Float64 = join.reduce(per_input.reshape(-1, repeat), axis=1)
    return folded
