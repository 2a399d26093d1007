"""Weights, biases and constant operands: scales, rounding, and integers behind DQ or floats behind Q and DQ.

Weights are symmetric int8, scales and rounding in float64, per tensor or per channel (stage 2). A bias is int32 at
exactly ``input_scale * weight_scale``, zero point 0 (stage 3): the runtime's kernels multiply the two scales themselves
and trust the bias to be on that grid; a Gemm whose bias is on another grid is silently wrong (rule
bias-scale-mismatch-gemm-wrong). Source: Kenosis paper, stage 3.

Where kernels add pairs of products in int16, the scale of a channel is the finest at which no pair of its weights can
clip, whatever the activations are: ``max(max |w| / 127, max over pairs of one sign (|w0| + |w1|) / 128)``. All 8 bits
are used, which 7-bit weights (``reduce_range``) give up, and the same integers come out on every processor.

Of fewer bits than 8 the scale is the one with the least squared error: there clipping a few large weights costs less
than coarse steps for all others.

The scale of a channel is widened where the int32 bias would overflow at ``input_scale * weight_scale``, or that product
would underflow: near-dead channels have tiny weights and a bias that is not tiny. A channel of zeros, whose scale is
free, gets one at which its bias is as fine as those of the others.
Source: Kenosis paper, stages 2 and 3.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization.base_quantizer import QuantizationParams
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.qdq_quantizer import QDQQuantTensorType, QDQTensorQuantInfo
from onnxruntime.quantization.quant_utils import (
    add_dequant_output_suffix,
    add_dequant_suffix,
    add_quant_output_suffix,
    add_quant_suffix,
    quantize_onnx_initializer,
)

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.outside import array_in, brought_in, put_outside
from kenosis_ort.graph.qdq import PairOrder, annotate, exact_grid, integer_bounds, on_grid, pair_orders, pair_sums
from kenosis_ort.plan import Decision, EdgeRole, How, PlacementPlan
from kenosis_ort.quantizer.editor import Array, QdqEditor, listed, nudged_parameters
from kenosis_ort.quantizer.pairs import Pairs
from kenosis_ort.quantizer.stock import four_bit_types

Float64 = npt.NDArray[np.float64]
_BLOCK = 2**20  # elements
_BIAS_LIMIT = float(2**30)  # half of int32's range: the accumulator needs room beside the bias
_FINE = 7  # bits at which the largest weight decides about the scale
_SHARES: Final[Float64] = np.concatenate(([1.0], np.linspace(0.98, 0.3, 35)))  # the first of equals is taken
_SAMPLED = 4096  # weights a channel
_LEAST_PRODUCT = 2.0 * float(np.finfo(np.float32).tiny)  # of two scales; below float32 rounds it coarsely


@dataclass(frozen=True)
class QuantizedWeight:
    """Weights as integers.

    Attributes:
        values: int8, the shape of the weight, zero point included.
        scale: float32, shape () per tensor or (channels,) per channel.
        axis: Channel axis, None per tensor.
        widened: Number of channels whose scale was widened for the bias.
        needed: The scale, float64, before that.
    """

    values: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float32]
    axis: int | None
    widened: int
    needed: Float64


def quantize_weight(
    weight: npt.NDArray[np.generic],
    *,
    axis: int | None,
    reduce_range: bool = False,
    bits: int = 8,
    biases: Sequence[tuple[float, Float64]] = (),
    zero_point: int = 0,
    orders: Sequence[PairOrder] = (),
    largest_pair: int | None = None,
) -> QuantizedWeight:
    """Quantizes a weight tensor.

    Args:
        weight: Real weights of any shape.
        axis: Channel axis, None per tensor.
        reduce_range: 7-bit weights (-64..64).
        bits: Width of the integers; the range is symmetric, -7..7 for 4.
        biases: For each consumer (input scale, bias of shape (channels,)) that must fit int32.
        zero_point: 0, or -1 for weights that are stored one lower.
        orders: In which kernels that add pairs of products in int16 read the weights.
        largest_pair: What stored weights of one sign in a pair may sum to; None for whatever they do.

    Raises:
        ValueError: The weights or the biases are not finite.
    """
    top = min(64 if reduce_range else 127, 2 ** (bits - 1) - 1)
    largest = _largest(weight, axis)
    if not np.isfinite(largest).all():
        raise ValueError("the weight holds NaN or infinity")
    # A channel of zeros gets the scale of the largest: its bias then has the steps of the others, not steps of 1.
    scale = np.where(largest > 0.0, largest / top, largest.max(initial=0.0) / top or 1.0)
    if bits <= _FINE:  # no two are too large
        largest_pair = None
    scale = np.maximum(scale, pair_scale(weight, axis, orders, largest_pair, zero_point))
    if bits < _FINE:
        scale = scale * _least_error_share(weight, scale, axis, top)
    least = least_scale(biases, scale)
    if not np.isfinite(least).all():
        raise ValueError("a bias of the weight holds NaN or infinity")
    widened = int(np.count_nonzero(least > scale))
    stored = stored_scale(scale, biases)
    values = np.empty(weight.shape, np.int8)
    steps = stored.astype(np.float64).reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
    for block in _blocks(weight):
        step = steps[block] if axis == 0 else steps
        values[block] = on_grid(weight[block], step, zero_point, zero_point - top, zero_point + top)
        if largest_pair is not None:
            for order in orders:
                values[block] = _lowered(values[block], order, largest_pair)
    return QuantizedWeight(values, stored, axis, widened, scale)


def stored_scale(scale: Float64, biases: Sequence[tuple[float, Float64]]) -> npt.NDArray[np.float32]:
    """A weight's scale as it is stored: widened for biases, and no smaller than float32 holds."""
    return np.maximum(np.maximum(scale, least_scale(biases, scale)), float(np.finfo(np.float32).tiny)).astype(
        np.float32
    )


