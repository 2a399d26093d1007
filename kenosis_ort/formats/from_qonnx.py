"""Readers of QONNX, layouts of its constants, and the float model behind a quantized one.

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

QKeras' weights pass a Transpose behind their quantizer, as do those of channels-last operators. The runtime takes a
weight for its integer kernels only where DQ of an initializer is what the kernel's operator reads.

``Conv``, ``MaxPool`` and ``BatchNormalization`` of the domain ``qonnx.custom_op.channels_last`` read and write values
of shape (N, ..., C); Conv's weights are (O, ..., I). They become ONNX's own between two Transposes. All else about them
is as in ONNX. When it loads the model the runtime moves the Transposes together and drops those that cancel out.
Source: what the `qonnx` package 1.0.0 executes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats import qonnx_nodes, tensors
from kenosis_ort.formats.from_qdq import is_dequantize
from kenosis_ort.graph import qdq
from kenosis_ort.graph.constants import LAYOUT
from kenosis_ort.graph.walk import MAIN_DOMAINS, attribute, attribute_int

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
        scale = qonnx_nodes.parameter(node, 1, "scale", self)
        qonnx_nodes.check_scale(node, scale)
        zero = np.zeros((), np.float32)
        grid = qonnx_nodes.QuantGrid(
            qonnx_nodes.label(node), scale, zero, bits=2, signed=True, narrow=True, rounding="ROUND"
        )
        constant = self._constant(node, grid.shape)
        if constant is not None:
            self._store(node, grid, np.where(constant >= 0, np.float32(1), np.float32(-1)))
            return
        self._check_data(node)
        self._quantize(self._spelling.bipolar(node, ""), node, grid)

    def trunc(self, node: onnx.NodeProto) -> None:
        """Writes a Trunc."""
        second = len(node.input) == 6
        names = ("scale", "zero point", "input bit width", "output scale" if second else "output bit width")
        scale, zero_point, before, then = (
            qonnx_nodes.parameter(node, at, name, self) for at, name in zip((1, 2, 3, 4), names, strict=True)
        )
        qonnx_nodes.check_scale(node, scale)
        qonnx_nodes.check_bits(node, before)
        if second:
            qonnx_nodes.check_scale(node, then)
        bits = qonnx_nodes.check_bits(
            node, qonnx_nodes.parameter(node, 5, "output bit width", self) if second else then
        )
        out_scale = then if second else scale
        if bits > 7 or zero_point.any() or out_scale.size != 1:
            self._spelling.trunc(node, node.output[0])
            return
        grid = qonnx_nodes.QuantGrid(
            qonnx_nodes.label(node), out_scale, np.zeros((), np.float32), 8, signed=True, narrow=False, rounding="ROUND"
        )
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
        raise UnsupportedModelError("the integers of a constant are not stored as such", where=tensor.where)
    draft.constant(tensor.real_values(), tensor.dequantize.output[0], named=True)


def _bound(tensor: tensors.QuantizedTensor, draft: tensors.Draft) -> None:
    q = tensor.quantizer
    ends = [((end - q.zero_point).astype(np.float32) * q.scale).astype(np.float32) for end in q.bounds]
    if q.axis is not None:
        ranks = [draft.rank(name) for name in (tensor.real, tensor.dequantize.output[0])]
        rank = next((rank for rank in ranks if rank is not None), None)
        if q.axis >= 0 and rank is None:
            raise UnsupportedModelError(
                "the rank of a value that is quantized by channel is not known", where=tensor.where
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
        qonnx_nodes.check_scale(node, qonnx_nodes.parameter(node, 1, "scale", self))
        self._spelling.bipolar(node, node.output[0])

    def trunc(self, node: onnx.NodeProto) -> None:
        """Writes a Trunc as what it divides by."""
        second = len(node.input) == 6
        scale = qonnx_nodes.parameter(node, 1, "scale", self)
        zero_point = qonnx_nodes.parameter(node, 2, "zero point", self)
        qonnx_nodes.check_scale(node, scale)
        base = qonnx_nodes.base_name(node)
        if second:
            out_scale = qonnx_nodes.parameter(node, 4, "output scale", self)
            qonnx_nodes.check_scale(node, out_scale)
            factor = out_scale / scale / np.exp2(np.round(np.log2(out_scale / scale)))
            shift = np.zeros((), np.float32)
        else:
            before = qonnx_nodes.check_bits(node, qonnx_nodes.parameter(node, 3, "input bit width", self))
            after = qonnx_nodes.check_bits(node, qonnx_nodes.parameter(node, 4, "output bit width", self))
            factor = np.float32(2.0 ** (after - before))
            shift = np.asarray(zero_point * scale * (factor - 1), np.float32)
        scaled = self.constant(np.asarray(factor, np.float32), f"{base}_factor")
        if not shift.any():
            self.add("Mul", [node.input[0], scaled], base, output=node.output[0])
            return
        product = self.add("Mul", [node.input[0], scaled], base)
        self.add("Add", [product, self.constant(shift, f"{base}_shift")], base, output=node.output[0])


def fold_layouts(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its quantized constants laid out as their readers want them.

    Args:
        model: A private model in the canonical spelling, its nodes in order; it is changed.
    """
    draft = tensors.Draft(model)
    constants: dict[str, onnx.NodeProto] = {}  # what a DQ of a constant writes -> the DQ
    declared = qdq.declared_datatypes(model.graph)
    for node in model.graph.node:
        source = constants.get(node.input[0]) if node.input else None
        if is_dequantize(node) and draft.is_constant(node.input[0]) and not attribute_int(node, "block_size", 0):
            constants[node.output[0]] = node
        elif source is not None and node.op_type in LAYOUT and node.domain in MAIN_DOMAINS:
            moved = _laid_out(node, source, draft)
            if moved is not None:
                node = _dequantized(node, source, *moved, draft)
                constants[node.output[0]] = node
                if source.input[0] in declared:
                    declared[node.input[0]] = declared[source.input[0]]
                    qdq.annotate(model.graph, node.input[0], declared[source.input[0]])
        draft.nodes.append(node)
    return draft.finish(may_go=lambda node: node.output[0] in constants)


