"""The canonical form of a quantized model: how each tensor is quantized, and the graph of one that is edited.

The canonical form is a QDQ model. A quantized activation is ``QuantizeLinear -> Clip -> DequantizeLinear``: the Clip is
one of integers and there where fewer bits than those of the container count. A quantized constant is an integer
initializer in front of DequantizeLinear, its values inside the range of its bits. How many bits a constant has, where
they are fewer than its container's, stands in the graph's ``quantization_annotation`` under the key that QONNX' tools
use for the data type of a tensor, as ``INT4`` or ``UINT2``; runtimes ignore it.

Writers (``to_*``) take this form, readers (``from_*``) return it.
Source: Pappalardo et al., "QONNX", 2022, equations 1 to 4 and section IV; `qonnx.core.modelwrapper` for the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.constants import drop_unread
from kenosis_ort.graph.live import Attribute, Attributes, Inputs, LiveGraph
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.qdq import INTEGERS, declared_datatypes, integer_bounds, width_of
from kenosis_ort.graph.view import ir
from kenosis_ort.graph.walk import MAIN_DOMAINS, MICROSOFT, all_names, attribute_int

_MOVED: Final = 128  # between int8 and uint8
_DATATYPE: Final = re.compile(r"(U?)INT(\d{1,2})")
_ANEW: Final = "leave the model in the format that it has, or quantize the float model anew with format="
_FOLD: Final = "fold the constants of the model first"
_SIGNED: Final = {**INTEGERS, TensorProto.INT32: (True, 32)}


@dataclass(frozen=True, eq=False)
class QuantizationSpec:
    """Quantization of one tensor: ``real = scale * (integer - zero_point)``.

    Attributes:
        scale: float32, shape () or (channels,).
        zero_point: int64, the shape of ``scale``.
        axis: Channel axis, counted from the front; None where there is one scale for all.
        signed: Integers may be negative.
        narrow: The range is one short at its end away from zero: -7..7 for -8..7, 0..14 for 0..15.
        bits: Width of the integers, 2 to 32.
    """

    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.int64]
    axis: int | None
    signed: bool
    narrow: bool
    bits: int

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and largest integer."""
        return integer_bounds(self.bits, signed=self.signed, narrow=self.narrow)

    def same_as(self, other: QuantizationSpec) -> bool:
        """Whether two quantize alike to the bit."""
        plain = ("axis", "signed", "narrow", "bits")
        same = all(getattr(self, name) == getattr(other, name) for name in plain)
        return same and all(np.array_equal(getattr(self, a), getattr(other, a)) for a in ("scale", "zero_point"))


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """One quantized tensor of a canonical model.

    Attributes:
        quantizer: How.
        real: The float value that is quantized; empty for a constant and for integers that enter the graph as such.
        integers: What DQ reads: an initializer, what Q or Clip writes, or an integer input of the graph.
        quantize: The Q node, None where the integers are given.
        clip: The Clip between Q and DQ, None where the container's range is the range.
        dequantize: The DQ node.
        constant: The initializer, None for an activation.
        elem_type: ONNX element type of the integers.
    """

    quantizer: QuantizationSpec
    real: str
    integers: str
    quantize: onnx.NodeProto | None
    clip: onnx.NodeProto | None
    dequantize: onnx.NodeProto
    constant: onnx.TensorProto | None
    elem_type: int

    @property
    def where(self) -> str:
        """Name of the tensor in messages."""
        return f"node '{self.dequantize.name or self.dequantize.output[0]}'"

    def along(self, part: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
        """A scale or zero point in the shape that broadcasts to a value of a rank."""
        if part.ndim == 0:
            return part
        assert self.quantizer.axis is not None
        return part.reshape([-1 if at == self.quantizer.axis % rank else 1 for at in range(rank)])

    def real_values(self, dtype: type[np.floating[Any]] = np.float32) -> npt.NDArray[Any]:
        """A constant as DQ computes it, in float32 or more finely."""
        assert self.constant is not None
        array = array_in(self.constant).astype(np.int64)
        scale, zero = (self.along(part, array.ndim) for part in (self.quantizer.scale, self.quantizer.zero_point))
        return np.asarray((array - zero).astype(dtype) * scale.astype(dtype), dtype)


def quantizers_of(model: onnx.ModelProto) -> tuple[QuantizedTensor, ...]:
    """The quantized tensors of the main graph of a canonical model, one for each DQ, in graph order.

    Raises:
        UnsupportedModelError: Scales by block or that are not constant, and a Clip whose bounds are no width of bits.
    """
    return tuple(_found(model))


def _found(model: onnx.ModelProto) -> Iterator[QuantizedTensor]:
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {value: node for node in graph.node for value in node.output if value}
    inputs = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    declared = declared_datatypes(graph)
    for node in graph.node:
        if node.op_type != "DequantizeLinear" or node.domain not in (*MAIN_DOMAINS, MICROSOFT):
            continue
        where = f"node '{node.name or node.output[0]}'"
        source = str(node.input[0])
        clip, quantize, constant = None, None, constants.get(source)
        made = makers.get(source)
        if made is not None and made.op_type == "Clip" and made.domain in MAIN_DOMAINS:
            clip, made = made, makers.get(made.input[0])
        if made is not None and made.op_type == "QuantizeLinear":
            quantize = made
        elif made is not None or (clip is not None and constants.get(clip.input[0]) is None):
            clip = None  # integers that a node of integers writes, whose Clip is its own
        if clip is not None and quantize is None:
            constant = constants.get(clip.input[0])
        scale, zero_point, elem_type = _parameters(node, constants, where)
        if constant is not None:
            elem_type = constant.data_type
        elif quantize is None:
            elem_type = inputs.get(source, elem_type)
        if elem_type not in _SIGNED:
            name = TensorProto.DataType.Name(elem_type)
            raise UnsupportedModelError(f"integers of type {name} are not supported", where=where, fix=_ANEW)
        signed, bits = _SIGNED[elem_type]
        narrow = False
        if clip is not None:
            bits, narrow, moved = _clipped(clip, constants, signed=signed, bits=bits)
            zero_point, signed = zero_point - (_MOVED if moved else 0), signed or moved
        elif source in declared:
            bits = _declared_bits(declared[source], signed=signed, bits=bits)
        if constant is not None and clip is None and signed and bits <= 16:
            array = array_in(constant)
            narrow = (int(array.min()) if array.size else 0) > integer_bounds(bits, signed=True)[0]
        axis = _axis(node, scale, graph, constant)
        quantizer = QuantizationSpec(scale, zero_point, axis, signed, narrow, bits)
        real = "" if quantize is None else str(quantize.input[0])
        yield QuantizedTensor(quantizer, real, source, quantize, clip, node, constant, elem_type)


def _parameters(
    node: onnx.NodeProto, constants: Mapping[str, TensorProto], where: str
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], int]:
    """Scale, zero point and the type of the integers as far as the zero point tells."""
    if attribute_int(node, "block_size", 0):
        raise UnsupportedModelError("scales by block are not supported in this format", where=where, fix=_ANEW)
    found = constants.get(node.input[1])
    if found is None:
        raise UnsupportedModelError(f"the scale '{node.input[1]}' is not constant", where=where, fix=_FOLD)
    scale = array_in(found).astype(np.float32)
    scale = scale.reshape(()) if scale.size == 1 and scale.ndim <= 1 else scale
    if scale.ndim > 1:
        what = f"a scale of shape {scale.shape} is not supported in this format"
        raise UnsupportedModelError(what, where=where, fix=_ANEW)
    if len(node.input) < 3 or not node.input[2]:
        return scale, np.zeros(scale.shape, np.int64), int(TensorProto.UINT8)
    zero = constants.get(node.input[2])
    if zero is None:
        raise UnsupportedModelError(f"the zero point '{node.input[2]}' is not constant", where=where, fix=_FOLD)
    values = array_in(zero).astype(np.int64)
    return scale, np.broadcast_to(values.reshape(-1)[0] if values.size == 1 else values, scale.shape), zero.data_type


