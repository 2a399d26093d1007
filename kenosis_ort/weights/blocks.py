"""Linear layers and embeddings with weights in blocks, as the runtime's kernels read them.

The kernel of linear layers quantizes the rows of its data by itself (``accuracy_level`` 4): no calibration is needed.
It reads a quarter of the bytes of float weights with 8 bits, an eighth with 4, which is what a batch of one row waits
for: 2.2x to 3.6x of FP32 at one row with 8 bits and up to 4.9x with 4, 1.0x to 1.9x at 128 rows, where the int8 forms
are faster. Source: ONNX Runtime contrib operator documentation; measured on ONNX Runtime 1.31.1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.view import GraphView, ir, optional
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.quantizer.linear_layers import CONTRIB, LinearLayer, become, exchange_layers
from kenosis_ort.weights.block_grids import LEAST_BLOCK, BlockGrid, Float64, UInt8, in_bytes, nearest, pack

INT8_PRODUCTS: Final = 4
"""Level of accuracy at which the kernel multiplies in 8 bits, and so is fastest."""

Choose = Callable[[LinearLayer], "tuple[Float64 | UInt8, BlockGrid] | None"]
"""Integers and grid of a layer's matrix, shape (K, N); None to leave it float."""


def weight_only(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy of a model with 8-bit weights in its linear layers, rounded to nearest; None if it has none.

    Whether the installed runtime loads the result is for the caller to see.

    Args:
        proto: A prepared float model. Not changed.
    """
    return with_block_weights(proto, lambda layer: nearest(layer.matrix, 8, 128))


def with_block_weights(
    proto: onnx.ModelProto, choose: Choose, *, accuracy_level: int = INT8_PRODUCTS
) -> onnx.ModelProto | None:
    """A copy of a model with weights in blocks, None if it has no linear layers.

    Args:
        proto: A prepared float model. Not changed.
        choose: Called for each layer, in graph order; for layers that share a matrix once.
        accuracy_level: Of the kernel: 4 multiplies in 8 bits, 0 and 1 in float.
    """
    made: dict[tuple[str, bool], tuple[tuple[ir.Value, ...], dict[str, int]] | None] = {}

    def make(layer: LinearLayer, graph: LiveGraph) -> bool:
        if layer.weight not in made:
            chosen = choose(layer)
            made[layer.weight] = None if chosen is None else _store(*chosen, accuracy_level, layer.constant.name, graph)
        stored = made[layer.weight]
        if stored is None:
            return False
        inputs, attributes = [layer.node.inputs[0], *stored[0]], stored[1]
        if layer.bias is None:
            become(graph, layer, "MatMulNBits", inputs, attributes)
            return True
        node, last, name = layer.node, layer.last, f"{layer.name}_bias"
        output = graph.hand_over(last.outputs[0])
        if last is not node:
            graph.move_before(node, last)
            graph.remove(last)
            name = last.name or ""
        node.outputs[0].name = graph.fresh_name(f"{output.name}_product")
        bias = graph.add_constant(layer.bias, f"{output.name}_bias")
        added = graph.append_behind(node, "Add", [node.outputs[0], bias], output=output).producer()
        assert added is not None
        added.name = name
        graph.rewrite(node, "MatMulNBits", inputs, attributes, domain=CONTRIB)
        return True

    return exchange_layers(proto, make)


def _store(
    integers: Float64 | UInt8, grid: BlockGrid, accuracy_level: int, base: str, graph: LiveGraph
) -> tuple[tuple[ir.Value, ...], dict[str, int]]:
    """Inputs of ``MatMulNBits`` beside its data, and its attributes."""
    packed, scales, zeros = pack(integers, grid)
    arrays: dict[str, npt.NDArray[np.generic]] = {"packed": packed, "scales": scales}
    if (grid.zero != (grid.top + 1) // 2).any():  # which the kernel supposes where none are given
        arrays["zero_points"] = zeros
    values = tuple(graph.add_constant(array, f"{base}_{what}") for what, array in arrays.items())
    attributes = {"K": integers.shape[0], "N": integers.shape[1], "accuracy_level": accuracy_level}
    return values, {**attributes, "bits": grid.bits, "block_size": grid.block}


def with_block_embeddings(
    proto: onnx.ModelProto, bits: int, block: int, excluded: Collection[str] = ()
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """A copy of a model whose look-ups of rows read them in blocks, and the names of those nodes.

    Args:
        proto: A prepared float model. Not changed.
        bits: 4 or 8.
        block: Numbers of a block; the width of a row has to hold a whole number of them.
        excluded: Names of nodes that stay as they are.
    """
    graph, changed = LiveGraph(proto, copied=True), list[str]()
    for node in graph.nodes:
        value = optional(node, 0)
        table = None if value is None or node.name in excluded else _table(graph, node, block)
        if value is None or table is None:
            continue
        turned, grid = nearest(table.T, bits, block, symmetric=False)
        integers = np.ascontiguousarray(turned.T)
        names = [graph.fresh_name(f"{value.name}_{what}") for what in ("packed", "scales", "zero_points")]
        scales = np.ascontiguousarray(grid.scale.T.astype(np.float32))
        tensors = (
            _packed_tensor(integers, bits, names[0]),
            numpy_helper.from_array(scales, names[1]),
            _packed_tensor(np.ascontiguousarray(grid.zero.T.astype(np.uint8)), bits, names[2]),
        )
        packed, *steps = (graph.register(tensor) for tensor in tensors)
        attributes = {"block_size": block, "gather_axis": 0, "quantize_axis": 1} | ({"bits": 8} if bits == 8 else {})
        graph.rewrite(node, "GatherBlockQuantized", [packed, node.inputs[1], *steps], attributes, domain=CONTRIB)
        changed.append(node.name or "")
    return graph.write(), tuple(changed)


def embeddings_for_blocks(proto: onnx.ModelProto, block: int) -> tuple[str, ...]:
    """The names of a prepared model's nodes that `with_block_embeddings` would change, in graph order."""
    graph = GraphView(proto)
    return tuple(node.name or "" for node in graph.nodes if _table(graph, node, block) is not None)


def _table(graph: GraphView, node: ir.Node, block: int) -> npt.NDArray[np.float32] | None:
    """The rows that a node looks up, if they can be stored in blocks."""
    if node.op_type != "Gather" or node.domain not in MAIN_DOMAINS or node.attributes.get_int("axis", 0) != 0:
        return None
    value = node.inputs[0]
    tensor = graph.constant(value)
    if tensor is None or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
        return None
    if tensor.dims[1] % block or tensor.dims[0] < LEAST_BLOCK or graph.readers(value) != [node]:
        return None
    table = array_in(tensor)
    return table if np.isfinite(table).all() else None


def _packed_tensor(array: npt.NDArray[np.uint8], bits: int, name: str) -> TensorProto:
    if bits == 8:
        return numpy_helper.from_array(np.ascontiguousarray(array), name)
    packed = in_bytes(array.reshape(-1)).tobytes()
    return helper.make_tensor(name, TensorProto.UINT4, array.shape, packed, raw=True)
