"""Biases of integer kernels, and pairs of Q and DQ around operators that move values.

Biases are chosen under which a layer's integers come out as they do without rounding the bias. A kernel computes
``round(step (k n + B) / k / s) + z``, clipped, for the sum of products ``n`` of the integers, with a whole number
``B``; trained was ``round((step n + bias) / s) + z``. Where there are few bits the steps of the sums are as coarse as
those of the outputs, and rounding ``bias k / step`` to ``B`` changes many of them. But ``n`` is whole, and the outputs
change at a few thresholds alone: any ``step'`` and ``B`` that leave each threshold between the same two neighbours give
the same integers for every input. For each ``B`` near the rounded one that is an interval of ``step'``. Where no ``B``
has one, that which moves the fewest thresholds is taken.

A quantizer behind MaxPool, Flatten, Transpose and their like gives what it gives in front of them, and what leaves them
is on the grid that went in. The runtime runs them on integers only between a DQ and a Q of the same parameters, and the
layer in front of them or behind them only where such a pair touches it. So pairs are repeated: in front of the
operators, behind the layer whose values they move, and behind them, in front of the layer that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.formats.from_qdq import is_dequantize, is_quantize
from kenosis_ort.formats.tensors import Draft
from kenosis_ort.graph.constants import Is, having
from kenosis_ort.graph.walk import MAIN_DOMAINS

_DATA_MOVEMENT: Final = having(Is.MOVE) - {"Dropout", "Identity"} | {"MaxPool", "Slice"}
FLOAT_LAYERS: Final = having(Is.HEAVY) - having(Is.FUSED) - having(Is.INTEGER)
"""Conv, Gemm and MatMul: what a layer of a canonical model is."""
_SOURCES: Final = frozenset({*FLOAT_LAYERS, "Add", "BatchNormalization", "Div", "Mul", "Sub"})


def carry_pairs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its pairs repeated around operators that move values.

    Args:
        model: A private canonical model, its nodes in order; it is changed.
    """
    return _Behind(_PairsBefore(model).write()).write()


def is_data_movement(node: onnx.NodeProto | None) -> TypeGuard[onnx.NodeProto]:
    """Whether a node only moves the values of its first input about or chooses among them."""
    return node is not None and node.op_type in _DATA_MOVEMENT and node.domain in MAIN_DOMAINS and len(node.output) == 1


class _Carrier(Draft):
    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self._old = list(model.graph.node)

    def _is_private(self, value: str) -> bool:
        return len(self.readers.get(value, [])) == 1 and value not in self.pinned

    def _is_plain(self, node: onnx.NodeProto) -> bool:
        """Whether a Q or DQ has one constant scale and a zero point."""
        scale = self.array(node.input[1])
        return scale is not None and scale.size == 1 and len(node.input) > 2 and self.is_constant(node.input[2])


