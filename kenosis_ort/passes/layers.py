"""Layers with weights (Conv, ConvTranspose, Gemm, MatMul) as passes see them.

Weights are output channel, input channel, kernel tap.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.live import optional
from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.graph.walk import MAIN_DOMAINS

Float64 = npt.NDArray[np.float64]

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_FLOAT32 = onnx.TensorProto.FLOAT


@dataclass(frozen=True)
class Weights:
    """How the weights of a layer lie in memory.

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
        """What is plain data of it, for another process."""
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


def weights_of(graph: GraphView, layer: Layer) -> Float64:
    """Canonical weights of a layer as they are now."""
    return layer.canonical(graph.content(layer.weight))
