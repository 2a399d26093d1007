"""Writers of QONNX and QCDQ, and what the tools around them take for granted of any model.

QONNX has one operator ``Quant`` from float to float for Q, Clip and DQ, with its number of bits as an input. Weights
are float initializers in front of their Quant; those of 2 bits that are all one step above or below zero have 1 bit in
truth and get ``BipolarQuant``. Integer inputs of the graph keep their DequantizeLinear: QONNX has no operator that
takes integers. Source: Pappalardo et al., "QONNX", 2022, table II; `qonnx` 1.0.0, `custom_op.general`.

QCDQ is QuantizeLinear, Clip of integers, DequantizeLinear. The canonical form is QCDQ already, as the runtime fuses it:
weights are bytes in the range of their bits. What QONNX' tools convert has float weights in front of Q, Clip and DQ of
their own: they read neither the bits nor the channels of an integer initializer. Source: Pappalardo et al., "QONNX",
2022, section IV; `qonnx.transformation.qcdq_to_qonnx` 1.0.0, measured.

The tools take for granted windows spelled out on each node, one entry of type and shape a value, float biases and no
nodes that stand there for one runtime's sake alone. Source: `qonnx` 1.0.0: `util.inference_cost` and `channels_last`
read ``kernel_shape``, `cleanup` asserts one entry a value; measured.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats.tensors import Edits, QuantizedTensor, quantizers_of
from kenosis_ort.graph.constants import QONNX, drop_stale_value_info, replace_entries
from kenosis_ort.graph.live import Attribute
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.qdq import integer_bounds
from kenosis_ort.graph.shapes import infer_shapes, rank_in, value_types
from kenosis_ort.graph.view import ir, optional, required
from kenosis_ort.graph.walk import MAIN_DOMAINS, all_nodes, attribute, attribute_int, fit_ir_version

_WINDOWED = ("Conv", "ConvTranspose", "MaxPool", "AveragePool")
_NEWEST_IR = 10


class Export(Edits):
    """A canonical model on its way to another format.

    Args:
        model: The canonical model. Not changed.

    Attributes:
        tensors: Its quantized tensors, but for biases, which are float constants now.

    Raises:
        UnsupportedModelError: The model is not canonical.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        found = quantizers_of(model)
        self.tensors = tuple(t for t in found if t.elem_type != TensorProto.INT32 or t.constant is None)
        for tensor in found:
            if tensor not in self.tensors:
                self._make_float(tensor)
        for node in self.nodes:
            if node.op_type == "Max" and node.domain in MAIN_DOMAINS and len(node.inputs) == 1:  # a barrier
                self._bypass(node)
        self._one_dequantizer_a_tensor()

    def dequantize(self, tensor: QuantizedTensor) -> ir.Node:
        """The DQ of a tensor."""
        return self.makers[tensor.dequantize.output[0]]

    def _make_float(self, tensor: QuantizedTensor) -> None:
        """Makes the value of a constant's DQ an initializer, and takes the DQ away."""
        node, real = self.dequantize(tensor), tensor.real_values()
        value = node.outputs[0]
        self.remove(node)
        if self.is_pinned(value):
            self.add_initializer(numpy_helper.from_array(np.asarray(real, order="C"), value.name), value)
        else:
            self.redirect(value, self.store(real, tensor.integers.removesuffix("_quantized")))

    def finish(self) -> onnx.ModelProto:
        """The model, as the tools take it."""
        self.remove_unread(lambda node: node.op_type in ("QuantizeLinear", "Clip"))
        model = self.write()
        keep = {node.domain for node in all_nodes(model)} | set(MAIN_DOMAINS)
        replace_entries(model, "opset_import", [entry for entry in model.opset_import if entry.domain in keep])
        _spell_windows(model)
        _declare_once(model)
        fit_ir_version(model, max_ir=_NEWEST_IR)
        return model

    def _bypass(self, node: ir.Node) -> None:
        """Takes a node away that only hands a value on."""
        source, value = required(node, 0), node.outputs[0]
        maker = source.producer()
        if not self.is_pinned(value):
            self.remove(node)
            self.redirect(value, source)
        elif maker is not None and len(maker.outputs) == 1 and not self.is_pinned(source):
            self.remove(node)
            self.take_over_output(maker, value)

    def _one_dequantizer_a_tensor(self) -> None:
        """Makes the readers of several DQs of one tensor read the first of them."""
        first: dict[str, QuantizedTensor] = {}
        remaining = []
        for tensor in self.tensors:
            other = first.setdefault(tensor.integers, tensor)
            node = self.dequantize(tensor)
            same = tensor is not other and tensor.quantizer.same_as(other.quantizer)
            if same and not self.is_pinned(node.outputs[0]):
                self.remove(node)
                self.redirect(node.outputs[0], self.dequantize(other).outputs[0])
            else:
                remaining.append(tensor)
        self.tensors = tuple(remaining)


