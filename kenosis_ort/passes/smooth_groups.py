"""Values whose channels can be scaled: the layers that read them, and the constants before them that take the factors.

The channel axis is the last one. Shape operators that keep it last are looked through on the way down to the layers
and on the way up to what absorbs the inverse factors: a normalization's weights, a linear layer's output channels, or
a constant factor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kenosis_ort.graph.constants import Is, having
from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.view import GraphView, ir, optional
from kenosis_ort.graph.walk import known_as
from kenosis_ort.passes.layers import Float64, Layer, layer_of, weights_of

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

    node: ir.Node
    position: int
    layer: Layer | None = None

    @property
    def constant(self) -> ir.Value:
        """The constant."""
        found = self.node.inputs[self.position]
        assert found is not None
        return found


class SmoothGroup(NamedTuple):
    """A value and the layers that read it.

    Attributes:
        value: The value whose channels are scaled.
        channels: Size of its last axis.
        layers: Layers that read it, directly or through shape operators.
        folds: What takes the inverse factors; empty where nothing can.
        direct: Whether all layers read the value itself.
        normal: Whether a normalization computes it, whose scale could take the factors if nothing but layers read it.
    """

    value: ir.Value
    channels: int
    layers: tuple[Layer, ...]
    folds: tuple[Fold, ...]
    direct: bool
    normal: bool = False

    @property
    def name(self) -> str:
        """Name of the value."""
        return self.value.name or ""

    def scaled(self, graph: GraphView) -> tuple[str, ...]:
        """The values that are divided where the folds are: from these on up to the layers."""
        ends = {layer.name for layer in self.layers}
        found: dict[str, None] = {}
        waiting = [fold.node.outputs[0] for fold in self.folds]
        while waiting:
            value = waiting.pop()
            if value.name in found:
                continue
            found[value.name or ""] = None
            inner = (reader for reader in graph.readers(value) if reader.name not in ends)
            waiting += [node.outputs[0] for node in inner if known_as(node.domain, node.op_type) not in _HARMLESS]
        return tuple(found)


def find_groups(graph: GraphView) -> Iterator[SmoothGroup]:
    """Yields the groups of a prepared model, shapes inferred, in graph order; each layer is in one at most."""
    finder = _Finder(graph)
    seen: set[ir.Value] = set()
    for node in graph.nodes:
        layer = finder.linear(node)
        if layer is None or node.inputs[0] is None:
            continue
        value = finder.origin(node.inputs[0], layer.channels_in)
        if value not in seen:
            seen.add(value)
            yield finder.group(value, layer.channels_in)


def scale_channels(graph: LiveGraph, group: SmoothGroup, factors: Float64) -> None:
    """Divides a value by channel where its folds are, and multiplies the weights of the layers that read it.

    Args:
        graph: The copy to change.
        group: Of that model.
        factors: Shape (channels,), positive.
    """
    for layer in group.layers:
        scaled = layer.stored(weights_of(graph, layer) * factors[:, None])
        graph.store_array(layer.node, 1, scaled, f"{layer.weight.name}_smooth")
    for fold in group.folds:
        constant = fold.constant
        real = graph.content(constant)
        if fold.layer is not None:
            divided = fold.layer.stored(fold.layer.canonical(real) / factors[:, None, None])
        else:
            divided = (np.asarray(real, np.float64) / factors).astype(real.dtype)
        graph.store_array(fold.node, fold.position, divided, f"{constant.name}_smooth")


class _Finder:
    def __init__(self, graph: GraphView) -> None:
        self.graph = graph

    def linear(self, node: ir.Node) -> Layer | None:
        layer = layer_of(node, self.graph) if node.op_type in ("MatMul", "Gemm") else None
        return layer if layer is not None and self.graph.constant(node.inputs[0]) is None else None

    def group(self, value: ir.Value, channels: int) -> SmoothGroup:
        found: list[Layer] = []
        complete = self._readers(value, channels, found)
        folds = self._folds(value, channels) if complete else None
        direct = all(layer.node.inputs[0] is value for layer in found)
        return SmoothGroup(value, channels, tuple(found), tuple(folds or ()), direct, self._is_normal(value, channels))

    def origin(self, value: ir.Value, channels: int) -> ir.Value:
        """The value before the shape operators in front of a layer."""
        for _ in range(_DEEPEST):
            node = value.producer()
            source = None if node is None or not self._keeps_channels(node, channels) else node.inputs[0]
            if source is None:
                break
            value = source
        return value

    def _readers(self, value: ir.Value, channels: int, found: list[Layer]) -> bool:
        """Gathers the layers that read a value; returns whether nothing else does."""
        complete = not self.graph.is_pinned(value)
        for reader in dict.fromkeys(self.graph.readers(value)):
            layer, once = self.linear(reader), list(reader.inputs).count(value) == 1
            if layer is not None and once and reader.inputs[0] is value:
                found.append(layer)
            elif once and self._keeps_channels(reader, channels):
                complete = self._readers(reader.outputs[0], channels, found) and complete
            elif known_as(reader.domain, reader.op_type) not in _HARMLESS:
                complete = False
        return complete

    def _width(self, value: ir.Value | None) -> int | None:
        """The size of a value's last axis, None where it is not known."""
        return (self.graph.dims(value) or (None,))[-1]

    def _keeps_channels(self, node: ir.Node, channels: int) -> bool:
        """Whether a node only moves rows about: its output's last axis is that of its first input."""
        operator = known_as(node.domain, node.op_type)
        if operator == "Transpose":
            perm = node.attributes.get_ints("perm", ())
            return bool(perm) and perm[-1] == len(perm) - 1
        if operator == "Reshape":
            return self._width(node.inputs[0]) == channels == self._width(node.outputs[0])
        if operator == "Gather":
            rank = self.graph.rank(node.inputs[0])
            indices = self.graph.constant(node.inputs[1]) is not None
            return bool(rank) and indices and node.attributes.get_int("axis", 0) not in (-1, (rank or 0) - 1)
        return operator == "Identity"

    def _folds(self, value: ir.Value, channels: int, depth: int = 0) -> list[Fold] | None:
        """Constants to divide so that the value is divided by channel; None if there are none."""
        node = value.producer()
        if node is None or depth > _DEEPEST or value is not node.outputs[0]:
            return None
        operator = known_as(node.domain, node.op_type)
        if operator in _NORMS:
            return self._norm_folds(node, channels)
        layer = self.linear(node)
        if layer is not None:
            return self._layer_folds(layer, channels)
        if operator in ("Mul", "Add"):
            return self._binary_folds(node, channels, depth)
        if operator in _HOMOGENEOUS or self._keeps_channels(node, channels):
            return self._private_folds(node.inputs[0], channels, depth)
        return None

    def _is_normal(self, value: ir.Value, channels: int) -> bool:
        node = value.producer()
        if node is None or known_as(node.domain, node.op_type) not in _NORMS or value is not node.outputs[0]:
            return False
        return self._norm_folds(node, channels) is not None

    def _private_folds(self, value: ir.Value | None, channels: int, depth: int) -> list[Fold] | None:
        private = value is not None and self.graph.is_private(value)
        return self._folds(value, channels, depth + 1) if value is not None and private else None

    def _norm_folds(self, node: ir.Node, channels: int) -> list[Fold] | None:
        folds = []
        for position in _NORMS[node.op_type]:
            value = optional(node, position)
            if value is not None:
                constant = self.graph.constant(value)
                if constant is None or list(constant.dims) != [channels]:
                    return None
                folds.append(Fold(node, position))
        return folds or None

    def _layer_folds(self, layer: Layer, channels: int) -> list[Fold] | None:
        if layer.channels_out != channels:
            return None
        folds = [Fold(layer.node, 1, layer)]
        bias = self.graph.constant(layer.bias)
        if bias is not None:
            if list(bias.dims)[-1:] not in ([channels], [1]):
                return None
            folds.append(Fold(layer.node, 2))
        return folds

    def _binary_folds(self, node: ir.Node, channels: int, depth: int) -> list[Fold] | None:
        """A constant takes the factors of a product by itself, that of a sum together with the other side."""
        constants = [(at, found) for at, v in enumerate(node.inputs) if (found := self.graph.constant(v)) is not None]
        if len(constants) == 1:
            position, constant = constants[0]
            data, dims = node.inputs[1 - position], list(constant.dims)
            wide = self._width(data) == channels
            if dims[-1:] != [channels] and not (wide and (not dims or dims[-1] == 1)):
                return None
            own = Fold(node, position)
            if node.op_type == "Mul":
                return [own]
            others = self._private_folds(data, channels, depth) if wide else None
            return None if others is None else [*others, own]
        if constants or node.op_type != "Mul" or node.inputs[0] is node.inputs[1]:
            return None
        for value in node.inputs:  # one factor of a gated product takes all
            folds = self._private_folds(value, channels, depth) if self._width(value) == channels else None
            if folds is not None:
                return folds
        return None
