"""Weights in blocks, rounded so that a layer's output changes least, not each weight.

As `kenosis_ort.accuracy.rounding`, on grids whose steps differ from block to block. For one column ``w`` of a matrix
and a choice ``v`` on its grid, the output's squared error over inputs ``x`` is ``(v - w)^T H (v - w)`` with
``H = E[x x^T]``. Sources: Frantar et al., "GPTQ", ICLR 2023, rows in the order of their importance; then coordinate
descent. The grid itself is that of least error weighed by the diagonal of ``H``, which is what is important to protect
(Lin et al., "AWQ", MLSys 2024).
"""

from __future__ import annotations

import numpy as np

from kenosis_ort.weights.blocks import BlockGrid, Float64, find_grid

_DAMPING = 0.01
_SWEEPS = 2
_CHUNK = 128


def round_in_blocks(
    matrix: Float64, bits: int, block: int, moments: Float64 | None, *, symmetric: bool = False
) -> tuple[Float64, BlockGrid]:
    """Returns integers for a matrix and the grid that they lie on.

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
    nearest = grid.nearest(matrix)
    passed = _descend(matrix, _pass_on(matrix, hessian, grid), hessian, grid)
    plain = _errors(matrix, nearest, hessian, grid)
    return np.where(_errors(matrix, passed, hessian, grid) <= plain, passed, nearest), grid


def relative_error(matrix: Float64, integers: Float64, grid: BlockGrid, moments: Float64 | None) -> float:
    """Returns the noise of a layer's output over its signal, as powers; by weights alone without moments."""
    off = grid.real(integers) - matrix
    if moments is None:
        return float((off**2).sum() / max(float((matrix**2).sum()), 1e-300))
    noise, signal = (float(np.einsum("kn,kn->", moments @ m, m)) for m in (off, matrix))
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