def _spell_windows(model: onnx.ModelProto) -> None:
    """Writes the attributes of convolutions and pools that have defaults, in place."""
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    quantizers = [n for n in model.graph.node if n.op_type in ("Quant", "QuantizeLinear", "Clip")]
    known = {name: shapes[n.input[0]] for n in quantizers if n.input[0] in shapes for name in n.output}
    for node in model.graph.node:
        if node.op_type not in _WINDOWED or node.domain not in MAIN_DOMAINS:
            continue
        kernel = attribute(node, "kernel_shape")
        weight = {**shapes, **known}.get(node.input[1]) if len(node.input) > 1 else None
        size = list(kernel.ints) if kernel is not None else None if weight is None else weight[2:]
        if size is None:
            continue
        for name, value in _defaults(node, size):
            if attribute(node, name) is None:
                node.attribute.append(helper.make_attribute(name, value))


def _defaults(node: onnx.NodeProto, size: list[int]) -> Iterator[tuple[str, Any]]:
    yield "kernel_shape", size
    yield "strides", [1] * len(size)
    padding = attribute(node, "auto_pad")
    if padding is None or padding.s == b"NOTSET":
        yield "pads", [0] * (2 * len(size))
    if node.op_type in ("Conv", "ConvTranspose"):
        yield "group", attribute_int(node, "group", 1)
    if node.op_type != "AveragePool":
        yield "dilations", [1] * len(size)


def _declare_once(model: onnx.ModelProto) -> None:
    """Leaves one entry of type and shape for each value, of values that the graph computes, in place."""
    drop_stale_value_info(model)
    infer_shapes(model, thorough=False)
    graph = model.graph
    given = {value.name for value in (*graph.input, *graph.output)} | {tensor.name for tensor in graph.initializer}
    entries = {value.name: value for value in graph.value_info if value.name not in given}
    replace_entries(graph, "value_info", entries.values())


def to_qcdq(model: onnx.ModelProto) -> onnx.ModelProto:
    """A canonical model with float weights in front of Q, Clip and DQ, as QONNX' tools convert it.

    Args:
        model: The canonical model. Not changed.

    Raises:
        UnsupportedModelError: The model is not canonical.
    """
    export = Export(model)
    for tensor in export.tensors:
        if tensor.constant is not None and tensor.quantize is None:
            _spell_out(export, tensor)
    return export.finish()


