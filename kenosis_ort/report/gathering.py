"""Gathers for the report what the float model, the quantized one and the calibration table hold.

Which range each tensor of the float model has in the quantized one, read off its Q and DQ nodes.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.graph.outside import array_in, is_outside, tensor_bytes
from kenosis_ort.graph.qdq import (
    INTEGERS,
    PairOrder,
    bounds_of,
    can_clip,
    declared_datatypes,
    integer_bounds,
    pair_order,
)
from kenosis_ort.graph.view import value_types
from kenosis_ort.graph.walk import MAIN_DOMAINS, read_names
from kenosis_ort.report.evidence import Bars, GraphSketch, SketchNode, TensorProfile

_DATATYPE: Final = re.compile(r"(U?)INT([2-8])")
_BLOCK: Final = 1 << 20  # elements
_BYTE: Final = 8
_DEQUANTIZE = "DequantizeLinear"
_QUANTIZE = "QuantizeLinear"


@dataclass(frozen=True, eq=False)
class ValueGrid:
    """The values that a quantized tensor can take.

    Attributes:
        scale: float64, of any number of elements; one, or one a channel.
        zero_point: int64, of as many elements.
        axis: Axis of the channels; meaningless with one scale.
        elem_type: ONNX element type of the integers.
        stored: The integers of a weight; None for an activation.
        bounds: Least and largest integer, where these are fewer than the element type's.
        order: In which an integer kernel that adds pairs of products reads a weight; None for others.
    """

    scale: npt.NDArray[np.float64]
    zero_point: npt.NDArray[np.int64]
    axis: int
    elem_type: int
    stored: TensorProto | None = None
    bounds: tuple[int, int] | None = None
    order: PairOrder | None = None

    @cached_property
    def bits(self) -> int:
        """Bits of an integer; of int8 weights those that they use, 7 from -64 to 64."""
        if self.bounds is not None:
            return (self.bounds[1] - self.bounds[0]).bit_length()
        if self.elem_type != TensorProto.INT8 or self._used is None or not any(end.any() for end in self._used):
            return INTEGERS[self.elem_type][1]
        largest = max(int(np.abs(end).max()) for end in self._used)
        return max(2, (largest - 1).bit_length() + 1)

    @cached_property
    def pairs_fit(self) -> bool:
        """Note on weights of all 8 bits: no two products that a kernel adds in int16 clip."""
        if self.order is None or self.stored is None or self.elem_type != TensorProto.INT8 or self.bits < _BYTE:
            return False
        integers = array_in(self.stored)
        row = self.order.row_axes()[0] if self.order.rows else None
        if row is None:
            return not can_clip(integers, self.order).any()
        parts = np.array_split(integers, max(1, min(integers.shape[row], integers.size // _BLOCK)), axis=row)
        return not any(can_clip(part, self.order).any() for part in parts)

    @cached_property
    def _used(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Least and largest integer of each scale less its zero point, 0 among them; None of what is no weight."""
        if self.stored is None:
            return None
        integers = array_in(self.stored)
        by_channel = self.scale.size > 1
        if not integers.size or (by_channel and not -integers.ndim <= self.axis < integers.ndim):
            return None
        if by_channel and integers.shape[self.axis] != self.scale.size:
            return None  # blocks
        others = tuple(i for i in range(integers.ndim) if not by_channel or i != self.axis % integers.ndim)
        ends = (integers.min(axis=others), integers.max(axis=others))
        low, high = (np.atleast_1d(end).astype(np.int64) - self.zero_point for end in ends)
        return np.minimum(low, 0), np.maximum(high, 0)

    @cached_property
    def range(self) -> tuple[float, float]:
        """The smallest and largest value of any channel; of a weight those that its integers span."""
        if self._used is not None and self.bounds is None:
            low, high = (end * self.scale for end in self._used)
            return float(low.min()), float(high.max())
        lowest, highest = bounds_of(self.elem_type) if self.bounds is None else self.bounds
        low = (lowest - self.zero_point) * self.scale
        high = (highest - self.zero_point) * self.scale
        return float(low.min()), float(high.max())

    def rounding(self, real: npt.NDArray[Any]) -> tuple[float, float] | None:
        """The power of a weight and that of its rounding error; None for an activation, or a blocked weight.

        Args:
            real: The float weight.
        """
        if self.stored is None:
            return None
        integers = array_in(self.stored)
        if integers.shape != real.shape:
            return None
        scale, zero = self.scale, self.zero_point.astype(np.float64)
        if scale.size > 1:
            if not -real.ndim <= self.axis < real.ndim or real.shape[self.axis] != scale.size:
                return None
            shape = [1] * real.ndim
            shape[self.axis] = scale.size
            scale, zero = scale.reshape(shape), zero.reshape(shape)
        scale, zero = (np.atleast_1d(part) for part in (scale, zero))
        real, integers = np.atleast_1d(real), np.atleast_1d(integers)
        signal = noise = 0.0
        rows = max(1, _BLOCK // max(1, math.prod(real.shape[1:])))
        for start in range(0, len(real), rows):  # so that float64 temporaries stay small beside a large weight
            block = slice(start, start + rows)
            steps, zeros = (part[block] if len(part) > 1 and part.ndim == real.ndim else part for part in (scale, zero))
            values = real[block].astype(np.float64)
            error = values - (integers[block] - zeros) * steps
            signal += float(np.square(values).sum())
            noise += float(np.square(error).sum())
        return signal, noise


def read_grids(float_model: onnx.ModelProto, quantized: onnx.ModelProto) -> dict[str, ValueGrid]:
    """The grids of the float model's tensors, by name.

    A tensor is identified by the node that reads it, which has the same name in both models, or by its own name before
    a Q; int32 biases have no range and are left out.

    Args:
        float_model: The model that was quantized, main graph only.
        quantized: What became of it, with its weights in memory.
    """
    reader = _Reader(quantized)
    found: dict[str, ValueGrid] = {}
    originals = {node.name: node for node in float_model.graph.node if node.name}
    known = _value_names(float_model)
    for node in quantized.graph.node:
        if node.op_type == _QUANTIZE and node.input[0] in known:
            _add(found, node.input[0], reader.grid(node))
        elif node.op_type not in (_QUANTIZE, _DEQUANTIZE) and node.name in originals:
            original = originals[node.name]
            for index, value in enumerate(node.input):
                maker = reader.producers.get(value)
                if maker is not None and maker.op_type == _DEQUANTIZE and index < len(original.input):
                    _add(found, original.input[index], reader.grid(maker, node))
    return found


def _add(found: dict[str, ValueGrid], name: str, grid: ValueGrid | None) -> None:
    if grid is not None and name not in found:
        found[name] = grid


def _value_names(model: onnx.ModelProto) -> set[str]:
    names = {value.name for value in model.graph.input}
    for node in model.graph.node:
        names.update(node.output)
    return names


class _Reader:
    """Reads the parameters of Q and DQ nodes of one model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.producers = {name: node for node in model.graph.node for name in node.output if name}
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.clipped = {str(node.input[0]): node for node in model.graph.node if node.op_type == "Clip"}
        self.declared = declared_datatypes(model.graph)

    def grid(self, node: onnx.NodeProto, consumer: onnx.NodeProto | None = None) -> ValueGrid | None:
        scale = self._array(node, 1)
        if scale is None:
            return None
        zero = self._array(node, 2)
        elem_type = self._elem_type(node)
        if elem_type not in INTEGERS:
            return None
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        flat = scale.astype(np.float64).ravel()
        zeros = np.zeros(flat.size, np.int64) if zero is None else zero.astype(np.int64).ravel()
        stored = self.constants.get(node.input[0]) if node.op_type == _DEQUANTIZE else None
        order = None if consumer is None or stored is None else pair_order(consumer, tuple(stored.dims))
        return ValueGrid(flat, zeros, axis, elem_type, stored, self._bounds(node), order)

    def _bounds(self, node: onnx.NodeProto) -> tuple[int, int] | None:
        """The bounds of the Clip between Q and DQ, or those that an annotation says of a weight."""
        source = str(node.input[0])
        clip = self.clipped.get(node.output[0]) if node.op_type == _QUANTIZE else self.producers.get(source)
        if clip is not None and clip.op_type == "Clip" and len(clip.input) == 3:
            ends = [self.constants.get(name) for name in clip.input[1:]]
            if all(end is not None and end.data_type in INTEGERS for end in ends):
                low, high = (int(array_in(end).reshape(())) for end in ends if end is not None)
                return low, high
        declared = _DATATYPE.fullmatch(self.declared.get(source, ""))
        return None if declared is None else integer_bounds(int(declared[2]), signed=not declared[1])

    def _array(self, node: onnx.NodeProto, index: int) -> npt.NDArray[Any] | None:
        tensor = self.constants.get(node.input[index]) if index < len(node.input) else None
        return None if tensor is None else array_in(tensor)

    def _elem_type(self, node: onnx.NodeProto) -> int:
        """The integers' type: the zero point's, the weight's, or that of the Q before a DQ."""
        for name in self._typed(node):
            tensor = self.constants.get(name)
            if tensor is not None:
                return int(tensor.data_type)
        return next((a.i for a in node.attribute if a.name == "output_dtype" and a.i), TensorProto.UINT8)

    def _typed(self, node: onnx.NodeProto) -> Iterator[str]:
        if len(node.input) > 2:
            yield node.input[2]
        if node.op_type == _DEQUANTIZE:
            yield node.input[0]
            maker = self.producers.get(node.input[0])
            if maker is not None and len(maker.input) > 2:
                yield maker.input[2]


BINS: Final = 48
_SAMPLED: Final = 1 << 20  # elements of a weight that go into its histogram at most
_LARGEST: Final = 1 << 30  # bytes of a weight that is still looked into
_WEIGHT_INPUTS: Final = 2  # a constant in these positions counts as weight; behind them are biases and steering inputs


def sketch_graph(model: onnx.ModelProto) -> GraphSketch:
    """The main graph of a model for a picture: nodes, edges and shapes, no constants.

    What a node's bodies read counts as read by the node.

    Args:
        model: A model with unique node names; not changed.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants.update({t.values.name: t.values for t in graph.sparse_initializer})
    inputs = tuple(value.name for value in graph.input if value.name not in constants)
    known = {*inputs, *(name for node in graph.node for name in node.output if name)}
    types = value_types(model)
    nodes = []
    for node in graph.node:
        read = dict.fromkeys(name for name in read_names(node) if name in known)
        written = tuple(name for name in node.output if name)
        shape = _shape(types.get(written[0])) if written else ""
        weights = [constants[n] for n in node.input[1:_WEIGHT_INPUTS] if n in constants and len(constants[n].dims) > 1]
        weight = "x".join(map(str, weights[0].dims)) if weights else ""
        nodes.append(SketchNode(node.name, _operator(node), tuple(read), written, shape, weight))
    return GraphSketch(tuple(nodes), inputs, tuple(value.name for value in graph.output))


def profile_tensors(
    float_model: onnx.ModelProto, quantized: onnx.ModelProto, table: CalibrationTable | None = None
) -> tuple[TensorProfile, ...]:
    """The ranges and histograms of the quantized tensors, activations first, each in graph order.

    Args:
        float_model: The model that was quantized, its weights in memory; not changed.
        quantized: What became of it, with its weights in memory; not changed.
        table: What calibration saw; None for weights only.
    """
    grids = read_grids(float_model, quantized)
    seen = {} if table is None else table.tensors
    profiles = [_activation(name, statistics, grids.get(name)) for name, statistics in seen.items()]
    profiles += [_weight(tensor, grids[tensor.name]) for tensor in _weights(float_model) if tensor.name in grids]
    return tuple(profiles)


def _activation(name: str, statistics: TensorStatistics, grid: ValueGrid | None) -> TensorProfile:
    chosen = None if grid is None else grid.range
    bars = None
    if statistics.histogram is not None:
        edges = _edges(statistics.low, statistics.high, chosen)
        if edges is not None:
            bars = _bars(edges, statistics.histogram.rebin(edges))
    bits = 0 if grid is None else grid.bits
    return TensorProfile(name, "activation", statistics.low, statistics.high, chosen, bits=bits, bars=bars)


def _weight(tensor: TensorProto, grid: ValueGrid) -> TensorProfile:
    values = array_in(tensor)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    edges = _edges(low, high, grid.range)
    bars = None
    if edges is not None and values.size:
        flat = values.ravel()
        sampled = flat[:: -(-flat.size // _SAMPLED)].astype(np.float64)
        span = float(edges[0]), float(edges[-1])  # of bins of equal width numpy need not sort what it counts
        bars = _bars(edges, np.histogram(sampled, BINS, span)[0])
    return TensorProfile(
        name=tensor.name,
        kind="weight",
        low=low,
        high=high,
        chosen=grid.range,
        scales=int(grid.scale.size),
        bits=grid.bits,
        pairs_fit=grid.pairs_fit,
        sqnr_db=_rounding_db(values, grid),
        bars=bars,
    )


def _rounding_db(values: npt.NDArray[Any], grid: ValueGrid) -> float | None:
    found = grid.rounding(values)
    if found is None:
        return None
    signal, noise = found
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def _edges(low: float, high: float, chosen: tuple[float, float] | None) -> npt.NDArray[np.float64] | None:
    """The edges of bins over all that was seen and all that can be represented; None without any width."""
    if chosen is not None:
        low, high = min(low, chosen[0]), max(high, chosen[1])
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        return None
    edges: npt.NDArray[np.float64] = np.linspace(low, high, BINS + 1)
    return edges if bool(np.all(np.diff(edges) > 0)) else None


def _bars(edges: npt.NDArray[np.float64], counts: npt.NDArray[Any]) -> Bars:
    return Bars(float(edges[0]), float(edges[-1]), tuple(int(count) for count in counts))


def _weights(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yields the float32 constants that are some node's weight, in the order they are read."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        for name in node.input[:_WEIGHT_INPUTS]:
            tensor = constants.pop(name, None)
            if (
                tensor is not None
                and tensor.data_type == TensorProto.FLOAT
                and (tensor.data_location != TensorProto.EXTERNAL or is_outside(tensor))
                and (tensor_bytes(tensor) or 0) <= _LARGEST
            ):
                yield tensor


def _operator(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in MAIN_DOMAINS else f"{node.domain}.{node.op_type}"


def _shape(type_: onnx.TypeProto | None) -> str:
    if type_ is None or not type_.tensor_type.HasField("shape"):
        return ""
    dims = type_.tensor_type.shape.dim
    return "x".join(str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in dims) or "scalar"
