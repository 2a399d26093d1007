"""Constants of a plan: weights, biases and operands as integers behind DQ, or as floats behind Q and DQ."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import quant_utils
from onnxruntime.quantization.base_quantizer import QuantizationParams
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.qdq_quantizer import QDQQuantTensorType, QDQTensorQuantInfo

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.outside import array_in, brought_in, put_outside
from kenosis_ort.graph.product_pairs import PairOrder, pair_orders
from kenosis_ort.graph.qdq import DQ, Q, annotate, exact_grid, integer_bounds, on_grid
from kenosis_ort.plan import Decision, EdgeRole, How, PlacementPlan
from kenosis_ort.quantizer import grids
from kenosis_ort.quantizer.pairs import Array, Pairs, QdqEditor, listed
from kenosis_ort.quantizer.stock import four_bit_types

_BYTE = 8
Biases = Sequence[tuple[float, grids.Float64]]


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
        self._floats: bool = self.quantizer.add_qdq_pair_to_weight
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
        exact = exact_grid(array) if array.size > 1 else None
        if exact is not None:
            scale, zero_point = exact.step, least - exact.low
            values = (exact.multiples + zero_point).astype(dtype)
        else:
            real = array.astype(np.float64)
            p = grids.nudged_parameters(float(real.min()), float(real.max()), signed=signed)
            scale, zero_point = p.scale, p.zero_point
            values = on_grid(real, scale, zero_point, least, most).astype(dtype)
        grid = np.array(scale, np.float32), np.array(zero_point, dtype)
        self._place(init.name, values, *grid, None, decisions, floats=self._floats)

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
            q = grids.quantize_weight(
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
            fix = "repair the model: the float weights are broken"
            raise UnsupportedModelError(str(error), where=f"initializer '{init.name}'", fix=fix) from error
        self._scales[init.name], self._widened[init.name] = q.scale, partial(grids.stored_scale, q.needed)
        zero_point = np.full(q.scale.shape, decisions[0].zero_point, np.int8)
        self._place(init.name, q.values, q.scale, zero_point, axis, decisions, floats=self._floats)

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
                least = grids.pair_scale(array_in(init), axis, orders, self.plan.largest_pair)
                scale = np.maximum(scale, least.astype(scale.dtype))
            needed = scale
            self._widened[init.name] = lambda given: _at_least(needed, given).astype(np.float32)
            scale = _at_least(needed, biases)
        known = {"block_size": block} if block else {}
        with four_bit_types():
            values = quant_utils.quantize_onnx_initializer(init, params["quant_type"], zero_point, scale, axis, **known)
        self._scales[init.name] = stored = scale.astype(np.float32)
        elem_type = params["quant_type"]
        self._place(init.name, values, stored, zero_point, axis, decisions, elem_type, block, floats=self._floats)

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
                q = grids.quantize_bias(self._reals[value], input_scale=input_scale, weight_scale=scale, beta=beta)
                name = f"{value}_{copies[value]}" if copies[value] else value
                copies[value] += 1
                zeros, axis = np.zeros(q.scale.shape, np.int32), 0 if q.scale.ndim else None
                made[key] = self._place(name, q.values, q.scale, zeros, axis, [d], floats=False)
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
        apart = any(made.setdefault(self._key(d), names) != names for d, names in self._biases)
        if apart or len(set(made.values())) != len(made):
            return None
        found = dict(constants)  # where a float node reads them
        for (value, input_scale, weight, beta), (integers, scale) in made.items():
            known = self._scales[weight]
            q = grids.quantize_bias(reals[value], input_scale=input_scale, weight_scale=known, beta=beta)
            found[integers] = put_outside(numpy_helper.from_array(q.values, integers))
            found[scale] = listed(scale, q.scale)
        return found

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _place(
        self,
        name: str,
        values: Array | onnx.TensorProto,
        scale: Array,
        zero_point: Array,
        axis: int | None,
        decisions: Collection[Decision],
        elem_type: int | None = None,
        block: int = 0,
        *,
        floats: bool,
    ) -> tuple[str, tuple[str, str]]:
        """Adds a constant's integers, scale, zero point and DQ; returns what DQ writes, names of integers and scale.

        Args:
            name: Of the constant.
            values: Its integers.
            scale: Of one number, or one a channel or block.
            zero_point: Likewise.
            axis: Of the channels or blocks.
            decisions: The edges that read it.
            elem_type: Of the zero point, that of its array by default.
            block: Numbers of a block, 0 without.
            floats: Q and Clip of the float constant in place of integers.
        """
        editor, bits = self.editor, min(d.bits for d in decisions)
        attributes = {"axis": axis, "block_size": block or None}
        if floats:
            grid = self._add_grid(name, scale, zero_point, elem_type)
            integers = editor.fresh(quant_utils.add_quant_output_suffix(name))
            editor.add(Q, name, integers, editor.fresh(quant_utils.add_quant_suffix(name)), grid, **attributes)
            if bits < _BYTE:
                clipped, clip = (editor.fresh(f"{name}_{what}") for what in ("Clip_Output", "Clip"))
                editor.add_clip(integers, clipped, clip, integer_bounds(bits, signed=True, narrow=True), signed=True)
                integers = clipped
        else:
            integers = editor.fresh(f"{name}_quantized")
            if isinstance(values, onnx.TensorProto):
                tensor = onnx.TensorProto()
                tensor.CopyFrom(values)
                tensor.name = integers
            else:
                tensor = numpy_helper.from_array(np.asarray(values, order="C"), integers)
            editor.add_constant(put_outside(tensor))
            if bits < _BYTE:
                annotate(editor.graph, integers, f"INT{bits}")
            grid = self._add_grid(name, scale, zero_point, elem_type)
        real = editor.fresh(quant_utils.add_dequant_output_suffix(name))
        editor.add(DQ, integers, real, editor.fresh(quant_utils.add_dequant_suffix(name)), grid, **attributes)
        for d in decisions:
            if d.how is not How.FLOAT:
                editor.read(d.edge.consumer, d.edge.index, real)
        return real, (integers, grid[0])

    def _add_grid(self, name: str, scale: Array, zero_point: Array, elem_type: int | None) -> tuple[str, str]:
        grid = self.editor.fresh(f"{name}_scale"), self.editor.fresh(f"{name}_zero_point")
        self.editor.add_list(grid[0], scale)
        self.editor.add_list(grid[1], zero_point, elem_type)
        return grid


def _at_least(scale: Array, biases: Biases) -> Array:
    """A scale of stock's, widened for biases."""
    return np.asarray(np.maximum(scale, grids.least_scale(biases, scale).astype(scale.dtype)))


def _reader(decision: Decision, plan: PlacementPlan) -> str:
    """The node that reads the data whose scale a bias follows: for a MatMul's bias not the Add behind it."""
    assert decision.scale_from is not None
    data, weight = decision.scale_from
    reads = plan.consumers.get(data, set()) & plan.consumers.get(weight, set())
    return decision.edge.consumer if decision.edge.consumer in reads or not reads else min(reads)
