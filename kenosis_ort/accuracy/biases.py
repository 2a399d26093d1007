"""Biases that a pass may move: one of its own for every Conv, ConvTranspose and Gemm."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.numpy_helper

from kenosis_ort.accuracy.layers import Float64, Layer, array_of, is_private_constant, layers, store
from kenosis_ort.graph.attributes import attribute_float
from kenosis_ort.graph.index import GraphIndex


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
    """Returns the constant that shifts the output channels of a layer alone, "" if there is none.

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
    """Returns a copy in which the outputs of layers are shifted.

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
