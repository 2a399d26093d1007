"""Layers with weights (Conv, ConvTranspose, Gemm, MatMul) as passes see them: weights, and rows of inputs.

Weights are output channel, input channel, kernel tap. Inputs of layers are rows that weights multiply, gathered on a
few samples for second moments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, element_types
from kenosis_ort.calibration.parts import StagedModel
from kenosis_ort.calibration.statistics import CalibrationConfig
from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.live import optional
from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.graph.walk import MAIN_DOMAINS

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
        seed: Of the choice of positions.
    """

    def __init__(self, layer: Layer, feeds: int, *, seed: int = 0) -> None:
        self.layer = layer
        taps = 1 if layer.operator == "ConvTranspose" else layer.taps
        self._width = layer.channels_in // layer.groups * taps
        wanted = max(_LEAST_ROWS, _ROWS_PER_COLUMN * self._width)
        self._per_feed = -(-wanted // max(feeds, 1))
        self._random = np.random.default_rng(seed)
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
    threads: int = 0,
) -> dict[str, Float64]:
    """Runs the float model and returns the moments of each layer's input by layer name, where samples suffice.

    Activations are fetched part by part under calibration's byte budget.

    Args:
        model: The float model, shapes inferred. Not changed.
        layers: Whose inputs; computed by nodes of the main graph or fed.
        feeds: A few samples.
        custom_op_libraries: Shared libraries of custom operators to register.
        threads: Threads of the runtime, 0 for its own choice.

    Raises:
        CalibrationError: The model fails on a sample.
    """
    moments = {layer.name: InputMoments(layer, len(feeds)) for layer in layers}
    readers: dict[str, list[InputMoments]] = {}
    for layer in layers:
        readers.setdefault(layer.data, []).append(moments[layer.name])
    made = dict.fromkeys(name for node in model.graph.node for name in node.output if name in readers)
    settings = SessionSettings(custom_op_libraries=tuple(custom_op_libraries), threads=threads)

    def take(arrays: Mapping[str, Array]) -> None:
        for name, array in arrays.items():
            for moment in readers[name]:
                moment.add(array)

    with ObservedModel(model, settings) as observed:
        computed = dict.fromkeys(made, "float32")
        staged = StagedModel(observed, model, computed, element_types(model), CalibrationConfig().fetch_budget)
        for feed in feeds:
            take({name: np.asarray(feed[name]) for name in readers if name in feed})
        together = len(feeds) if staged.is_heavy else 1
        for at in range(0, len(feeds), together):
            staged.run(feeds[at : at + together], range(at, len(feeds))[:together], lambda _, arrays: take(arrays))
    return {name: moment.result() for name, moment in moments.items() if moment.suffice}


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


Float64 = npt.NDArray[np.float64]

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_FLOAT32 = onnx.TensorProto.FLOAT