def _clipped(
    clip: onnx.NodeProto, constants: Mapping[str, TensorProto], *, signed: bool, bits: int
) -> tuple[int, bool, bool]:
    """(bits, narrow) of a Clip of integers, and whether they are signed ones moved up into uint8."""
    low, high = integer_bounds(bits, signed=signed)
    ends = [low, high]
    for position, name in enumerate(clip.input[1:3]):
        if name:
            found = constants.get(name)
            if found is None:
                what = f"the bound '{name}' is not constant"
                raise UnsupportedModelError(what, where=f"node '{clip.name}'", fix=_FOLD)
            ends[position] = int(array_in(found).reshape(()))
    ends = [max(ends[0], low), min(ends[1], high)]
    width = width_of(ends[0], ends[1], signed=signed)
    moved = width is None and not signed and bits == 8
    if moved:
        width = width_of(ends[0] - _MOVED, ends[1] - _MOVED, signed=True)
    if width is None:
        what = f"a Clip of integers to [{ends[0]}, {ends[1]}] is the range of no number of bits"
        fix = "signed -(2^(b-1)) .. 2^(b-1)-1, unsigned 0 .. 2^b-1, each perhaps one short for narrow ranges"
        raise UnsupportedModelError(what, where=f"node '{clip.name or clip.output[0]}'", fix=fix)
    return (*width, moved)


