"""The linear layers of a float model, MatMul and Gemm with constant weights, and their exchange for other kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.copying import copy_model
from kenosis_ort.graph.index import GraphIndex
from kenosis_ort.graph.shapes import value_types
from kenosis_ort.graph.walk import MAIN_DOMAINS

CONTRIB = "com.microsoft"
_LEAST = 16
"""Smaller matrices, and outputs of fewer columns, take the float kernels less time than a conversion."""


@dataclass(frozen=True)
class LinearLayer:
    """``output = data @ matrix + bias``.

    Attributes:
        name: Name of the MatMul or Gemm.
        data: Value of shape (..., K), float32.
        weight: Name of the constant.
        transposed: The constant is the matrix's transpose.
        matrix: Float32 of shape (K, N).
        bias: Name of a constant of N elements in one row, None without.
        output: Value of shape (..., N).
    """

    name: str
    data: str
    weight: str
    transposed: bool
    matrix: npt.NDArray[np.float32]
    bias: str | None
    output: str


@dataclass
class Parts:
    """What takes a layer's place.

    Attributes:
        nodes: In order; the last one writes the layer's output.
        constants: To be added; one of a name that is there already is left out.
    """

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)


Maker = Callable[["LinearLayer", "Workpiece"], Parts]


class Workpiece:
    """A copy of a model while its linear layers are exchanged.

    Args:
        proto: A prepared float model: nodes named, constants as initializers. Not changed.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.model = copy_model(proto)
        self.index = GraphIndex(self.model)
        self.types = value_types(proto)
        self.biased: dict[int, LinearLayer] = {}
        self.layers = {id(node): layer for node in self.index.nodes if (layer := self._layer(node)) is not None}

    def readers(self, value: str) -> int:
        """Returns how many linear layers read a value."""
        return sum(layer.data == value for layer in self.layers.values())

    def name(self, base: str) -> str:
        """Returns a value name that is free, and reserves it."""
        return self.index.fresh_name(base)

    def exchange(self, make: Maker) -> onnx.ModelProto | None:
        """Returns the model with all its linear layers exchanged, None if there is none."""
        if not self.layers:
            return None
        graph = self.model.graph
        absorbed = {id(add): layer for add, layer in self._biases()}
        nodes: list[onnx.NodeProto] = []
        known = {tensor.name for tensor in graph.initializer}
        by_node = {**self.layers, **absorbed}
        dropped = {name for name, layer in ((l.name, l) for l in absorbed.values())}
        for node in self.index.nodes:
            layer = by_node.get(id(node))
            if layer is None:
                nodes.append(node)
            elif id(node) in absorbed or layer.name not in dropped:
                parts = make(layer, self)
                nodes += parts.nodes
                for tensor in parts.constants:
                    if tensor.name not in known:
                        known.add(tensor.name)
                        graph.initializer.append(tensor)
        replace_nodes(graph, nodes)
        _drop_unread(self.model, self.index)
        _import_contrib(self.model)
        return self.model