@dataclass(frozen=True)
class Weights:
    """How the weights of a layer lie in memory.

    Attributes:
        name: Name of the layer's node.
        operator: Conv, ConvTranspose, Gemm or MatMul.
        shape: Shape of the weights as stored.
        groups: Groups of channels, 1 but for convolutions.
        transposed: Whether the weights are stored with output channels first (Conv, Gemm with transB).
    """

    name: str
    operator: str
    shape: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def is_convolution(self) -> bool:
        return self.operator in _CONVOLUTIONS

    @property
    def taps(self) -> int:
        """Elements of the kernel, 1 for Gemm and MatMul."""
        return math.prod(self.shape[2:]) if self.is_convolution else 1

    @property
    def channels_out(self) -> int:
        if self.operator == "ConvTranspose":
            return self.shape[1] * self.groups
        return self.shape[0] if self.transposed else self.shape[1]

    @property
    def channels_in(self) -> int:
        if self.operator == "Conv":
            return self.shape[1] * self.groups
        return self.shape[1] if self.transposed else self.shape[0]

    @property
    def channel_axis(self) -> int:
        """Axis of the channels in its data input and its output."""
        return 1 if self.is_convolution or self.operator == "Gemm" else -1

    def canonical(self, stored: npt.NDArray[np.generic]) -> Float64:
        """Weights as float64 of shape (output channels, input channels of the group, taps)."""
        real = np.asarray(stored, np.float64)
        if self.operator == "ConvTranspose":
            grouped = real.reshape(self.groups, self.shape[0] // self.groups, self.shape[1], self.taps)
            return np.asarray(grouped.transpose(0, 2, 1, 3).reshape(self.channels_out, -1, self.taps))
        if self.operator == "Conv":
            return real.reshape(self.shape[0], self.shape[1], self.taps)
        rows = real if self.transposed else real.T
        return rows.reshape(self.channels_out, self.channels_in, 1)

    def stored(self, canonical: Float64) -> npt.NDArray[np.float32]:
        """Canonical weights as they are stored, rounded to float32."""
        if self.operator == "ConvTranspose":
            per_group = self.shape[0] // self.groups
            back = canonical.reshape(self.groups, self.shape[1], per_group, self.taps).transpose(0, 2, 1, 3)
        elif self.operator == "Conv" or self.transposed:
            back = canonical
        else:
            back = canonical[:, :, 0].T
        return np.ascontiguousarray(back.reshape(self.shape), np.float32)

    def by_group(self, per_input: Float64) -> Float64:
        """Spreads one number an input channel to shape (output channels, input channels of the group)."""
        rows = per_input.reshape(self.groups, -1)
        return np.repeat(rows, self.channels_out // self.groups, axis=0)


@dataclass(frozen=True)
class Layer(Weights):
    """A node with constant float32 weights, affine in its data input.

    Attributes:
        node: The node.
        weight: Its weights.
        bias: Its constant bias, None without one. A MatMul's Add is not looked at.
    """

    node: ir.Node
    weight: ir.Value
    bias: ir.Value | None

    @property
    def data(self) -> str:
        """Name of the value that the weights multiply."""
        value = self.node.inputs[0]
        return "" if value is None else value.name or ""

    @property
    def output(self) -> ir.Value:
        """The value that the node writes."""
        return self.node.outputs[0]

    @property
    def weights(self) -> Weights:
        """What is plain data of it, for another process."""
        return Weights(**{entry.name: getattr(self, entry.name) for entry in fields(Weights)})


def layer_of(node: ir.Node, graph: GraphView) -> Layer | None:
    """A node as a layer, None where it has no constant float32 weights on input 1."""
    operator, attributes = node.op_type, node.attributes
    if operator not in LAYERS or node.domain not in MAIN_DOMAINS:
        return None
    value = optional(node, 1)
    weight = graph.constant(value)
    if value is None or weight is None or weight.data_type != _FLOAT32:
        return None
    shape = tuple(weight.dims)
    convolution, gemm = operator in _CONVOLUTIONS, operator == "Gemm"
    if (
        (len(shape) < 3 if convolution else len(shape) != 2)
        or 0 in shape
        or (gemm and attributes.get_int("transA", 0) != 0)
    ):
        return None
    groups = attributes.get_int("group", 1) if convolution else 1
    if shape[0] % groups:
        return None
    bias = optional(node, 2) if operator != "MatMul" else None
    if bias is not None and graph.constant(bias) is None:
        return None
    transposed = operator == "Conv" or (gemm and bool(attributes.get_int("transB", 0)))
    return Layer(node.name or "", operator, shape, groups, transposed, node, value, bias)


def layers(graph: GraphView, nodes: Collection[str] | None = None) -> Iterator[Layer]:
    """Yields the layers of the main graph in graph order, all or those of these names."""
    for node in graph.nodes:
        if (nodes is None or node.name in nodes) and (found := layer_of(node, graph)) is not None:
            yield found


def weights_of(graph: GraphView, layer: Layer) -> Float64:
    """Canonical weights of a layer as they are now."""
    return layer.canonical(graph.content(layer.weight))
