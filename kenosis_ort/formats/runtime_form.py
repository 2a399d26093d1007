"""A canonical model in the form that ONNX Runtime's integer kernels take; what it computes stays.

Nets that were trained with few bits keep what training needs and the runtime does not fuse:

- *BatchNormalization, Mul and Add of constants* behind a Conv, Gemm or MatMul with quantized weights. They go into the
  scales of the weights, one a channel, and into the bias: ``a (s q * x + b) + c = (a s) q * x + (a b + c)``. Where
  ``a`` is negative the integers change their sign.
- *Biases* that are float, or quantized by a scale of their own. The kernels add the bias to sums of products, so that
  it becomes int32 at the scale of these, rounded to half a step of theirs. (The runtime takes a Gemm's bias for such
  whatever its scale says.)
- *Signed activations.* On x86-64 there are kernels for uint8 alone; the integers and their zero point move up by 128,
  which means the same reals.

Weights of a channel that are all zero get the largest scale there is, so that its bias fits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.formats.draft import Draft
from kenosis_ort.formats.from_qdq import is_dequantize
from kenosis_ort.formats.model import annotate, datatypes_said
from kenosis_ort.formats.signedness import to_unsigned
from kenosis_ort.graph.attributes import attribute_float, attribute_int
from kenosis_ort.graph.walk import MAIN_DOMAINS

Double = npt.NDArray[np.float64]

_LAYERS: Final = frozenset({"Conv", "Gemm", "MatMul"})
_AFFINE: Final = frozenset({"Add", "BatchNormalization", "Div", "Mul", "Sub"})
_LARGEST_BIAS: Final = 2**30  # sums of products are to fit in int32 beside it


def to_runtime_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model in the form that the runtime's integer kernels take.

    Args:
        model: A private canonical model, its nodes named and in order; it is changed.
    """
    _Layers(model).rewrite()
    return to_unsigned(model)