def pair_scale(
    weight: npt.NDArray[np.generic],
    axis: int | None,
    orders: Sequence[PairOrder],
    largest_pair: int | None,
    zero_point: int = 0,
) -> Float64:
    """Least scale at which no two neighbours of one sign sum to more than a kernel holds, shape () or (channels,).

    Args:
        weight: Real weights of any shape.
        axis: Channel axis, None per tensor.
        orders: In which kernels read the weights.
        largest_pair: What two stored neighbours may sum to; None for whatever they do.
        zero_point: 0, or -1 for weights that are stored one lower.
    """
    found = np.zeros(() if axis is None else weight.shape[axis])
    if largest_pair is None:
        return found
    room = largest_pair + 2 * zero_point  # both of a pair are stored lower
    for order in orders:
        found = np.maximum(found, _largest_pair(weight, axis, order) / room)
    return found


def _largest_pair(weight: npt.NDArray[np.generic], axis: int | None, order: PairOrder) -> Float64:
    """Largest magnitude that two weights of one sign in a pair sum to, shape () or (channels,)."""
    found = np.zeros(() if axis is None else weight.shape[axis])
    for block in _blocks(weight):
        pairs = order.pairs(np.asarray(weight[block], np.float64))
        a, b = pairs[..., 0], pairs[..., 1]  # a reduction over two is slow
        sums = np.maximum(np.maximum(a, 0.0) + np.maximum(b, 0.0), -(np.minimum(a, 0.0) + np.minimum(b, 0.0)))
        if axis is None or axis not in order.row_axes():
            found = np.maximum(found, sums.max(initial=0.0))  # an axis that pairs cross: one bound for all channels
            continue
        row = order.row_axes().index(axis)
        part = sums.max(axis=tuple(i for i in range(sums.ndim) if i != row), initial=0.0)
        if axis == 0:
            found[block] = part
        else:
            found = np.maximum(found, part)
    return found


