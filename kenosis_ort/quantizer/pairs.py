"""Edits of the model that stock's quantizer holds, and Q and DQ on its activations: parameters, and who reads what."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime.quantization import quant_utils
from onnxruntime.quantization.base_quantizer import QuantizationParams
from onnxruntime.quantization.calibrate import TensorData

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.constants import drop_unread, replace_nodes
from kenosis_ort.graph.qdq import DQ, INTEGERS, Q, integer_bounds
from kenosis_ort.graph.walk import all_names, reserve_name
from kenosis_ort.plan import Decision, EdgeRole, How, Kind, PlacementPlan, RangeLimit
from kenosis_ort.quantizer.grids import clamped, nudged_parameters

_BYTE = 8

Array = np.ndarray[Any, Any]

_BY_INT32: Final = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32)
_FIELDS: Final[dict[int, str]] = {TensorProto.FLOAT: "float_data", **dict.fromkeys(_BY_INT32, "int32_data")}
"""Where lists of the usual numbers are stored: they are many, and `onnx.helper.make_tensor` asks much of each."""


class QdqEditor:
    """Edits the model of one quantizer.

    Args:
        quantizer: Stock's quantizer.

    Attributes:
        graph: The main graph. New nodes and initializers go behind those there are.
        nodes: The nodes of the float model by name.
        makers: The nodes of the float model by the values that they write.
        constants: Initializers by name.
        fresh: Reserves a name, with a number behind it where the model has that name already.
    """

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer
        self.graph: onnx.GraphProto = quantizer.model.model.graph
        self.nodes: dict[str, onnx.NodeProto] = {node.name: node for node in self.graph.node}
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.constants: dict[str, onnx.TensorProto] = {t.name: t for t in self.graph.initializer}
        self.fresh: Callable[[str], str] = partial(reserve_name, taken=all_names(quantizer.model.model))
        self._bounds: dict[str, str] = {}
        self._removed: set[str] = set()

    def constant(self, name: str) -> onnx.TensorProto:
        """An initializer with its content."""
        found: onnx.TensorProto | None = self.quantizer.weights.get(name)
        return self.constants[name] if found is None else found

    def add_constant(self, tensor: onnx.TensorProto) -> None:
        """Adds an initializer."""
        self.graph.initializer.append(tensor)
        self.constants[tensor.name] = self.graph.initializer[-1]

    def add_list(self, name: str, array: Array, elem_type: int | None = None) -> None:
        """Adds an initializer stored as a list of numbers, as stock stores scales and zero points."""
        self.add_constant(listed(name, array, elem_type))

    def read(self, node: str, index: int, value: str) -> None:
        """Makes an input of a node of the float model read a value."""
        self.nodes[node].input[index] = value

    def rename_output(self, value: str, new: str) -> None:
        """Gives a value of the float model another name where it is written, not where it is read."""
        node = self.makers.get(value)
        if node is not None:
            node.output[list(node.output).index(value)] = new
            self.makers[new] = self.makers.pop(value)

    def remove(self, node: onnx.NodeProto) -> None:
        """Takes a node of the float model out, when all is done."""
        self._removed.add(node.name)

    def finish(self) -> None:
        """Takes out what was removed and what nothing reads any more."""
        if self._removed:
            replace_nodes(self.graph, [node for node in self.graph.node if node.name not in self._removed])
        drop_unread(self.graph)
        for tensor in self.graph.initializer:
            if tensor.name in self.quantizer.weights:  # a node that stays float reads it too
                tensor.CopyFrom(self.quantizer.weights[tensor.name])

    def add(
        self, kind: str, source: str, result: str, name: str, grid: tuple[str, str], **attributes: int | None
    ) -> None:
        """Adds Q or DQ; ``grid`` names scale and zero point, attributes that are None are left out."""
        given = {key: value for key, value in attributes.items() if value is not None}
        domain = self.quantizer.qdq_op_domain
        node = onnx.NodeProto(op_type=kind, input=(source, *grid), output=(result,), name=name, domain=domain)
        node.attribute.extend(helper.make_attribute(key, given[key]) for key in sorted(given))
        self.graph.node.append(node)

    def add_clip(self, integers: str, clipped: str, name: str, bounds: tuple[int, int], *, signed: bool) -> None:
        """Adds a Clip of bytes."""
        dtype = np.dtype(np.int8 if signed else np.uint8)
        ends = []
        for bound in bounds:
            end = f"{dtype.name}_{bound}".replace("-", "minus_")
            if end not in self._bounds:
                self._bounds[end] = self.fresh(end)
                self.add_list(self._bounds[end], np.asarray(bound, dtype))
            ends.append(self._bounds[end])
        self.graph.node.append(helper.make_node("Clip", [integers, *ends], [clipped], name=name))


def listed(name: str, array: Array, elem_type: int | None = None) -> onnx.TensorProto:
    """A tensor that holds a list of numbers, as `onnx.helper.make_tensor` makes it."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype) if elem_type is None else elem_type
    field = _FIELDS.get(kind)
    if field is None:
        return helper.make_tensor(name, kind, array.shape, array.ravel().tolist())
    return onnx.TensorProto(data_type=kind, name=name, dims=array.shape, **{field: array.ravel().tolist()})


