"""One way to look at the weights of Conv, ConvTranspose, Gemm and MatMul: output channel, input channel, kernel tap."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.attributes import attribute_int
from kenosis_ort.graph.index import GraphIndex
from kenosis_ort.graph.operators import LAYERS
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import MAIN_DOMAINS

Float64 = npt.NDArray[np.float64]

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_FLOAT32 = onnx.TensorProto.FLOAT


@dataclass(frozen=True)
class Layer:
    """A node with constant float32 weights, affine in its data input.

    Attributes:
        node: The node.
        weight: Name of its weights.
        bias: Name of its constant bias, "" without one. A MatMul's Add is not looked at.
        shape: Shape of the weights as stored.
        groups: Groups of channels, 1 but for convolutions.
        transposed: Whether the weights are stored with output channels first (Conv, Gemm with transB).
    """

    node: onnx.NodeProto
    weight: str
    bias: str
    shape: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def name(self) -> str:
        return str(self.node.name)

    @property
    def is_convolution(self) -> bool:
        return self.node.op_type in _CONVOLUTIONS

    @property
    def taps(self) -> int:
        """Elements of the kernel, 1 for Gemm and MatMul."""
        return math.prod(self.shape[2:]) if self.is_convolution else 1

    @property
    def channels_out(self) -> int:
        if self.node.op_type == "ConvTranspose":
            return self.shape[1] * self.groups
        return self.shape[0] if self.transposed else self.shape[1]

    @property
    def channels_in(self) -> int:
        if self.node.op_type == "Conv":
            return self.shape[1] * self.groups
        return self.shape[1] if self.transposed else self.shape[0]

    @property
    def channel_axis(self) -> int:
        """Axis of the channels in its data input and its output."""
        return 1 if self.is_convolution or self.node.op_type == "Gemm" else -1

    def canonical(self, stored: npt.NDArray[np.generic]) -> Float64:
        """Returns weights as float64 of shape (output channels, input channels of the group, taps)."""
        real = np.asarray(stored, np.float64)
        if self.node.op_type == "ConvTranspose":
            grouped = real.reshape(self.groups, self.shape[0] // self.groups, self.shape[1], self.taps)
            return np.asarray(grouped.transpose(0, 2, 1, 3).reshape(self.channels_out, -1, self.taps))
        if self.node.op_type == "Conv":
            return real.reshape(self.shape[0], self.shape[1], self.taps)
        rows = real if self.transposed else real.T
        return rows.reshape(self.channels_out, self.channels_in, 1)

    def stored(self, canonical: Float64) -> npt.NDArray[np.float32]:
        """Returns canonical weights as they are stored, rounded to float32."""
        if self.node.op_type == "ConvTranspose":
            per_group = self.shape[0] // self.groups
            back = canonical.reshape(self.groups, self.shape[1], per_group, self.taps).transpose(0, 2, 1, 3)
        elif self.node.op_type == "Conv" or self.transposed:
            back = canonical
        else:
            back = canonical[:, :, 0].T
        return np.ascontiguousarray(back.reshape(self.shape), np.float32)

    def by_group(self, per_input: Float64) -> Float64:
        """Spreads one number an input channel to shape (output channels, input channels of the group)."""
        rows = per_input.reshape(self.groups, -1)
        return np.repeat(rows, self.channels_out // self.groups, axis=0)


def layer_of(node: onnx.NodeProto, index: GraphIndex) -> Layer | None:
    """Returns a node as a layer, None where it has no constant float32 weights on input 1."""
    if node.op_type not in LAYERS or node.domain not in MAIN_DOMAINS or len(node.input) < 2:
        return None
    weight = index.constant(node.input[1])
    if weight is None or weight.data_type != _FLOAT32:
        return None
    shape = tuple(weight.dims)
    convolution = node.op_type in _CONVOLUTIONS
    if (len(shape) < 3 if convolution else len(shape) != 2) or 0 in shape or attribute_int(node, "transA", 0):
        return None
    groups = attribute_int(node, "group", 1) if convolution else 1
    if shape[0] % groups:
        return None
    bias = node.input[2] if node.op_type != "MatMul" and len(node.input) > 2 else ""
    if bias and index.constant(bias) is None:
        return None
    transposed = node.op_type == "Conv" or (node.op_type == "Gemm" and bool(attribute_int(node, "transB", 0)))
    return Layer(node, str(node.input[1]), str(bias), shape, groups, transposed)


def layers(index: GraphIndex) -> Iterator[Layer]:
    """Yields all layers of the main graph, in graph order."""
    for node in index.nodes:
        found = layer_of(node, index)
        if found is not None:
            yield found


def is_private_constant(index: GraphIndex, name: str) -> bool:
    """Returns whether exactly one input of one node reads a constant and nothing else needs it."""
    readers = index.readers.get(name, ())
    return len(readers) == 1 and list(readers[0].input).count(name) == 1 and not index.is_pinned_constant(name)


def array_of(index: GraphIndex, name: str) -> npt.NDArray[np.generic]:
    """Returns the content of a constant."""
    return array_in(index.constants[name])


def store(index: GraphIndex, name: str, array: npt.NDArray[np.generic]) -> None:
    """Replaces the content of a constant, keeping its name."""
    index.replace_constant(name, onnx.numpy_helper.from_array(np.ascontiguousarray(array)))
