"""Grids of the quantized tensors of a QDQ model: the values that each can hold, read off its Q and DQ nodes."""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from kenosis_ort.graph import product_pairs, qdq
from kenosis_ort.graph.outside import array_in

Float64 = npt.NDArray[np.float64]

_DATATYPE: Final = re.compile(r"(U?)INT([2-8])")
_BLOCK: Final = 1 << 20  # elements
_BYTE: Final = 8
_TYPES: Final = {*qdq.INTEGERS, TensorProto.INT32}  # int32: of biases, which have no range of their own


@dataclass(frozen=True, eq=False)
class ValueGrid:
    """The values that a quantized tensor can take.

    Attributes:
        scale: float64, of any number of elements; one, or one a channel.
        zero_point: int64, of as many elements, or one.
        axis: Axis of the channels; meaningless with one scale.
        elem_type: ONNX element type of the integers.
        stored: The integers of a weight; None for an activation.
        bounds: Least and largest integer, where these are fewer than the element type's.
        order: In which an integer kernel that adds pairs of products reads a weight; None for others.
    """

    scale: Float64
    zero_point: npt.NDArray[np.int64]
    axis: int
    elem_type: int
    stored: TensorProto | None = None
    bounds: tuple[int, int] | None = None
    order: product_pairs.PairOrder | None = None

    @cached_property
    def bits(self) -> int:
        """Bits of an integer; of int8 weights those that they use, 7 from -64 to 64."""
        if self.bounds is not None:
            return (self.bounds[1] - self.bounds[0]).bit_length()
        if self.elem_type != TensorProto.INT8 or self._used is None or not any(end.any() for end in self._used):
            return qdq.INTEGERS[self.elem_type][1]
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
            return not product_pairs.can_clip(integers, self.order).any()
        parts = np.array_split(integers, max(1, min(integers.shape[row], integers.size // _BLOCK)), axis=row)
        return not any(product_pairs.can_clip(part, self.order).any() for part in parts)

    @cached_property
    def range(self) -> tuple[float, float]:
        """The smallest and largest value of any channel; of a weight those that its integers span."""
        if self._used is not None and self.bounds is None:
            low, high = (end * self.scale for end in self._used)
        else:
            ends = qdq.bounds_of(self.elem_type) if self.bounds is None else self.bounds
            low, high = ((end - self.zero_point) * self.scale for end in ends)
        return float(low.min()), float(high.max())

    @cached_property
    def _used(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Least and largest integer of each scale less its zero point, 0 among them; None of what is no weight."""
        integers = None if self.stored is None else array_in(self.stored)
        if integers is None or not integers.size or self._along(integers.shape) is None:
            return None
        others = tuple(i for i in range(integers.ndim) if self.scale.size == 1 or i != self.axis % integers.ndim)
        ends = (integers.min(axis=others), integers.max(axis=others))
        low, high = (np.atleast_1d(end).astype(np.int64) - self.zero_point for end in ends)
        return np.minimum(low, 0), np.maximum(high, 0)

    @property
    def facts(self) -> tuple[tuple[float, float], int, bool]:
        """Facts of the grid: `range`, `bits`, and whether `pairs_fit`."""
        return self.range, self.bits, self.pairs_fit

    def values(self) -> tuple[Float64, Float64] | None:
        """The reals of a weight, and its steps so that they broadcast; None of an activation or a blocked weight."""
        integers = None if self.stored is None else array_in(self.stored)
        along = None if integers is None else self._along(integers.shape)
        return None if integers is None or along is None else ((integers - along[1]) * along[0], along[0])

    def rounding(self, real: npt.NDArray[Any]) -> tuple[float, float] | None:
        """The power of a weight and that of its rounding error; None for an activation, or a blocked weight.

        Args:
            real: The float weight.
        """
        integers = None if self.stored is None else array_in(self.stored)
        along = self._along(real.shape)
        if integers is None or integers.shape != real.shape or along is None:
            return None
        real, integers = np.atleast_1d(real), np.atleast_1d(integers)
        scale, zero = (np.atleast_1d(part) for part in along)
        signal = noise = 0.0
        rows = max(1, _BLOCK // max(1, math.prod(real.shape[1:])))
        for start in range(0, len(real), rows):  # so that float64 temporaries stay small beside a large weight
            block = slice(start, start + rows)
            steps, zeros = (part[block] if len(part) > 1 else part for part in (scale, zero))
            values = real[block].astype(np.float64)
            error = values - (integers[block] - zeros) * steps
            signal += float(np.square(values).sum())
            noise += float(np.square(error).sum())
        return signal, noise

    def _along(self, shape: tuple[int, ...]) -> tuple[Float64, Float64] | None:
        """Scale and zero point so that they broadcast over a weight of a shape; None where scales are of blocks."""
        if self.scale.size == 1:
            sizes = [1] * len(shape)
        elif -len(shape) <= self.axis < len(shape) and shape[self.axis] == self.scale.size:
            sizes = [-1 if at == self.axis % len(shape) else 1 for at in range(len(shape))]
        else:
            return None
        zero = self.zero_point.astype(np.float64)
        return self.scale.reshape(sizes), zero.reshape(sizes if zero.size > 1 else [1] * len(shape))


class GridReader:
    """Reads the parameters of Q and DQ nodes of a model, its weights in memory.

    Attributes:
        nodes: Of the main graph.
        producers: By value.
        constants: By name.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.nodes = list(model.graph.node)
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._clipped = {str(node.input[0]): node for node in self.nodes if node.op_type == "Clip"}
        self._declared = qdq.declared_datatypes(model.graph)

    def grid(self, node: onnx.NodeProto, consumer: onnx.NodeProto | None = None) -> ValueGrid | None:
        """The grid of a Q or DQ; None where its scale is no constant, or its type none of integers.

        Args:
            node: The Q or DQ.
            consumer: What reads the DQ of a weight.
        """
        elem_type = self._elem_type(node)
        scales, point = [*(self.constants.get(name) for name in node.input[1:3]), None, None][:2]
        if scales is None or elem_type not in _TYPES:
            return None
        scale, zero = array_in(scales), None if point is None else array_in(point)
        flat = scale.astype(np.float64).ravel()
        zeros = np.zeros(flat.size, np.int64) if zero is None else zero.astype(np.int64).ravel()
        stored = self.constants.get(node.input[0]) if node.op_type == qdq.DQ else None
        order = None if consumer is None or stored is None else product_pairs.pair_order(consumer, tuple(stored.dims))
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        return ValueGrid(flat, zeros, axis, elem_type, stored, self._bounds(node), order)

    def _bounds(self, node: onnx.NodeProto) -> tuple[int, int] | None:
        """The bounds of the Clip between Q and DQ, or those that an annotation says of a weight."""
        source = str(node.input[0])
        clip = self._clipped.get(node.output[0]) if node.op_type == qdq.Q else self.producers.get(source)
        if clip is not None and clip.op_type == "Clip" and len(clip.input) == 3:
            ends = [self.constants.get(name) for name in clip.input[1:]]
            if all(end is not None and end.data_type in qdq.INTEGERS for end in ends):
                low, high = (int(array_in(end).reshape(())) for end in ends if end is not None)
                return low, high
        declared = _DATATYPE.fullmatch(self._declared.get(source, ""))
        return None if declared is None else qdq.integer_bounds(int(declared[2]), signed=not declared[1])

    def _elem_type(self, node: onnx.NodeProto) -> int:
        """The integers' type: the zero point's, the weight's, or that of the Q before a DQ."""
        named = list(node.input[2:3])
        if node.op_type == qdq.DQ:
            maker = self.producers.get(node.input[0])
            named += [node.input[0], *(() if maker is None else maker.input[2:3])]
        found = next((self.constants[name].data_type for name in named if name in self.constants), 0)
        return int(found or next((a.i for a in node.attribute if a.name == "output_dtype"), 0) or TensorProto.UINT8)


def read_grids(float_model: onnx.ModelProto, quantized: onnx.ModelProto) -> dict[str, ValueGrid]:
    """The grids of the float model's tensors, by name.

    A tensor is identified by the node that reads it, which has the same name in both models, or by its own name before
    a Q; int32 biases have no range and are left out.

    Args:
        float_model: The model that was quantized, main graph only.
        quantized: What became of it, with its weights in memory.
    """
    reader = GridReader(quantized)
    found: dict[str, ValueGrid] = {}
    originals = {node.name: node for node in float_model.graph.node if node.name}
    known = {value.name for value in float_model.graph.input}
    known.update(name for node in float_model.graph.node for name in node.output)

    def add(name: str, grid: ValueGrid | None) -> None:
        if grid is not None and grid.elem_type in qdq.INTEGERS:
            found.setdefault(name, grid)

    for node in reader.nodes:
        if node.op_type == qdq.Q and node.input[0] in known:
            add(node.input[0], reader.grid(node))
        elif node.op_type not in qdq.QDQ_OPS and node.name in originals:
            for value, original in zip(node.input, originals[node.name].input, strict=False):
                maker = reader.producers.get(value)
                if maker is None or maker.op_type != qdq.DQ:
                    continue
                stored = reader.constants.get(maker.input[0])
                if stored is None or stored.data_type != TensorProto.INT32:
                    add(original, reader.grid(maker, node))
    return found
