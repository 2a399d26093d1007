"""Second moments of the inputs of layers: of the rows that weights multiply, gathered on a few samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, element_types
from kenosis_ort.calibration.parts import StagedModel
from kenosis_ort.calibration.statistics import CalibrationConfig
from kenosis_ort.graph.view import ir
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
        windows = self._windows(array)
        spatial = (array.ndim - 2) if array.ndim > 2 else 0
        places = (windows.shape[0], *windows.shape[2 : 2 + spatial])
        total = int(np.prod(places))
        take = min(total, self._per_feed)
        flat = self._random.choice(total, take, replace=False) if take < total else np.arange(total)
        at = np.unravel_index(flat, places)
        index: tuple[Any, ...] = (at[0], slice(None), *at[1:])
        return np.asarray(windows[index]).reshape(take, -1)

    def _chosen(self, rows: Array) -> Array:
        if len(rows) <= self._per_feed:
            return rows
        return np.asarray(rows[self._random.choice(len(rows), self._per_feed, replace=False)])

    def _is_pointwise(self) -> bool:
        attributes = self.layer.node.attributes
        plain = not any(attributes.get_ints("pads", ())) and all(s == 1 for s in attributes.get_ints("strides", ()))
        return self.layer.taps == 1 and plain

    def _windows(self, array: Array) -> Array:
        """A view of shape (batch, channels, *output places, *taps)."""
        kernel = self.layer.shape[2:]
        rank = len(kernel)
        strides, dilations = (_numbers(self.layer.node, name, rank) for name in ("strides", "dilations"))
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        before, after = _padding(self.layer.node, array.shape[2:], reach, strides)
        padded = np.pad(array, [(0, 0), (0, 0), *zip(before, after, strict=True)])
        view = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=tuple(range(2, 2 + rank)))
        steps = (slice(None), slice(None), *(slice(None, None, s) for s in (*strides, *dilations)))
        return np.asarray(view[steps])


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


def _numbers(node: ir.Node, name: str, rank: int) -> list[int]:
    return list(node.attributes.get_ints(name, ())) or [1] * rank


def _padding(
    node: ir.Node, sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int]
) -> tuple[list[int], list[int]]:
    rank, automatic = len(sizes), node.attributes.get_string("auto_pad", "")
    if automatic in ("SAME_UPPER", "SAME_LOWER"):
        total = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(sizes, strides, reach, strict=True)]
        less, more = [t // 2 for t in total], [t - t // 2 for t in total]
        return (less, more) if automatic == "SAME_UPPER" else (more, less)
    given = list(node.attributes.get_ints("pads", ())) or [0] * (2 * rank)
    return given[:rank], given[rank:]
