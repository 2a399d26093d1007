"""A canonical model in the form that a runtime's integer kernels take; what it computes stays.

Nets that were trained with few bits keep what training needs and the runtime does not fuse:

- *BatchNormalization, Mul and Add of constants* behind a Conv, Gemm or MatMul with quantized weights. They go into the
  scales of the weights, one a channel, and into the bias: ``a (s q * x + b) + c = (a s) q * x + (a b + c)``. Where
  ``a`` is negative the integers change their sign.
- *Biases* that are float, or quantized by a scale of their own. The kernels add the bias to sums of products, so that
  it becomes int32 at the scale of these (the runtime takes a Gemm's bias for such whatever its scale says), chosen so
  that few bits come out as they did, see `integer_bias`. Weights of few bits take the larger part of int8 for a finer
  bias where that does not suffice.
- *Operators between a layer and its quantizer*, see `pair_propagation`.
- *Signed activations* where there are kernels for unsigned ones alone. The integers and their zero point move up by
  128, which means the same reals.
- *Weights whose pairs of products can clip* in int16 are stored as uint8, see `kenosis_ort.graph.qdq`.

Weights of a channel that are all zero get the largest scale there is, so that its bias fits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from kenosis_ort.formats import integer_bias
from kenosis_ort.formats.from_qdq import is_dequantize, is_quantize, to_unsigned
from kenosis_ort.formats.tensors import Array, Edits
from kenosis_ort.graph.qdq import annotate, declared_datatypes
from kenosis_ort.graph.view import channel_axis, ir, optional, required
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.rewrite.affine import affine_step, scale_of_norm
from kenosis_ort.rewrite.rule import NotCollapsibleError
from kenosis_ort.targets.vocabulary import DataTypes

_AFFINE: Final = frozenset({"Add", "BatchNormalization", "Div", "Mul", "Sub"})


def to_runtime_form(model: onnx.ModelProto, types: DataTypes) -> onnx.ModelProto:
    """The model in the form that the runtime's integer kernels take.

    Args:
        model: A private canonical model, its nodes named and in order; it is changed.
        types: What the kernels take.
    """
    rewritten = _Layers(integer_bias.carry_pairs(Edits(model, copied=False)), types.largest_pair).run()
    return (rewritten if types.takes_anywhere(TensorProto.INT8) else to_unsigned(rewritten)).finish()


class _Layers:
    """Takes constants behind the layers into their weights and biases."""

    def __init__(self, model: Edits, largest_pair: int | None) -> None:
        self.live = model.next_step()
        self._largest_pair = largest_pair
        self._declared = declared_datatypes(self.live.proto.graph)

    def run(self) -> Edits:
        """The graph, its layers rewritten."""
        for node in self.live.nodes:
            if node.op_type in integer_bias.FLOAT_LAYERS and node.domain in MAIN_DOMAINS:
                weight = self._weight(node)
                if weight is not None:
                    self._absorb(node, weight)
        self.live.remove_unread(is_dequantize)
        return self.live

    def _weight(self, node: ir.Node) -> ir.Node | None:
        """The DQ of a layer's constant weights."""
        maker = required(node, 1).producer()
        if maker is None or not is_dequantize(maker) or optional(maker, 2) is None:
            return None
        integers, scale = self.live.array(maker.inputs[0]), self.live.array(maker.inputs[1])
        if integers is None or scale is None or integers.dtype not in (np.int8, np.uint8):
            return None
        if node.op_type == "MatMul" and integers.ndim != 2:
            return None
        axis = channel_axis(node, integers.ndim)
        return maker if scale.size <= 1 or maker.attributes.get_int("axis", 1) % integers.ndim == axis else None

    def _absorb(self, node: ir.Node, weight: ir.Node) -> None:
        """Takes what follows a layer into it, and puts its bias on the grid of its products."""
        layer = self._read(node, weight)
        if layer is None:
            return
        last, absorbed = node, list[ir.Node]()
        whole = layer
        while (found := self._next(last, node, layer)) is not None:
            last, (times, plus) = found
            whole = replace(whole, factor=whole.factor * times, bias=whole.bias * times + plus)
            absorbed.append(last)
        folded = whole.folded()
        if folded is None:
            absorbed, folded = [], layer.folded()
        if folded is None:
            return
        for gone in absorbed:
            self.live.take_over_output(node, gone.outputs[0])
            self.live.remove(gone)
        if node.op_type == "Gemm":  # the runtime quantizes a bias without regard to beta
            self.live.set_attribute(node, "alpha", None)
            self.live.set_attribute(node, "beta", None)
        self._write(node, weight, folded, self._outputs(node.outputs[0]))

    def _read(self, node: ir.Node, weight: ir.Node) -> integer_bias.IntegerLayer | None:
        """A layer's integers, scales and bias; None where its bias is none by channel."""
        integers, scale, zero_point = (self.live.content(required(weight, at)) for at in range(3))
        axis = channel_axis(node, integers.ndim)
        channels = integers.shape[axis]
        bias = self._bias(node, channels)
        if bias is None:
            return None
        spread = np.broadcast_to(scale.reshape(-1).astype(np.float64), channels)
        zero = np.broadcast_to(zero_point.reshape(-1).astype(np.int64), channels)
        centred = np.moveaxis(integers.astype(np.int64), axis, 0).reshape(channels, -1) - zero[:, None]
        data = required(node, 0).producer()
        data = data if data is not None and is_dequantize(data) else None
        step = None if data is None else self.live.array(data.inputs[1])
        data_scale = float(step.reshape(-1)[0]) if step is not None and step.size == 1 else None
        factor = np.full(channels, node.attributes.get_float("alpha", 1.0) if node.op_type == "Gemm" else 1.0)
        reach = 255 if data is None else self._reach(data)
        return integer_bias.IntegerLayer(integers, axis, centred, zero, spread, factor, bias, data_scale, reach)

    def _reach(self, dequantize: ir.Node) -> int:
        """The largest distance of an activation's integers from their zero point."""
        source = self._before_data_movement(dequantize)
        if source is not None:
            return self._reach(source)
        given = optional(dequantize, 2)
        zero_point = np.zeros(1, np.uint8) if given is None else self.live.content(given)
        clip = required(dequantize, 0).producer()
        low, high = self.live.bounds(clip if clip is not None and clip.op_type == "Clip" else None, zero_point.dtype)
        zero = zero_point.astype(np.int64)
        return int(max(high - zero.min(), zero.max() - low))

    def _before_data_movement(self, dequantize: ir.Node) -> ir.Node | None:
        """The DQ of the same parameters whose values operators bring to the Q in front of a DQ."""
        quantize = required(dequantize, 0).producer()
        if quantize is None or not is_quantize(quantize) or quantize.inputs[1:] != dequantize.inputs[1:]:
            return None
        maker = required(quantize, 0).producer()
        while maker is not None and integer_bias.is_data_movement(maker):
            maker = required(maker, 0).producer()
        found = maker is not None and is_dequantize(maker) and maker.inputs[1:] == dequantize.inputs[1:]
        return maker if found else None

    def _outputs(self, value: ir.Value) -> integer_bias.Outputs | None:
        """Quantization of a layer's values by their only reader, perhaps behind a Relu."""
        while self.live.is_private(value):
            (node,) = self.live.readers(value)
            if node.op_type == "Relu" and node.domain in MAIN_DOMAINS:
                value = node.outputs[0]
                continue
            if not is_quantize(node):
                return None
            scale, zero_point = self.live.array(node.inputs[1]), self.live.array(optional(node, 2))
            if scale is None or zero_point is None or scale.size != 1 or zero_point.dtype not in (np.int8, np.uint8):
                return None
            behind = self.live.readers(node.outputs[0])
            clip = behind[0] if len(behind) == 1 and behind[0].op_type == "Clip" else None
            ends = self.live.bounds(clip, zero_point.dtype)
            return integer_bias.Outputs(float(scale.reshape(-1)[0]), int(zero_point.reshape(-1)[0]), *ends)
        return None

    def _write(
        self, node: ir.Node, weight: ir.Node, layer: integer_bias.IntegerLayer, outputs: integer_bias.Outputs | None
    ) -> None:
        """Gives a node a layer's integers, scales and bias."""
        data = required(node, 0)
        if node.op_type == "MatMul" and layer.bias.any() and not data.is_graph_input() and self.live.rank(data) == 2:
            self.live.put(node, "Gemm", list(node.inputs))
        has_bias = node.op_type != "MatMul" and optional(node, 2) is not None
        if node.op_type == "MatMul" or layer.data_scale is None:
            self._set_weight(node, weight, layer)
            if layer.bias.any() or has_bias:
                self._set_float_bias(node, layer.bias)
            return
        step = layer.scale * layer.data_scale
        reach = np.abs(layer.centred).sum(axis=1) * layer.data_reach
        factor, fitted = 1, integer_bias.fit(step, layer.bias, reach, 1, outputs)
        finer = layer.headroom(reach, self._largest_pair)
        if finer > 1 and not fitted.exact.all():
            refitted = integer_bias.fit(step, layer.bias, reach, finer, outputs)
            if refitted.exact.sum() >= fitted.exact.sum():
                factor, fitted = finer, refitted
        fits = np.abs(fitted.bias) + reach * factor < integer_bias.LARGEST_SUM
        if not fits.all():
            self._set_weight(node, weight, layer)
            self._set_float_bias(node, layer.bias)
            return
        finest = replace(layer, centred=layer.centred * factor, scale=fitted.step / layer.data_scale / factor)
        scale = self._set_weight(node, weight, finest)
        if fitted.bias.any() or has_bias:
            self._set_integer_bias(node, fitted.bias, scale * np.float32(layer.data_scale))

    def _next(
        self, last: ir.Node, layer: ir.Node, content: integer_bias.IntegerLayer
    ) -> tuple[ir.Node, tuple[integer_bias.Double, integer_bias.Double]] | None:
        """The node behind that multiplies and adds constants by channel, and these."""
        value = last.outputs[0]
        if not self.live.is_private(value):
            return None
        (node,) = self.live.readers(value)
        if node.op_type not in _AFFINE or node.domain not in MAIN_DOMAINS:
            return None
        if node.op_type != "BatchNormalization":
            spatial = content.integers.ndim - 2 if layer.op_type == "Conv" else 0
            found = self._operand(node, value, content, spatial=spatial)
        elif layer.op_type == "MatMul" and self.live.rank(value) != 2:
            return None
        else:
            found = self._normalized(node, content.channels)
        return None if found is None else (node, found)

    def _normalized(self, node: ir.Node, channels: int) -> tuple[integer_bias.Double, integer_bias.Double] | None:
        try:
            factor, shift = scale_of_norm(self.live, node)
        except NotCollapsibleError:
            return None
        return (factor, shift) if len(factor) == channels else None

    def _operand(
        self, node: ir.Node, value: ir.Value, layer: integer_bias.IntegerLayer, *, spatial: int
    ) -> tuple[integer_bias.Double, integer_bias.Double] | None:
        at = list(node.inputs).index(value)
        constant = self.live.array(node.inputs[1 - at])
        if constant is None or constant.dtype != np.float32:
            return None  # also where both operands are computed
        numbers = _by_channel(constant, layer.channels, behind=spatial)
        if numbers is None or (at == 1 and node.op_type in ("Div", "Sub")):
            return None
        rank = self.live.rank(value)
        if constant.ndim > (rank if rank is not None else 1):
            return None
        if node.op_type == "Div" and not numbers.all():
            return None
        return affine_step(node.op_type, np.ones(layer.channels), np.zeros(layer.channels), numbers, swapped=False)

    def _bias(self, node: ir.Node, channels: int) -> integer_bias.Double | None:
        """Bias of a layer by channel, None where it is not one number a channel."""
        if node.op_type == "MatMul":
            return np.zeros(channels)
        if node.op_type == "Gemm" and node.attributes.get_int("transA", 0) != 0:
            return None
        given = optional(node, 2)
        if given is None:
            return np.zeros(channels)
        addend = self._constant_of(given)
        if addend is None or addend.size not in (1, channels) or addend.shape[-1:] not in ((1,), (channels,), ()):
            return None
        numbers: integer_bias.Double = addend.reshape(-1).astype(np.float64)
        beta = node.attributes.get_float("beta", 1.0) if node.op_type == "Gemm" else 1.0
        return numbers * beta + np.zeros(channels)

    def _constant_of(self, value: ir.Value) -> Array | None:
        """A constant, or the reals of a quantized one."""
        maker = value.producer()
        if maker is None or not is_dequantize(maker):
            return self.live.array(value)
        integers: Array | None = self.live.array(maker.inputs[0])
        scale: Array | None = self.live.array(maker.inputs[1])
        if integers is None or scale is None or scale.size not in (1, integers.size):
            return None
        given = optional(maker, 2)
        zero_point: Array | None = np.zeros((), integers.dtype) if given is None else self.live.array(given)
        if zero_point is None:
            return None
        centred = integers.reshape(-1).astype(np.int64) - zero_point.reshape(-1)
        return np.asarray(centred.astype(np.float32) * scale.reshape(-1)).reshape(integers.shape)

    def _set_weight(self, node: ir.Node, old: ir.Node, layer: integer_bias.IntegerLayer) -> npt.NDArray[np.float32]:
        """Gives a node the DQ of a layer's weights, the one that it has where they are the same; returns its scale."""
        stored = required(old, 0)
        base = stored.name or ""
        moved = layer.centred + layer.zero[:, None]
        axis, shape = layer.axis, layer.integers.shape
        channels_first = (shape[axis], *(size for at, size in enumerate(shape) if at != axis))
        integers = np.moveaxis(moved.reshape(channels_first), 0, axis).astype(layer.integers.dtype)
        scale = layer.scale.astype(np.float32)
        if np.array_equal(integers, layer.integers):
            known = np.asarray(self.live.content(required(old, 1)), np.float32)
            if np.array_equal(np.broadcast_to(known.reshape(-1), scale.shape), scale):
                return known
        new = self.live.store(integers, f"{base}_folded")
        largest = np.abs(self.live.content(stored).astype(np.int64)).max()
        if base in self._declared and np.abs(layer.centred).max(initial=0) <= largest:
            annotate(self.live.proto.graph, new.name or "", self._declared[base])
        zeros = layer.zero.astype(integers.dtype)
        parameters = [self.live.store(scale, f"{base}_scale"), self.live.store(zeros, f"{base}_zero_point")]
        self._dequantize(node, 1, [new, *parameters], axis)
        return scale

    def _set_float_bias(self, node: ir.Node, bias: integer_bias.Double) -> None:
        real = bias.astype(np.float32)
        if node.op_type == "MatMul":
            value = node.outputs[0]
            output = self.live.hand_over(value, f"{value.name}_product")
            inputs = [value, self.live.store(real, f"{node.name}_bias")]
            self.live.add(node, "Add", inputs, node.name, behind=True, output=output)
        else:
            self.live.read(node, 2, self.live.store(real, f"{node.name}_bias"))

    def _set_integer_bias(self, node: ir.Node, whole: npt.NDArray[np.int64], scale: npt.NDArray[np.float32]) -> None:
        base = node.name
        scale = scale.reshape(()) if scale.size == 1 else scale.reshape(-1)
        zeros = np.zeros(scale.shape, np.int32)
        parts = (("quantized", whole.astype(np.int32)), ("scale", scale), ("zero_point", zeros))
        inputs = [self.live.store(array, f"{base}_bias_{part}") for part, array in parts]
        self._dequantize(node, 2, inputs, 0 if scale.ndim else None)

    def _dequantize(self, node: ir.Node, position: int, inputs: Sequence[ir.Value], axis: int | None) -> None:
        """Makes a node read a new DQ."""
        base = inputs[0].name
        output = ir.Value(name=self.live.fresh_name(f"{base}_dequantized"))
        self.live.read(node, position, self.live.add(node, "DequantizeLinear", inputs, base, output=output, axis=axis))


def _by_channel(constant: npt.NDArray[Any], channels: int, behind: int) -> integer_bias.Double | None:
    """A constant operand as one number a channel, the channels' axis having ``behind`` axes behind it."""
    if constant.size == 1:
        return np.full(channels, float(constant.reshape(-1)[0]))
    at = constant.ndim - 1 - behind
    if at < 0 or constant.shape[at] != channels or constant.size != channels:
        return None
    return constant.reshape(-1).astype(np.float64)
