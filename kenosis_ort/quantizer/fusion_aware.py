"""The quantizer: performs a placement plan on stock's ``QDQQuantizer``.

Without a plan it is stock's quantizer, node for node and initializer for initializer, in linear time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.quantization.base_quantizer import QuantizationParams
from onnxruntime.quantization.calibrate import TensorData, TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import (
    add_dequant_output_suffix,
    add_dequant_suffix,
    add_quant_input_suffix,
    add_quant_output_suffix,
    add_quant_suffix,
    compute_data_quant_params,
    quantize_onnx_initializer,
    tensor_proto_to_array,
)

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.grid import exact_grid
from kenosis_ort.graph.names import reserve_name
from kenosis_ort.graph.walk import all_graphs
from kenosis_ort.options import Stages
from kenosis_ort.plan import Decision, How, PlacementPlan, RangeLimit, Role
from kenosis_ort.quantizer._ort_compat import IndexedONNXModel, linear_time
from kenosis_ort.quantizer.bias import quantize_bias
from kenosis_ort.quantizer.parameters import clamped, nudged_parameters
from kenosis_ort.quantizer.weights import QuantizedWeight, least_scale, quantize_weight

_log = logging.getLogger(__name__)

_PRODUCER = "kenosis_ort"


class FusionAwareQDQQuantizer(QDQQuantizer):  # type: ignore[misc]
    """Stock's quantizer with the plan's marks in place of its own.

    Args:
        model: Prepared model; changed in place, so pass a private copy.
        per_channel, reduce_range, weight_qType, activation_qType, tensors_range, nodes_to_quantize,
            nodes_to_exclude, op_types_to_quantize, extra_options: As ``QDQQuantizer``.
        plan: What to place where; None or an empty plan leaves everything to stock.
        stages: Which Kenosis stages act on the arithmetic.
        weights: Content of initializers that the model only names, so that weights which become integers are never
            copied as floats. Not changed; copied in where something still reads them.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        per_channel: bool,
        reduce_range: bool,
        weight_qType: Any,  # noqa: N803 - stock's name
        activation_qType: Any,  # noqa: N803 - stock's name
        tensors_range: TensorsData | None,
        nodes_to_quantize: Sequence[str],
        nodes_to_exclude: Sequence[str],
        op_types_to_quantize: Sequence[str],
        extra_options: Mapping[str, Any] | None = None,
        plan: PlacementPlan | None = None,
        stages: Stages | None = None,
        weights: Mapping[str, onnx.TensorProto] | None = None,
    ) -> None:
        self.plan = plan or None
        self.stages = stages or Stages()
        self._weights = dict(weights or {})
        with linear_time():
            super().__init__(
                model,
                per_channel,
                reduce_range,
                weight_qType,
                activation_qType,
                None if self.plan else tensors_range,
                nodes_to_quantize if len(nodes_to_quantize or ()) < 16 else frozenset(nodes_to_quantize),
                nodes_to_exclude if len(nodes_to_exclude or ()) < 16 else frozenset(nodes_to_exclude),
                op_types_to_quantize,
                dict(extra_options or {}),
            )
        stock_model = self.model
        self.model: IndexedONNXModel = (
            stock_model if isinstance(stock_model, IndexedONNXModel) else IndexedONNXModel(stock_model.model)
        )
        self.tensors_range = tensors_range

    def quantize_model(self) -> onnx.ModelProto:
        """Quantizes and returns the model (the one given, changed in place), unsorted as in stock."""
        with linear_time():
            if self.plan is None:
                super().quantize_model()
                self.model.flush()
            else:
                self._perform(self.plan)
        quantized: onnx.ModelProto = self.model.model
        return quantized

    def is_tensor_per_channel(
        self, tensor_name: str, default_axis: int, op_type: str | None = None
    ) -> tuple[bool, int | None]:
        """As stock, but a MatMul weight of three or more dimensions is per tensor: the runtime takes no other."""
        weight = self.initializers.get(tensor_name)
        refused = op_type == "MatMul" and weight is not None and len(weight.dims) > 2
        overridden = self.tensor_quant_overrides.has_per_channel_overrides(tensor_name)
        if refused and not overridden and self.stages != Stages.none():
            return False, None
        found: tuple[bool, int | None] = super().is_tensor_per_channel(tensor_name, default_axis, op_type)
        return found

    def _quantize_sharing_param_tensors(self) -> None:
        """As stock, which waits for ever for a provider that the model itself brings quantized: such stay float."""
        waiting = dict(self.tensors_to_quantize)
        resolved = set(self.quantized_value_map)
        progress = True
        while progress:
            ready = {name for name, info in waiting.items() if info.quant_para_provider.input_name in resolved}
            progress = bool(ready)
            resolved |= ready
            for name in ready:
                del waiting[name]
        for name in waiting:
            _log.warning("'%s' stays float: the tensor it shares its scale with is quantized already", name)
            del self.tensors_to_quantize[name]
        super()._quantize_sharing_param_tensors()

    # -- performing a plan ------------------------------------------------------------------------------------------

    def _perform(self, plan: PlacementPlan) -> None:
        self._nodes = {node.name: node for node in self.model.nodes()}
        self._taken = _all_names(self.model.model.graph) | self.model.initializer().by_name.keys()
        self._scales: dict[str, float] = {}
        quantized = dict(plan.quantized_values())
        self._limits = _limits_by_root(plan.limits, quantized)
        self._saturations = {limit.value: limit for limit in plan.saturations}
        barriers = frozenset(plan.barriers)
        activations = {n: d for n, d in quantized.items() if n not in self.model.initializer().by_name}
        parameters = self._make_parameters(activations)
        for value in activations:
            scale_name, zero_point_name, scale = parameters[value]
            self._scales[value] = scale
            self._place_pair(value, plan.by_value[value], scale_name, zero_point_name, value in barriers)
        for value in quantized.keys() - activations.keys():
            self._place_scalar(value, plan.by_value[value])
        weights = self._place_weights(plan)
        self._place_biases(plan, weights)
        self.model.clean_initializers()
        for init in self.model.initializer():
            if init.name in self._weights:  # a node that stays float reads it too
                init.CopyFrom(self._weights[init.name])
        self.model.model.producer_name = _PRODUCER

    def _constant(self, name: str) -> onnx.TensorProto:
        """Returns an initializer with its content."""
        return self._weights.get(name) or self.model.constant(name)

    def _make_parameters(self, activations: Mapping[str, Decision]) -> dict[str, tuple[str, str, float]]:
        """Returns (scale name, zero point name, scale) by value; values of one group name the same initializers."""
        roots: dict[str, tuple[str, str, float]] = {}
        made = {}
        for value, decision in activations.items():
            root = decision.provider or value
            if root not in roots:
                params = self._parameters_of(root)
                zero_point, scale = self._fresh(f"{root}_zero_point"), self._fresh(f"{root}_scale")
                self._add_list(zero_point, params["zero_point"])
                self._add_list(scale, params["scale"])
                roots[root] = (scale, zero_point, float(params["scale"]))
            made[value] = roots[root]
        return made

    def _fresh(self, name: str) -> str:
        """Returns the name, with a number behind it where the model has that name already."""
        return reserve_name(name, self._taken)

    def _add_list(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Adds an initializer stored as a list of numbers, as stock stores scales and zero points."""
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        self.model.add_initializer(helper.make_tensor(name, dtype, array.shape, array.ravel().tolist()))

    def _parameters_of(self, value: str) -> QuantizationParams:
        assert self.tensors_range is not None
        if value not in self.tensors_range:
            raise UnsupportedModelError("no calibrated range", where=f"tensor '{value}'")
        low, high = (float(np.asarray(x).reshape(-1)[0]) for x in self.tensors_range[value].range_value)
        restricted = getattr(self, "is_activation_restricted_asymmetric", False)  # since runtime 1.27
        plain = not (self.is_activation_symmetric or restricted or self.min_real_range is not None)
        limit = self._limits.get(value)
        if self.stages.nudge and plain:
            signed = self.activation_qType == onnx.TensorProto.INT8
            low, high = clamped(low, high, self._saturations.get(value))
            p = nudged_parameters(low, high, signed=signed, limit=limit)
            dtype = np.int8 if signed else np.uint8
            return QuantizationParams(
                zero_point=np.array(p.zero_point, dtype),
                scale=np.array(p.scale, np.float32),
                quant_type=self.activation_qType,
            )
        data = TensorData(lowest=np.float32(low), highest=np.float32(high))
        params: QuantizationParams = self.calc_quant_params(data, {})
        return params

    def _place_pair(
        self, value: str, decisions: Sequence[Decision], scale_name: str, zero_point_name: str, barrier: bool
    ) -> None:
        """Puts Q and DQ on a value; edges that the plan leaves float keep reading the value itself."""
        source, dequantized = value, value
        by_name = [d for d in decisions if d.role is Role.OUTPUT or d.edge.index < 0]
        if any(d.how is not How.FLOAT for d in by_name):  # outputs and bodies know the name: it becomes DQ's
            source = self._fresh(add_quant_input_suffix(value))
            self.model.replace_output_of_all_nodes(value, source)
        else:
            dequantized = self._fresh(add_dequant_output_suffix(value))
        for d in decisions:
            if d in by_name:
                continue
            reads = source if d.how is How.FLOAT else dequantized
            node = self._nodes[d.edge.consumer]
            if node.input[d.edge.index] != reads:
                self.model.rename_edge(node, d.edge.index, reads)
        if barrier:
            held = self._fresh(f"{source}_barrier")
            self.model.add_node(helper.make_node("Max", [source], [held], name=self._fresh(f"{value}_Barrier")))
            source = held
        integers = self._fresh(add_quant_output_suffix(value))
        self._create_qdq_nodes(
            source,
            integers,
            self._fresh(add_quant_suffix(value)),
            integers,
            dequantized,
            self._fresh(add_dequant_suffix(value)),
            scale_name,
            zero_point_name,
        )

    def _place_scalar(self, name: str, decisions: Sequence[Decision]) -> None:
        """Quantizes the constant operand of an elementwise kernel, which the planner chose for being exact."""
        init = self._constant(name)
        array = tensor_proto_to_array(init)
        signed = self.activation_qType == onnx.TensorProto.INT8
        grid = exact_grid(array) if array.size > 1 else None
        if grid is not None:
            least, kind = (-128, np.int8) if signed else (0, np.uint8)
            zero_point = np.array(least - grid.low, kind)
            moved = (grid.multiples + (least - grid.low)).astype(kind)
            self._place_constant(name, moved, np.array(grid.step, np.float32), zero_point, None, decisions)
            return
        real = float(array.reshape(-1)[0])
        p = nudged_parameters(min(real, 0.0), max(real, 0.0), signed=signed)
        dtype = np.int8 if signed else np.uint8
        lowest, highest = (-128, 127) if signed else (0, 255)
        integer = int(min(max(round(real / p.scale) + p.zero_point, lowest), highest))
        values = np.full(tuple(init.dims), integer, dtype)
        self._place_constant(
            name, values, np.array(p.scale, np.float32), np.array(p.zero_point, dtype), None, decisions
        )

    def _place_weights(self, plan: PlacementPlan) -> dict[str, np.ndarray[Any, Any]]:
        """Quantizes weights; returns their scales by initializer name."""
        by_weight: dict[str, list[Decision]] = {}
        for d in plan.decisions:
            if d.role is Role.WEIGHT and d.how is How.OWN:
                by_weight.setdefault(d.edge.value, []).append(d)
        biases = self._biases_by_weight(plan)
        scales = {}
        for name, decisions in by_weight.items():
            init = self._constant(name)
            axis = decisions[0].axis
            if self._symmetric_int8():
                scales[name] = self._place_own_weight(init, axis, biases.get(name, ()), decisions)
            else:
                scales[name] = self._place_stock_weight(init, axis, biases.get(name, ()), decisions)
        return scales

    def _symmetric_int8(self) -> bool:
        return bool(
            self.stages.weights
            and self.weight_qType == onnx.TensorProto.INT8
            and self.is_weight_symmetric(self.weight_qType)
            and self.min_real_range is None
        )

    def _biases_by_weight(self, plan: PlacementPlan) -> dict[str, list[tuple[float, np.ndarray[Any, Any]]]]:
        found: dict[str, list[tuple[float, np.ndarray[Any, Any]]]] = {}
        if self.stages.bias and not self.qdq_disable_weight_adjust_for_int32_bias:
            for d in plan.decisions:
                if d.role is Role.BIAS and d.how is How.DERIVED and d.scale_from is not None:
                    real = numpy_helper.to_array(self._constant(d.edge.value)).reshape(-1)
                    bias = real.astype(np.float64) * d.beta
                    found.setdefault(d.scale_from[1], []).append((self._scales[d.scale_from[0]], bias))
        return found

    def _place_own_weight(
        self,
        init: onnx.TensorProto,
        axis: int | None,
        biases: Sequence[tuple[float, np.ndarray[Any, Any]]],
        decisions: Sequence[Decision],
    ) -> np.ndarray[Any, Any]:
        try:
            q: QuantizedWeight = quantize_weight(
                numpy_helper.to_array(init), axis=axis, reduce_range=self.reduce_range, biases=biases
            )
        except ValueError as error:
            raise UnsupportedModelError(
                str(error), where=f"initializer '{init.name}'", fix="repair the model: the float weights are broken"
            ) from error
        shift = decisions[0].zero_point
        stored = q.values if shift == 0 else (q.values.astype(np.int16) + shift).astype(np.int8)  # -127 and above
        self._place_constant(init.name, stored, q.scale, np.full(q.scale.shape, shift, np.int8), axis, decisions)
        return q.scale

    def _place_stock_weight(
        self,
        init: onnx.TensorProto,
        axis: int | None,
        biases: Sequence[tuple[float, np.ndarray[Any, Any]]],
        decisions: Sequence[Decision],
    ) -> np.ndarray[Any, Any]:
        real = tensor_proto_to_array(init)
        symmetric = axis is not None or self.is_weight_symmetric(self.weight_qType)
        slices = [real.ravel()] if axis is None else [real.take(i, axis).ravel() for i in range(real.shape[axis])]
        params = [
            compute_data_quant_params(
                s, self.weight_qType, symmetric, reduce_range=self.reduce_range, min_real_range=self.min_real_range
            )
            for s in slices
        ]
        zero_point = np.asarray([p[0] for p in params]) if axis is not None else np.asarray(params[0][0])
        scale = np.asarray([p[1] for p in params]) if axis is not None else np.asarray(params[0][1])
        scale = np.maximum(scale, least_scale(biases, scale).astype(scale.dtype))
        values = quantize_onnx_initializer(init, self.weight_qType, zero_point, scale, axis)
        stored: np.ndarray[Any, Any] = scale.astype(np.float32)
        self._place_constant(init.name, numpy_helper.to_array(values), stored, zero_point, axis, decisions)
        return stored

    def _place_biases(self, plan: PlacementPlan, weights: Mapping[str, np.ndarray[Any, Any]]) -> None:
        made: dict[tuple[str, str, str, float], str] = {}
        copies: Counter[str] = Counter()
        for d in plan.decisions:
            if d.role is not Role.BIAS or d.how is not How.DERIVED or d.scale_from is None:
                continue
            node = self._nodes[d.edge.consumer]
            key = (d.edge.value, *d.scale_from, d.beta)
            if key in made:  # consumers that agree on both scales share one bias
                self.model.rename_edge(node, d.edge.index, made[key])
                continue
            bias = numpy_helper.to_array(self._constant(d.edge.value)).reshape(-1)
            q = quantize_bias(
                bias, input_scale=self._scales[d.scale_from[0]], weight_scale=weights[d.scale_from[1]], beta=d.beta
            )
            zero_point = np.zeros(q.scale.shape, np.int32)
            name = f"{d.edge.value}_{copies[d.edge.value]}" if copies[d.edge.value] else d.edge.value
            copies[d.edge.value] += 1
            axis = 0 if q.scale.ndim else None
            made[key] = self._place_constant(name, q.values, q.scale, zero_point, axis, [d])
        for d in plan.decisions:
            if d.role is Role.BIAS and d.beta != 1.0:
                for attribute in self._nodes[d.edge.consumer].attribute:
                    if attribute.name == "beta":
                        attribute.f = 1.0

    def _place_constant(
        self,
        name: str,
        values: np.ndarray[Any, Any],
        scale: np.ndarray[Any, Any],
        zero_point: np.ndarray[Any, Any],
        axis: int | None,
        decisions: Collection[Decision],
    ) -> str:
        """Adds integers, scale, zero point and DQ for a constant, and points the planned edges at the DQ."""
        dequantized = self._fresh(add_dequant_output_suffix(name))
        integers = [self._fresh(f"{name}_{part}") for part in ("quantized", "scale", "zero_point")]
        self.model.add_initializer(numpy_helper.from_array(np.asarray(values, order="C"), integers[0]))
        for array, initializer in zip((scale, zero_point), integers[1:], strict=True):
            self._add_list(initializer, array)
        node_name = self._fresh(add_dequant_suffix(name))
        self._create_dq_node(integers[0], dequantized, node_name, integers[1], integers[2], axis)
        for d in decisions:
            if d.how is not How.FLOAT:
                self.model.rename_edge(self._nodes[d.edge.consumer], d.edge.index, dequantized)
        return dequantized


def _all_names(graph: onnx.GraphProto) -> set[str]:
    """Returns the names of all nodes and values, those inside bodies too."""
    names: set[str] = set()
    for inner in all_graphs(graph):
        names.update(v.name for v in (*inner.input, *inner.output, *inner.initializer))
        for node in inner.node:
            names.update((node.name, *node.input, *node.output))
    return names


def _limits_by_root(limits: Sequence[RangeLimit], quantized: Mapping[str, Decision]) -> dict[str, RangeLimit]:
    """Returns the bounds that each group's parameters must keep: those of all its members together."""
    found: dict[str, RangeLimit] = {}
    for limit in limits:
        root = quantized[limit.value].provider or limit.value
        other = found.get(root, limit)
        lows = [b for b in (limit.low, other.low) if b is not None]
        highs = [b for b in (limit.high, other.high) if b is not None]
        found[root] = RangeLimit(root, max(lows, default=None), min(highs, default=None))
    return found