def _laid_out(
    node: onnx.NodeProto, source: onnx.NodeProto, draft: tensors.Draft
) -> tuple[npt.NDArray[Any], int | None] | None:
    """The integers as the layout operator leaves them, and their channel axis; None where that is not known."""
    integers, scale = draft.array(source.input[0]), draft.array(source.input[1])
    if integers is None or scale is None:
        return None
    axis = None if scale.ndim == 0 else attribute_int(source, "axis", 1) % max(integers.ndim, 1)
    if node.op_type == "Identity":
        return integers, axis
    if node.op_type == "Transpose":
        given = attribute(node, "perm")
        perm = list(given.ints) if given is not None else list(range(integers.ndim))[::-1]
        if sorted(perm) != list(range(integers.ndim)):
            return None
        return integers.transpose(perm), None if axis is None else perm.index(axis)
    shape = _shape(node, integers.shape, draft)
    if shape is None:
        return None
    if axis is not None:
        ahead = math.prod(integers.shape[:axis])
        found = [at for at, size in enumerate(shape) if size == integers.shape[axis] and math.prod(shape[:at]) == ahead]
        if not found:
            return None
        axis = found[0]
    return integers.reshape(shape), axis


def _shape(node: onnx.NodeProto, before: tuple[int, ...], draft: tensors.Draft) -> tuple[int, ...] | None:
    """The shape that Reshape, Flatten, Squeeze or Unsqueeze gives a value."""
    if node.op_type == "Flatten":
        axis = attribute_int(node, "axis", 1)
        axis += len(before) if axis < 0 else 0
        return math.prod(before[:axis]), math.prod(before[axis:])
    numbers = draft.array(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    declared = None if numbers is None else [int(n) for n in numbers.reshape(-1)]
    if node.op_type == "Reshape":
        return None if declared is None or attribute_int(node, "allowzero", 0) else _reshaped(declared, before)
    if node.op_type == "Squeeze":
        axes = range(len(before)) if declared is None else [a % max(len(before), 1) for a in declared]
        return tuple(size for at, size in enumerate(before) if not (at in axes and size == 1))
    if declared is None:
        return None
    rank = len(before) + len(declared)
    axes = [a % rank for a in declared]
    rest = iter(before)
    return tuple(1 if at in axes else next(rest) for at in range(rank))


def _reshaped(declared: Sequence[int], before: tuple[int, ...]) -> tuple[int, ...] | None:
    if any(n == 0 and at >= len(before) for at, n in enumerate(declared)) or declared.count(-1) > 1:
        return None
    sizes = [before[at] if n == 0 else n for at, n in enumerate(declared)]
    known = math.prod(n for n in sizes if n != -1)
    total = math.prod(before)
    if -1 in sizes:
        if known <= 0 or total % known:
            return None
        sizes[sizes.index(-1)] = total // known
    return tuple(sizes) if math.prod(sizes) == total and min(sizes, default=1) >= 0 else None


def _dequantized(
    node: onnx.NodeProto, source: onnx.NodeProto, integers: npt.NDArray[Any], axis: int | None, draft: tensors.Draft
) -> onnx.NodeProto:
    name = draft.constant(np.ascontiguousarray(integers), f"{source.input[0]}_{node.op_type.lower()}")
    new = onnx.helper.make_node("DequantizeLinear", [name, *source.input[1:]], [node.output[0]], name=node.name)
    if axis is not None:
        new.attribute.append(onnx.helper.make_attribute("axis", axis))
    return new


_OPERATORS = frozenset({"Conv", "MaxPool", "BatchNormalization"})


def to_channels_first(model: onnx.ModelProto) -> None:
    """Puts ONNX's operators and Transposes in the place of the channels-last ones, in place.

    Nothing but Python looks at the model here.

    Raises:
        UnsupportedModelError: Another operator of the domain, or the rank of its data is not known.
    """
    if not any(node.domain == qonnx_nodes.CHANNELS_LAST for node in model.graph.node):
        return
    draft = tensors.Draft(model)
    for node in model.graph.node:
        if node.domain != qonnx_nodes.CHANNELS_LAST:
            draft.nodes.append(node)
            continue
        if node.op_type not in _OPERATORS or len(node.output) != 1 or not node.input:
            raise UnsupportedModelError(
                f"The channels-last operator has no counterpart in other formats (known are "
                f"{', '.join(sorted(_OPERATORS))}, with one output).",
                where=qonnx_nodes.label(node),
            )
        _write(node, _rank(node, draft), draft)
    draft.finish()
    qonnx_nodes.drop_imports(model, (qonnx_nodes.CHANNELS_LAST,))


def _write(node: onnx.NodeProto, rank: int, draft: tensors.Draft) -> None:
    base = node.name or node.output[0]
    first, last = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
    new = onnx.NodeProto()
    new.CopyFrom(node)
    new.domain = ""
    for at in range(2 if node.op_type == "Conv" else 1):
        new.input[at] = draft.add("Transpose", [node.input[at]], base, perm=first)
    new.output[0] = draft.fresh(f"{base}_channels_first")
    draft.nodes.append(new)
    draft.add("Transpose", [new.output[0]], base, output=node.output[0], perm=last)


def _rank(node: onnx.NodeProto, draft: tensors.Draft) -> int:
    kernel = attribute(node, "kernel_shape")
    if kernel is not None and kernel.ints:
        return len(kernel.ints) + 2
    for name in (node.input[0], node.output[0]):
        rank = draft.rank(name)
        if rank is not None and rank > 1:
            return rank
    raise UnsupportedModelError(
        "The rank of the data of a channels-last operator is not known.",
        where=qonnx_nodes.label(node),
        fix="declare the shapes of the values, as qonnx' InferShapes does, or give kernel_shape",
    )
