"""Readers of QDQ, of QCDQ, and of grids in uint8.

QuantizeLinear and DequantizeLinear of any exporter come into the one spelling of the canonical form:

- A zero point is always written; one number for all channels is a scalar without an axis.
- Integers of 2 and 4 bits become those of 8 with values in the narrow range, and a Clip between Q and DQ: the runtime
  has no integer kernel for the small types, and refuses some models that use them.
- Of several DQ that read the integers of one Q with the same parameters one stays.
- The operators of the runtime's own domain become those of ONNX, where the types are of 8 bits.
- Layout operators behind the DQ of a constant are performed on its integers: QKeras' weights pass a Transpose behind
  their quantizer, as do those of channels-last operators, and the runtime takes a weight for its integer kernels only
  where DQ of an initializer is what the kernel's operator reads.

Integers and zero point moved by 128 stand for the same reals: some kernels take unsigned activations alone; QONNX'
tools want signed integers around a zero point of 0.

In QCDQ, as Brevitas, QKeras and the qonnx package write it, a weight stands in a file as ``float -> QuantizeLinear ->
Clip -> DequantizeLinear`` or as ``integer initializer -> Clip -> DequantizeLinear``. Both become the integer
initializer that the runtime would compute, in front of DequantizeLinear; the bits that the Clip says are written down
beside it. Source: Pappalardo et al., "QONNX", 2022, section IV.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from kenosis_ort.formats.tensors import Array, Edits
from kenosis_ort.graph.constants import LAYERS, LAYOUT
from kenosis_ort.graph.qdq import INTEGERS, annotate, declared_datatypes, integer_bounds, width_of
from kenosis_ort.graph.view import ir, moved_by, optional, required
from kenosis_ort.graph.walk import MAIN_DOMAINS, MICROSOFT

_INTEGERS = (np.int8, np.uint8)


def from_qcdq(model: Edits) -> Edits:
    """The model with QuantizeLinear and integer Clip of constants performed.

    Args:
        model: Edits of a private model with Constant nodes made initializers, its nodes in order; it is changed.
    """
    live = model.next_step()
    for node in live.nodes:
        integers = _quantized(node, live)
        if integers is None or live.is_output(node.outputs[0]):
            continue
        if node.op_type == "Clip":
            low, high = live.bounds(node, integers.dtype)
            width = width_of(low, high, signed=integers.dtype == np.int8)
            if width is not None:
                datatype = f"{'' if integers.dtype == np.int8 else 'U'}INT{width[0]}"
                annotate(live.proto.graph, node.outputs[0].name or "", datatype)
        live.replace(node, integers)
    return live


def _quantized(node: ir.Node, live: Edits) -> Array | None:
    """Constant behind a QuantizeLinear or an integer Clip; None for other nodes."""
    x: Array | None = live.array(optional(node, 0))
    if x is None or node.domain not in (*MAIN_DOMAINS, MICROSOFT) or len(node.outputs) != 1:
        return None
    if node.op_type == "Clip" and x.dtype.type in _INTEGERS:
        if not all(live.constant(value) for value in node.inputs[1:3] if value is not None):
            return None
        low, high = live.bounds(node, x.dtype)
        return np.asarray(np.clip(x, low, max(low, high)), x.dtype)
    if node.op_type != "QuantizeLinear" or x.dtype != np.float32 or node.attributes.get_int("block_size", 0) > 0:
        return None
    scale: Array | None = live.array(node.inputs[1])
    given = optional(node, 2)
    zero_point: Array | None = np.zeros((), np.uint8) if given is None else live.array(given)
    if scale is None or zero_point is None or scale.dtype != np.float32 or zero_point.dtype.type not in _INTEGERS:
        return None
    if scale.size > 1:
        axis = node.attributes.get_int("axis", 1)
        if not -x.ndim <= axis < x.ndim or scale.shape != (x.shape[axis],) or zero_point.shape != scale.shape:
            return None  # the runtime refuses it
        shape = [-1 if at == axis % x.ndim else 1 for at in range(x.ndim)]
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    else:
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    limits = np.iinfo(zero_point.dtype)
    steps = np.round(x / scale) + zero_point.astype(np.float32)
    return np.asarray(np.clip(steps, limits.min, limits.max), zero_point.dtype)


_HALF: Final = 128


def to_unsigned(model: Edits) -> Edits:
    """The model with uint8 for int8 in activations, and in constants that meet them in other operators.

    Args:
        model: Edits of a private canonical model; it is changed.
    """
    return _Mover(model, signed=False).move()


def to_signed(model: Edits) -> Edits:
    """The model with int8 for uint8 in activations whose zero point is 128.

    Args:
        model: Edits of a private canonical model; it is changed.
    """
    return _Mover(model, signed=True).move()


class _Mover:
    def __init__(self, model: Edits, *, signed: bool) -> None:
        self.live = model.next_step()
        self._signed = signed
        self._moved: dict[ir.Value, ir.Value] = {}

    def move(self) -> Edits:
        """The model."""
        activations: set[ir.Value] = set()
        declared = declared_datatypes(self.live.proto.graph)
        for node in self.live.nodes:
            if is_quantize(node) and self._is_to_move(node):
                integers = list(self._integers(node))
                if not any(map(self.live.is_pinned, integers)) and all(map(self._keeps_pairs, integers)):
                    activations.update(integers)
                    self._move(node, 2)
            elif node.op_type == "Clip" and node.outputs[0] in activations:
                for position in range(1, len(node.inputs)):
                    self._move(node, position)
            elif is_dequantize(node) and (required(node, 0) in activations or self._is_operand(node)):
                if node.inputs[0] not in activations:
                    is_declared = required(node, 0).name in declared
                    self._move(node, 0)
                    if is_declared:
                        annotate(self.live.proto.graph, required(node, 0).name or "", "UINT8")
                self._move(node, 2)
        for value in activations:
            self.live.forget_shape(value)
        return self.live

    def _is_to_move(self, node: ir.Node) -> bool:
        """Whether the integers of a Q or DQ are of the type to leave."""
        zero_point = self.live.array(optional(node, 2))
        if zero_point is None or (self._signed and not (zero_point == _HALF).all()):
            return False
        return zero_point.dtype == (np.uint8 if self._signed else np.int8)

    def _keeps_pairs(self, value: ir.Value) -> bool:
        """Whether DQ and Clip alone read integers, with zero points and bounds that can be moved."""
        for reader in self.live.readers(value):
            is_clip = reader.op_type == "Clip" and reader.domain in MAIN_DOMAINS
            ends = [each for each in reader.inputs[1 if is_clip else 2 :] if each is not None]
            if not (is_clip or is_dequantize(reader)) or any(self.live.constant(each) is None for each in ends):
                return False
        return True

    def _is_operand(self, node: ir.Node) -> bool:
        """Whether a DQ reads a constant that meets quantized data in an operator without weights."""
        if self._signed or self.live.constant(node.inputs[0]) is None or not self._is_to_move(node):
            return False
        value = node.outputs[0]
        readers = self.live.readers(value)
        makers = (operand.producer() for r in readers for operand in r.inputs if operand not in (None, value))
        meets = any(maker is not None and is_dequantize(maker) for maker in makers)
        return meets and not any(r.op_type in LAYERS for r in readers) and not self.live.is_pinned(value)

    def _integers(self, node: ir.Node) -> Iterator[ir.Value]:
        """Yields the integers that a Q writes, and those of the Clips behind it."""
        stack = [node.outputs[0]]
        while stack:
            value = stack.pop()
            yield value
            stack += [r.outputs[0] for r in self.live.readers(value) if r.op_type == "Clip" and r.inputs[0] is value]

    def _move(self, node: ir.Node, position: int) -> None:
        """Makes a node read a constant of the other type."""
        value = node.inputs[position]
        if value is None:
            return
        if value not in self._moved:
            moved = self.live.content(value).astype(np.int64) + (-_HALF if self._signed else _HALF)
            kind = (np.int8, "signed") if self._signed else (np.uint8, "unsigned")
            self._moved[value] = self.live.store(moved.astype(kind[0]), f"{value.name}_{kind[1]}")
        self.live.read(node, position, self._moved[value])


_CONTAINERS: Final = {TensorProto.INT32: TensorProto.INT32} | {
    kind: TensorProto.INT8 if signed else TensorProto.UINT8 for kind, (signed, bits) in INTEGERS.items() if bits <= 8
}
"""The element types that are read, and the one of whole bytes that each takes in the canonical form."""


def is_quantize(node: onnx.NodeProto | ir.Node) -> bool:
    """Whether a node is QuantizeLinear, of ONNX or of the runtime."""
    return node.op_type == "QuantizeLinear" and node.domain in (*MAIN_DOMAINS, MICROSOFT)


def is_dequantize(node: onnx.NodeProto | ir.Node) -> bool:
    """Whether a node is DequantizeLinear, of ONNX or of the runtime."""
    return node.op_type == "DequantizeLinear" and node.domain in (*MAIN_DOMAINS, MICROSOFT)


def from_qdq(model: Edits) -> Edits:
    """The model with every Q and DQ of constant parameters in the canonical spelling.

    What is beyond it (scales by block, floating types of 8 and 4 bits) stays as it is; the writers say so.

    Args:
        model: Edits of a private model with Constant nodes made initializers, its nodes in order; it is changed.
    """
    return _Reader(model).run()


class _Reader:
    def __init__(self, model: Edits) -> None:
        self.live = model.next_step()
        self._widened: dict[ir.Value, ir.Value] = {}  # integers of a small type -> those of eight bits
        self._spelled: dict[tuple[ir.Value, ir.Value | None, int | None, int], tuple[ir.Value, ir.Value]] = {}

    def run(self) -> Edits:
        seen: dict[tuple[ir.Value | int | None, ...], ir.Value] = {}
        for node in self.live.nodes:
            if not is_quantize(node) and not is_dequantize(node):
                continue
            self._respell(node)
            value = node.outputs[0]
            if is_quantize(node) or self.live.is_pinned(value):
                continue
            attributes = (node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0))
            first = seen.setdefault((*node.inputs, *attributes), value)
            if first is not value and self.live.constant(node.inputs[0]) is None:
                self.live.redirect(value, first)
                self.live.remove(node)
        return self.live

    def _respell(self, node: ir.Node) -> None:
        """Gives a node its canonical spelling, where it has one."""
        elem_type = self._elem_type(node)
        scale = self.live.array(node.inputs[1])
        by_block = node.attributes.get_int("block_size", 0)
        if elem_type not in _CONTAINERS or scale is None or by_block or scale.dtype.kind != "f":
            return
        axis = None if scale.size == 1 else node.attributes.get_int("axis", 1)
        parameters = self._parameters(node, axis, _CONTAINERS[elem_type])
        if parameters is None:
            return
        self.live.put(node, node.op_type, [node.inputs[0], *parameters])
        self.live.set_attribute(node, "output_dtype", None)
        self.live.set_attribute(node, "axis", axis)
        if elem_type != _CONTAINERS[elem_type]:
            self._widen(node, *INTEGERS[elem_type])

    def _elem_type(self, node: ir.Node) -> int:
        """The element type of the integers of a Q or DQ, 0 where it does not show."""
        given = optional(node, 2)
        if given is None and is_quantize(node):
            return node.attributes.get_int("output_dtype", 0) or int(TensorProto.UINT8)
        found = self.live.constant(node.inputs[0] if given is None else given)
        if found is not None or given is not None:
            return 0 if found is None else found.data_type
        maker = required(node, 0).producer()
        return self._elem_type(maker) if maker is not None and is_quantize(maker) else 0

    def _parameters(self, node: ir.Node, axis: int | None, container: int) -> tuple[ir.Value, ir.Value] | None:
        """Scale and zero point in their canonical shapes."""
        step, given = required(node, 1), optional(node, 2)
        key = (step, given, axis, container)
        if key in self._spelled:
            return self._spelled[key]
        scale = self.live.content(step)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(container)
        zero_point = np.zeros((), dtype) if given is None else self.live.array(given)
        if zero_point is None or zero_point.size not in (1, scale.size):
            return None
        shape = () if axis is None else (scale.size,)
        found = list[ir.Value]()
        for array, value, kind in ((scale, step, scale.dtype), (zero_point, given, dtype)):
            if value is not None and array.shape == shape and array.dtype == kind:
                found.append(value)
                continue
            spread = np.broadcast_to(array.reshape(-1), shape) if shape else array.reshape(())
            base = f"{step.name}_zero_point" if value is None else value.name or ""
            found.append(self.live.store(spread.astype(kind), base))
        self._spelled[key] = (found[0], found[1])
        return self._spelled[key]

    def _widen(self, node: ir.Node, signed: bool, bits: int) -> None:
        """Gives the integers of 2 or 4 bits of a Q or DQ eight, and Clips those that are computed."""
        dtype = np.int8 if signed else np.uint8
        if is_quantize(node):
            value = node.outputs[0]
            written = self.live.hand_over(value, f"{value.name}_wide")
            ends = integer_bounds(bits, signed=signed)
            bounds = [self.live.store(np.asarray(end, dtype), f"{written.name}_bound") for end in ends]
            self.live.add(node, "Clip", [value, *bounds], written.name, behind=True, output=written)
            return
        source = required(node, 0)
        found = self.live.array(source)
        if found is not None:
            if source not in self._widened:
                self._widened[source] = wide = self.live.store(found.astype(dtype), f"{source.name}_wide")
                annotate(self.live.proto.graph, wide.name or "", f"{'' if signed else 'U'}INT{bits}")
            self.live.read(node, 0, self._widened[source])


def fold_layouts(model: Edits) -> Edits:
    """The model with its quantized constants laid out as their readers want them.

    Args:
        model: Edits of a private model in the canonical spelling, its nodes in order; it is changed.
    """
    live = model.next_step()
    constants: set[ir.Value] = set()  # what DQs of constants write
    declared = declared_datatypes(live.proto.graph)
    for node in live.nodes:
        source = optional(node, 0)
        maker = source.producer() if source is not None and source in constants else None
        if is_dequantize(node) and live.constant(source) is not None and not node.attributes.get_int("block_size", 0):
            constants.add(node.outputs[0])
        elif maker is not None and node.op_type in LAYOUT and node.domain in MAIN_DOMAINS:
            moved = _laid_out(node, maker, live)
            if moved is not None:
                integers, axis = moved
                old = required(maker, 0).name or ""
                new = live.store(integers, f"{old}_{node.op_type.lower()}")
                attributes = None if axis is None else {"axis": axis}
                live.rewrite(node, "DequantizeLinear", [new, *maker.inputs[1:]], attributes)
                constants.add(node.outputs[0])
                if old in declared:
                    declared[new.name or ""] = declared[old]
                    annotate(live.proto.graph, new.name or "", declared[old])
    live.remove_unread(lambda node: node.outputs[0] in constants)
    return live


def _laid_out(node: ir.Node, source: ir.Node, live: Edits) -> tuple[Array, int | None] | None:
    """The integers as the layout operator leaves them, and their channel axis; None where that is not known."""
    integers, scale = live.array(source.inputs[0]), live.array(source.inputs[1])
    others = [live.array(value) for value in node.inputs[1:] if value is not None]
    moved = moved_by(node, [integers, *others])
    if integers is None or scale is None or moved is None:
        return None
    if scale.ndim == 0:
        return moved[0], None
    axis = source.attributes.get_int("axis", 1) % max(integers.ndim, 1)
    channels = np.arange(integers.shape[axis]).reshape([-1 if at == axis else 1 for at in range(integers.ndim)])
    (places,) = moved_by(node, [np.broadcast_to(channels, integers.shape), *others]) or moved  # the channel of each
    along = [at for at, size in enumerate(places.shape) if size == channels.size]
    for at in along:
        shape = [-1 if other == at else 1 for other in range(places.ndim)]
        if np.array_equal(places, np.broadcast_to(channels.reshape(shape), places.shape)):
            return moved[0], at
    return None