def _spell_out(export: Export, tensor: QuantizedTensor) -> None:
    """Puts a float constant, Q and Clip in front of a DQ."""
    dequantize, q = export.dequantize(tensor), tensor.quantizer
    base = tensor.integers.removesuffix("_quantized")
    real, scale, zero_point = export.store(tensor.real_values(), base), required(dequantize, 1), optional(dequantize, 2)
    container = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    zero_point = zero_point or export.store(q.zero_point.astype(container), f"{base}_zero_point")
    axis: dict[str, int] = {} if q.axis is None else {"axis": q.axis}
    integers = ir.Value(name=export.fresh_name(f"{base}_QuantizeLinear_Output"))
    parts = [real, scale, zero_point]
    export.insert_before(dequantize, "QuantizeLinear", parts, output=integers, base=f"{base}_Quantize", **axis)
    low, high = q.bounds
    if (low, high) != integer_bounds(8, signed=q.signed) and tensor.elem_type in (TensorProto.INT8, TensorProto.UINT8):
        clipped = ir.Value(name=export.fresh_name(f"{base}_Clip_Output"))
        ends = [export.store(np.asarray(end, container), f"{base}_bound") for end in (low, high)]
        export.insert_before(dequantize, "Clip", [integers, *ends], output=clipped, base=f"{base}_Clip")
        integers = clipped
    dequantize.resize_inputs(3)
    for position, value in enumerate((integers, scale, zero_point)):
        export.read(dequantize, position, value)
    export.set_attribute(dequantize, "axis", q.axis)


_VERSION = 1


def to_qonnx(model: onnx.ModelProto) -> onnx.ModelProto:
    """A canonical model in QONNX.

    Args:
        model: The canonical model. Not changed.

    Raises:
        UnsupportedModelError: The model is not canonical, or an activation's rank, needed for scales by channel, is
            unknown.
    """
    export = Export(model)
    types = value_types(model)
    for tensor in export.tensors:
        if tensor.quantize is not None:
            source = required(export.makers[tensor.quantize.output[0]], 0)
            ranks = (rank_in(types, name) for name in (tensor.real, str(tensor.dequantize.output[0])))
            _write(export, tensor, source, next((rank for rank in ranks if rank is not None), None))
        elif tensor.constant is not None:
            real = tensor.real_values()
            base = tensor.integers.removesuffix("_quantized")
            _write(export, tensor, export.store(real, base), real.ndim)
    written = export.finish()
    gone = {tensor.integers for tensor in export.tensors if tensor.quantize is not None or tensor.constant is not None}
    entries = [entry for entry in written.graph.quantization_annotation if entry.tensor_name not in gone]
    replace_entries(written.graph, "quantization_annotation", entries)
    if not any(entry.domain == QONNX for entry in written.opset_import):
        written.opset_import.append(helper.make_opsetid(QONNX, _VERSION))
    return written


def _write(export: Export, tensor: QuantizedTensor, source: ir.Value, rank: int | None) -> None:
    """Makes a DQ the Quant of a float value."""
    q, node = tensor.quantizer, export.dequantize(tensor)
    if q.axis is not None and rank is None:
        what = f"the rank of '{source.name}', which has scales by channel, is unknown"
        fix = "have shapes inferred into the model first, with onnx.shape_inference"
        raise UnsupportedModelError(what, where=tensor.where, fix=fix)
    base = (node.outputs[0].name or "").removesuffix("_DequantizeLinear_Output")
    scale = export.store(tensor.along(q.scale, rank or 0).astype(np.float32), f"{base}_quant_scale")
    if _is_bipolar(tensor):
        export.put(node, "BipolarQuant", [source, scale], {}, domain=QONNX)
        return
    zero_point = export.store(tensor.along(q.zero_point, rank or 0).astype(np.float32), f"{base}_quant_zero_point")
    bits = export.store(np.float32(q.bits), f"{base}_quant_bits")
    given: dict[str, Attribute] = {"signed": int(q.signed), "narrow": int(q.narrow), "rounding_mode": "ROUND"}
    export.put(node, "Quant", [source, scale, zero_point, bits], given, domain=QONNX)


def _is_bipolar(tensor: QuantizedTensor) -> bool:
    """Whether a constant's integers are -1 and 1 alone."""
    q = tensor.quantizer
    if tensor.constant is None or q.bits != 2 or not q.signed or q.zero_point.any():
        return False
    array = array_in(tensor.constant)
    return bool(array.size) and bool((np.abs(array.astype(np.int64)) == 1).all())