def _lowered(values: npt.NDArray[np.int8], order: PairOrder, limit: int) -> npt.NDArray[np.int8]:
    """The integers, the larger of a pair brought nearer to 0 where rounding took the pair's sum beyond the limit."""
    high, low = pair_sums(values, order)
    excess = np.maximum(high - limit, 0) + np.minimum(low + limit, 0)  # of one sign: both cannot be
    if not excess.any():
        return values
    pairs = order.pairs(values).astype(np.int16)
    larger = np.argmax(pairs * np.sign(excess)[..., None], axis=-1)[..., None]
    np.put_along_axis(pairs, larger, np.take_along_axis(pairs, larger, -1) - excess[..., None], -1)
    return np.ascontiguousarray(order.tensor(pairs, values.shape), np.int8)


def _least_error_share(weight: npt.NDArray[np.generic], scale: Float64, axis: int | None, top: int) -> Float64:
    """Factor for each scale with the least squared error, from some of the weights where there are many."""
    rows = np.moveaxis(weight, axis, 0).reshape(scale.size, -1) if axis is not None else weight.reshape(1, -1)
    steps = np.asarray(rows[:, :: max(1, rows.shape[1] // _SAMPLED)], np.float64) / scale.reshape(-1, 1)
    errors = [np.square(steps - on_grid(steps, share, 0, -top, top) * share).sum(axis=1) for share in _SHARES]
    return np.asarray(_SHARES[np.argmin(errors, axis=0)].reshape(scale.shape))


def _largest(weight: npt.NDArray[np.generic], axis: int | None) -> Float64:
    """The largest magnitudes, shape () or (channels,); NaN or infinity stay what they are."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    found = np.zeros(() if axis is None else weight.shape[axis])
    for block in _blocks(weight):
        part = np.abs(np.asarray(weight[block], np.float64)).max(axis=others, initial=0.0)
        if axis == 0:
            found[block] = part
        else:
            found = np.maximum(found, part)
    return found


def _blocks(weight: npt.NDArray[np.generic]) -> Iterator[tuple[slice, ...]]:
    """Yields slices of the first axis, so that float64 temporaries stay small beside a large weight."""
    if weight.ndim == 0:
        yield ()
        return
    rows = max(2, _BLOCK // max(1, math.prod(weight.shape[1:])) // 2 * 2)  # even: pairs along the axis stay together
    for start in range(0, weight.shape[0], rows):
        yield (slice(start, start + rows),)


def least_scale(biases: Sequence[tuple[float, Float64]], scale: Float64) -> Float64:
    """The smallest weight scale at which every bias fits int32.

    Args:
        biases: For each consumer (input scale, bias of shape (channels,)).
        scale: The weight's own scale, of shape () or (channels,): the shape of the result.
    """
    needed = np.zeros_like(scale, dtype=np.float64)
    for input_scale, bias in biases:
        steps = np.maximum(np.abs(np.asarray(bias, dtype=np.float64)) / _BIAS_LIMIT, _LEAST_PRODUCT)
        least = steps / input_scale
        needed = np.maximum(needed, least.max(initial=0.0) if scale.ndim == 0 else least)
    return needed


@dataclass(frozen=True)
class QuantizedBias:
    """Attributes: ``values`` int32 (channels,); ``scale`` float32, shape () or (channels,)."""

    values: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32]


def quantize_bias(
    bias: npt.NDArray[np.generic], *, input_scale: float, weight_scale: npt.NDArray[np.float32], beta: float = 1.0
) -> QuantizedBias:
    """Quantizes a bias vector.

    Args:
        bias: Real bias, shape (channels,).
        input_scale: Scale of the data input, a float32 value.
        weight_scale: Scale of the weights, shape () or (channels,).
        beta: Gemm's factor on the bias, folded in here.
    """
    scale = np.float32(input_scale) * weight_scale.astype(np.float32)
    limit = np.iinfo(np.int32)
    values = on_grid(np.asarray(bias, np.float64) * beta, scale.astype(np.float64), 0, limit.min, limit.max)
    return QuantizedBias(values.astype(np.int32), np.asarray(scale, np.float32))


_BYTE = 8
Biases = Sequence[tuple[float, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]]


class Constants:
    """Quantizes the constants of a plan.

    Args:
        editor: Of the model.
        plan: What to place where.
        pairs: The activations, placed already.
    """

    def __init__(self, editor: QdqEditor, plan: PlacementPlan, pairs: Pairs) -> None:
        self.editor = editor
        self.quantizer = editor.quantizer
        self.plan = plan
        self.pairs = pairs
        self._scales: dict[str, Array] = {}  # of weights, by initializer name
        self._widened: dict[str, Callable[[Biases], Array]] = {}  # the same with other biases
        self._reals: dict[str, Array] = {}  # biases
        self._biases: list[tuple[Decision, tuple[str, str]]] = []  # with the names of integers and scale
        self._derived = [d for d in plan.decisions if d.role is EdgeRole.BIAS and d.how is How.DERIVED and d.scale_from]
        activations = [d for d in plan.decisions if d.role is EdgeRole.ACTIVATION]
        dtypes = {d.edge.consumer: d.dtype for d in activations if d.dtype}
        moved = set(plan.integer_nodes()) - dtypes.keys()  # of bytes that an operator brought there without a Q
        self._of_bytes = moved | {node for node, dtype in dtypes.items() if dtype in ("int8", "uint8")}

    def place(self) -> None:
        """Quantizes operands, weights and biases, and points the planned edges at their DQ."""
        self._reals = {d.edge.value: array_in(self.editor.constant(d.edge.value)).reshape(-1) for d in self._derived}
        constants = set(self.editor.constants)
        for value, _ in self.plan.quantized_values():
            if value in constants:
                self._place_operand(self.editor.constant(value), self.plan.by_value[value])
        self._place_weights()
        self._place_biases()

    # -- operands ---------------------------------------------------------------------------------------------------

    def _place_operand(self, init: onnx.TensorProto, decisions: Sequence[Decision]) -> None:
        """Quantizes the constant operand of an elementwise kernel, which the planner chose for being exact."""
        kind = self.quantizer.activation_qType
        if init.name in self.quantizer.tensor_quant_overrides or kind not in (TensorProto.UINT8, TensorProto.INT8):
            self._place_as_stock(init, None, (), decisions, QDQQuantTensorType.ACTIVATION)
            return
        signed = kind == TensorProto.INT8
        dtype, (least, most) = (np.int8, (-128, 127)) if signed else (np.uint8, (0, 255))
        array = array_in(init)
        grid = exact_grid(array) if array.size > 1 else None
        if grid is not None:
            zero_point = np.array(least - grid.low, dtype)
            moved = (grid.multiples + (least - grid.low)).astype(dtype)
            self._place_constant(init, moved, np.array(grid.step, np.float32), zero_point, None, decisions)
            return
        real = array.astype(np.float64)
        p = nudged_parameters(min(float(real.min()), 0.0), max(float(real.max()), 0.0), signed=signed)
        values = on_grid(real, p.scale, p.zero_point, least, most).astype(dtype)
        scale, zero_point = np.array(p.scale, np.float32), np.array(p.zero_point, dtype)
        self._place_constant(init, values, scale, zero_point, None, decisions)

    # -- weights ----------------------------------------------------------------------------------------------------

    def _place_weights(self) -> None:
        by_weight: dict[str, list[Decision]] = {}
        for d in self.plan.decisions:
            if d.role is EdgeRole.WEIGHT and d.how is How.OWN:
                by_weight.setdefault(d.edge.value, []).append(d)
        biases = self._biases_by_weight(self._reals)
        for name, decisions in by_weight.items():
            init, axis = self.editor.constant(name), decisions[0].axis
            if self._is_symmetric_int8(name):
                self._place_own(init, axis, biases.get(name, ()), decisions)
            else:
                self._place_as_stock(init, axis, biases.get(name, ()), decisions, QDQQuantTensorType.WEIGHT)

    def _is_symmetric_int8(self, name: str) -> bool:
        quantizer = self.quantizer
        return bool(
            quantizer.stages.weights
            and name not in quantizer.tensor_quant_overrides
            and quantizer.weight_qType == TensorProto.INT8
            and quantizer.is_weight_symmetric(quantizer.weight_qType)
            and quantizer.min_real_range is None
            and not (getattr(quantizer, "block_size", 0) and len(self.editor.constants[name].dims) == 2)
        )

    def _biases_by_weight(self, reals: Mapping[str, Array]) -> dict[str, list[tuple[float, Array]]]:
        found: dict[str, list[tuple[float, Array]]] = {}
        if self.quantizer.stages.bias and not self.quantizer.qdq_disable_weight_adjust_for_int32_bias:
            for d in self._derived:
                _, scale, weight, beta = self._key(d)
                found.setdefault(weight, []).append((scale, reals[d.edge.value].astype(np.float64) * beta))
        return found

    def _place_own(
        self, init: onnx.TensorProto, axis: int | None, biases: Biases, decisions: Sequence[Decision]
    ) -> None:
        try:
            q: QuantizedWeight = quantize_weight(
                array_in(init),
                axis=axis,
                reduce_range=self.quantizer.reduce_range,
                bits=decisions[0].bits,
                biases=biases,
                zero_point=decisions[0].zero_point,
                orders=self._orders(decisions, tuple(init.dims)),
                largest_pair=self.plan.largest_pair,
            )
        except ValueError as error:
            raise UnsupportedModelError(
                str(error), where=f"initializer '{init.name}'", fix="repair the model: the float weights are broken"
            ) from error
        self._scales[init.name], self._widened[init.name] = q.scale, partial(stored_scale, q.needed)
        zero_point = np.full(q.scale.shape, decisions[0].zero_point, np.int8)
        self._place_constant(init, q.values, q.scale, zero_point, axis, decisions)

    def _orders(self, decisions: Sequence[Decision], shape: tuple[int, ...]) -> list[PairOrder]:
        """Orders in which the integer kernels among a weight's readers read it; int8 data are made uint8 at load."""
        found = []
        for d in decisions:
            if d.edge.consumer in self._of_bytes:
                node = self.editor.nodes[d.edge.consumer]
                orders = pair_orders(node, shape, even_channels=self.plan.even_channels)
                found += [order for order in orders if order not in found]
        return found

    def _place_as_stock(
        self,
        init: onnx.TensorProto,
        axis: int | None,
        biases: Biases,
        decisions: Sequence[Decision],
        kind: QDQQuantTensorType,
    ) -> None:
        """Quantizes with stock's parameters: other types, blocks, and what the caller says about the tensor."""
        init = brought_in(init)
        with four_bit_types():
            params = self._parameters_of_stock(init, axis, kind)
        scale, zero_point = np.asarray(params["scale"]), np.asarray(params["zero_point"])
        axis, block = params.get("axis"), params.get("block_size", 0)
        if not block and not self.quantizer.tensor_quant_overrides.overrides_scale_zp(init.name):
            if self.quantizer.stages.weights and params["quant_type"] == TensorProto.INT8 and not zero_point.any():
                orders = self._orders(decisions, tuple(init.dims))
                least = pair_scale(array_in(init), axis, orders, self.plan.largest_pair)
                scale = np.maximum(scale, least.astype(scale.dtype))
            needed = scale
            self._widened[init.name] = lambda given: _at_least(needed, given).astype(np.float32)
            scale = _at_least(needed, biases)
        known = {"block_size": block} if block else {}
        with four_bit_types():
            values = quantize_onnx_initializer(init, params["quant_type"], zero_point, scale, axis, **known)
        stored = scale.astype(np.float32)
        self._scales[init.name] = stored
        self._place_constant(init, values, stored, zero_point, axis, decisions, params["quant_type"], block)

    def _parameters_of_stock(
        self, init: onnx.TensorProto, axis: int | None, kind: QDQQuantTensorType
    ) -> QuantizationParams:
        """Stock's parameters of a constant; stock looks it up in a model that holds nothing else."""
        quantizer, block_size = self.quantizer, getattr(self.quantizer, "block_size", 0)
        model, alone = quantizer.model, onnx.ModelProto(graph=onnx.GraphProto(initializer=[init]))
        info = QDQTensorQuantInfo(tensor_type=kind, axis=axis, data_type=init.data_type)
        quantizer.model, quantizer.tensors_to_quantize = ONNXModel(alone), {init.name: info}
        quantizer.block_size = block_size if len(init.dims) == 2 else 0  # stock has no blocks in other shapes
        try:
            return quantizer._calc_initializer_quant_params()[init.name]
        finally:
            quantizer.model, quantizer.tensors_to_quantize, quantizer.block_size = model, {}, block_size

    # -- biases -----------------------------------------------------------------------------------------------------

    def _key(self, d: Decision) -> tuple[str, float, str, float]:
        """Bias, input scale, weight and beta: consumers that agree on them share one bias."""
        assert d.scale_from is not None
        data, weight = d.scale_from
        return d.edge.value, self.pairs.scale_read(data, _reader(d, self.plan)), weight, d.beta

    def _place_biases(self) -> None:
        made: dict[tuple[str, float, str, float], tuple[str, tuple[str, str]]] = {}
        copies: Counter[str] = Counter()
        for d in self._derived:
            key = value, input_scale, weight, beta = self._key(d)
            if key in made:
                self.editor.read(d.edge.consumer, d.edge.index, made[key][0])
            else:
                scale = self._scales[weight]
                q = quantize_bias(self._reals[value], input_scale=input_scale, weight_scale=scale, beta=beta)
                name = f"{value}_{copies[value]}" if copies[value] else value
                copies[value] += 1
                axis = 0 if q.scale.ndim else None
                made[key] = self._place_integers(name, q.values, q.scale, np.zeros(q.scale.shape, np.int32), axis, [d])
            self._biases.append((d, made[key][1]))
        for d in self._derived:
            if d.beta != 1.0:
                for attribute in self.editor.nodes[d.edge.consumer].attribute:
                    if attribute.name == "beta":
                        attribute.f = 1.0

    def rescaled(self, constants: Mapping[str, onnx.TensorProto]) -> dict[str, onnx.TensorProto] | None:
        """The initializers that differ with other constants and activations' scales as they are now, by name.

        Returns:
            None where more than biases would differ, or they would be shared otherwise.
        """
        decided = [d for name in constants for d in self.plan.by_value.get(name, ())]
        if any(d.role is not EdgeRole.BIAS and d.how is not How.FLOAT for d in decided):
            return None
        reals = {**self._reals, **{name: array_in(tensor).reshape(-1) for name, tensor in constants.items()}}
        biases = self._biases_by_weight(reals)
        for weight, widened in self._widened.items():
            if not np.array_equal(widened(biases.get(weight, ())), self._scales[weight]):
                return None
        made: dict[tuple[str, float, str, float], tuple[str, str]] = {}
        if any(made.setdefault(self._key(d), names) != names for d, names in self._biases):
            return None
        if len(set(made.values())) != len(made):
            return None
        found = dict(constants)  # where a float node reads them
        for (value, input_scale, weight, beta), (integers, scale) in made.items():
            known = self._scales[weight]
            q = quantize_bias(reals[value], input_scale=input_scale, weight_scale=known, beta=beta)
            found[integers] = put_outside(numpy_helper.from_array(q.values, integers))
            found[scale] = listed(scale, q.scale)
        return found

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _place_constant(
        self,
        init: onnx.TensorProto,
        values: Array | onnx.TensorProto,
        scale: Array,
        zero_point: Array,
        axis: int | None,
        decisions: Collection[Decision],
        elem_type: int | None = None,
        block: int = 0,
    ) -> None:
        if not self.quantizer.add_qdq_pair_to_weight:
            self._place_integers(init.name, values, scale, zero_point, axis, decisions, elem_type, block)
            return
        grid = self._add_grid(init.name, scale, zero_point, elem_type)
        integers = self.editor.fresh(add_quant_output_suffix(init.name))
        name, attributes = self.editor.fresh(add_quant_suffix(init.name)), {"axis": axis, "block_size": block or None}
        self.editor.add_quantize(init.name, integers, name, grid, **attributes)
        bits = min(d.bits for d in decisions)
        if bits < _BYTE:
            clipped, name = (self.editor.fresh(f"{init.name}_{what}") for what in ("Clip_Output", "Clip"))
            self.editor.add_clip(integers, clipped, name, integer_bounds(bits, signed=True, narrow=True), signed=True)
            integers = clipped
        self._dequantize(init.name, integers, grid, decisions, **attributes)

    def _place_integers(
        self,
        name: str,
        values: Array | onnx.TensorProto,
        scale: Array,
        zero_point: Array,
        axis: int | None,
        decisions: Collection[Decision],
        elem_type: int | None = None,
        block: int = 0,
    ) -> tuple[str, tuple[str, str]]:
        """Adds integers, scale, zero point and DQ; returns what DQ writes, and the names of integers and scale."""
        integers = self.editor.fresh(f"{name}_quantized")
        if isinstance(values, onnx.TensorProto):
            tensor = onnx.TensorProto()
            tensor.CopyFrom(values)
            tensor.name = integers
        else:
            tensor = numpy_helper.from_array(np.asarray(values, order="C"), integers)
        self.editor.add_constant(put_outside(tensor))
        bits = min(d.bits for d in decisions)
        if bits < _BYTE:
            annotate(self.editor.graph, integers, f"INT{bits}")
        grid = self._add_grid(name, scale, zero_point, elem_type)
        real = self._dequantize(name, integers, grid, decisions, axis=axis, block_size=block or None)
        return real, (integers, grid[0])

    def _add_grid(self, name: str, scale: Array, zero_point: Array, elem_type: int | None) -> tuple[str, str]:
        grid = self.editor.fresh(f"{name}_scale"), self.editor.fresh(f"{name}_zero_point")
        self.editor.add_list(grid[0], scale)
        self.editor.add_list(grid[1], zero_point, elem_type)
        return grid

    def _dequantize(
        self, name: str, integers: str, grid: tuple[str, str], decisions: Collection[Decision], **attributes: int | None
    ) -> str:
        """Adds DQ and points the planned edges at it; returns what it writes."""
        real = self.editor.fresh(add_dequant_output_suffix(name))
        self.editor.add_dequantize(integers, real, self.editor.fresh(add_dequant_suffix(name)), grid, **attributes)
        for d in decisions:
            if d.how is not How.FLOAT:
                self.editor.read(d.edge.consumer, d.edge.index, real)
        return real


def _at_least(scale: Array, biases: Biases) -> Array:
    """A scale of stock's, widened for biases."""
    return np.asarray(np.maximum(scale, least_scale(biases, scale).astype(scale.dtype)))


def _reader(decision: Decision, plan: PlacementPlan) -> str:
    """The node that reads the data whose scale a bias follows: for a MatMul's bias not the Add behind it."""
    assert decision.scale_from is not None
    data, weight = decision.scale_from
    reads = plan.consumers.get(data, set()) & plan.consumers.get(weight, set())
    return decision.edge.consumer if decision.edge.consumer in reads or not reads else min(reads)
