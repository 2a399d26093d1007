"""One way to look at the weights of Conv, ConvTranspose, Gemm and MatMul: output channel, input channel, kernel tap.

Biases that a pass may move: one of its own for every Conv, ConvTranspose and Gemm.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.index import GraphIndex
from kenosis_ort.graph.operators import LAYERS
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import MAIN_DOMAINS, attribute_float, attribute_int

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
        """Weights as float64 of shape (output channels, input channels of the group, taps)."""
        real = np.asarray(stored, np.float64)
        if self.node.op_type == "ConvTranspose":
            grouped = real.reshape(self.groups, self.shape[0] // self.groups, self.shape[1], self.taps)
            return np.asarray(grouped.transpose(0, 2, 1, 3).reshape(self.channels_out, -1, self.taps))
        if self.node.op_type == "Conv":
            return real.reshape(self.shape[0], self.shape[1], self.taps)
        rows = real if self.transposed else real.T
        return rows.reshape(self.channels_out, self.channels_in, 1)

    def stored(self, canonical: Float64) -> npt.NDArray[np.float32]:
        """Canonical weights as they are stored, rounded to float32."""
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
    """A node as a layer, None where it has no constant float32 weights on input 1."""
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
    """Whether exactly one input of one node reads a constant and nothing else needs it."""
    readers = index.readers.get(name, ())
    return len(readers) == 1 and list(readers[0].input).count(name) == 1 and not index.is_pinned_constant(name)


def array_of(index: GraphIndex, name: str) -> npt.NDArray[np.generic]:
    """The content of a constant."""
    return array_in(index.constants[name])


def store(index: GraphIndex, name: str, array: npt.NDArray[np.generic]) -> None:
    """Replaces the content of a constant, keeping its name."""
    index.replace_constant(name, onnx.numpy_helper.from_array(np.ascontiguousarray(array)))


@dataclass(frozen=True)
class Biased:
    """A model all of whose layers can take a shift of their output channels.

    Attributes:
        model: The model; the one given where nothing had to change.
        added: Names of the nodes that got a bias of zeros, or a bias of their own where they shared one.
    """

    model: onnx.ModelProto
    added: tuple[str, ...]


def with_biases(model: onnx.ModelProto, *, nodes: Collection[str] | None = None) -> Biased:
    """Gives every Conv, ConvTranspose and Gemm a bias of its own, so that bias correction has something to move.

    A plan names biases by value, so this comes before planning. A bias costs an integer kernel nothing.

    Args:
        model: The prepared float model. Not changed.
        nodes: Names of the layers concerned, None for all.
    """
    index = GraphIndex.of_copy(model)
    added = []
    for layer in list(layers(index)):
        if layer.node.op_type == "MatMul" or (nodes is not None and layer.name not in nodes):
            continue
        if layer.bias and (is_private_constant(index, layer.bias) and array_of(index, layer.bias).size > 1):
            continue
        if not layer.bias and len(layer.node.input) > 2 and layer.node.input[2]:
            continue  # computed at run time
        bias = np.zeros(layer.channels_out, np.float32)
        if layer.bias:
            present = array_of(index, layer.bias)
            if present.size not in (1, layer.channels_out):
                continue  # a Gemm's matrix of biases
            bias = np.broadcast_to(present.reshape(-1), (layer.channels_out,)).astype(np.float32)
        index.store_constant(layer.node, 2, onnx.numpy_helper.from_array(bias), f"{layer.weight}_bias")
        added.append(layer.name)
    return Biased(index.commit() if added else model, tuple(added))


def bias_of(layer: Layer, index: GraphIndex) -> str:
    """The constant that shifts the output channels of a layer alone, "" if there is none.

    A MatMul's is that of the Add which alone reads it.
    """
    name = layer.bias
    if layer.node.op_type == "MatMul":
        output = str(layer.node.output[0])
        readers = index.readers.get(output, [])
        if not index.is_private(output) or readers[0].op_type != "Add":
            return ""
        name = next((str(i) for i in readers[0].input if i != output), "")
    tensor = index.constant(name) if name else None
    if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT or not is_private_constant(index, name):
        return ""
    dims = [d for d in tensor.dims if d != 1]
    return name if dims == [layer.channels_out] or (not dims and layer.channels_out == 1) else ""


def with_shifts(model: onnx.ModelProto, shifts: Mapping[str, Float64]) -> onnx.ModelProto:
    """A copy in which the outputs of layers are shifted.

    Args:
        model: The float model. Not changed.
        shifts: What is added to each output channel, by node name; of nodes with a bias of their own.
    """
    index = GraphIndex.of_copy(model)
    by_name = {layer.name: layer for layer in layers(index)}
    for node, shift in shifts.items():
        layer = by_name[node]
        name = bias_of(layer, index)
        before = array_of(index, name)
        beta = attribute_float(layer.node, "beta", 1.0) if layer.node.op_type == "Gemm" else 1.0
        after = before.astype(np.float64) + (shift / beta).reshape(before.shape)
        store(index, name, after.astype(np.float32))
    return index.commit()
