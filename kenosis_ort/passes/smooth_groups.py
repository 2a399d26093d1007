"""Values whose channels can be scaled: the layers that read them, and the constants before them that take the factors.

The channel axis is the last one. Shape operators that keep it last are looked through on the way down to the layers
and on the way up to what absorbs the inverse factors: a normalization's weights, a linear layer's output channels, or
a constant factor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from kenosis_ort.graph.constants import GraphIndex, Is, having
from kenosis_ort.graph.outside import put_outside
from kenosis_ort.graph.walk import attribute, attribute_int, known_as
from kenosis_ort.passes.layers import Float64, Layer, array_of, layer_of, shapes_of, weights_of

_NORMS = {  # operator to the inputs that scale its output 0 by channel
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3),
    "SkipSimplifiedLayerNormalization": (2,),
}
_HOMOGENEOUS = having(Is.HOMOGENEOUS | Is.ELEMENTWISE)
_HARMLESS = having(Is.SHAPE)
_DEEPEST = 12


@dataclass(frozen=True)
class Fold:
    """A constant to be divided by the factors: input ``position`` of ``node``, along its output channels.

    Attributes:
        node: The node.
        position: Which of its inputs.
        layer: The node as a linear layer, None where the constant is a vector or a scalar.
    """

    node: onnx.NodeProto
    position: int
    layer: Layer | None = None


@dataclass(frozen=True)
class SmoothGroup:
    """A value and the layers that read it.

    Attributes:
        value: Name of the value whose channels are scaled.
        channels: Size of its last axis.
        layers: Layers that read it, directly or through shape operators.
        folds: What takes the inverse factors; empty where nothing can.
        direct: Whether all layers read the value itself.
        normal: Whether a normalization computes it, whose scale could take the factors if nothing but layers read it.
    """

    value: str
    channels: int
    layers: tuple[Layer, ...]
    folds: tuple[Fold, ...]
    direct: bool
    normal: bool = False

    def scaled(self, index: GraphIndex) -> tuple[str, ...]:
        """The values that are divided where the folds are: from these on up to the layers."""
        ends = {layer.name for layer in self.layers}
        found: dict[str, None] = {}
        waiting = [str(fold.node.output[0]) for fold in self.folds]
        while waiting:
            value = waiting.pop()
            if value in found:
                continue
            found[value] = None
            inner = (reader for reader in index.readers.get(value, ()) if reader.name not in ends)
            waiting += [str(node.output[0]) for node in inner if known_as(node.domain, node.op_type) not in _HARMLESS]
        return tuple(found)


def find_groups(model: onnx.ModelProto, index: GraphIndex) -> Iterator[SmoothGroup]:
    """Yields the groups of a model, in graph order; each layer is in one at most.

    Args:
        model: Prepared model, shapes inferred.
        index: Its index.
    """
    finder = _Finder(model, index)
    seen: set[str] = set()
    for node in index.nodes:
        layer = finder.linear(node)
        if layer is None:
            continue
        value = finder.origin(str(node.input[0]), layer.channels_in)
        if value not in seen:
            seen.add(value)
            yield finder.group(value, layer.channels_in)


def scale_channels(index: GraphIndex, group: SmoothGroup, factors: Float64) -> None:
    """Divides a value by channel where its folds are, and multiplies the weights of the layers that read it.

    Args:
        index: Of the copy to change.
        group: Of that model.
        factors: Shape (channels,), positive.
    """
    for layer in group.layers:
        _store(index, layer.node, 1, layer.stored(weights_of(index, layer) * factors[:, None]))
    for fold in group.folds:
        real = array_of(index, fold.node.input[fold.position])
        if fold.layer is not None:
            _store(
                index, fold.node, fold.position, fold.layer.stored(fold.layer.canonical(real) / factors[:, None, None])
            )
        else:
            divided = (np.asarray(real, np.float64) / factors).astype(real.dtype)
            _store(index, fold.node, fold.position, divided)


def _store(index: GraphIndex, node: onnx.NodeProto, position: int, array: npt.NDArray[np.floating[Any]]) -> None:
    tensor = put_outside(numpy_helper.from_array(array))
    index.store_constant(node, position, tensor, f"{node.input[position]}_smooth")


class _Finder:
    def __init__(self, model: onnx.ModelProto, index: GraphIndex) -> None:
        self.index = index
        self.dims = shapes_of(model.graph)

    def linear(self, node: onnx.NodeProto) -> Layer | None:
        layer = layer_of(node, self.index) if node.op_type in ("MatMul", "Gemm") else None
        return layer if layer is not None and node.input[0] not in self.index.constants else None

    def group(self, value: str, channels: int) -> SmoothGroup:
        found: list[Layer] = []
        complete = self._readers(value, channels, found)
        folds = self._folds(value, channels) if complete else None
        direct = all(layer.node.input[0] == value for layer in found)
        return SmoothGroup(value, channels, tuple(found), tuple(folds or ()), direct, self._is_normal(value, channels))

    def origin(self, value: str, channels: int) -> str:
        """The value before the shape operators in front of a layer."""
        for _ in range(_DEEPEST):
            node = self.index.producers.get(value)
            if node is None or not self._keeps_channels(node, channels):
                break
            value = str(node.input[0])
        return value

    def _readers(self, value: str, channels: int, found: list[Layer]) -> bool:
        """Gathers the layers that read a value; returns whether nothing else does."""
        complete = not self.index.is_pinned(value)
        for reader in {id(node): node for node in self.index.readers.get(value, ())}.values():
            layer = self.linear(reader)
            if layer is not None and list(reader.input).count(value) == 1 and reader.input[0] == value:
                found.append(layer)
            elif self._keeps_channels(reader, channels) and list(reader.input).count(value) == 1:
                complete = self._readers(str(reader.output[0]), channels, found) and complete
            elif known_as(reader.domain, reader.op_type) not in _HARMLESS:
                complete = False
        return complete

    def _keeps_channels(self, node: onnx.NodeProto, channels: int) -> bool:
        """Whether a node only moves rows about: its output's last axis is that of its first input."""
        op_type = known_as(node.domain, node.op_type)
        if op_type == "Transpose":
            perm = attribute(node, "perm")
            return perm is not None and bool(perm.ints) and perm.ints[-1] == len(perm.ints) - 1
        if op_type == "Reshape":
            sizes = [self.dims.get(str(name), (-1,)) for name in (node.input[0], node.output[0])]
            return all(bool(s) and s[-1] == channels for s in sizes)
        if op_type == "Gather":
            dims = self.dims.get(str(node.input[0]))
            indices = node.input[1] in self.index.constants
            return bool(dims) and indices and attribute_int(node, "axis", 0) not in (-1, len(dims or ()) - 1)
        return op_type == "Identity"

    def _folds(self, value: str, channels: int, depth: int = 0) -> list[Fold] | None:
        """Constants to divide so that the value is divided by channel; None if there are none."""
        node = self.index.producers.get(value)
        if node is None or depth > _DEEPEST or value != node.output[0]:
            return None
        op_type = known_as(node.domain, node.op_type)
        if op_type in _NORMS:
            return self._norm_folds(node, channels)
        layer = self.linear(node)
        if layer is not None:
            return self._layer_folds(layer, channels)
        if op_type in ("Mul", "Add"):
            return self._binary_folds(node, channels, depth)
        if op_type in _HOMOGENEOUS or self._keeps_channels(node, channels):
            return self._private_folds(str(node.input[0]), channels, depth)
        return None

    def _is_normal(self, value: str, channels: int) -> bool:
        node = self.index.producers.get(value)
        if node is None or known_as(node.domain, node.op_type) not in _NORMS or value != node.output[0]:
            return False
        return self._norm_folds(node, channels) is not None

    def _private_folds(self, value: str, channels: int, depth: int) -> list[Fold] | None:
        return self._folds(value, channels, depth + 1) if self.index.is_private(value) else None

    def _norm_folds(self, node: onnx.NodeProto, channels: int) -> list[Fold] | None:
        folds = []
        for position in _NORMS[node.op_type]:
            if position < len(node.input) and node.input[position]:
                constant = self.index.constant(node.input[position])
                if constant is None or list(constant.dims) != [channels]:
                    return None
                folds.append(Fold(node, position))
        return folds or None

    def _layer_folds(self, layer: Layer, channels: int) -> list[Fold] | None:
        if layer.channels_out != channels:
            return None
        folds = [Fold(layer.node, 1, layer)]
        if layer.bias:
            if list(self.index.constants[layer.bias].dims)[-1:] not in ([channels], [1]):
                return None
            folds.append(Fold(layer.node, 2))
        return folds

    def _binary_folds(self, node: onnx.NodeProto, channels: int, depth: int) -> list[Fold] | None:
        """A constant takes the factors of a product by itself, that of a sum together with the other side."""
        constants = [i for i, name in enumerate(node.input) if name in self.index.constants]
        if len(constants) == 1:
            position = constants[0]
            data, dims = str(node.input[1 - position]), list(self.index.constants[node.input[position]].dims)
            wide = self.dims.get(data, (-1,))[-1:] == (channels,)
            if dims[-1:] != [channels] and not (wide and (not dims or dims[-1] == 1)):
                return None
            own = Fold(node, position)
            if node.op_type == "Mul":
                return [own]
            others = self._private_folds(data, channels, depth) if wide else None
            return None if others is None else [*others, own]
        if constants or node.op_type != "Mul" or node.input[0] == node.input[1]:
            return None
        for name in node.input:  # one factor of a gated product takes all
            if self.dims.get(str(name), (-1,))[-1:] == (channels,):
                found = self._private_folds(str(name), channels, depth)
                if found is not None:
                    return found
        return None
