"""Readers of QONNX, and the float model behind a quantized one.

QONNX of the qonnx package, Brevitas, QKeras and FINN comes into the canonical form:

- A Quant of a constant becomes an integer initializer and DequantizeLinear; the integers are computed here, so that
  any way of rounding will do. One of more than 8 bits, as of a bias, takes int32.
- A Quant of data becomes QuantizeLinear, Clip where fewer than 8 bits or a narrow range ask for it, DequantizeLinear.
- A BipolarQuant of a constant becomes the integers -1 and 1. One of data compares with zero first.
- Trunc is written in ONNX's own operators: there is no QuantizeLinear that rounds down. It stands behind pools, where
  data are small.

The float model behind a quantized one has its ranges without its grids:

- A quantized constant becomes the float constant that its integers stand for.
- The quantizer of an activation becomes a Clip to the range of its integers. What a quantizer cuts off belongs to what
  the model computes (a quantizer that begins at zero is often the only Relu that is left), its rounding does not.
- The sign that a BipolarQuant takes of data stays: without it there would be no net.
- Trunc divides, without rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats import qonnx_nodes, tensors
from kenosis_ort.graph import qdq
from kenosis_ort.graph.constants import QONNX_DOMAINS
from kenosis_ort.graph.shapes import rank_in
from kenosis_ort.graph.view import ir, required

_CONTAINERS: dict[bool, type[np.int8] | type[np.uint8]] = {True: np.int8, False: np.uint8}
_LARGEST = np.float32(2**31 - 128)  # the largest float32 that an int32 holds


class Reader(tensors.Edits):
    """Writes one operator of QONNX after the other as Q, Clip and DQ.

    Args:
        model: A private model of QONNX, whose nodes `check_nodes` passed, with Constant nodes made initializers and
            constants folded; it is changed.
        types: Types and shapes of its values, as far as they are known.
    """

    def __init__(self, model: onnx.ModelProto, types: Mapping[str, onnx.TypeProto]) -> None:
        super().__init__(model, copied=False)
        self._types = types

    def run(self) -> onnx.ModelProto:
        """The model in its new form."""
        for node in self.nodes:
            if node.domain in QONNX_DOMAINS:
                operator = qonnx_nodes.operator_of(node)
                quantize = {"BipolarQuant": self.bipolar, "Trunc": self.trunc}.get(operator, self.quant)
                self.replace(node, quantize(node))
        model = self.finish()
        qonnx_nodes.drop_imports(model, QONNX_DOMAINS)
        return model

    def quant(self, node: ir.Node) -> tensors.Array | ir.Value:
        """The value of a Quant."""
        grid = qonnx_nodes.grid_of(node, self)
        constant = self._constant(node, grid.shape)
        if constant is not None:
            return self._store(node, grid, grid.integers(constant))
        self._check_data(node)
        self._check_grid(node, grid)
        return self._quantize(required(node, 0), node, grid)

    def _check_grid(self, node: ir.Node, grid: qonnx_nodes.QuantGrid) -> None:
        """Checks that QuantizeLinear can do to data what a node says."""
        if grid.rounding not in qonnx_nodes.HALF_EVEN:
            clause = f"rounding_mode {grid.rounding} of data: QuantizeLinear rounds half to even"
            qonnx_nodes.refuse(node, clause, "export it with rounding_mode ROUND")
        if grid.bits > 8:
            qonnx_nodes.refuse(node, f"{grid.bits} bits for data are more than the 8 that integer kernels take")
        if grid.bits == 1:
            qonnx_nodes.refuse(node, "1 bit for data has no quantized form; from 2 bits on there is one")

    def bipolar(self, node: ir.Node) -> tensors.Array | ir.Value:
        """The value of a BipolarQuant."""
        scale = qonnx_nodes.parameters(node, self)["scale"]
        grid = qonnx_nodes.QuantGrid(scale, np.zeros((), np.float32), 2, signed=True, narrow=True)
        constant = self._constant(node, grid.shape)
        if constant is not None:
            return self._store(node, grid, np.where(constant >= 0, np.float32(1), np.float32(-1)))
        self._check_data(node)
        return self._quantize(qonnx_nodes.Spelling(self, node).bipolar(), node, grid)

    def trunc(self, node: ir.Node) -> ir.Value:
        """The value of a Trunc."""
        given = qonnx_nodes.parameters(node, self)
        bits = qonnx_nodes.width(given["output bit width"])
        scale = given.get("output scale", given["scale"])
        spelled = qonnx_nodes.Spelling(self, node).trunc()
        if bits > 7 or given["zero point"].any() or scale.size != 1:
            return spelled
        grid = qonnx_nodes.QuantGrid(scale, np.zeros((), np.float32), 8, signed=True, narrow=False)
        return self._quantize(spelled, node, grid)  # int8 holds 7 bits, signed or not

    def _constant(self, node: ir.Node, shape: tuple[int, ...]) -> qonnx_nodes.Float | None:
        """The constant that a node quantizes, None where it quantizes data; checks that shapes agree."""
        value = required(node, 0)
        found = self.array(value)
        if found is None:
            self._check_shape(node, shape)
            return None
        if found.dtype.kind != "f":
            qonnx_nodes.refuse(node, f"it quantizes '{value.name}' of type {found.dtype}; float32 is wanted")
        known = zip(shape[::-1], found.shape[::-1], strict=False)
        if len(shape) > found.ndim or any(size not in (1, whole) for size, whole in known):
            clause = f"a scale or zero point of shape {list(shape)} does not fit a value of {list(found.shape)}"
            qonnx_nodes.refuse(node, clause)
        if not np.isfinite(found).all():
            qonnx_nodes.refuse(node, f"the constant '{value.name}' is not finite")
        return np.asarray(found, np.float32)

    def _type(self, node: ir.Node) -> onnx.TypeProto | None:
        """Type and shape of the value that a node quantizes, as far as known."""
        return self._types.get(required(node, 0).name or "")

    def _check_shape(self, node: ir.Node, shape: tuple[int, ...]) -> None:
        known = self._type(node)
        if known is None or not known.tensor_type.HasField("shape"):
            return
        dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in known.tensor_type.shape.dim]
        padded = (*[1] * (len(dims) - len(shape)), *shape)
        if len(shape) > len(dims) or any(s not in (1, d) for s, d in zip(padded, dims, strict=True) if d is not None):
            shown = ["?" if dim is None else dim for dim in dims]
            qonnx_nodes.refuse(node, f"a scale or zero point of shape {list(shape)} does not fit a value of {shown}")

    def _check_data(self, node: ir.Node) -> None:
        known = self._type(node)
        elem_type = TensorProto.FLOAT if known is None else known.tensor_type.elem_type
        if elem_type not in (TensorProto.FLOAT, TensorProto.UNDEFINED):
            kind = TensorProto.DataType.Name(elem_type)
            qonnx_nodes.refuse(node, f"it quantizes data of type {kind}; FLOAT is wanted")

    def _store(self, node: ir.Node, grid: qonnx_nodes.QuantGrid, whole: qonnx_nodes.Float) -> tensors.Array | ir.Value:
        """Stores a constant's integers and adds the DQ that reads them."""
        scale, zero_point, axis = self._per_axis(node, grid, rank=whole.ndim)
        base = qonnx_nodes.base_name(node)
        container: type[np.int8] | type[np.uint8] | type[np.int32] = _CONTAINERS[grid.signed]
        if grid.bits <= 8:
            self._check_zero_point(node, zero_point, container)
        else:
            container = np.int32
            if zero_point.any():
                qonnx_nodes.refuse(node, f"a zero point beside {grid.bits} bits; from 9 bits on it has to be 0")
            whole = np.minimum(whole, _LARGEST)
        integers = self.store(whole.astype(container), f"{required(node, 0).name}_quantized")
        if grid.bits not in (8, 32):
            datatype = f"{'' if container is not np.uint8 else 'U'}INT{max(grid.bits, 2)}"
            qdq.annotate(self.proto.graph, integers.name or "", datatype)
        step, zero = self.store(scale, f"{base}_scale"), self.store(zero_point.astype(container), f"{base}_zero_point")
        return self.add(node, "DequantizeLinear", [integers, step, zero], base, axis=axis)

    def _quantize(self, x: ir.Value, node: ir.Node, grid: qonnx_nodes.QuantGrid) -> ir.Value:
        """Adds Q, Clip where it is needed, and DQ; returns what that writes."""
        rank = rank_in(self._types, required(node, 0).name or "")
        scale, zero_point, axis = self._per_axis(node, grid, rank=rank)
        container = _CONTAINERS[grid.signed]
        self._check_zero_point(node, zero_point, container)
        base = qonnx_nodes.base_name(node)
        stored = ((scale, "scale"), (zero_point.astype(container), "zero_point"))
        parameters = [self.store(array, f"{base}_{what}") for array, what in stored]
        integers = self.add(node, "QuantizeLinear", [x, *parameters], base, axis=axis)
        bounds = qdq.integer_bounds(grid.bits, signed=grid.signed, narrow=grid.narrow)
        if bounds != qdq.integer_bounds(8, signed=grid.signed):
            ends = [self.store(np.asarray(end, container), f"{base}_bound") for end in bounds]
            integers = self.add(node, "Clip", [integers, *ends], base)
        return self.add(node, "DequantizeLinear", [integers, *parameters], base, axis=axis)

    def _per_axis(
        self, node: ir.Node, grid: qonnx_nodes.QuantGrid, *, rank: int | None
    ) -> tuple[qonnx_nodes.Float, qonnx_nodes.Float, int | None]:
        """Scale and zero point as Q and DQ take them, one number or one a channel, and the channels' axis."""
        shape = grid.shape
        along = [at for at, size in enumerate(shape) if size != 1]
        if len(along) > 1:
            clause = f"a scale or zero point of shape {list(shape)} is by group; one number or one a channel is wanted"
            qonnx_nodes.refuse(node, clause)
        scale, zero_point = (np.broadcast_to(a, shape).reshape(-1) for a in (grid.scale, grid.zero_point))
        if not along:
            return scale.reshape(()), zero_point.reshape(()), None
        from_back = along[0] - len(shape)
        return scale, zero_point, from_back if rank is None else rank + from_back

    def _check_zero_point(self, node: ir.Node, zero_point: qonnx_nodes.Float, container: type[np.integer[Any]]) -> None:
        limits = np.iinfo(container)
        if (zero_point != np.round(zero_point)).any():
            qonnx_nodes.refuse(node, f"a zero point of {zero_point.reshape(-1)[0]:g}; it has to be a whole number")
        if (zero_point < limits.min).any() or (zero_point > limits.max).any():
            worst = zero_point.reshape(-1)[int(np.argmax(np.abs(zero_point.reshape(-1))))]
            bounds = f"[{limits.min}, {limits.max}]"
            qonnx_nodes.refuse(node, f"the zero point {worst:g} lies outside the range {bounds} of its integers")


