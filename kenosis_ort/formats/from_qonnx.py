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

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats import qonnx_nodes, tensors
from kenosis_ort.formats.from_qdq import is_dequantize
from kenosis_ort.graph import qdq

_CONTAINERS: dict[bool, type[np.int8] | type[np.uint8]] = {True: np.int8, False: np.uint8}
_LARGEST = np.float32(2**31 - 128)  # the largest float32 that an int32 holds


class Reader(tensors.Draft):
    """Writes one operator of QONNX after the other as Q, Clip and DQ.

    Args:
        model: A private model of QONNX, whose nodes `check_nodes` passed, with Constant nodes made initializers and
            constants folded; it is changed.
        types: Types and shapes of its values, as far as they are known.
    """

    def __init__(self, model: onnx.ModelProto, types: Mapping[str, onnx.TypeProto]) -> None:
        super().__init__(model)
        self._types = types
        self._spelling = qonnx_nodes.Spelling(self)

    def read(self) -> onnx.ModelProto:
        """The model in its new form."""
        for node in self.graph.node:
            if node.domain not in qonnx_nodes.DOMAINS:
                self.nodes.append(node)
            elif node.op_type in qonnx_nodes.QUANT:
                self.quant(node)
            elif node.op_type == "BipolarQuant":
                self.bipolar(node)
            else:
                self.trunc(node)
        qonnx_nodes.drop_imports(self.model, qonnx_nodes.DOMAINS)
        return self.finish()

    def quant(self, node: onnx.NodeProto) -> None:
        """Writes a Quant."""
        grid = qonnx_nodes.grid_of(node, self)
        constant = self._constant(node, grid.shape)
        if constant is not None:
            self._store(node, grid, grid.integers(constant))
            return
        self._check_data(node)
        self._check_grid(node, grid)
        self._quantize(node.input[0], node, grid)

    def _check_grid(self, node: onnx.NodeProto, grid: qonnx_nodes.QuantGrid) -> None:
        """Checks that QuantizeLinear can do to data what a node says."""
        if grid.rounding not in qonnx_nodes.HALF_EVEN:
            qonnx_nodes.refuse(
                node,
                f"rounding_mode {grid.rounding} of data: QuantizeLinear rounds half to even",
                "export it with rounding_mode ROUND",
            )
        if grid.bits > 8:
            qonnx_nodes.refuse(node, f"{grid.bits} bits for data are more than the 8 that integer kernels take")
        if grid.bits == 1:
            qonnx_nodes.refuse(node, "1 bit for data has no quantized form; from 2 bits on there is one")

    def bipolar(self, node: onnx.NodeProto) -> None:
        """Writes a BipolarQuant."""
        scale = qonnx_nodes.parameters(node, self)["scale"]
        grid = qonnx_nodes.QuantGrid(scale, np.zeros((), np.float32), 2, signed=True, narrow=True)
        constant = self._constant(node, grid.shape)
        if constant is not None:
            self._store(node, grid, np.where(constant >= 0, np.float32(1), np.float32(-1)))
            return
        self._check_data(node)
        self._quantize(self._spelling.bipolar(node, ""), node, grid)

    def trunc(self, node: onnx.NodeProto) -> None:
        """Writes a Trunc."""
        given = qonnx_nodes.parameters(node, self)
        bits = qonnx_nodes.width(given["output bit width"])
        scale = given.get("output scale", given["scale"])
        if bits > 7 or given["zero point"].any() or scale.size != 1:
            self._spelling.trunc(node, node.output[0])
            return
        grid = qonnx_nodes.QuantGrid(scale, np.zeros((), np.float32), 8, signed=True, narrow=False)
        self._quantize(self._spelling.trunc(node, ""), node, grid)  # int8 holds 7 bits, signed or not

    def _constant(self, node: onnx.NodeProto, shape: tuple[int, ...]) -> qonnx_nodes.Float | None:
        """The constant that a node quantizes, None where it quantizes data; checks that shapes agree."""
        name = node.input[0]
        found = self.array(name)
        if found is None:
            self._check_shape(node, shape)
            return None
        if found.dtype.kind != "f":
            qonnx_nodes.refuse(node, f"it quantizes '{name}' of type {found.dtype}; float32 is wanted")
        if not _fits(shape, found.shape):
            qonnx_nodes.refuse(
                node, f"a scale or zero point of shape {list(shape)} does not fit a value of {list(found.shape)}"
            )
        if not np.isfinite(found).all():
            qonnx_nodes.refuse(node, f"the constant '{name}' is not finite")
        return np.asarray(found, np.float32)

    def _check_shape(self, node: onnx.NodeProto, shape: tuple[int, ...]) -> None:
        known = self._types.get(node.input[0])
        if known is None or not known.tensor_type.HasField("shape"):
            return
        dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in known.tensor_type.shape.dim]
        padded = (*[1] * (len(dims) - len(shape)), *shape)
        if len(shape) > len(dims) or any(s not in (1, d) for s, d in zip(padded, dims, strict=True) if d is not None):
            shown = ["?" if dim is None else dim for dim in dims]
            qonnx_nodes.refuse(node, f"a scale or zero point of shape {list(shape)} does not fit a value of {shown}")

    def _check_data(self, node: onnx.NodeProto) -> None:
        known = self._types.get(node.input[0])
        elem_type = TensorProto.FLOAT if known is None else known.tensor_type.elem_type
        if elem_type not in (TensorProto.FLOAT, TensorProto.UNDEFINED):
            qonnx_nodes.refuse(
                node, f"it quantizes data of type {TensorProto.DataType.Name(elem_type)}; FLOAT is wanted"
            )

    def _store(self, node: onnx.NodeProto, grid: qonnx_nodes.QuantGrid, whole: qonnx_nodes.Float) -> None:
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
        name = self.constant(whole.astype(container), f"{node.input[0]}_quantized")
        if grid.bits not in (8, 32):
            bits = max(grid.bits, 2)
            qdq.annotate(self.graph, name, f"{'' if container is not np.uint8 else 'U'}INT{bits}")
        inputs = [
            name,
            self.constant(scale, f"{base}_scale"),
            self.constant(zero_point.astype(container), f"{base}_zero_point"),
        ]
        self.add("DequantizeLinear", inputs, base, output=node.output[0], axis=axis)

    def _quantize(self, x: str, node: onnx.NodeProto, grid: qonnx_nodes.QuantGrid) -> None:
        """Adds Q, Clip where it is needed, and DQ."""
        known = self._types.get(node.input[0])
        rank = len(known.tensor_type.shape.dim) if known is not None and known.tensor_type.HasField("shape") else None
        scale, zero_point, axis = self._per_axis(node, grid, rank=rank)
        container = _CONTAINERS[grid.signed]
        self._check_zero_point(node, zero_point, container)
        base = qonnx_nodes.base_name(node)
        parameters = [
            self.constant(scale, f"{base}_scale"),
            self.constant(zero_point.astype(container), f"{base}_zero_point"),
        ]
        integers = self.add("QuantizeLinear", [x, *parameters], base, axis=axis)
        bounds = qdq.integer_bounds(grid.bits, signed=grid.signed, narrow=grid.narrow)
        if bounds != qdq.integer_bounds(8, signed=grid.signed):
            ends = [self.constant(np.asarray(end, container), f"{base}_bound") for end in bounds]
            integers = self.add("Clip", [integers, *ends], base)
        self.add("DequantizeLinear", [integers, *parameters], base, output=node.output[0], axis=axis)

    def _per_axis(
        self, node: onnx.NodeProto, grid: qonnx_nodes.QuantGrid, *, rank: int | None
    ) -> tuple[qonnx_nodes.Float, qonnx_nodes.Float, int | None]:
        """Scale and zero point as Q and DQ take them, one number or one a channel, and the channels' axis."""
        shape = grid.shape
        along = [at for at, size in enumerate(shape) if size != 1]
        if len(along) > 1:
            qonnx_nodes.refuse(
                node, f"a scale or zero point of shape {list(shape)} is by group; one number or one a channel is wanted"
            )
        scale, zero_point = (np.broadcast_to(a, shape).reshape(-1) for a in (grid.scale, grid.zero_point))
        if not along:
            return scale.reshape(()), zero_point.reshape(()), None
        from_back = along[0] - len(shape)
        return scale, zero_point, from_back if rank is None else rank + from_back

    def _check_zero_point(
        self, node: onnx.NodeProto, zero_point: qonnx_nodes.Float, container: type[np.integer[Any]]
    ) -> None:
        limits = np.iinfo(container)
        if (zero_point != np.round(zero_point)).any():
            qonnx_nodes.refuse(node, f"a zero point of {zero_point.reshape(-1)[0]:g}; it has to be a whole number")
        if (zero_point < limits.min).any() or (zero_point > limits.max).any():
            worst = zero_point.reshape(-1)[int(np.argmax(np.abs(zero_point.reshape(-1))))]
            qonnx_nodes.refuse(
                node, f"the zero point {worst:g} lies outside the range [{limits.min}, {limits.max}] of its integers"
            )


