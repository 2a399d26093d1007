"""The search for whole numbers on a grid that change a layer's output least: GPTQ, then coordinate descent.

For real weights ``w`` and weights ``v`` on the grid the output error over inputs ``x`` is ``(v - w)^T H (v - w)`` with
``H = E[x x^T]``. Source: Frantar et al., "GPTQ", ICLR 2023 (column after column in the order of their importance, the
error of each passed on to those to come). Its result is then improved by coordinate descent over all columns until
nothing changes or a few times.

All groups of a layer are rounded together, for a depthwise one has as many as channels. The work is done on
(groups, columns, rows), in which a column is contiguous; ``H`` is (groups, columns, columns), positive definite.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.product_pairs import LARGEST_PAIR
from kenosis_ort.graph.qdq import on_grid

Float64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]

_BLOCK = 128


@dataclass(frozen=True)
class Grid:
    """Points ``scale * (q - zero)`` for integers ``q`` from `low` to `high`.

    Attributes:
        low: The least integer.
        high: The largest.
        scale: Steps, broadcasting to (groups, columns, rows).
        zero: Zero points, likewise.
        neighbour: For each column the one whose sum with it kernels limit, -1 for none; None where none is.
    """

    low: float
    high: float
    scale: Float64 = field(default_factory=lambda: np.ones((1, 1, 1)))
    zero: Float64 = field(default_factory=lambda: np.zeros((1, 1, 1)))
    neighbour: Places | None = None

    def like(self, shape: tuple[int, ...]) -> tuple[Float64, Float64]:
        """Scale and zero point of every weight."""
        return np.broadcast_to(self.scale, shape), np.broadcast_to(self.zero, shape)

    def fixed(self, start: Float64) -> Flags:
        """The integers that decide about a symmetric scale, of shape (groups, columns, rows)."""
        largest = np.abs(start) == np.abs(start).max(axis=1, keepdims=True)
        if self.neighbour is None:
            return np.asarray(largest)
        other = np.where((self.neighbour >= 0)[:, None], start[:, self.neighbour], 0.0)
        sums = np.where(np.sign(start) == np.sign(other), np.abs(start + other), np.abs(start))
        return np.asarray(largest | (sums == sums.max(axis=1, keepdims=True)))

    def nearest(self, wanted: Float64, scale: Float64, zero: Float64, beside: Float64 | None) -> Float64:
        """The nearest integers of a column that are allowed beside those of its neighbour, None without."""
        whole = on_grid(wanted, scale, zero, self.low, self.high)
        if beside is None:
            return whole
        low, high = -LARGEST_PAIR - np.minimum(beside, 0.0), LARGEST_PAIR - np.maximum(beside, 0.0)
        return np.asarray(np.clip(whole, low, high))


def pass_on(real: Float64, start: Float64, fixed: Flags, hessian: Float64, grid: Grid) -> Float64:
    """GPTQ: rounds column after column, passing each column's error on to the columns behind it.

    Args:
        real: Weights.
        start: Integers for those that are fixed.
        fixed: Which are.
        hessian: Second moments of the inputs.
        grid: What the integers stand for.
    """
    order = np.argsort(-np.einsum("gcc->gc", hessian), kind="stable")
    ordered = np.take_along_axis(np.take_along_axis(hessian, order[:, :, None], 1), order[:, None, :], 2)
    lower = np.linalg.cholesky(np.linalg.inv(ordered))
    at_order = order[:, :, None]
    work: Float64
    work, known, scale, zero = (np.take_along_axis(each, at_order, 1) for each in (real, start, *grid.like(real.shape)))
    pinned = np.take_along_axis(fixed, at_order, 1)
    found: Float64 = known.copy()
    groups, columns = np.arange(len(work)), work.shape[1]
    places = None if grid.neighbour is None else _places(order, grid.neighbour)
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        errors = np.empty((len(work), end - begin, work.shape[2]))
        for at in range(begin, end):
            beside = None if places is None else _beside(found, groups, places[:, at])
            nearest = grid.nearest(work[:, at], scale[:, at], zero[:, at], beside)
            found[:, at] = np.where(pinned[:, at], known[:, at], nearest)
            off = work[:, at] - (found[:, at] - zero[:, at]) * scale[:, at]
            error = errors[:, at - begin] = off / lower[:, at, at, None]
            work[:, at + 1 : end] -= lower[:, at + 1 : end, at, None] * error[:, None]
        work[:, end:] -= lower[:, end:, begin:end] @ errors
    out: Float64 = np.empty_like(found)
    np.put_along_axis(out, at_order, found, 1)
    return out


def _places(order: Places, neighbour: Places) -> Places:
    """Position of each column's neighbour once columns are in this order, of shape (groups, columns)."""
    inverse = np.argsort(order, axis=1)
    beside = neighbour[order]
    return np.where(beside >= 0, np.take_along_axis(inverse, np.maximum(beside, 0), 1), -1)


def _beside(found: Float64, groups: Places, places: Places) -> Float64:
    """The integers of one column a group, 0 where there is none, of shape (groups, rows)."""
    return np.where((places >= 0)[:, None], found[groups, places], 0.0)


def descend(real: Float64, start: Float64, fixed: Flags, hessian: Float64, grid: Grid, sweeps: int) -> Float64:
    """Coordinate descent: moves each column to the grid point that is best for the others as they are.

    Args:
        real: Weights.
        start: Integers to begin with.
        fixed: Which of them stay.
        hessian: Second moments of the inputs.
        grid: What the integers stand for.
        sweeps: Over all columns, at most.
    """
    found: Float64 = start.copy()
    scale, zero = grid.like(real.shape)
    gradient = hessian @ ((found - zero) * scale - real)
    diagonal = np.einsum("gcc->gc", hessian)[:, :, None]
    columns = found.shape[1]
    for _ in range(sweeps):
        changed = False
        for begin in range(0, columns, _BLOCK):
            end = min(begin + _BLOCK, columns)
            before = found[:, begin:end].copy()
            local = gradient[:, begin:end].copy()
            for at in range(begin, end):
                place = -1 if grid.neighbour is None else int(grid.neighbour[at])
                wanted = (found[:, at] - zero[:, at]) * scale[:, at] - local[:, at - begin] / diagonal[:, at]
                best = grid.nearest(wanted, scale[:, at], zero[:, at], None if place < 0 else found[:, place])
                step = np.where(fixed[:, at], 0.0, best - found[:, at])
                rows = np.flatnonzero(step.any(axis=0))
                if rows.size:
                    found[:, at, rows] += step[:, rows]
                    step *= scale[:, at]
                    local[:, :, rows] += hessian[:, begin:end, at, None] * step[:, None, rows]
            moved = (found[:, begin:end] - before) * scale[:, begin:end]
            if moved.any():
                changed = True
                gradient += hessian[:, :, begin:end] @ moved
        if not changed:
            break
    return found
