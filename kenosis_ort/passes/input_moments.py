"""Second moments of the inputs of layers: of the rows that weights multiply, gathered on a few samples.

By them whole numbers on a grid are found that change a layer's output least: GPTQ, then coordinate descent. For real
weights ``w`` and weights ``v`` on the grid the output error over inputs ``x`` is ``(v - w)^T H (v - w)`` with ``H = E[x
x^T]``. Source: Frantar et al., "GPTQ", ICLR 2023 (column after column in the order of their importance, the error of
each passed on to those to come). Its result is then improved by coordinate descent over all columns until nothing
changes or a few times.

All groups of a layer are rounded together, for a depthwise one has as many as channels. The work is done on
(groups, columns, rows), in which a column is contiguous; ``H`` is (groups, columns, columns), positive definite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.methods import CalibrationConfig
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, element_types
from kenosis_ort.calibration.parts import StagedModel
from kenosis_ort.graph.product_pairs import LARGEST_PAIR
from kenosis_ort.graph.qdq import on_grid
from kenosis_ort.graph.shapes import windows
from kenosis_ort.passes.layers import Float64, Layer

Array = npt.NDArray[Any]
Feed = Mapping[str, Any]

_LEAST_ROWS = 4096
_ROWS_PER_COLUMN = 4
_SURE_ROWS = 4.0  # with as many rows as columns, this part of what lies beside the diagonal is taken off: 1 in 4


class InputMoments:
    """Second moments of the rows that a layer's weights are multiplied with, by group of channels.

    A row has one element for each input channel of the group and kernel tap, in the order of canonical weights. For
    ConvTranspose, whose taps go to different places, it has one for each input channel.

    Args:
        layer: The layer.
        feeds: Number of feeds that will come.
    """

    def __init__(self, layer: Layer, feeds: int) -> None:
        self.layer = layer
        taps = 1 if layer.operator == "ConvTranspose" else layer.taps
        self._width = layer.channels_in // layer.groups * taps
        wanted = max(_LEAST_ROWS, _ROWS_PER_COLUMN * self._width)
        self._per_feed = -(-wanted // max(feeds, 1))
        self._random = np.random.default_rng(0)  # of positions
        self._products = np.zeros((layer.groups, self._width, self._width))
        self.rows = 0

    @property
    def suffice(self) -> bool:
        """Whether there are half as many rows as columns; fewer say little about how columns go together."""
        return 2 * self.rows >= self._width

    def add(self, array: Array) -> None:
        """Adds one feed's input of the layer."""
        rows = self._rows(array).astype(np.float32)
        grouped = np.ascontiguousarray(rows.reshape(len(rows), self.layer.groups, self._width).transpose(1, 0, 2))
        self._products += grouped.transpose(0, 2, 1) @ grouped
        self.rows += len(rows)

    def result(self) -> Float64:
        """The moments, (groups, width, width).

        What lies beside the diagonal is shrunk by a share of columns to rows, which says how much of it is chance.
        """
        moments = self._products / max(self.rows, 1)
        share = 1.0 - min(self._width / (_SURE_ROWS * max(self.rows, 1)), 0.5)
        diagonal = np.einsum("gcc->gc", moments).copy()
        moments *= share
        np.einsum("gcc->gc", moments)[:] = diagonal
        return moments

    def _rows(self, array: Array) -> Array:
        if not self.layer.is_convolution:
            return self._chosen(array.reshape(-1, array.shape[-1]))
        if self.layer.operator == "ConvTranspose" or self._is_pointwise():
            return self._chosen(np.moveaxis(array, 1, -1).reshape(-1, array.shape[1]))
        attributes = self.layer.node.attributes
        known: dict[str, Any] = {name: attributes.get_ints(name, ()) for name in ("strides", "dilations", "pads")}
        view = windows(array, self.layer.shape[2:], **known, auto_pad=attributes.get_string("auto_pad", ""))
        places = (view.shape[0], *view.shape[2 : array.ndim])
        total = int(np.prod(places))
        take = min(total, self._per_feed)
        flat = self._random.choice(total, take, replace=False) if take < total else np.arange(total)
        at = np.unravel_index(flat, places)
        index: tuple[Any, ...] = (at[0], slice(None), *at[1:])
        return np.asarray(view[index]).reshape(take, -1)

    def _chosen(self, rows: Array) -> Array:
        if len(rows) <= self._per_feed:
            return rows
        return np.asarray(rows[self._random.choice(len(rows), self._per_feed, replace=False)])

    def _is_pointwise(self) -> bool:
        attributes = self.layer.node.attributes
        plain = not any(attributes.get_ints("pads", ())) and all(s == 1 for s in attributes.get_ints("strides", ()))
        return self.layer.taps == 1 and plain


def gather_moments(
    model: onnx.ModelProto,
    layers: Sequence[Layer],
    feeds: Sequence[Feed],
    *,
    custom_op_libraries: Sequence[str] = (),
) -> dict[str, Float64]:
    """Runs the float model and returns the moments of each layer's input by layer name, where samples suffice.

    Args:
        model: The float model, shapes inferred. Not changed.
        layers: Whose inputs; computed by nodes of the main graph or fed.
        feeds: A few samples.
        custom_op_libraries: Shared libraries of custom operators to register.

    Raises:
        CalibrationError: The model fails on a sample.
    """
    moments = {layer.name: InputMoments(layer, len(feeds)) for layer in layers}
    readers: dict[str, list[InputMoments]] = {}
    for layer in layers:
        readers.setdefault(layer.data, []).append(moments[layer.name])

    def take(arrays: Mapping[str, Array]) -> None:
        for name, array in arrays.items():
            for moment in readers[name]:
                moment.add(array)

    observe(model, readers, feeds, take, custom_op_libraries)
    return {name: moment.result() for name, moment in moments.items() if moment.suffice}


def observe(
    model: onnx.ModelProto,
    values: Collection[str],
    feeds: Sequence[Feed],
    take: Callable[[Mapping[str, Array]], None],
    custom_op_libraries: Sequence[str],
) -> None:
    """Runs the float model and hands out values by name, part by part under calibration's byte budget.

    Args:
        model: The float model, shapes inferred. Not changed.
        values: Float32 tensors that nodes of the main graph compute, or that are fed.
        feeds: A few samples.
        take: Called with some of the values for each feed, by name; must not keep them.
        custom_op_libraries: Shared libraries of custom operators to register.

    Raises:
        CalibrationError: The model fails on a sample.
    """
    for feed in feeds:
        take({name: np.asarray(feed[name]) for name in values if name in feed})
    computed = dict.fromkeys((name for node in model.graph.node for name in node.output if name in values), "float32")
    with ObservedModel(model, SessionSettings(custom_op_libraries=tuple(custom_op_libraries))) as observed:
        staged = StagedModel(observed, model, computed, element_types(model), CalibrationConfig().fetch_budget)
        together = len(feeds) if staged.is_heavy else 1
        for at in range(0, len(feeds), together):
            staged.run(feeds[at : at + together], range(at, len(feeds))[:together], lambda _, arrays: take(arrays))


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