class _PairsBefore(_Carrier):
    """Repeats pairs in front of operators, behind the layer whose values they move."""

    def write(self) -> onnx.ModelProto:
        for node in self._old:
            if is_quantize(node) and self._is_plain(node):
                self._repeat(node)
        extra: dict[str, list[onnx.NodeProto]] = {}
        for new in self.nodes:
            extra.setdefault(self._behind[new.name], []).append(new)
        ordered: list[onnx.NodeProto] = []
        for node in self._old:
            if node.name not in self._gone:
                ordered += [node, *extra.get(node.name, ())]
        return self.finish(ordered)

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self._behind: dict[str, str] = {}
        self._gone: set[str] = set()

    def _repeat(self, quantize: onnx.NodeProto) -> None:
        """Puts a copy of Q, Clip and DQ behind the layer from which operators bring the values that a Q reads."""
        value, passed = quantize.input[0], []
        while self._is_private(value) and (maker := self.makers.get(value)) is not None:
            if not (is_data_movement(maker) or (maker.op_type == "Relu" and self._is_bounded(quantize))):
                break
            passed.append(maker)
            value = maker.input[0]
        source = self.makers.get(value)
        first = next((node for node in reversed(passed) if node.op_type != "Relu"), None)
        if first is None or source is None or source.op_type not in _SOURCES or not self._is_private(value):
            return
        clip = self._clip(quantize)
        if clip is None and any(not is_dequantize(r) for r in self.readers.get(quantize.output[0], [])):
            return
        base, start = quantize.name, len(self.nodes)
        integers = self.add("QuantizeLinear", [value, *quantize.input[1:]], base)
        if clip is not None:
            integers = self.add("Clip", [integers, *clip.input[1:]], base)
        real = self.add("DequantizeLinear", [integers, *quantize.input[1:]], base)
        for node in self.nodes[start:]:
            self._behind[node.name] = source.name
        for node in passed:  # a Relu is what the quantizer's range says now
            if node.op_type == "Relu":
                self._gone.add(node.name)
        chain = [node for node in reversed(passed) if node.op_type != "Relu"]
        for node in chain:
            node.input[0] = real
            real = node.output[0]
        quantize.input[0] = real

    def _is_bounded(self, quantize: onnx.NodeProto) -> bool:
        """Whether no integer of a Q represents a value below zero."""
        zero = np.asarray(self.array(quantize.input[2]))
        clip = self._clip(quantize)
        low = self.array(clip.input[1]) if clip is not None and clip.input[1] else None
        return bool((zero <= (np.iinfo(zero.dtype).min if low is None else low)).all())

    def _clip(self, quantize: onnx.NodeProto) -> onnx.NodeProto | None:
        readers = self.readers.get(quantize.output[0], [])
        return readers[0] if len(readers) == 1 and readers[0].op_type == "Clip" and len(readers[0].input) > 1 else None


class _Behind(_Carrier):
    """Repeats pairs behind operators, in front of the layer that reads what they move."""

    def write(self) -> onnx.ModelProto:
        grids: dict[str, list[str]] = {}
        moved: list[onnx.NodeProto] = []
        for node in self._old:
            if is_dequantize(node) and self._is_plain(node) and not self.is_constant(node.input[0]):
                grids[node.output[0]] = list(node.input[1:3])
            elif is_data_movement(node) and node.input[0] in grids:
                grids[node.output[0]] = grids[node.input[0]]
                moved.append(node)
        wanted: set[str] = set()
        for node in reversed(moved):
            value = node.output[0]
            readers = self.readers.get(value, [])
            if any(self._profits(r, value) or (is_data_movement(r) and r.output[0] in wanted) for r in readers):
                wanted.add(value)
        for node in self._old:
            self.nodes.append(node)
            value = node.output[0] if node.output else ""
            if value not in wanted or any(is_quantize(r) for r in self.readers.get(value, [])):
                continue
            node.output[0] = self.fresh(f"{value}_moved")
            integers = self.add("QuantizeLinear", [node.output[0], *grids[value]], value)
            self.add("DequantizeLinear", [integers, *grids[value]], value, output=value)
        return self.finish()

    def _profits(self, node: onnx.NodeProto, value: str) -> bool:
        """Whether a node can run on integers where the value is one of a DQ."""
        if is_quantize(node):
            return True
        if node.op_type in ("Add", "Concat", "Mul"):
            return all(is_dequantize(self.makers[n]) for n in node.input if n != value and n in self.makers)
        weight = self.makers.get(node.input[1]) if node.op_type in FLOAT_LAYERS and node.input[0] == value else None
        return weight is not None and is_dequantize(weight)


Double = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

_MARGIN: Final = 2.0**-16
"""Distance to keep from a threshold, in steps of the output: above what float32 rounds, below what matters."""

_INSET: Final = 0.1


@dataclass(frozen=True)
class Outputs:
    """Quantization of a layer's outputs.

    Attributes:
        scale: Real value of one step.
        zero_point: Integer that stands for 0.
        low: Least integer.
        high: Largest integer.
    """

    scale: float
    zero_point: int
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class Fitted:
    """Biases and steps for the channels of a layer.

    Attributes:
        bias: Whole numbers to add to ``k n``.
        step: Real value of ``k`` of them.
        exact: Channels whose outputs are those of the unrounded bias for every input.
    """

    bias: Whole
    step: Double
    exact: npt.NDArray[np.bool_]


