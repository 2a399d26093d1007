"""Pairs of products that clip in int16, and weights stored so that none does.

Integer kernels for x86-64 processors with AVX2 or AVX-512 and without VNNI multiply uint8 activations by int8 weights
with ``vpmaddubsw``, which adds two neighbouring products in int16 and clips the sum. A pair of stored weights cannot
clip, whatever the activations are, if its positive members sum to 128 at most and its negative ones to -128 at least:
255 * 128 = 32640 lies inside int16, 255 * 129 = 32895 does not.

Which weights are neighbours was found by experiment, every pair of positions tried: (2j, 2j + 1) along K in MatMul and
Gemm; of the flattened (kernel, input channel of the group) order in Conv; none in depthwise Convs, whose kernel sums in
int32. Kernels of uint8 weights, and of int8 activations, add in int32 too. oneDNN's pairs are the same but in Convs
of an odd number of channels, which most of its kernels fill up to an even one for each element of the kernel.

Weights that come quantized have scales that must stay, so that pairs cannot be made to fit as those of float weights
are. The same integers as uint8, they and their zero point 128 higher, stand for the same reals and run on the kernels
of uint8 weights, which add in int32: exact on every processor, at 0.6 to 0.85 of the speed.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from kenosis_ort.graph.outside import array_in, put_outside
from kenosis_ort.graph.walk import all_names, attribute_int, drop_initializers, read_names, reserve_name

LARGEST_ACTIVATION: Final = 255
INT16_SUM: Final = 2**15 - 1
"""What two products may sum to: beyond it they are clipped."""
LARGEST_PAIR: Final = INT16_SUM // LARGEST_ACTIVATION
"""What two neighbouring weights of one sign may sum to: 128."""
_CONVOLUTIONS: Final = frozenset({"Conv", "ConvInteger", "QLinearConv"})
_PRODUCTS: Final = frozenset(
    ["MatMul", "MatMulInteger", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention"]
)
_GEMMS: Final = frozenset({"Gemm", "QGemm"})

Array = npt.NDArray[Any]


def weight_pair(largest: int | None) -> int | None:
    """Largest sum of two neighbouring int8 weights of one sign, for the largest sum of their products."""
    return None if largest is None else largest // LARGEST_ACTIVATION


class PairOrder(NamedTuple):
    """The order in which a kernel reads a weight tensor.

    Attributes:
        axes: Permutation of the tensor's axes: those of rows, then those that flatten to K.
        rows: How many of them are rows.
    """

    axes: tuple[int, ...]
    rows: int

    def pairs(self, weight: Array) -> Array:
        """Neighbours side by side: shape (rows..., pairs, 2); an odd K is filled up with 0."""
        turned = weight.transpose(self.axes)
        columns = turned.reshape(*turned.shape[: self.rows], -1)
        if columns.shape[-1] % 2:
            columns = np.pad(columns, [(0, 0)] * self.rows + [(0, 1)])
        return np.asarray(columns.reshape(*columns.shape[:-1], -1, 2))

    def tensor(self, pairs: Array, shape: tuple[int, ...]) -> Array:
        """The inverse of `pairs` for a tensor of this shape."""
        turned = tuple(shape[axis] for axis in self.axes)
        columns = pairs.reshape(*turned[: self.rows], -1)[..., : math.prod(turned[self.rows :])]
        return np.asarray(columns.reshape(turned).transpose(np.argsort(self.axes)))

    def row_axes(self) -> tuple[int, ...]:
        """The tensor's axes that are rows."""
        return self.axes[: self.rows]


ROWS_DOWN: Final = PairOrder((1, 0), 1)
"""Of a matrix of shape (K, N)."""


def pair_order(node: onnx.NodeProto, shape: tuple[int, ...]) -> PairOrder | None:
    """Order of the weights of a node, None where its kernel adds no pairs in int16.

    Args:
        node: Conv, MatMul, Gemm, or an integer operator of the same layout.
        shape: Of its weights.
    """
    rank = len(shape)
    if node.op_type in _CONVOLUTIONS and rank > 2:
        groups = attribute_int(node, "group", 1)
        depthwise = groups > 1 and shape[1] == 1 and shape[0] == groups
        return None if depthwise else PairOrder((0, *range(2, rank), 1), 1)
    if node.op_type in _GEMMS and rank == 2:
        return PairOrder((0, 1) if attribute_int(node, "transB", 0) else (1, 0), 1)
    if node.op_type in _PRODUCTS and rank:
        return PairOrder((*range(rank - 2), rank - 1, rank - 2), rank - 1) if rank > 1 else PairOrder((0,), 0)
    return None