class _Layers(Draft):
    """Takes constants behind the layers into their weights and biases."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self._nodes = list(model.graph.node)
        self._makers = {name: node for node in self._nodes for name in node.output if name}
        self._readers = self.read_by()
        self._held = self.pinned()
        self._gone: set[str] = set()
        self._behind: dict[str, list[onnx.NodeProto]] = {}
        self._said = datatypes_said(model.graph)

    def rewrite(self) -> onnx.ModelProto:
        """Returns the model, its layers rewritten."""
        for node in self._nodes:
            if node.op_type in _LAYERS and node.domain in MAIN_DOMAINS and self._weight(node) is not None:
                self._absorb(node)
        kept = [node for node in self._nodes if node.name not in self._gone]
        for node in kept:
            self.nodes.extend(self._behind.pop(f"before {node.name}", ()))
            self.nodes.append(node)
            self.nodes.extend(self._behind.pop(node.name, ()))
        read = {name for node in self.nodes for name in node.input} | self._held
        self.nodes = [n for n in self.nodes if not (is_dequantize(n) and n.output[0] not in read)]
        return self.finish()

    def _weight(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """Returns the DQ of a layer's constant weights."""
        maker: onnx.NodeProto | None = self._makers.get(node.input[1])
        if maker is None or not is_dequantize(maker) or not self.is_constant(maker.input[0]):
            return None
        integers, scale = self.array(maker.input[0]), self.array(maker.input[1])
        if integers is None or scale is None or integers.dtype not in (np.int8, np.uint8) or len(maker.input) < 3:
            return None
        if node.op_type == "MatMul" and integers.ndim != 2:
            return None
        if scale.size > 1 and attribute_int(maker, "axis", 1) % integers.ndim != _channel_axis(node):
            return None
        return maker

    def _absorb(self, node: onnx.NodeProto) -> None:
        """Takes what follows a layer into it, and puts its bias on the grid of its products."""
        weight = self._weight(node)
        assert weight is not None
        integers, scale, zero_point = (np.asarray(self.array(name)) for name in weight.input[:3])
        axis = _channel_axis(node)
        channels = integers.shape[axis]
        factor, bias, last = np.ones(channels), self._bias(node, channels), node
        if bias is None:
            return
        absorbed = []
        while (found := self._next(last, node, channels)) is not None:
            last, (times, plus) = found
            factor, bias = factor * times, bias * times + plus
            absorbed.append(last)
        shape = [channels if at == axis else 1 for at in range(integers.ndim)]
        spread = np.broadcast_to(scale.reshape(-1).astype(np.float64), channels)
        zero = np.broadcast_to(zero_point.reshape(-1).astype(np.int64), channels).reshape(shape)
        centred = integers.astype(np.int64) - zero
        signed = centred * np.where(factor < 0, -1, 1).reshape(shape) * (factor != 0).reshape(shape)
        limits = np.iinfo(integers.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            new_scale = (spread * np.abs(factor)).astype(np.float32)
            new_bias = bias.astype(np.float32)
        fits = (signed + zero >= limits.min).all() and (signed + zero <= limits.max).all()
        empty = ~signed.any(axis=tuple(at for at in range(integers.ndim) if at != axis))
        usable = np.isfinite(new_scale) & (new_scale > 0)
        if not fits or not np.isfinite(new_bias).all() or not (usable | empty).all():
            absorbed, new_scale, signed = [], spread.astype(np.float32), centred
            bias = self._bias(node, channels)
            empty = ~centred.any(axis=tuple(at for at in range(integers.ndim) if at != axis))
        if not absorbed and not empty.any():
            self._set_bias(node, bias, scale.reshape(-1))
            return
        solid = new_scale[~empty]
        new_scale = np.where(empty, solid.max() if solid.size else np.float32(1), new_scale).astype(np.float32)
        self._set_weight(node, weight, (signed + zero).astype(integers.dtype), new_scale, zero.reshape(-1), axis)
        if absorbed:
            self._gone.update(n.name for n in absorbed)
            node.output[0] = last.output[0]
        self._set_bias(node, bias, new_scale)

    def _next(
        self, last: onnx.NodeProto, layer: onnx.NodeProto, channels: int
    ) -> tuple[onnx.NodeProto, tuple[Double, Double]] | None:
        """Returns the node behind that multiplies and adds constants by channel, and these."""
        value = last.output[0]
        readers = self._readers.get(value, [])
        if value in self._held or len(readers) != 1 or readers[0].op_type not in _AFFINE:
            return None
        node = readers[0]
        if node.domain not in MAIN_DOMAINS or list(node.input).count(value) != 1:
            return None
        found = self._normalized(node, channels) if node.op_type == "BatchNormalization" else None
        if node.op_type != "BatchNormalization":
            found = self._operand(node, value, layer, channels)
        elif layer.op_type == "MatMul" and self._rank(value) != 2:
            found = None
        return None if found is None else (node, found)

    def _normalized(self, node: onnx.NodeProto, channels: int) -> tuple[Double, Double] | None:
        arrays = [self.array(name) for name in node.input[1:5]]
        trained = attribute_int(node, "training_mode", 0) or any(node.output[1:])
        if trained or any(a is None or a.shape != (channels,) for a in arrays):
            return None
        gamma, beta, mean, variance = (np.asarray(a, np.float64) for a in arrays)
        with np.errstate(invalid="ignore", divide="ignore"):
            factor: Double = gamma / np.sqrt(variance + attribute_float(node, "epsilon", 1e-5))
            return factor, beta - factor * mean

    def _operand(
        self, node: onnx.NodeProto, value: str, layer: onnx.NodeProto, channels: int
    ) -> tuple[Double, Double] | None:
        at = list(node.input).index(value)
        constant = self.array(node.input[1 - at])
        if constant is None or constant.dtype != np.float32:
            return None  # also where both operands are computed
        numbers = _by_channel(constant, channels, behind=0 if layer.op_type != "Conv" else self._spatial(layer))
        if numbers is None or (at == 1 and node.op_type in ("Div", "Sub")):
            return None
        rank = self._rank(value)
        if constant.ndim > (rank if rank is not None else 1):
            return None
        one, none = np.ones(channels), np.zeros(channels)
        if node.op_type in ("Add", "Sub"):
            return one, (numbers if node.op_type == "Add" else -numbers)
        if node.op_type == "Div" and not numbers.all():
            return None
        factor: Double = numbers if node.op_type == "Mul" else one / numbers
        return factor, none

    def _spatial(self, layer: onnx.NodeProto) -> int:
        weight = self._weight(layer)
        integers = None if weight is None else self.array(weight.input[0])
        return 0 if integers is None else integers.ndim - 2

    def _rank(self, value: str) -> int | None:
        for known in (*self.graph.value_info, *self.graph.output):
            if known.name == value and known.type.tensor_type.HasField("shape"):
                return len(known.type.tensor_type.shape.dim)
        return None

    def _bias(self, node: onnx.NodeProto, channels: int) -> Double | None:
        """Returns a layer's bias by channel, None where it is not one number a channel or the layer scales it."""
        if node.op_type == "MatMul":
            return np.zeros(channels)
        if node.op_type == "Gemm" and (
            attribute_float(node, "alpha", 1.0) != 1.0
            or attribute_float(node, "beta", 1.0) != 1.0
            or attribute_int(node, "transA", 0)
        ):
            return None
        if len(node.input) < 3 or not node.input[2]:
            return np.zeros(channels)
        held = self._constant_of(node.input[2])
        if held is None or held.size not in (1, channels) or held.shape[-1:] not in ((1,), (channels,), ()):
            return None
        numbers: Double = held.reshape(-1).astype(np.float64)
        return numbers + np.zeros(channels)

    def _constant_of(self, name: str) -> npt.NDArray[Any] | None:
        """Returns a constant, or the reals of a quantized one."""
        maker = self._makers.get(name)
        if maker is None or not is_dequantize(maker):
            return self.array(name)
        integers, scale = self.array(maker.input[0]), self.array(maker.input[1])
        if integers is None or scale is None or integers.ndim > 1:
            return None
        zero_point = self.array(maker.input[2]) if len(maker.input) > 2 else np.zeros((), integers.dtype)
        if zero_point is None:
            return None
        real: npt.NDArray[Any] = (integers.astype(np.int64) - zero_point).astype(np.float32) * scale
        return real

    def _set_weight(
        self,
        node: onnx.NodeProto,
        weight: onnx.NodeProto,
        integers: npt.NDArray[Any],
        scale: npt.NDArray[np.float32],
        zero_point: npt.NDArray[np.int64],
        axis: int,
    ) -> None:
        base = weight.input[0]
        name = self.constant(integers, f"{base}_folded")
        if base in self._said:
            annotate(self.graph, name, self._said[base])
        zeros = np.broadcast_to(zero_point, scale.shape).astype(integers.dtype)
        parameters = [self.constant(scale, f"{base}_scale"), self.constant(zeros, f"{base}_zero_point")]
        node.input[1] = self._dequantize(node, [name, *parameters], axis)

    def _set_bias(self, node: onnx.NodeProto, bias: Double | None, scale: npt.NDArray[np.float32]) -> None:
        """Gives a layer its bias, as int32 where its data are quantized by one scale and it fits."""
        if bias is None or (not bias.any() and (node.op_type == "MatMul" or len(node.input) < 3 or not node.input[2])):
            return
        base = node.name or node.output[0]
        real = bias.astype(np.float32)
        if node.op_type == "MatMul":
            output = node.output[0]
            node.output[0] = self.fresh(f"{output}_product")
            added = onnx.helper.make_node(
                "Add", [node.output[0], self.constant(real, f"{base}_bias")], [output], name=self.fresh(f"{base}_Add")
            )
            self._behind.setdefault(node.name, []).append(added)
            return
        data = self._makers.get(node.input[0])
        steps = self.array(data.input[1]) if data is not None and is_dequantize(data) else None
        name = ""
        if steps is not None and steps.size == 1:
            product = (scale * steps.reshape(-1)).astype(np.float32)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                whole = np.round(bias / product.astype(np.float64))
            if np.isfinite(whole).all() and (np.abs(whole) <= _LARGEST_BIAS).all():
                product = product.reshape(()) if product.size == 1 else product
                parameters = [
                    self.constant(whole.astype(np.int32), f"{base}_bias_quantized"),
                    self.constant(product, f"{base}_bias_scale"),
                    self.constant(np.zeros(product.shape, np.int32), f"{base}_bias_zero_point"),
                ]
                name = self._dequantize(node, parameters, 0 if product.ndim else None)
        name = name or self.constant(real, f"{base}_bias")
        node.input.extend([""] * (3 - len(node.input)))
        node.input[2] = name

    def _dequantize(self, node: onnx.NodeProto, inputs: list[str], axis: int | None) -> str:
        output = self.fresh(f"{inputs[0]}_dequantized")
        new = onnx.helper.make_node(
            "DequantizeLinear", inputs, [output], name=self.fresh(f"{inputs[0]}_DequantizeLinear")
        )
        if axis is not None:
            new.attribute.append(onnx.helper.make_attribute("axis", axis))
        self._behind.setdefault(f"before {node.name}", []).append(new)
        return output


def _channel_axis(node: onnx.NodeProto) -> int:
    """Returns the axis of a layer's weights along which its output channels lie."""
    return 0 if node.op_type == "Conv" or (node.op_type == "Gemm" and attribute_int(node, "transB", 0)) else 1


def _by_channel(constant: npt.NDArray[Any], channels: int, behind: int) -> Double | None:
    """Returns a constant operand as one number a channel, the channels' axis having ``behind`` axes behind it."""
    if constant.size == 1:
        return np.full(channels, float(constant.reshape(-1)[0]))
    at = constant.ndim - 1 - behind
    if at < 0 or constant.shape[at] != channels or constant.size != channels:
        return None
    return constant.reshape(-1).astype(np.float64)