class GridNames(NamedTuple):
    """Names of the initializers that hold scale and zero point, and the scale itself."""

    names: tuple[str, str]
    scale: float


class Pairs:
    """Puts Q and DQ on the activations of a plan.

    Args:
        editor: Of the model.
        plan: What to place where.
    """

    def __init__(self, editor: QdqEditor, plan: PlacementPlan) -> None:
        self.editor = editor
        self.quantizer = editor.quantizer
        self.plan = plan
        self._overrides = self.quantizer.tensor_quant_overrides
        self._activations = {n: d for n, d in plan.quantized_values() if n not in editor.constants}
        self._symmetric = {d.provider or n: d.symmetric for n, d in self._activations.items()}
        self._widths = {name: d.bits for n, d in self._activations.items() for name in (d.provider or n, n)}
        self._limits = _limits_by_root(plan.limits, dict(plan.quantized_values()))
        self._saturations = {limit.value: limit for limit in plan.saturations}
        self._own_grids = {limit.value: (limit.low, limit.high) for limit in plan.grids}
        self._grids: dict[str, GridNames] = {}
        self._converted: dict[str, GridNames] = {}

    def scale_read(self, value: str, consumer: str) -> float:
        """The scale at which a node reads a value."""
        return (self._converted[value] if self._reads_converted(value, consumer) else self._grids[value]).scale

    def place(self) -> None:
        """Adds all pairs."""
        barriers = frozenset(self.plan.barriers)
        roots: dict[str, GridNames] = {}
        for value, decision in self._activations.items():
            root = decision.provider or value
            if root not in roots:
                roots[root] = self._add_grid(root, self._parameters_of(root))
            self._grids[value] = roots[root]
        for value in self._activations:
            convert = self._override(value).get("convert")
            if convert:
                params = self._stock_parameters(self._range_of(value), convert)
                self._converted[value] = self._add_grid(f"{value}_convert", params)
            self._place_pairs(value, self.plan.by_value[value], barrier=value in barriers)

    def rescaled(self) -> dict[str, onnx.TensorProto]:
        """The scales and zero points by the quantizer's ranges as they are now, by name; `scale_read` follows."""
        found: dict[str, onnx.TensorProto] = {}
        roots: dict[str, GridNames] = {}
        for value, decision in self._activations.items():
            root = decision.provider or value
            if root not in roots:
                roots[root] = self._changed(self._grids[value], self._parameters_of(root), found)
            self._grids[value] = roots[root]
        for value, grid in self._converted.items():
            params = self._stock_parameters(self._range_of(value), self._override(value)["convert"])
            self._converted[value] = self._changed(grid, params, found)
        return found

    def _changed(self, grid: GridNames, params: QuantizationParams, found: dict[str, onnx.TensorProto]) -> GridNames:
        grid = grid._replace(scale=float(np.asarray(params["scale"]).item()))
        found.update((tensor.name, tensor) for tensor in _tensors(grid, params))
        return grid

    # -- parameters -------------------------------------------------------------------------------------------------

    def _override(self, value: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._overrides.get_per_tensor_overrides(value, default_val={})
        return found

    def _add_grid(self, base: str, params: QuantizationParams) -> GridNames:
        zero_point, scale = self.editor.fresh(f"{base}_zero_point"), self.editor.fresh(f"{base}_scale")
        grid = GridNames((scale, zero_point), float(np.asarray(params["scale"]).item()))
        for tensor in _tensors(grid, params):
            self.editor.add_constant(tensor)
        return grid

    def _range_of(self, value: str) -> TensorData:
        ranges = self.quantizer.tensors_range
        assert ranges is not None
        if value not in ranges:
            fix = "observe it when calibrating, or give its range"
            raise UnsupportedModelError("no calibrated range", where=f"tensor '{value}'", fix=fix)
        seen = self._own_grids.get(value) or ranges[value].range_value
        low, high = (np.float32(np.asarray(x).reshape(-1)[0]) for x in seen)
        return TensorData(lowest=low, highest=high)

    def _parameters_of(self, value: str) -> QuantizationParams:
        quantizer, own = self.quantizer, self._override(value)
        restricted = getattr(quantizer, "is_activation_restricted_asymmetric", False)  # since runtime 1.27
        plain = not ((quantizer.is_activation_symmetric and self._symmetric[value]) or restricted)
        given = {key for key in own if key != "convert"} - {"quant_type"}
        kind = own["quant_type"].tensor_type if "quant_type" in own else quantizer.activation_qType
        data = self._range_of(value)
        signed, width = INTEGERS.get(kind, (False, 0))
        if quantizer.stages.nudge and plain and not given and width >= _BYTE:
            low, high = (float(end) for end in data.range_value)
            if value not in self._own_grids:
                low, high = clamped(low, high, self._saturations.get(value))
            if quantizer.min_real_range is not None:
                low = min(low, 0.0)
                high = max(high, 0.0, low + float(quantizer.min_real_range))
            bits = width if width > _BYTE else self._widths[value]
            p = nudged_parameters(low, high, signed=signed, limit=self._limits.get(value), bits=bits)
            zero_point = np.array(p.zero_point, helper.tensor_dtype_to_np_dtype(kind))
            return QuantizationParams(zero_point=zero_point, scale=np.array(p.scale, np.float32), quant_type=kind)
        if quantizer.is_activation_symmetric and not self._symmetric[value]:
            own = {"symmetric": False, **own}
        return self._stock_parameters(data, own)

    def _stock_parameters(self, data: TensorData, own: Mapping[str, Any]) -> QuantizationParams:
        """Stock's parameters under the caller's entry, whose numbers may be plain ones."""
        arrays = {key: np.asarray(own[key], np.float32) for key in ("scale", "rmin", "rmax") if key in own}
        if "zero_point" in own:
            arrays["zero_point"] = np.asarray(own["zero_point"])
        params: QuantizationParams = self.quantizer.calc_quant_params(data, {**own, **arrays})
        return params

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _reads_converted(self, value: str, consumer: str) -> bool:
        receivers = self._override(value).get("convert", {}).get("recv_nodes")
        return value in self._converted and (receivers is None or consumer in receivers)

    def _place_pairs(self, value: str, decisions: Sequence[Decision], *, barrier: bool) -> None:
        """Puts Q and DQ on a value; edges that the plan leaves float keep reading the value itself."""
        editor, source = self.editor, value
        by_name = [d for d in decisions if d.role is EdgeRole.OUTPUT or d.edge.index < 0]
        known = any(d.how is not How.FLOAT for d in by_name)  # outputs and bodies know the name: it becomes DQ's
        if known:
            source = editor.fresh(quant_utils.add_quant_input_suffix(value))
            editor.rename_output(value, source)
        readers = [d for d in decisions if not (d.role is EdgeRole.OUTPUT or d.edge.index < 0)]
        for d in readers:
            if d.how is How.FLOAT:
                self._read(d, source)
        through = [d for d in readers if d.how is not How.FLOAT]
        if len(through) == len(readers):
            source = self._without_absorbed(value, source)
        barrier_output = self._barrier(value, source, f"{source}_barrier") if barrier else source
        if value in self.plan.splits:
            self._place_split(value, barrier_output, through, known=known)
            return
        groups = list(self._groups(through, value, known=known))
        integers = ""
        for number, (named, converted, members) in enumerate(groups):
            suffix = f"_{number + 1}" if len(groups) > 1 and self.quantizer.dedicated_qdq_pair else ""
            if not integers or self.quantizer.dedicated_qdq_pair:
                integers = self._quantize(value, barrier_output, suffix)
            read, grid, base = integers, self._grids[value], value
            if converted:
                read, grid, base = self._convert(value, integers), self._converted[value], f"{value}_convert"
            real = self._dequantize(base, read, grid, suffix, value if named else "")
            for d in members:
                self._read(d, real)

    def _place_split(self, value: str, source: str, readers: Sequence[Decision], *, known: bool) -> None:
        """Gives each reader a Q and DQ of its own, with an attribute that keeps the session from merging them.

        Where an integer kernel writes the value they go behind a pair for it and a barrier, which float nodes and the
        graph's outputs read. Source: rule int8-branches-behind-barrier of the target.
        """
        if self.plan.splits[value]:
            real = self._dequantize(value, self._quantize(value, source), self._grids[value])
            source = self._barrier(value, real, value if known else f"{real}_barrier")
        elif known:
            self._dequantize(value, self._quantize(value, source), self._grids[value], named=value)
        for number, d in enumerate(readers):
            if d.how is How.DEQUANTIZED and self.plan.splits[value]:
                self._read(d, source)
                continue
            integers = self._quantize(value, source, f"_{number + 1}", axis=number)
            self._read(d, self._dequantize(value, integers, self._grids[value], f"_{number + 1}", axis=number))

    def _quantize(self, value: str, source: str, suffix: str = "", axis: int | None = None) -> str:
        """Adds Q; returns what it writes. A scale of one number leaves ``axis`` without effect."""
        editor = self.editor
        integers = editor.fresh(quant_utils.add_quant_output_suffix(value) + suffix)
        name = editor.fresh(quant_utils.add_quant_suffix(value) + suffix)
        editor.add(Q, source, integers, name, self._grids[value].names, axis=axis)
        bits, kind = self._widths[value], self.quantizer.activation_qType
        if bits == _BYTE:
            return integers
        clipped = editor.fresh(f"{value}_Clip_Output{suffix}")
        signed = kind == TensorProto.INT8
        bounds = integer_bounds(bits, signed=signed)
        editor.add_clip(integers, clipped, editor.fresh(f"{value}_Clip{suffix}"), bounds, signed=signed)
        return clipped

    def _without_absorbed(self, value: str, source: str) -> str:
        """The value to quantize below 8 bits: the Clip of integers is the Relu or Clip that wrote ``source``.

        The runtime would look for its bounds in those of the container, keep it, and run the layer before it in float.
        """
        node = self.editor.makers.get(source)
        decided = None if node is None else self.plan.by_node.get(node.name)
        if self._widths[value] == _BYTE or node is None or decided is None or decided.kind is not Kind.ABSORBED:
            return source
        limit = self._limits.get(self._activations[value].provider or value)
        if limit is None:  # the Add of a bias, which a layer takes in too
            return source
        if limit.low == 0.0 and self.quantizer.activation_qType == TensorProto.UINT8:  # zero point 0 takes a Relu in
            node.op_type = "Relu"
            for bound in list(node.input)[1:]:
                node.input.remove(bound)
            return source
        self.editor.remove(node)
        return str(node.input[0])

    def _dequantize(
        self, base: str, integers: str, grid: GridNames, suffix: str = "", named: str = "", axis: int | None = None
    ) -> str:
        """Adds DQ; returns what it writes, ``named`` if that is given."""
        editor = self.editor
        real = named or editor.fresh(quant_utils.add_dequant_output_suffix(base) + suffix)
        editor.add(
            DQ, integers, real, editor.fresh(quant_utils.add_dequant_suffix(base) + suffix), grid.names, axis=axis
        )
        return real

    def _groups(
        self, readers: Sequence[Decision], value: str, *, known: bool
    ) -> Iterator[tuple[bool, bool, list[Decision]]]:
        """Yields the readers of one DQ each: whether it bears the value's name, whether its type is converted."""
        plain: list[Decision] = []
        changed: list[Decision] = []
        for d in readers:
            (changed if self._reads_converted(value, d.edge.consumer) else plain).append(d)
        # The graph's outputs are in the converted type only where every node reads that one.
        in_changed = value in self._converted and not plain
        if self.quantizer.dedicated_qdq_pair:
            if known:
                yield True, in_changed, []
            for converted, members in ((False, plain), (True, changed)):
                by_node: dict[str, list[Decision]] = {}
                for d in members:
                    by_node.setdefault(d.edge.consumer, []).append(d)
                for own in by_node.values():
                    yield False, converted, own
            return
        if plain or (known and not in_changed):
            yield known and not in_changed, False, plain
        if changed or (known and in_changed):
            yield known and in_changed, True, changed

    def _convert(self, value: str, integers: str) -> str:
        """Adds DQ and Q from a value's integers to those of the other type; returns these."""
        editor, grid = self.editor, self._grids[value].names
        real = editor.fresh(quant_utils.add_quant_input_suffix(f"{value}_convert"))
        editor.add(DQ, integers, real, editor.fresh(quant_utils.add_dequant_suffix(f"{value}_convert_clone")), grid)
        converted = editor.fresh(quant_utils.add_quant_output_suffix(f"{value}_convert"))
        name = editor.fresh(quant_utils.add_quant_suffix(f"{value}_convert"))
        editor.add(Q, real, converted, name, self._converted[value].names)
        return converted

    def _barrier(self, value: str, source: str, name: str) -> str:
        """Adds a node that changes nothing, and that the session does not look through; returns what it writes."""
        barrier_output = name if name == value else self.editor.fresh(name)
        node = self.editor.fresh(f"{value}_Barrier")
        self.editor.graph.node.append(helper.make_node("Max", [source], [barrier_output], name=node))
        return barrier_output

    def _read(self, decision: Decision, value: str) -> None:
        self.editor.read(decision.edge.consumer, decision.edge.index, value)


def _tensors(grid: GridNames, params: QuantizationParams) -> tuple[onnx.TensorProto, onnx.TensorProto]:
    """The initializers of a zero point and a scale."""
    zero_point = listed(grid.names[1], np.asarray(params["zero_point"]), params["quant_type"])
    return zero_point, listed(grid.names[0], np.asarray(params["scale"], np.float32))


def _limits_by_root(limits: Sequence[RangeLimit], quantized: Mapping[str, Decision]) -> dict[str, RangeLimit]:
    """The bounds that each group's parameters must keep: those of all its members together."""
    found: dict[str, RangeLimit] = {}
    for limit in limits:
        if limit.value not in quantized:  # nothing reads it
            continue
        root = quantized[limit.value].provider or limit.value
        other = found.get(root, limit)
        lows = [b for b in (limit.low, other.low) if b is not None]
        highs = [b for b in (limit.high, other.high) if b is not None]
        found[root] = RangeLimit(root, max(lows, default=None), min(highs, default=None))
    return found