def pair_orders(node: onnx.NodeProto, shape: tuple[int, ...], *, even_channels: bool) -> tuple[PairOrder, ...]:
    """Orders of the weights of a node in all kernels that may read them, none where none adds pairs in int16.

    Args:
        node: As for `pair_order`.
        shape: Of its weights.
        even_channels: Some kernels of Conv fill up the channels to an even number: no pair has two kernel elements.
    """
    order = pair_order(node, shape)
    if order is None:
        return ()
    if even_channels and node.op_type in _CONVOLUTIONS and shape[1] % 2:
        return order, PairOrder(order.axes, len(shape) - 1)
    return (order,)


def pair_sums(stored: Array, order: PairOrder) -> tuple[Array, Array]:
    """Sums of the positive and of the negative members of each pair, int32, shape (rows..., pairs).

    Args:
        stored: int8 weights as the file has them, zero point included.
        order: How the kernel reads them.
    """
    pairs = order.pairs(stored).astype(np.int32)
    a, b = pairs[..., 0], pairs[..., 1]  # a reduction over two is slow
    return np.maximum(a, 0) + np.maximum(b, 0), np.minimum(a, 0) + np.minimum(b, 0)


def can_clip(stored: Array, order: PairOrder) -> Array:
    """Pairs of int8 weights that clip for some activations, bool of shape (rows..., pairs)."""
    pairs = order.pairs(stored)
    sums = pairs[..., 0].astype(np.int16) + pairs[..., 1]  # of both signs within the limit
    return np.asarray(np.abs(sums) > LARGEST_PAIR)


def stored_weights(node: onnx.NodeProto) -> int | None:
    """Position of the int8 weights among the inputs of a node that adds pairs; None for other nodes."""
    if node.op_type in ("QLinearConv", "QLinearMatMul", "QGemm"):
        return 3
    return 1 if node.op_type in _CONVOLUTIONS | _PRODUCTS | _GEMMS else None


def data_zero_point(node: onnx.NodeProto) -> str:
    """Name of the zero point of an integer operator's data, whose type is that of the data; "" where it has none."""
    at = {"MatMulIntegerToFloat": 4, "DynamicQuantizeMatMul": len(node.input)}.get(node.op_type, 2)
    return str(node.input[at]) if at < len(node.input) else ""


_OFFSET: Final = 128


def store_exactly(graph: onnx.GraphProto, among: Container[str] | None = None) -> tuple[str, ...]:
    """Stores int8 weights as uint8 where pairs of their products can clip in int16.

    Args:
        graph: Of a QDQ model, its nodes named; changed.
        among: Names of the initializers that may be stored anew; None for all.

    Returns:
        Names of the layers that read them.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    makers = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    to_store: dict[str, None] = {}  # outputs of DQ
    for node in graph.node:
        maker = makers.get(node.input[1]) if len(node.input) > 1 else None
        stored = None if maker is None else tensors.get(maker.input[0])
        if maker is None or stored is None or stored.data_type != onnx.TensorProto.INT8:
            continue
        order = pair_order(node, tuple(stored.dims))
        if order is None or (among is not None and stored.name not in among):
            continue
        if all(name in tensors for name in maker.input[2:]) and can_clip(array_in(stored), order).any():
            to_store[maker.output[0]] = None
    if not to_store:
        return ()
    names = all_names(graph)
    for output in to_store:
        _store(graph, makers[output], tensors, names)
    read = {value.name for value in graph.output}.union(*(read_names(node) for node in graph.node))
    drop_initializers(graph, [at for at, tensor in enumerate(graph.initializer) if tensor.name not in read])
    return tuple(node.name for node in graph.node if len(node.input) > 1 and node.input[1] in to_store)


def _store(
    graph: onnx.GraphProto, dequantize: onnx.NodeProto, tensors: dict[str, onnx.TensorProto], names: set[str]
) -> None:
    """Has a DQ read integers and zero point as uint8."""
    integers = array_in(tensors[dequantize.input[0]])
    shape = tuple(tensors[dequantize.input[1]].dims)
    known = array_in(tensors[dequantize.input[2]]) if len(dequantize.input) > 2 else np.zeros(shape, np.int8)
    base = dequantize.input[0]
    del dequantize.input[2:]
    dequantize.input.append("")
    for at, array, what in ((0, integers, "uint8"), (2, known, "uint8_zero_point")):
        dequantize.input[at] = reserve_name(f"{base}_{what}", names)
        raised = (array.astype(np.int16) + _OFFSET).astype(np.uint8)
        graph.initializer.append(put_outside(numpy_helper.from_array(raised, dequantize.input[at])))
