"""Linear layers and embeddings with weights in blocks, as the runtime's kernels read them, and the grids of these.

The kernel of linear layers quantizes the rows of its data by itself (``accuracy_level`` 4): no calibration is needed.
It reads a quarter of the bytes of float weights with 8 bits, an eighth with 4, which is what a batch of one row waits
for: 2.2x to 3.6x of FP32 at one row with 8 bits and up to 4.9x with 4, 1.0x to 1.9x at 128 rows, where the int8 forms
are faster. Source: ONNX Runtime contrib operator documentation; measured on ONNX Runtime 1.31.1.

A matrix of shape (K, N) multiplies rows of K numbers. Each column is cut into blocks of rows, and
``w ~ scale * (q - z)`` with ``q`` of 4 or 8 bits. Storage: ONNX Runtime contrib operators MatMulNBits (two 4-bit
numbers a byte, the lower first; zero points likewise, padded to whole bytes a column) and GatherBlockQuantized.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.qdq import on_grid
from kenosis_ort.graph.view import GraphView, ir, optional
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.quantizer.linear_layers import CONTRIB, LinearLayer, become, exchange_layers

Float64 = npt.NDArray[np.float64]
UInt8 = npt.NDArray[np.uint8]

LEAST_BLOCK: Final = 16
_AT_ONCE: Final = 1 << 18
"""Elements in float64, where they need not be there all together: what fits into a cache is three times faster."""
_SHRINKS: Final = (*np.linspace(1.0, 0.6, 21),)
"""How much less than the whole range a grid may span: what is clipped is paid by finer steps.
With 8 bits there is nothing to gain."""


@dataclass(frozen=True)
class BlockGrid:
    """Steps of a matrix, by block and column.

    Attributes:
        bits: Of a number.
        block: Rows of a block; the last may hold fewer.
        scale: Steps, shape (blocks, N), positive.
        zero: Zero points, whole numbers from 0 to 2**bits - 1, shape (blocks, N).
    """

    bits: int
    block: int
    scale: Float64
    zero: Float64

    @property
    def top(self) -> int:
        """The largest number."""
        return int(2**self.bits) - 1

    def steps(self, rows: slice | npt.NDArray[np.intp]) -> tuple[Float64, Float64]:
        """Scale and zero point of some rows, each of shape (rows, N)."""
        blocks = np.arange(len(self.scale) * self.block)[rows] // self.block
        return self.scale[blocks], self.zero[blocks]

    def of(self, columns: slice) -> BlockGrid:
        """The grid of some columns."""
        return replace(self, scale=self.scale[:, columns], zero=self.zero[:, columns])

    def nearest(self, values: Float64) -> Float64:
        """The integers nearest to a matrix, shape (K, N)."""
        scale, zero = self.steps(slice(len(values)))
        return on_grid(values, scale, zero, 0, self.top)

    def real(self, integers: Float64) -> Float64:
        """Dequantized values of integers, shape (K, N)."""
        scale, zero = self.steps(slice(len(integers)))
        return np.asarray((integers - zero) * scale)


def block_of(rows: int, wanted: int) -> int:
    """The rows of a block: a power of two from 16 to what is wanted, and not more than the matrix needs."""
    block = wanted
    while block > LEAST_BLOCK and block > rows:
        block //= 2
    return block


def find_grid(
    matrix: Float64, bits: int, block: int, *, symmetric: bool, importance: Float64 | None = None
) -> BlockGrid:
    """The grid of least squared error, rounding to nearest.

    Args:
        matrix: Shape (K, N).
        bits: 4 or 8.
        block: Rows of a block.
        symmetric: Zero points stand in the middle.
        importance: What an error of a row weighs, shape (K,); None for all the same.
    """
    rows, columns = matrix.shape
    blocks, top = -(-rows // block), 2**bits - 1
    cut = _cut(matrix, block)
    weight = None
    if importance is not None:
        weight = np.pad(importance, (0, blocks * block - rows)).reshape(blocks, block, 1)
    low, high = np.minimum(cut.min(axis=1), 0.0), np.maximum(cut.max(axis=1), 0.0)
    if symmetric:
        half = np.maximum(-low / ((top + 1) / 2), high / ((top - 1) / 2))
        low, high = -half * (top + 1) / 2, half * (top - 1) / 2
    best, off = np.full((blocks, columns), np.inf), np.empty_like(cut)
    scale, zero = np.ones((blocks, columns)), np.full((blocks, columns), float((top + 1) // 2))
    for shrink in _SHRINKS if bits < 8 else (1.0,):
        tried = as_stored(np.maximum((high - low) * shrink / top, np.finfo(np.float32).tiny))
        point = np.full_like(tried, float((top + 1) // 2)) if symmetric else on_grid(-low * shrink, tried, 0, 0, top)
        np.divide(cut, tried[:, None], out=off)  # in place throughout: it is the memory that takes the time
        np.rint(off, out=off)
        off += point[:, None]
        np.clip(off, 0, top, out=off)
        off -= point[:, None]
        off *= tried[:, None]
        off -= cut
        np.square(off, out=off)
        if weight is not None:
            off *= weight
        error = off.sum(axis=1)
        better = error < best
        best, scale, zero = np.where(better, error, best), np.where(better, tried, scale), np.where(better, point, zero)
    return BlockGrid(bits, block, scale, zero)


def nearest(
    matrix: npt.NDArray[np.floating[Any]], bits: int, block: int, *, symmetric: bool = True
) -> tuple[UInt8, BlockGrid]:
    """A matrix rounded to nearest on its grid, with memory for a few columns beside the result.

    Args:
        matrix: Shape (K, N).
        bits: 4 or 8.
        block: Rows of a block at most, see `block_of`.
        symmetric: Zero points stand in the middle.
    """
    block = block_of(len(matrix), block)
    integers = np.empty(matrix.shape, np.uint8)
    grids = []
    for columns in some_columns(matrix.shape):
        part = matrix[:, columns].astype(np.float64)
        grids.append(find_grid(part, bits, block, symmetric=symmetric))
        integers[:, columns] = grids[-1].nearest(part)
    scale, zero = (np.concatenate([getattr(grid, name) for grid in grids], axis=1) for name in ("scale", "zero"))
    return integers, BlockGrid(bits, block, scale, zero)


def some_columns(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yields the columns of a matrix, as many at a time as float64 takes little memory for."""
    width = max(_AT_ONCE // max(shape[0], 1), 1)
    yield from (slice(start, start + width) for start in range(0, shape[1], width))


def pack(integers: Float64 | UInt8, grid: BlockGrid) -> tuple[UInt8, npt.NDArray[np.float32], UInt8]:
    """A matrix as ``MatMulNBits`` stores it.

    Args:
        integers: Shape (K, N).
        grid: What they stand for.

    Returns:
        Weights (N, blocks, block * bits / 8), scales (N, blocks), zero points (N, bytes).
    """
    blocks = len(grid.scale)
    padded = np.zeros((blocks * grid.block, integers.shape[1]), np.uint8)
    padded[: len(integers)] = integers
    padded = padded.T.reshape(-1, blocks, grid.block)
    zero = grid.zero.T.astype(np.uint8)
    if grid.bits == 4:
        padded, zero = in_bytes(padded), in_bytes(zero)
    return padded, np.ascontiguousarray(grid.scale.T.astype(np.float32)), np.ascontiguousarray(zero)


def in_bytes(integers: UInt8) -> UInt8:
    """Two numbers of 4 bits a byte along the last axis, the lower first; an odd one is alone in the last byte."""
    even = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, integers.shape[-1] % 2)])
    return (even[..., 0::2] | (even[..., 1::2] << 4)).astype(np.uint8)


def _cut(matrix: Float64, block: int) -> Float64:
    """A matrix in blocks, (blocks, block, N), the last filled up with zeros."""
    rows, columns = matrix.shape
    padded = np.zeros((-(-rows // block) * block, columns))
    padded[:rows] = matrix
    return padded.reshape(-1, block, columns)


def as_stored(scale: Float64) -> Float64:
    """Scales as float32 holds them: what is rounded to a grid that is not the stored one is off."""
    return scale.astype(np.float32).astype(np.float64)


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
