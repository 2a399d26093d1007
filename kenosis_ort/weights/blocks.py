"""Weights in blocks of rows, each with a scale and a zero point: grids, integers, and how kernels store them.

A matrix of shape (K, N) multiplies rows of K numbers. Each column is cut into blocks of rows, and
``w ~ scale * (q - z)`` with ``q`` of 4 or 8 bits. Storage: ONNX Runtime contrib operators MatMulNBits (two 4-bit
numbers a byte, the lower first; zero points likewise, padded to whole bytes a column) and GatherBlockQuantized.

Larger scales for channels that matter before weights are rounded, divided out of the layer before them.

With ``s`` a factor for each channel of what linear layers read, ``x @ W = (x / s) @ (s * W)``: a weight that large
activations meet gets a finer grid relative to its size. The division goes into the layer or normalization in front,
exactly; where nothing can take it, nothing is done. Source: Lin et al., "AWQ: Activation-aware Weight Quantization for
On-Device LLM Compression and Acceleration", MLSys 2024, https://arxiv.org/abs/2306.00978, section 3.2, with
``s = sqrt(E[x^2])^alpha``.

What is different here: rounding follows second moments and fits grids anyway (`kenosis_ort.weights.kernels`), so
that less is left to gain, and only where channels differ much. Factors are kept if the layers' error on calibration
data, after that rounding, falls by a twentieth. On a small trained Llama that is the down-projections, whose error
falls by 0.4 to 0.8 dB, and the outputs' by 0.05 dB; with four channels of each normalization 20 times the others it is
13 layers, and the outputs' by 1.6 dB. Alphas beyond 0.3 gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.constants import GraphIndex
from kenosis_ort.passes.layers import array_of
from kenosis_ort.passes.smooth_groups import SmoothGroup, find_groups, scale_channels

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
        return np.asarray(np.clip(np.rint(values / scale) + zero, 0, self.top))

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
        point = (
            np.full_like(tried, float((top + 1) // 2)) if symmetric else np.clip(np.rint(-low * shrink / tried), 0, top)
        )
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
        padded = (padded[..., 0::2] | (padded[..., 1::2] << 4)).astype(np.uint8)
        zero = np.pad(zero, ((0, 0), (0, blocks % 2)))
        zero = (zero[:, 0::2] | (zero[:, 1::2] << 4)).astype(np.uint8)
    return padded, np.ascontiguousarray(grid.scale.T.astype(np.float32)), np.ascontiguousarray(zero)


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


@dataclass(frozen=True)
class Weighed:
    """A model whose channels are scaled in front of some layers.

    Attributes:
        model: A copy; equal to the original in float but for rounding. The original where nothing was scaled.
        factors: What each channel was divided by, by layer that reads it.
    """

    model: onnx.ModelProto
    factors: dict[str, Float64]


def weigh_channels(model: onnx.ModelProto, moments: Moments, error: Error, excluded: Collection[str]) -> Weighed:
    """The model with scaled channels where that lowers the error of rounded layers.

    Args:
        model: Prepared float model, shapes inferred. Not changed.
        moments: Returns second moments of what a layer reads, (K, K), by its name; None where there are none.
        error: Rounds a layer, and returns what that costs.
        excluded: Names of nodes that stay float.
    """
    index = GraphIndex.of_copy(model)
    found: dict[str, Float64] = {}
    for group in find_groups(model, index):
        names = {layer.name for layer in group.layers}
        if not group.folds or names & set(excluded) or _shares(index, group):
            continue
        factors = _factors(index, group, moments, error)
        if factors is not None:
            scale_channels(index, group, factors)
            found.update(dict.fromkeys(names, factors))
    return Weighed(index.commit() if found else model, found)


def _shares(index: GraphIndex, group: SmoothGroup) -> bool:
    """Whether others read a matrix too, which would have to be stored twice."""
    return any(len(index.readers[layer.node.input[1]]) > 1 for layer in group.layers)


def _factors(index: GraphIndex, group: SmoothGroup, moments: Moments, error: Error) -> Float64 | None:
    """The factors of least error, None where they are not worth it."""
    hessian = moments(group.layers[0].name)
    if hessian is None:
        return None
    size = np.sqrt(np.diagonal(hessian))
    middle = float(np.median(size))
    if not middle > 0.0 or float(size.max()) < _SPREAD * middle:
        return None
    matrices = [layer.canonical(array_of(index, layer.node.input[1]))[:, :, 0].T for layer in group.layers]

    def cost(factors: Float64) -> float:
        scaled = hessian / np.outer(factors, factors)
        return sum(error(matrix * factors[:, None], scaled) for matrix in matrices)

    tried = [np.maximum(size / middle, 1.0 / _SPREAD**4) ** alpha for alpha in _ALPHAS]
    costs = [cost(factors) for factors in tried]
    best = int(np.argmin(costs))
    return tried[best] if costs[best] < _WORTH * cost(np.ones(len(size))) else None