def _declared_bits(datatype: str, *, signed: bool, bits: int) -> int:
    """The bits of an annotation, those of the container where it does not fit it."""
    found = _DATATYPE.fullmatch(datatype)
    if found is None or bool(found[1]) == signed or not 1 < int(found[2]) <= bits:
        return bits
    return int(found[2])


def _axis(
    node: onnx.NodeProto, scale: npt.NDArray[np.float32], graph: onnx.GraphProto, constant: TensorProto | None
) -> int | None:
    if scale.ndim == 0:
        return None
    axis = attribute_int(node, "axis", 1)
    if axis >= 0:
        return axis
    if constant is not None:
        return axis + len(constant.dims)
    for value in (*graph.value_info, *graph.output, *graph.input):
        if value.name in (node.input[0], node.output[0]) and value.type.tensor_type.HasField("shape"):
            return axis + len(value.type.tensor_type.shape.dim)
    return axis


Array = npt.NDArray[Any]


class Edits(LiveGraph):
    """A quantized model whose nodes become others.

    Args:
        model: The model.
        copied: It is not changed; `write` and `finish` make a copy.

    Attributes:
        makers: The nodes that the graph came with, by the names of the values that they write.
    """

    def __init__(self, model: onnx.ModelProto, *, copied: bool = True) -> None:
        super().__init__(model, copied=copied)
        self._is_edited = copied  # a copy in any case
        self._names |= all_names(model)  # those in bodies too
        self.makers = {output.name or "": node for node in self.nodes for output in node.outputs}

    def next_step(self) -> Edits:
        """The same edits, `nodes` as they are now; names that were in use before stay reserved."""
        taken = self._names
        self.settle()
        self.begin(())
        self._names |= taken
        return self

    def store(self, array: npt.ArrayLike, base: str) -> ir.Value:
        """Adds a constant, of no dimension where the array has none."""
        return self.register(onnx.numpy_helper.from_array(np.asarray(array, order="C"), self.fresh_name(base)))

    def finish(self) -> onnx.ModelProto:
        """The model as it is now, without constants that nothing reads."""
        model = self.write()
        drop_unread(model.graph)
        return model

    def bounds(self, clip: ir.Node | None, dtype: np.dtype[Any]) -> tuple[int, int]:
        """Constant ends of a Clip of integers, those of the type where it has none or there is no Clip."""
        limits = np.iinfo(dtype)
        ends = [int(limits.min), int(limits.max)]
        for at, value in enumerate(() if clip is None else clip.inputs[1:3]):
            found = self.array(value)
            if found is not None:
                ends[at] = int(found.reshape(-1)[0])
        return ends[0], ends[1]

    def add(
        self,
        node: ir.Node,
        operator: str,
        inputs: Inputs,
        base: str | None,
        *,
        behind: bool = False,
        output: ir.Value | None = None,
        **attributes: Attribute | None,
    ) -> ir.Value:
        """Puts a new node in front of a node or behind it; returns the value that it writes.

        Args:
            node: The node.
            operator: The operator.
            inputs: What it reads.
            base: What its name and that of a new value begin with.
            behind: Behind it.
            output: What it writes, see `hand_over`; a new value by default.
            attributes: Its attributes; those that are None are left out.
        """
        name = self.fresh_name(f"{base}_{operator}")
        output = output or ir.Value(name=self.fresh_name(f"{name}_output"))
        given: dict[str, Any] = {key: value for key, value in attributes.items() if value is not None}
        put = self.append_behind if behind else self.insert_before
        return put(node, operator, inputs, output=output, base=name, **given)

    def replace(self, node: ir.Node, by: ir.Value | npt.ArrayLike) -> None:
        """Removes a node, for whose output a new node's value or a constant stands, under its name."""
        value = node.outputs[0]
        if isinstance(by, ir.Value):
            maker = by.producer()
            assert maker is not None
            self.take_over_output(maker, value)
            self.remove(node)
        else:
            self.remove(node)
            self.add_initializer(onnx.numpy_helper.from_array(np.asarray(by, order="C"), value.name), value)

    def remove_unread(self, may_go: Callable[[ir.Node], bool]) -> None:
        """Removes nodes that ``may_go`` and whose output nothing reads."""
        for node in reversed(list(self.graph)):
            value = node.outputs[0]
            if may_go(node) and not self.readers(value) and not self.is_pinned(value):
                self.remove(node)

    def put(
        self, node: ir.Node, operator: str, inputs: Inputs, attributes: Attributes | None = None, *, domain: str = ""
    ) -> None:
        """Makes a node another one that writes the same value; without ``attributes`` it keeps those that it has."""
        own = dict(node.attributes)
        self.rewrite(node, operator, inputs, attributes, domain=domain)
        if attributes is None:
            node.attributes.update(own)