def to_float(model: onnx.ModelProto) -> onnx.ModelProto:
    """The float model behind one in the canonical form.

    Args:
        model: A private model; it is changed.

    Raises:
        UnsupportedModelError: Scales by block or that are not constant, integers that no quantizer writes.
    """
    live = tensors.Edits(model, copied=False)
    for tensor in tensors.quantizers_of(model):
        node = live.makers[tensor.dequantize.output[0]]
        if tensor.constant is not None:
            if live.constant(node.inputs[0]) is None:
                what, fix = "the integers of a constant are not stored as such", "fold the constants of the model first"
                raise UnsupportedModelError(what, where=tensor.where, fix=fix)
            live.replace(node, tensor.real_values())
        elif tensor.quantize is not None:
            _bound(tensor, node, live)
    live.remove_unread(lambda node: node.op_type in ("QuantizeLinear", "Clip"))  # of integers nothing reads
    return live.finish()


def _bound(tensor: tensors.QuantizedTensor, node: ir.Node, live: tensors.Edits) -> None:
    assert tensor.quantize is not None
    q, x = tensor.quantizer, required(live.makers[tensor.quantize.output[0]], 0)
    ends = [((end - q.zero_point).astype(np.float32) * q.scale).astype(np.float32) for end in q.bounds]
    if q.axis is not None:
        rank = next((rank for rank in map(live.rank, (x, node.outputs[0])) if rank is not None), None)
        if q.axis >= 0 and rank is None:
            what = "the rank of a value that is quantized by channel is not known"
            fix = "have shapes inferred into the model first, with onnx.shape_inference"
            raise UnsupportedModelError(what, where=tensor.where, fix=fix)
        behind = (rank or 0) - 1 - q.axis if q.axis >= 0 else -1 - q.axis
        ends = [end.reshape(-1, *[1] * behind) for end in ends]
    live.replace(node, _clip(node, x, ends, live))


