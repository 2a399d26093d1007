"""Where a channel's scale can move from one layer to the next: layer, positively homogeneous operators, layer.

If every operator between two layers maps ``t * x`` to ``t * y`` for each channel by itself and each ``t > 0``, then
output channel ``c`` of the first layer may be multiplied by ``t[c]`` and input channel ``c`` of the second be divided
by it, and the net computes what it did. Relu, LeakyRelu, PRelu and pooling are such operators; Clip is one as long as
no channel gets to a bound other than 0 on one side of the change only.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import onnx

from kenosis_ort.accuracy.layers import Layer, array_of, is_private_constant, layers
from kenosis_ort.graph.attributes import attribute, attribute_int
from kenosis_ort.graph.index import GraphIndex
from kenosis_ort.graph.operators import Is, having, what
from kenosis_ort.graph.walk import MAIN_DOMAINS

Bounds = tuple[float, float]
Dims = dict[str, tuple[int, ...]]

_HOMOGENEOUS = having(Is.POOL) | {"Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "Clip", "Flatten", "Reshape"}


@dataclass(frozen=True)
class Link:
    """A pair of layers between which scales can move.

    Attributes:
        first: The layer that writes the channels.
        second: The layer that reads them.
        path: The nodes between them, in order.
        offset: The constant that an Add behind a MatMul puts on its output channels, "" without one.
        bounds: Bounds of the Clips between them; infinite without.
        clipped: Output of the last Clip, "" without one.
        repeat: Input channels of the second layer that stem from one channel (behind a Flatten), else 1.
    """

    first: Layer
    second: Layer
    path: tuple[onnx.NodeProto, ...]
    offset: str
    bounds: Bounds
    clipped: str
    repeat: int

    @property
    def value(self) -> str:
        """The value that the second layer reads."""
        return str(self.second.node.input[0])

    @property
    def values(self) -> tuple[str, ...]:
        """All values between the layers whose channels are scaled."""
        return (str(self.first.node.output[0]), *(str(node.output[0]) for node in self.path))

    @property
    def axes(self) -> dict[str, int]:
        """Axis of the channels of each of `values`."""
        axis, found = self.first.channel_axis, {self.values[0]: self.first.channel_axis}
        for node in self.path:
            axis = -1 if node.op_type in ("Flatten", "Reshape") else axis
            found[str(node.output[0])] = axis
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


def find_links(model: onnx.ModelProto, index: GraphIndex, *, nodes: Collection[str] | None = None) -> tuple[Link, ...]:
    """Returns every link of the main graph.

    Values between the layers have one reader each, are no outputs, and no body of control flow reads them; the
    weights and biases concerned are read once.

    Args:
        model: The model, shapes inferred.
        index: Its index; values that it keeps are left alone.
        nodes: Names of the layers to look at, None for all.
    """
    known = {layer.name: layer for layer in layers(index)}
    dims = _dims(model.graph)
    found = []
    for layer in known.values():
        if (nodes is None or layer.name in nodes) and _is_free(index, layer):
            link = _follow(layer, known, index, dims)
            if link is not None and (nodes is None or link.second.name in nodes) and _is_free(index, link.second):
                found.append(link)
    return tuple(found)


def _is_free(index: GraphIndex, layer: Layer) -> bool:
    return is_private_constant(index, layer.weight) and (not layer.bias or is_private_constant(index, layer.bias))


def _follow(first: Layer, known: dict[str, Layer], index: GraphIndex, dims: Dims) -> Link | None:
    """Walks from a layer to the next one; None if something on the way forbids it."""
    walk = _Walk(first, index, dims)
    while index.is_private(walk.value):
        node = index.readers[walk.value][0]
        if list(node.input).count(walk.value) != 1 or node.domain not in MAIN_DOMAINS:
            return None
        second = known.get(node.name)
        if second is not None:
            return walk.ends_at(second)
        if not walk.passes(node):
            return None
    return None


class _Walk:
    """The way from a layer to the next one so far."""

    def __init__(self, first: Layer, index: GraphIndex, dims: Dims) -> None:
        self.value = str(first.node.output[0])
        self._first, self._index, self._dims = first, index, dims
        self._path: list[onnx.NodeProto] = []
        self._offset, self._clipped = "", ""
        self._low, self._high = -math.inf, math.inf
        self._repeat = 1
        self._is_flat = not first.is_convolution  # the channels are the last axis

    def ends_at(self, second: Layer) -> Link | None:
        fits = second.node.input[0] == self.value and second.is_convolution != self._is_flat
        if not fits or second.channels_in != self._first.channels_out * self._repeat:
            return None
        bounds = (self._low, self._high)
        return Link(self._first, second, tuple(self._path), self._offset, bounds, self._clipped, self._repeat)

    def passes(self, node: onnx.NodeProto) -> bool:
        """Goes on behind a node; returns False where scales cannot."""
        if any(node.output[1:]) or not self._may_pass(node):
            return False
        self._path.append(node)
        self.value = str(node.output[0])
        return True

    def _may_pass(self, node: onnx.NodeProto) -> bool:
        if node.op_type == "Add" and self._first.node.op_type == "MatMul" and not self._path:
            self._offset = _row_offset(node, self.value, self._first, self._index)
            return bool(self._offset)
        if node.op_type not in _HOMOGENEOUS or node.input[0] != self.value:
            return False
        if Is.POOL in what(node) and self._is_flat:
            return False  # a pool never leaves the last axis alone
        if node.op_type == "Clip":
            bounds = _bounds(node, self._index)
            if bounds is not None:
                self._low, self._high = max(self._low, bounds[0]), min(self._high, bounds[1])
                self._clipped = str(node.output[0])
            return bounds is not None
        if node.op_type == "PRelu":
            return self._index.constant(node.input[1]) is not None
        if node.op_type in ("Flatten", "Reshape"):
            self._repeat = 0 if self._is_flat else _flattened(node, self._first.channels_out, self._dims)
            self._is_flat = True
            return self._repeat > 0
        return True


def _row_offset(node: onnx.NodeProto, value: str, first: Layer, index: GraphIndex) -> str:
    """Returns the constant that an Add puts on the last axis, "" if it is another kind of Add."""
    other = next((str(name) for name in node.input if name != value), "")
    tensor = index.constant(other)
    fits = tensor is not None and tensor.data_type == onnx.TensorProto.FLOAT
    if tensor is None or not fits or not is_private_constant(index, other):
        return ""
    return other if list(tensor.dims)[-1:] == [first.channels_out] == [math.prod(tensor.dims)] else ""


def _bounds(node: onnx.NodeProto, index: GraphIndex) -> Bounds | None:
    ends = []
    for position, name, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        given = node.input[position] if position < len(node.input) else ""
        kept = attribute(node, name)
        if given:
            if index.constant(given) is None:
                return None
            ends.append(float(array_of(index, given).reshape(-1)[0]))
        else:
            ends.append(default if kept is None else float(kept.f))
    low, high = (b if abs(b) < 3.4e38 else math.copysign(math.inf, b) for b in ends)
    return (low, high) if low <= 0.0 <= high and low < high else None


def _flattened(node: onnx.NodeProto, channels: int, dims: Dims) -> int:
    """Returns how many features of a flattened value stem from one channel, 0 if it is not flattened like that."""
    before, after = dims.get(node.input[0], ()), dims.get(node.output[0], ())
    if len(before) < 3 or len(after) != 2 or before[1] != channels or -1 in before[1:]:
        return 0
    if node.op_type == "Flatten" and attribute_int(node, "axis", 1) != 1:
        return 0
    spread = math.prod(before[2:])
    return spread if spread and after[1] == channels * spread else 0


def _dims(graph: onnx.GraphProto) -> Dims:
    """Returns shapes by value, -1 for a dimension that is not fixed."""
    found = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            found[value.name] = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
    return found
