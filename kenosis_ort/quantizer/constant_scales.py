"""Weights, biases and constant operands: integers behind DQ, or floats behind Q and DQ where the caller says so.

Stage 3: int32 bias at exactly ``input_scale * weight_scale``, zero point 0, in float64.

The runtime's kernels multiply the two scales themselves and trust the bias to be on that grid; a Gemm whose bias
is on another grid is silently wrong (rule bias-scale-mismatch-gemm-wrong). Source: Kenosis paper, stage 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
from kenosis_ort.graph.qdq import PairOrder, annotate, exact_grid, integer_bounds, pair_orders
from kenosis_ort.plan import Decision, EdgeRole, How, PlacementPlan
from kenosis_ort.quantizer.editor import Array, QdqEditor, nudged_parameters
from kenosis_ort.quantizer.pairs import Pairs
from kenosis_ort.quantizer.stock import four_bit_types
from kenosis_ort.quantizer.weights import QuantizedWeight, least_scale, pair_scale, quantize_weight


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
    steps = np.asarray(bias, dtype=np.float64) * beta / scale.astype(np.float64)
    limit = np.iinfo(np.int32)
    return QuantizedBias(np.clip(np.rint(steps), limit.min, limit.max).astype(np.int32), np.asarray(scale, np.float32))


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
        activations = [d for d in plan.decisions if d.role is EdgeRole.ACTIVATION]
        dtypes = {d.edge.consumer: d.dtype for d in activations if d.dtype}
        moved = set(plan.integer_nodes()) - dtypes.keys()  # of bytes that an operator brought there without a Q
        self._of_bytes = moved | {node for node, dtype in dtypes.items() if dtype in ("int8", "uint8")}

    def place(self) -> None:
        """Quantizes operands, weights and biases, and points the planned edges at their DQ."""
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
        values = np.clip(np.rint(real / p.scale) + p.zero_point, least, most).astype(dtype)
        scale, zero_point = np.array(p.scale, np.float32), np.array(p.zero_point, dtype)
        self._place_constant(init, values, scale, zero_point, None, decisions)

    # -- weights ----------------------------------------------------------------------------------------------------

    def _place_weights(self) -> None:
        by_weight: dict[str, list[Decision]] = {}
        for d in self.plan.decisions:
            if d.role is EdgeRole.WEIGHT and d.how is How.OWN:
                by_weight.setdefault(d.edge.value, []).append(d)
        biases = self._biases_by_weight()
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

    def _biases_by_weight(self) -> dict[str, list[tuple[float, Array]]]:
        found: dict[str, list[tuple[float, Array]]] = {}
        if self.quantizer.stages.bias and not self.quantizer.qdq_disable_weight_adjust_for_int32_bias:
            for d in self.plan.decisions:
                if d.role is EdgeRole.BIAS and d.how is How.DERIVED and d.scale_from is not None:
                    real = array_in(self.editor.constant(d.edge.value)).reshape(-1)
                    scale = self.pairs.scale_read(d.scale_from[0], _reader(d, self.plan))
                    found.setdefault(d.scale_from[1], []).append((scale, real.astype(np.float64) * d.beta))
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
        self._scales[init.name] = q.scale
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
            needed = least_scale(biases, scale)
            if self.quantizer.stages.weights and params["quant_type"] == TensorProto.INT8 and not zero_point.any():
                orders = self._orders(decisions, tuple(init.dims))
                needed = np.maximum(needed, pair_scale(array_in(init), axis, orders, self.plan.largest_pair))
            scale = np.maximum(scale, needed.astype(scale.dtype))
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

    def _place_biases(self) -> None:
        made: dict[tuple[str, float, str, float], str] = {}
        copies: Counter[str] = Counter()
        derived = [d for d in self.plan.decisions if d.role is EdgeRole.BIAS and d.how is How.DERIVED and d.scale_from]
        for d in derived:
            assert d.scale_from is not None
            data, weight = d.scale_from
            input_scale = self.pairs.scale_read(data, _reader(d, self.plan))
            key = (d.edge.value, input_scale, weight, d.beta)
            if key in made:  # consumers that agree on both scales share one bias
                self.editor.read(d.edge.consumer, d.edge.index, made[key])
                continue
            init = self.editor.constant(d.edge.value)
            bias = array_in(init).reshape(-1)
            q = quantize_bias(bias, input_scale=input_scale, weight_scale=self._scales[weight], beta=d.beta)
            name = f"{d.edge.value}_{copies[d.edge.value]}" if copies[d.edge.value] else d.edge.value
            copies[d.edge.value] += 1
            axis = 0 if q.scale.ndim else None
            made[key] = self._place_integers(name, q.values, q.scale, np.zeros(q.scale.shape, np.int32), axis, [d])
        for d in derived:
            if d.beta != 1.0:
                for attribute in self.editor.nodes[d.edge.consumer].attribute:
                    if attribute.name == "beta":
                        attribute.f = 1.0

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
    ) -> str:
        """Adds integers, scale, zero point and DQ for a constant; returns what DQ writes."""
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
        return self._dequantize(name, integers, grid, decisions, axis=axis, block_size=block or None)

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


def _reader(decision: Decision, plan: PlacementPlan) -> str:
    """The node that reads the data whose scale a bias follows: for a MatMul's bias not the Add behind it."""
    assert decision.scale_from is not None
    data, weight = decision.scale_from
    reads = plan.consumers.get(data, set()) & plan.consumers.get(weight, set())
    return decision.edge.consumer if decision.edge.consumer in reads or not reads else min(reads)
