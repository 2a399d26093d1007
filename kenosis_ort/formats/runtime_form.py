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

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from kenosis_ort.formats import integer_bias
from kenosis_ort.formats.from_qdq import is_dequantize, is_quantize, to_unsigned
from kenosis_ort.formats.from_qop import weight_axis
from kenosis_ort.formats.tensors import Draft
from kenosis_ort.graph.qdq import annotate, declared_datatypes
from kenosis_ort.graph.walk import MAIN_DOMAINS, attribute_float, attribute_int
from kenosis_ort.targets.model import DataTypes

_AFFINE: Final = frozenset({"Add", "BatchNormalization", "Div", "Mul", "Sub"})


def to_runtime_form(model: onnx.ModelProto, types: DataTypes) -> onnx.ModelProto:
    """The model in the form that the runtime's integer kernels take.

    Args:
        model: A private canonical model, its nodes named and in order; it is changed.
        types: What the kernels take.
    """
    rewritten = _Layers(integer_bias.carry_pairs(model), types.largest_pair).rewrite()
    return rewritten if types.takes_anywhere(TensorProto.INT8) else to_unsigned(rewritten)


class _Layers(Draft):
    """Takes constants behind the layers into their weights and biases."""

    def __init__(self, model: onnx.ModelProto, largest_pair: int | None) -> None:
        super().__init__(model)
        self._largest_pair = largest_pair
        self._nodes = list(model.graph.node)
        self._gone: set[str] = set()
        self._behind: dict[str, list[onnx.NodeProto]] = {}
        self._declared = declared_datatypes(model.graph)

    def rewrite(self) -> onnx.ModelProto:
        """The model, its layers rewritten."""
        for node in self._nodes:
            if (
                node.op_type in integer_bias.FLOAT_LAYERS
                and node.domain in MAIN_DOMAINS
                and self._weight(node) is not None
            ):
                self._absorb(node)
        remaining = [node for node in self._nodes if node.name not in self._gone]
        for node in remaining:
            self.nodes.extend(self._behind.pop(f"before {node.name}", ()))
            self.nodes.append(node)
            self.nodes.extend(self._behind.pop(node.name, ()))
        return self.finish(may_go=is_dequantize)

    def _weight(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The DQ of a layer's constant weights."""
        maker: onnx.NodeProto | None = self.makers.get(node.input[1])
        if maker is None or not is_dequantize(maker) or not self.is_constant(maker.input[0]):
            return None
        integers, scale = self.array(maker.input[0]), self.array(maker.input[1])
        if integers is None or scale is None or integers.dtype not in (np.int8, np.uint8) or len(maker.input) < 3:
            return None
        if node.op_type == "MatMul" and integers.ndim != 2:
            return None
        axis = weight_axis(node.op_type, attribute_int(node, "transB", 0), integers.ndim)
        return maker if scale.size <= 1 or attribute_int(maker, "axis", 1) % integers.ndim == axis else None

    def _absorb(self, node: onnx.NodeProto) -> None:
        """Takes what follows a layer into it, and puts its bias on the grid of its products."""
        layer = self._read(node)
        if layer is None:
            return
        last, absorbed = node, []
        whole = layer
        while (found := self._next(last, node, layer.channels)) is not None:
            last, (times, plus) = found
            whole = replace(whole, factor=whole.factor * times, bias=whole.bias * times + plus)
            absorbed.append(last)
        folded = whole.folded()
        if folded is None:
            last, absorbed, folded = node, [], layer.folded()
        if folded is None:
            return
        if absorbed:
            self._gone.update(n.name for n in absorbed)
            node.output[0] = last.output[0]
        if node.op_type == "Gemm":  # the runtime quantizes a bias without regard to beta
            remaining = [a for a in node.attribute if a.name not in ("alpha", "beta")]
            del node.attribute[:]
            node.attribute.extend(remaining)
        self._write(node, folded, self._outputs(node.output[0]))

    def _read(self, node: onnx.NodeProto) -> integer_bias.IntegerLayer | None:
        """A layer's integers, scales and bias; None where its bias is none by channel."""
        weight = self._weight(node)
        assert weight is not None
        integers, scale, zero_point = (np.asarray(self.array(name)) for name in weight.input[:3])
        axis = weight_axis(node.op_type, attribute_int(node, "transB", 0), integers.ndim)
        channels = integers.shape[axis]
        bias = self._bias(node, channels)
        if bias is None:
            return None
        spread = np.broadcast_to(scale.reshape(-1).astype(np.float64), channels)
        zero = np.broadcast_to(zero_point.reshape(-1).astype(np.int64), channels)
        centred = np.moveaxis(integers.astype(np.int64), axis, 0).reshape(channels, -1) - zero[:, None]
        data = self.makers.get(node.input[0])
        step = self.array(data.input[1]) if data is not None and is_dequantize(data) else None
        return integer_bias.IntegerLayer(
            integers=integers,
            axis=axis,
            centred=centred,
            zero=zero,
            scale=spread,
            factor=np.full(channels, attribute_float(node, "alpha", 1.0) if node.op_type == "Gemm" else 1.0),
            bias=bias,
            data_scale=float(step.reshape(-1)[0]) if step is not None and step.size == 1 else None,
            data_reach=self._reach(data) if data is not None and is_dequantize(data) else 255,
        )

    def _reach(self, dequantize: onnx.NodeProto) -> int:
        """The largest distance of an activation's integers from their zero point."""
        source = self._before_data_movement(dequantize)
        if source is not None:
            return self._reach(source)
        zero_point = np.asarray(self.array(dequantize.input[2])) if len(dequantize.input) > 2 else np.zeros(1, np.uint8)
        clip = self.makers.get(dequantize.input[0])
        clip = clip if clip is not None and clip.op_type == "Clip" else onnx.NodeProto()
        low, high = self.bounds(clip, zero_point.dtype)
        zero = zero_point.astype(np.int64)
        return int(max(high - zero.min(), zero.max() - low))

    def _before_data_movement(self, dequantize: onnx.NodeProto) -> onnx.NodeProto | None:
        """The DQ of the same parameters whose values operators bring to the Q in front of a DQ."""
        quantize = self.makers.get(dequantize.input[0])
        if quantize is None or not is_quantize(quantize) or quantize.input[1:] != dequantize.input[1:]:
            return None
        maker = self.makers.get(quantize.input[0])
        while maker is not None and integer_bias.is_data_movement(maker):
            maker = self.makers.get(maker.input[0])
        found = maker is not None and is_dequantize(maker) and maker.input[1:] == dequantize.input[1:]
        return maker if found else None

    def _outputs(self, value: str) -> integer_bias.Outputs | None:
        """Quantization of a layer's values by their only reader, perhaps behind a Relu."""
        while value not in self.pinned and len(readers := self.readers.get(value, [])) == 1:
            node = readers[0]
            if node.op_type == "Relu" and node.domain in MAIN_DOMAINS:
                value = node.output[0]
                continue
            scale = self.array(node.input[1]) if is_quantize(node) else None
            zero_point = self.array(node.input[2]) if is_quantize(node) and len(node.input) > 2 else None
            if scale is None or zero_point is None or scale.size != 1 or zero_point.dtype not in (np.int8, np.uint8):
                return None
            behind = self.readers.get(node.output[0], [])
            is_clipped = len(behind) == 1 and behind[0].op_type == "Clip"
            ends = self.bounds(behind[0] if is_clipped else onnx.NodeProto(), zero_point.dtype)
            return integer_bias.Outputs(float(scale.reshape(-1)[0]), int(zero_point.reshape(-1)[0]), *ends)
        return None

    def _write(
        self, node: onnx.NodeProto, layer: integer_bias.IntegerLayer, outputs: integer_bias.Outputs | None
    ) -> None:
        """Gives a node a layer's integers, scales and bias."""
        is_matrix = node.input[0] not in self.inputs and self.rank(node.input[0]) == 2
        if node.op_type == "MatMul" and layer.bias.any() and is_matrix:
            node.op_type = "Gemm"
        if node.op_type == "MatMul" or layer.data_scale is None:
            self._set_weight(node, layer)
            if layer.bias.any() or (node.op_type != "MatMul" and len(node.input) > 2 and node.input[2]):
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
            self._set_weight(node, layer)
            self._set_float_bias(node, layer.bias)
            return
        finest = replace(layer, centred=layer.centred * factor, scale=fitted.step / layer.data_scale / factor)
        self._set_weight(node, finest)
        if fitted.bias.any() or (len(node.input) > 2 and node.input[2]):
            scale = self.array(self._weight_scale(node))
            self._set_integer_bias(node, fitted.bias, np.asarray(scale, np.float32) * np.float32(layer.data_scale))

    def _next(
        self, last: onnx.NodeProto, layer: onnx.NodeProto, channels: int
    ) -> tuple[onnx.NodeProto, tuple[integer_bias.Double, integer_bias.Double]] | None:
        """The node behind that multiplies and adds constants by channel, and these."""
        value = last.output[0]
        readers = self.readers.get(value, [])
        if value in self.pinned or len(readers) != 1 or readers[0].op_type not in _AFFINE:
            return None
        node = readers[0]
        if node.domain not in MAIN_DOMAINS or list(node.input).count(value) != 1:
            return None
        found = self._normalized(node, channels) if node.op_type == "BatchNormalization" else None
        if node.op_type != "BatchNormalization":
            found = self._operand(node, value, layer, channels)
        elif layer.op_type == "MatMul" and self.rank(value) != 2:
            found = None
        return None if found is None else (node, found)

    def _normalized(
        self, node: onnx.NodeProto, channels: int
    ) -> tuple[integer_bias.Double, integer_bias.Double] | None:
        arrays = [self.array(name) for name in node.input[1:5]]
        trained = attribute_int(node, "training_mode", 0) or any(node.output[1:])
        if trained or any(a is None or a.shape != (channels,) for a in arrays):
            return None
        gamma, beta, mean, variance = (np.asarray(a, np.float64) for a in arrays)
        with np.errstate(invalid="ignore", divide="ignore"):
            factor: integer_bias.Double = gamma / np.sqrt(variance + attribute_float(node, "epsilon", 1e-5))
            return factor, beta - factor * mean

    def _operand(
        self, node: onnx.NodeProto, value: str, layer: onnx.NodeProto, channels: int
    ) -> tuple[integer_bias.Double, integer_bias.Double] | None:
        at = list(node.input).index(value)
        constant = self.array(node.input[1 - at])
        if constant is None or constant.dtype != np.float32:
            return None  # also where both operands are computed
        numbers = _by_channel(constant, channels, behind=0 if layer.op_type != "Conv" else self._spatial(layer))
        if numbers is None or (at == 1 and node.op_type in ("Div", "Sub")):
            return None
        rank = self.rank(value)
        if constant.ndim > (rank if rank is not None else 1):
            return None
        one, none = np.ones(channels), np.zeros(channels)
        if node.op_type in ("Add", "Sub"):
            return one, (numbers if node.op_type == "Add" else -numbers)
        if node.op_type == "Div" and not numbers.all():
            return None
        factor: integer_bias.Double = numbers if node.op_type == "Mul" else one / numbers
        return factor, none

    def _spatial(self, layer: onnx.NodeProto) -> int:
        weight = self._weight(layer)
        integers = None if weight is None else self.array(weight.input[0])
        return 0 if integers is None else integers.ndim - 2

    def _bias(self, node: onnx.NodeProto, channels: int) -> integer_bias.Double | None:
        """Bias of a layer by channel, None where it is not one number a channel."""
        if node.op_type == "MatMul":
            return np.zeros(channels)
        if node.op_type == "Gemm" and attribute_int(node, "transA", 0):
            return None
        if len(node.input) < 3 or not node.input[2]:
            return np.zeros(channels)
        addend = self._constant_of(node.input[2])
        if addend is None or addend.size not in (1, channels) or addend.shape[-1:] not in ((1,), (channels,), ()):
            return None
        numbers: integer_bias.Double = addend.reshape(-1).astype(np.float64)
        return numbers * (attribute_float(node, "beta", 1.0) if node.op_type == "Gemm" else 1.0) + np.zeros(channels)

    def _constant_of(self, name: str) -> npt.NDArray[Any] | None:
        """A constant, or the reals of a quantized one."""
        maker = self.makers.get(name)
        if maker is None or not is_dequantize(maker):
            return self.array(name)
        integers, scale = self.array(maker.input[0]), self.array(maker.input[1])
        if integers is None or scale is None or scale.size not in (1, integers.size):
            return None
        zero_point = self.array(maker.input[2]) if len(maker.input) > 2 else np.zeros((), integers.dtype)
        if zero_point is None:
            return None
        centred = integers.reshape(-1).astype(np.int64) - zero_point.reshape(-1)
        real: npt.NDArray[Any] = (centred.astype(np.float32) * scale.reshape(-1)).reshape(integers.shape)
        return real

    def _set_weight(self, node: onnx.NodeProto, layer: integer_bias.IntegerLayer) -> None:
        """Gives a node the DQ of a layer's weights, the one that it has where they are the same."""
        old = self._weight(node)
        base = node.input[1] if old is None else str(old.input[0])
        moved = layer.centred + layer.zero[:, None]
        axis, shape = layer.axis, layer.integers.shape
        channels_first = (shape[axis], *(size for at, size in enumerate(shape) if at != axis))
        integers = np.moveaxis(moved.reshape(channels_first), 0, axis).astype(layer.integers.dtype)
        scale = layer.scale.astype(np.float32)
        if old is not None and np.array_equal(integers, layer.integers):
            known = np.asarray(self.array(old.input[1])).reshape(-1)
            if np.array_equal(np.broadcast_to(known, scale.shape), scale):
                return
        name = self.constant(integers, f"{base}_folded")
        if base in self._declared and np.abs(layer.centred).max(initial=0) <= np.abs(self._range(base)).max():
            annotate(self.graph, name, self._declared[base])
        zeros = layer.zero.astype(integers.dtype)
        parameters = [self.constant(scale, f"{base}_scale"), self.constant(zeros, f"{base}_zero_point")]
        node.input[1] = self._dequantize(node, [name, *parameters], axis)

    def _range(self, name: str) -> npt.NDArray[np.int64]:
        array = self.array(name)
        return np.zeros(1, np.int64) if array is None else array.astype(np.int64)

    def _weight_scale(self, node: onnx.NodeProto) -> str:
        """The name of the scale of a node's weights."""
        made = [new for new in self._behind.get(f"before {node.name}", ()) if new.output[0] == node.input[1]]
        return str((made[0] if made else self.makers[node.input[1]]).input[1])

    def _set_float_bias(self, node: onnx.NodeProto, bias: integer_bias.Double) -> None:
        base, real = node.name or node.output[0], bias.astype(np.float32)
        if node.op_type == "MatMul":
            output = node.output[0]
            node.output[0] = self.fresh(f"{output}_product")
            added = onnx.helper.make_node(
                "Add", [node.output[0], self.constant(real, f"{base}_bias")], [output], name=self.fresh(f"{base}_Add")
            )
            self._behind.setdefault(node.name, []).append(added)
            return
        node.input.extend([""] * (3 - len(node.input)))
        node.input[2] = self.constant(real, f"{base}_bias")

    def _set_integer_bias(
        self, node: onnx.NodeProto, whole: npt.NDArray[np.int64], scale: npt.NDArray[np.float32]
    ) -> None:
        base = node.name or node.output[0]
        scale = scale.reshape(()) if scale.size == 1 else scale.reshape(-1)
        parameters = [
            self.constant(whole.astype(np.int32), f"{base}_bias_quantized"),
            self.constant(scale, f"{base}_bias_scale"),
            self.constant(np.zeros(scale.shape, np.int32), f"{base}_bias_zero_point"),
        ]
        node.input.extend([""] * (3 - len(node.input)))
        node.input[2] = self._dequantize(node, parameters, 0 if scale.ndim else None)

    def _dequantize(self, node: onnx.NodeProto, inputs: list[str], axis: int | None) -> str:
        output = self.fresh(f"{inputs[0]}_dequantized")
        new = onnx.helper.make_node(
            "DequantizeLinear", inputs, [output], name=self.fresh(f"{inputs[0]}_DequantizeLinear")
        )
        if axis is not None:
            new.attribute.append(onnx.helper.make_attribute("axis", axis))
        self._behind.setdefault(f"before {node.name}", []).append(new)
        return output


def _by_channel(constant: npt.NDArray[Any], channels: int, behind: int) -> integer_bias.Double | None:
    """A constant operand as one number a channel, the channels' axis having ``behind`` axes behind it."""
    if constant.size == 1:
        return np.full(channels, float(constant.reshape(-1)[0]))
    at = constant.ndim - 1 - behind
    if at < 0 or constant.shape[at] != channels or constant.size != channels:
        return None
    return constant.reshape(-1).astype(np.float64)
