"""Weights in blocks, rounded so that a layer's output changes least, not each weight.

As `kenosis_ort.accuracy.rounding`, on grids whose steps differ from block to block. For one column ``w`` of a matrix
and a choice ``v`` on its grid, the output's squared error over inputs ``x`` is ``(v - w)^T H (v - w)`` with
``H = E[x x^T]``. Sources: Frantar et al., "GPTQ", ICLR 2023, rows in the order of their importance; then coordinate
descent, in turn with the steps of all blocks of a column, fitted to its integers by least squares. The first grid is
that of least error weighed by the diagonal of ``H``, which is what is important to protect (Lin et al., "AWQ", MLSys
2024).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kenosis_ort.weights.blocks import BlockGrid, Float64, as_stored, find_grid, some_columns

_DAMPING = 0.01
_SWEEPS = 2
_ROUNDS = 2  # of fitted steps and descent: the first one has three quarters of the gain, a third one next to nothing
_RIDGE = 1e-6
_CHUNK = 128


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
    if moments is None:
        grid = find_grid(matrix, bits, block, symmetric=symmetric)
        return grid.nearest(matrix), grid
    if not np.trace(moments) > 0.0:  # nothing ever flows
        grid = find_grid(matrix, bits, block, symmetric=symmetric)
        return grid.nearest(matrix), grid
    hessian = moments + np.eye(len(moments)) * (_DAMPING * float(np.trace(moments)) / len(moments))
    grid = find_grid(matrix, bits, block, symmetric=symmetric, importance=np.diagonal(hessian))
    found = _descend(matrix, _pass_on(matrix, hessian, grid), hessian, grid)
    errors = _errors(matrix, found, hessian, grid)
    nearest = grid.nearest(matrix)
    plain = _errors(matrix, nearest, hessian, grid)
    found, errors = np.where(errors <= plain, found, nearest), np.minimum(errors, plain)
    for _ in range(_ROUNDS if bits < 8 else 0):
        fitted = replace(grid, scale=fitted_steps(matrix, found, hessian, grid))
        moved = _descend(matrix, found, hessian, fitted)
        after = _errors(matrix, moved, hessian, fitted)
        better = after < errors
        if not better.any():
            break
        grid = replace(grid, scale=np.where(better, fitted.scale, grid.scale))
        found, errors = np.where(better, moved, found), np.where(better, after, errors)
    nearest = grid.nearest(matrix)  # of the fitted steps
    return np.where(errors <= _errors(matrix, nearest, hessian, grid), found, nearest), grid


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


def _pass_on(matrix: Float64, hessian: Float64, grid: BlockGrid) -> Float64:
    """Rounds row after row, passing each row's error on to the rows behind it."""
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    lower = np.linalg.cholesky(np.linalg.inv(hessian[np.ix_(order, order)]))
    scale, zero = grid.steps(order)
    work, found = matrix[order], np.empty_like(matrix)
    for begin in range(0, len(work), _CHUNK):
        end = min(begin + _CHUNK, len(work))
        errors = np.empty((end - begin, work.shape[1]))
        for at in range(begin, end):
            found[at] = np.clip(np.rint(work[at] / scale[at]) + zero[at], 0, grid.top)
            errors[at - begin] = (work[at] - (found[at] - zero[at]) * scale[at]) / lower[at, at]
            work[at + 1 : end] -= lower[at + 1 : end, at, None] * errors[at - begin]
        work[end:] -= lower[end:, begin:end] @ errors
    out = np.empty_like(found)
    out[order] = found
    return out


def _descend(matrix: Float64, start: Float64, hessian: Float64, grid: BlockGrid) -> Float64:
    """Coordinate descent: moves each row to the grid point that is best for the others as they are."""
    found: Float64 = start.copy()
    scale, zero = grid.steps(slice(len(found)))
    gradient = hessian @ (grid.real(found) - matrix)
    diagonal = np.diagonal(hessian)
    for _ in range(_SWEEPS):
        moved_at_all = False
        for begin in range(0, len(found), _CHUNK):
            end = min(begin + _CHUNK, len(found))
            before, local = found[begin:end].copy(), gradient[begin:end].copy()
            for at in range(begin, end):
                real = (found[at] - zero[at]) * scale[at] - local[at - begin] / diagonal[at]
                best = np.clip(np.rint(real / scale[at]) + zero[at], 0, grid.top)
                step = (best - found[at]) * scale[at]
                columns = np.flatnonzero(step)
                if columns.size:
                    found[at] = best
                    local[:, columns] += hessian[begin:end, at, None] * step[columns]
            moved = (found[begin:end] - before) * scale[begin:end]
            if moved.any():
                moved_at_all = True
                gradient += hessian[:, begin:end] @ moved
        if not moved_at_all:
            break
    return found