def fit(step: Double, bias: Double, reach: Whole, factor: int, outputs: Outputs | None) -> Fitted:
    """Whole biases, and steps near those given, under which outputs come out the same.

    Args:
        step: Real value of one in the sum of products, by channel; above zero.
        bias: What is added to the sums, by channel.
        reach: Largest absolute sum of products, by channel.
        factor: ``k``: by what the integers of the weights are multiplied.
        outputs: How the outputs are quantized, None where they are not.
    """
    target = bias / step * factor
    nearest = np.rint(target)
    on_grid = np.abs(target - nearest) <= 1e-6 * np.maximum(np.abs(target), 1.0)
    plain = Fitted(nearest.astype(np.int64), step.copy(), on_grid)
    if outputs is None or on_grid.all():
        return plain
    integers = np.arange(outputs.low + 1, outputs.high + 1)
    thresholds: Double = (integers - outputs.zero_point - 0.5).astype(np.float64) * outputs.scale
    found_bias, found_step, exact = plain.bias, plain.step, plain.exact.copy()
    shifts = np.array(sorted(range(-factor, factor + 1), key=abs), np.int64)
    for channel in np.nonzero(~on_grid)[0]:
        first = _first_sums(step[channel], bias[channel], thresholds, integers, outputs)
        first = np.clip(first, -reach[channel], reach[channel] + 1)
        candidates = nearest[channel].astype(np.int64) + shifts
        low, high = _interval(candidates / factor, first, thresholds, int(reach[channel]), outputs.scale)
        inset = np.where(np.isfinite(high), (high - low) * _INSET, 0.0)
        wanted = np.clip(step[channel], low + inset, high - inset)
        fits = (low <= high) & (wanted > 0) & np.isfinite(wanted)
        if fits.any():
            change = np.where(fits, np.abs(np.log(np.where(fits, wanted, 1.0) / step[channel])), np.inf)
            best = int(np.argmin(change))
            found_bias[channel], found_step[channel], exact[channel] = candidates[best], wanted[best], True
        else:
            moved = _moved(candidates / factor, step[channel], first, thresholds, int(reach[channel]))
            found_bias[channel] = candidates[int(np.argmin(moved))]
    return Fitted(found_bias, found_step, exact)


def _moved(shift: Double, step: float, first: Whole, thresholds: Double, reach: int) -> Whole:
    """Number of thresholds, by shift of the sums, that lie between others at an unchanged step."""
    at = first[None, :] + shift[:, None]
    late = (at * step < thresholds) & (first <= reach)
    early = ((at - 1) * step >= thresholds) & (first > -reach)
    count: Whole = (late | early).sum(axis=1)
    return count


def _first_sums(step: float, bias: float, thresholds: Double, integers: Whole, outputs: Outputs) -> Whole:
    """Smallest sum of products that gives each output integer but the least, or a larger one."""
    guess = np.ceil((thresholds - bias) / step)

    def gives(sums: Double) -> Double:
        whole: Double = np.rint((sums * step + bias) / outputs.scale) + outputs.zero_point
        return whole

    guess = np.where(gives(guess - 1) >= integers, guess - 1, guess)
    guess = np.where(gives(guess) < integers, guess + 1, guess)
    return np.clip(guess, -(2.0**40), 2.0**40).astype(np.int64)