def _fits(shape: tuple[int, ...], value: tuple[int, ...]) -> bool:
    """Whether parameters of a shape broadcast to a value without making it larger."""
    return len(shape) <= len(value) and all(s in (1, v) for s, v in zip(shape[::-1], value[::-1], strict=False))


def to_float(model: onnx.ModelProto) -> onnx.ModelProto:
    """The float model behind one in the canonical form.

    Args:
        model: A private model; it is changed.

    Raises:
        UnsupportedModelError: Scales by block or that are not constant, integers that no quantizer writes.
    """
    draft = tensors.Draft(model)
    quantized = {tensor.dequantize.output[0]: tensor for tensor in tensors.quantizers_of(model)}
    for node in model.graph.node:
        tensor = quantized.get(node.output[0]) if is_dequantize(node) else None
        if tensor is None:
            draft.nodes.append(node)
        elif tensor.constant is not None:
            _dequantize(tensor, draft)
        elif tensor.quantize is not None:
            _bound(tensor, draft)
        else:
            draft.nodes.append(node)
    return draft.finish(may_go=lambda node: node.op_type in ("QuantizeLinear", "Clip"))  # of integers nothing reads


def _dequantize(tensor: tensors.QuantizedTensor, draft: tensors.Draft) -> None:
    if draft.array(tensor.integers) is None:
        raise UnsupportedModelError(
            "the integers of a constant are not stored as such",
            where=tensor.where,
            fix="fold the constants of the model first",
        )
    draft.constant(tensor.real_values(), tensor.dequantize.output[0], named=True)