def _clip(node: ir.Node, x: ir.Value, ends: Sequence[qonnx_nodes.Float], live: tensors.Edits) -> ir.Value:
    """Bounds of a value in front of a node: one number, or numbers that are broadcast to it."""
    base = node.outputs[0].name
    low, high = (live.store(end, f"{base}_bound") for end in ends)
    if ends[0].ndim == 0:
        return live.add(node, "Clip", [x, low, high], base)
    return live.add(node, "Min", [live.add(node, "Max", [x, low], base), high], base)


class FloatReader(Reader):
    """Reads QONNX into the float model behind it, with any bits and any rounding."""

    def _check_grid(self, node: ir.Node, grid: qonnx_nodes.QuantGrid) -> None:
        del node, grid  # any range will do

    def _store(self, node: ir.Node, grid: qonnx_nodes.QuantGrid, whole: qonnx_nodes.Float) -> tensors.Array | ir.Value:
        del node
        return np.asarray((whole - grid.zero_point) * grid.scale, np.float32)

    def _quantize(self, x: ir.Value, node: ir.Node, grid: qonnx_nodes.QuantGrid) -> ir.Value:
        bounds = qdq.integer_bounds(grid.bits, signed=grid.signed, narrow=grid.narrow)
        if grid.bits == 1 and grid.signed:
            bounds = (-1, 1)
        scale, zero_point = np.broadcast_arrays(grid.scale, grid.zero_point)
        ends = [np.asarray((np.float32(end) - zero_point) * scale, np.float32) for end in bounds]
        if ends[0].size == 1:
            ends = [end.reshape(()) for end in ends]
        return _clip(node, x, ends, self)

    def bipolar(self, node: ir.Node) -> tensors.Array | ir.Value:
        """The value of a BipolarQuant: a constant's values, the sign of data."""
        if self.constant(node.inputs[0]) is not None:
            return super().bipolar(node)
        qonnx_nodes.parameters(node, self)
        return qonnx_nodes.Spelling(self, node).bipolar()

    def trunc(self, node: ir.Node) -> ir.Value:
        """The value of a Trunc: what it divides by."""
        given = qonnx_nodes.parameters(node, self)
        scale, base = given["scale"], qonnx_nodes.base_name(node)
        if "output scale" in given:
            ratio = given["output scale"] / scale
            factor = ratio / np.exp2(np.round(np.log2(ratio)))
            shift = np.zeros((), np.float32)
        else:
            before, after = (qonnx_nodes.width(given[f"{which} bit width"]) for which in ("input", "output"))
            factor = np.float32(2.0 ** (after - before))
            shift = np.asarray(given["zero point"] * scale * (factor - 1), np.float32)
        scaled = self.store(np.asarray(factor, np.float32), f"{base}_factor")
        product = self.add(node, "Mul", [node.inputs[0], scaled], base)
        if not shift.any():
            return product
        return self.add(node, "Add", [product, self.store(shift, f"{base}_shift")], base)