def _interval(shift: Double, first: Whole, thresholds: Double, reach: int, scale: float) -> tuple[Double, Double]:
    """Least and largest step, by shift of the sums, that leave all thresholds where they are.

    Args:
        shift: What is added to the sums, in their own unit; shape (candidates,).
        first: First sum at or above each threshold, shape (thresholds,).
        thresholds: Real values at which the output changes.
        reach: Largest absolute sum.
        scale: Step of the outputs.
    """
    margin = _MARGIN * scale
    low, high = np.full(shift.shape, np.finfo(np.float64).tiny), np.full(shift.shape, np.inf)
    above = first <= reach
    at = first[above][None, :] + shift[:, None]  # at * step >= threshold + margin
    bound = np.broadcast_to(thresholds[above] + margin, at.shape)
    low, high = _narrow(low, high, at, bound, at_least=True)
    below = first - 1 >= -reach
    at = first[below][None, :] - 1 + shift[:, None]  # at * step <= threshold - margin
    bound = np.broadcast_to(thresholds[below] - margin, at.shape)
    return _narrow(low, high, at, bound, at_least=False)


def _narrow(low: Double, high: Double, at: Double, bound: Double, *, at_least: bool) -> tuple[Double, Double]:
    """Narrows intervals of steps by ``at * step >= bound``, or by ``<=``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = bound / at
    rises = (at > 0) == at_least
    lower = np.where((at != 0) & rises, quotient, -np.inf)
    upper = np.where((at != 0) & ~rises, quotient, np.inf)
    stuck = (at == 0) & ((bound > 0) if at_least else (bound < 0))
    upper = np.where(stuck, -np.inf, upper)
    return np.maximum(low, lower.max(axis=1, initial=-np.inf)), np.minimum(high, upper.min(axis=1, initial=np.inf))


LARGEST_SUM: Final = 2**31 - 1
"""What an int32 sum of products holds."""


@dataclass(frozen=True, eq=False)
class IntegerLayer:
    """A layer with quantized weights, and what is multiplied and added to its outputs.

    Attributes:
        integers: The weights as they are stored.
        axis: Their output channels' axis.
        centred: Integers less the zero point, shape (channels, others).
        zero: Zero point by channel.
        scale: Scale by channel.
        factor: What the outputs are multiplied by, by channel.
        bias: What is then added to them.
        data_scale: Scale of the data, None where they are not quantized by one.
        data_reach: Largest distance of the data's integers from their zero point.
    """

    integers: npt.NDArray[Any]
    axis: int
    centred: npt.NDArray[np.int64]
    zero: npt.NDArray[np.int64]
    scale: Double
    factor: Double
    bias: Double
    data_scale: float | None
    data_reach: int

    @property
    def channels(self) -> int:
        """Number of output channels."""
        return len(self.scale)

    def folded(self) -> IntegerLayer | None:
        """The layer with its factors in scales and integers; None where they do not fit there."""
        flipped = self.centred * np.where(self.factor < 0, -1, 1)[:, None] * (self.factor != 0)[:, None]
        limits = np.iinfo(self.integers.dtype)
        stored = flipped + self.zero[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            scale = (self.scale * np.abs(self.factor)).astype(np.float32)
        empty = ~flipped.any(axis=1)
        usable = np.isfinite(scale) & (scale > 0)
        if (stored < limits.min).any() or (stored > limits.max).any() or not (usable | empty).all():
            return None
        if not np.isfinite(self.bias.astype(np.float32)).all():
            return None
        if empty.any():
            scale = np.where(empty, scale[~empty].max() if not empty.all() else np.float32(1), scale)
        ones = np.ones(len(scale))
        return replace(self, centred=flipped, scale=scale.astype(np.float64), factor=ones)

    def headroom(self, reach: npt.NDArray[np.int64], largest_pair: int | None) -> int:
        """The largest power of two by which the integers may be multiplied.

        Args:
            reach: Largest sum of products by channel.
            largest_pair: What the sum of two products may be, see `kenosis_ort.targets.model.DataTypes`.
        """
        largest = int(np.abs(self.centred).max(initial=0))
        if not largest or self.zero.any() or self.integers.dtype != np.int8:
            return 1
        factor, most = 1, LARGEST_SUM if largest_pair is None else largest_pair
        while (
            2 * factor * largest <= 127
            and 2 * (2 * factor * largest) * (self.data_reach + 128) <= most
            and 2 * factor * int(reach.max(initial=0)) < LARGEST_SUM // 2
        ):
            factor *= 2
        return factor