def _bound(tensor: tensors.QuantizedTensor, draft: tensors.Draft) -> None:
    q = tensor.quantizer
    ends = [((end - q.zero_point).astype(np.float32) * q.scale).astype(np.float32) for end in q.bounds]
    if q.axis is not None:
        ranks = [draft.rank(name) for name in (tensor.real, tensor.dequantize.output[0])]
        rank = next((rank for rank in ranks if rank is not None), None)
        if q.axis >= 0 and rank is None:
            raise UnsupportedModelError(
                "the rank of a value that is quantized by channel is not known",
                where=tensor.where,
                fix="have shapes inferred into the model first, with onnx.shape_inference",
            )
        behind = (rank or 0) - 1 - q.axis if q.axis >= 0 else -1 - q.axis
        ends = [end.reshape(-1, *[1] * behind) for end in ends]
    clip(draft, tensor.real, ends, tensor.dequantize.output[0])


def clip(draft: tensors.Draft, x: str, ends: list[qonnx_nodes.Float], output: str) -> None:
    """Adds what bounds a value, by one number or by numbers that are broadcast to it."""
    low, high = (draft.constant(end, f"{output}_bound") for end in ends)
    if ends[0].ndim == 0:
        draft.add("Clip", [x, low, high], output, output=output)
    else:
        draft.add("Min", [draft.add("Max", [x, low], output), high], output, output=output)


class FloatReader(Reader):
    """Reads QONNX into the float model behind it, with any bits and any rounding."""

    def _check_grid(self, node: onnx.NodeProto, grid: qonnx_nodes.QuantGrid) -> None:
        del node, grid  # any range will do

    def _store(self, node: onnx.NodeProto, grid: qonnx_nodes.QuantGrid, whole: qonnx_nodes.Float) -> None:
        real = ((whole - grid.zero_point) * grid.scale).astype(np.float32)
        self.constant(real, node.output[0], named=True)

    def _quantize(self, x: str, node: onnx.NodeProto, grid: qonnx_nodes.QuantGrid) -> None:
        bounds = qdq.integer_bounds(grid.bits, signed=grid.signed, narrow=grid.narrow)
        if grid.bits == 1 and grid.signed:
            bounds = (-1, 1)
        scale, zero_point = np.broadcast_arrays(grid.scale, grid.zero_point)
        ends = [np.asarray((np.float32(end) - zero_point) * scale, np.float32) for end in bounds]
        if ends[0].size == 1:
            ends = [end.reshape(()) for end in ends]
        clip(self, x, ends, node.output[0])

    def bipolar(self, node: onnx.NodeProto) -> None:
        """Writes a BipolarQuant: a constant's values, the sign of data."""
        if self.array(node.input[0]) is not None:
            super().bipolar(node)
            return
        qonnx_nodes.parameters(node, self)
        self._spelling.bipolar(node, node.output[0])

    def trunc(self, node: onnx.NodeProto) -> None:
        """Writes a Trunc as what it divides by."""
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
        scaled = self.constant(np.asarray(factor, np.float32), f"{base}_factor")
        if not shift.any():
            self.add("Mul", [node.input[0], scaled], base, output=node.output[0])
            return
        product = self.add("Mul", [node.input[0], scaled], base)
        self.add("Add", [product, self.constant(shift, f"{base}_shift")], base, output=node.output[0])
