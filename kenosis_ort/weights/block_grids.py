"""Grids of weights in blocks of rows, each with a scale and a zero point, and rounding to nearest on them.

A matrix of shape (K, N) multiplies rows of K numbers. Each column is cut into blocks of rows, and
``w ~ scale * (q - z)`` with ``q`` of 4 or 8 bits. Storage: ONNX Runtime contrib operators MatMulNBits (two 4-bit
numbers a byte, the lower first; zero points likewise, padded to whole bytes a column) and GatherBlockQuantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.qdq import on_grid

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
