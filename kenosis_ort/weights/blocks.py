"""Weights in blocks of rows, each with a scale and a zero point: grids and rounding.

A matrix of shape (K, N) multiplies rows of K numbers. Each column is cut into blocks of rows, and
``w ~ scale * (q - z)`` with ``q`` of 4 or 8 bits. Storage: ONNX Runtime contrib operators MatMulNBits (two 4-bit
numbers a byte, the lower first; zero points likewise, padded to whole bytes a column) and GatherBlockQuantized.

Channels that matter get larger scales before weights are rounded, divided out of the layer before them. With ``s`` a
factor for each channel of what linear layers read, ``x @ W = (x / s) @ (s * W)``: a weight that large activations meet
gets a finer grid relative to its size. The division goes into the layer or normalization in front, exactly; where
nothing can take it, nothing is done. Source: Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM
Compression and Acceleration", MLSys 2024, https://arxiv.org/abs/2306.00978, section 3.2, with ``s =
sqrt(E[x^2])^alpha``.

What is different here: rounding follows second moments and fits grids anyway, so that less is left to gain, and only
where channels differ much. Factors are kept if the layers' error on calibration data, after that rounding, falls by a
twentieth. On a small trained Llama that is the down-projections, whose error falls by 0.4 to 0.8 dB, and the outputs'
by 0.05 dB; with four channels of each normalization 20 times the others it is 13 layers, and the outputs' by 1.6 dB.
Alphas beyond 0.3 gain nothing.

Weights are rounded so that a layer's output changes least, as in `kenosis_ort.passes.round_weights`, on grids whose
steps differ from block to block. For one column ``w`` of a matrix and a choice ``v`` on its grid, the output's squared
error over inputs ``x`` is ``(v - w)^T H (v - w)`` with ``H = E[x x^T]``. Sources: Frantar et al., "GPTQ", ICLR 2023,
rows in the order of their importance; then coordinate descent, in turn with the steps of all blocks of a column, fitted
to its integers by least squares. The first grid is that of least error weighed by the diagonal of ``H``, which is what
is important to protect (Lin et al., "AWQ", MLSys 2024).

The runtime has kernels for linear layers and embeddings with weights in blocks. The kernel of linear layers quantizes
the rows of its data by itself (``accuracy_level`` 4): no calibration is needed. It reads a quarter of the bytes of
float weights with 8 bits, an eighth with 4, which is what a batch of one row waits for: 2.2x to 3.6x of FP32 at one row
with 8 bits and up to 4.9x with 4, 1.0x to 1.9x at 128 rows, where the int8 forms are faster. Source: ONNX Runtime
contrib operator documentation; measured on ONNX Runtime 1.31.1.
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
from kenosis_ort.passes.input_moments import Grid, descend, pass_on
from kenosis_ort.passes.layers import weights_of
from kenosis_ort.passes.smooth_groups import SmoothGroup, find_groups, scale_channels
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


_ALPHAS: Final = (0.15, 0.3)
_SPREAD: Final = 4.0
"""The largest channel over the middle one, below which there is nothing to gain."""
_WORTH: Final = 0.95

Moments = Callable[[str], "Float64 | None"]
Error = Callable[[npt.NDArray[np.floating[Any]], Float64], float]
"""Relative error of a layer's output, by its matrix (K, N) and the moments (K, K) of what it reads, after rounding."""


def weigh_channels(
    model: onnx.ModelProto, moments: Moments, error: Error, excluded: Collection[str]
) -> tuple[onnx.ModelProto, dict[str, Float64]]:
    """The model with scaled channels where that lowers the error of rounded layers, and by layer what they are.

    Args:
        model: Prepared float model, shapes inferred. Not changed.
        moments: Returns second moments of what a layer reads, (K, K), by its name; None where there are none.
        error: Rounds a layer, and returns what that costs.
        excluded: Names of nodes that stay float.

    Returns:
        A copy, equal to the model in float but for rounding, or the model itself where nothing was scaled; and what
        each channel was divided by, by layer that reads it.
    """
    graph = LiveGraph(model, copied=True)
    found: dict[str, Float64] = {}
    for group in find_groups(graph):
        names = {layer.name for layer in group.layers}
        # A matrix that others read too would have to be stored twice.
        shared = any(len(graph.readers(layer.weight)) > 1 for layer in group.layers)
        if not group.folds or names & set(excluded) or shared:
            continue
        factors = _factors(graph, group, moments, error)
        if factors is not None:
            scale_channels(graph, group, factors)
            found.update(dict.fromkeys(names, factors))
    return graph.write() if found else model, found


def _factors(graph: GraphView, group: SmoothGroup, moments: Moments, error: Error) -> Float64 | None:
    """The factors of least error, None where they are not worth it."""
    hessian = moments(group.layers[0].name)
    if hessian is None:
        return None
    size = np.sqrt(np.diagonal(hessian))
    middle = float(np.median(size))
    if not middle > 0.0 or float(size.max()) < _SPREAD * middle:
        return None
    matrices = [weights_of(graph, layer)[:, :, 0].T for layer in group.layers]

    def cost(factors: Float64) -> float:
        scaled = hessian / np.outer(factors, factors)
        return sum(error(matrix * factors[:, None], scaled) for matrix in matrices)

    tried = [np.maximum(size / middle, 1.0 / _SPREAD**4) ** alpha for alpha in _ALPHAS]
    costs = [cost(factors) for factors in tried]
    best = int(np.argmin(costs))
    return tried[best] if costs[best] < _WORTH * cost(np.ones(len(size))) else None


_DAMPING = 0.01
_SWEEPS = 2
_ROUNDS = 2  # of fitted steps and descent: the first one has three quarters of the gain, a third one next to nothing
_RIDGE = 1e-6


def round_in_blocks(
    matrix: Float64, bits: int, block: int, moments: Float64 | None, *, symmetric: bool = False
) -> tuple[Float64, BlockGrid]:
    """Integers for a matrix and the grid that they lie on.

    Args:
        matrix: Shape (K, N).
        bits: 4 or 8.
        block: Rows of a block.
        moments: Second moments of what it multiplies, shape (K, K); None rounds to nearest.
        symmetric: Zero points stand in the middle.
    """
    if moments is None or not np.trace(moments) > 0.0:  # nothing ever flows
        grid = find_grid(matrix, bits, block, symmetric=symmetric)
        return grid.nearest(matrix), grid
    hessian = moments + np.eye(len(moments)) * (_DAMPING * float(np.trace(moments)) / len(moments))
    grid = find_grid(matrix, bits, block, symmetric=symmetric, importance=np.diagonal(hessian))
    found = _search(matrix, None, hessian, grid)
    errors = _errors(matrix, found, hessian, grid)
    nearest = grid.nearest(matrix)
    plain = _errors(matrix, nearest, hessian, grid)
    found, errors = np.where(errors <= plain, found, nearest), np.minimum(errors, plain)
    for _ in range(_ROUNDS if bits < 8 else 0):
        fitted = replace(grid, scale=fitted_steps(matrix, found, hessian, grid))
        moved = _search(matrix, found, hessian, fitted)
        after = _errors(matrix, moved, hessian, fitted)
        better = after < errors
        if not better.any():
            break
        grid = replace(grid, scale=np.where(better, fitted.scale, grid.scale))
        found, errors = np.where(better, moved, found), np.where(better, after, errors)
    by_weight = find_grid(matrix, bits, block, symmetric=symmetric)  # of few rows the better one now and then
    for other in (grid, by_weight):  # `grid` has the fitted steps
        nearest = other.nearest(matrix)
        after = _errors(matrix, nearest, hessian, other)
        better = after < errors
        scale, zero = np.where(better, other.scale, grid.scale), np.where(better, other.zero, grid.zero)
        grid = replace(grid, scale=scale, zero=zero)
        found, errors = np.where(better, nearest, found), np.where(better, after, errors)
    return found, grid


def fitted_steps(matrix: Float64, integers: Float64, hessian: Float64, grid: BlockGrid) -> Float64:
    """The steps, (blocks, N), with which the integers of a column are closest to it in the layer's output.

    Args:
        matrix: Shape (K, N).
        integers: Shape (K, N).
        hessian: Shape (K, K), positive definite.
        grid: What the integers stand for so far; a column for which a step would not be positive keeps its own.
    """
    blocks = len(grid.scale)
    rows = [slice(b * grid.block, min((b + 1) * grid.block, len(matrix))) for b in range(blocks)]
    _, zero = grid.steps(slice(len(matrix)))
    counts = integers - zero
    left = hessian @ (matrix - grid.real(integers))
    right = np.stack([np.einsum("kn,kn->n", counts[r], left[r]) for r in rows], axis=-1)
    system = np.empty((matrix.shape[1], blocks, blocks))
    for b, own in enumerate(rows):
        product = hessian[:, own] @ counts[own]
        for c, other in enumerate(rows):
            system[:, c, b] = np.einsum("kn,kn->n", counts[other], product[other])
    diagonal = np.einsum("nbb->nb", system)
    diagonal += _RIDGE * diagonal.mean(axis=1, keepdims=True) + np.finfo(np.float64).tiny
    steps = as_stored(grid.scale + np.linalg.solve(system, right[..., None])[..., 0].T)
    usable = (steps > 0.0).all(axis=0) & np.isfinite(steps).all(axis=0)
    return np.where(usable, steps, grid.scale)


def relative_error(
    matrix: npt.NDArray[np.floating[Any]],
    integers: npt.NDArray[np.number[Any]],
    grid: BlockGrid,
    moments: Float64 | None,
) -> float:
    """The noise of a layer's output over its signal, as powers; by weights alone without moments."""
    noise = signal = 0.0
    for columns in some_columns(matrix.shape):
        real = matrix[:, columns].astype(np.float64)
        off = grid.of(columns).real(integers[:, columns].astype(np.float64)) - real
        for_noise, for_signal = (off, real) if moments is None else (moments @ off, moments @ real)
        noise += float(np.einsum("kn,kn->", for_noise, off))
        signal += float(np.einsum("kn,kn->", for_signal, real))
    return noise / max(signal, 1e-300)


def _errors(matrix: Float64, integers: Float64, hessian: Float64, grid: BlockGrid) -> Float64:
    off = grid.real(integers) - matrix
    return np.asarray(np.einsum("kn,kn->n", hessian @ off, off))


def _search(matrix: Float64, start: Float64 | None, hessian: Float64, grid: BlockGrid) -> Float64:
    """Integers of a small error by coordinate descent, from GPTQ's where there are none to start from."""
    scale, zero = grid.steps(slice(len(matrix)))
    points = Grid(0, grid.top, scale[None], zero[None])
    real, moments = matrix[None], hessian[None]
    free = np.zeros(real.shape, np.bool_)
    first = pass_on(real, np.zeros_like(real), free, moments, points) if start is None else start[None]
    return np.asarray(descend(real, first, free, moments, points, _SWEEPS)[0])


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
    """What ``MatMulNBits`` reads beside its data, and its attributes."""
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
