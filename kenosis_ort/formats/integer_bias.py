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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kenosis_ort.formats.from_qdq import is_dequantize, is_quantize
from kenosis_ort.formats.tensors import Edits
from kenosis_ort.graph.constants import Is, having
from kenosis_ort.graph.view import ir, optional, required
from kenosis_ort.graph.walk import MAIN_DOMAINS

_DATA_MOVEMENT: Final = having(Is.MOVE) - {"Dropout", "Identity"} | {"MaxPool", "Slice"}
FLOAT_LAYERS: Final = having(Is.HEAVY) - having(Is.FUSED) - having(Is.INTEGER)
"""Conv, Gemm and MatMul: what a layer of a canonical model is."""
_SOURCES: Final = frozenset({*FLOAT_LAYERS, "Add", "BatchNormalization", "Div", "Mul", "Sub"})


def carry_pairs(model: Edits) -> Edits:
    """The model with its pairs repeated around operators that move values.

    Args:
        model: Edits of a private canonical model, its nodes in order; it is changed.
    """
    carrier = _Carrier(model.next_step())
    carrier.carry_back()
    carrier.carry_forward()
    return carrier.live


def is_data_movement(node: ir.Node) -> bool:
    """Whether a node only moves the values of its first input about or chooses among them."""
    return node.op_type in _DATA_MOVEMENT and node.domain in MAIN_DOMAINS and len(node.outputs) == 1


class _Carrier:
    """Repeats pairs of Q and DQ on the other side of operators that move values."""

    def __init__(self, live: Edits) -> None:
        self.live = live

    def _is_plain(self, node: ir.Node) -> bool:
        """Whether a Q or DQ has one constant scale and a zero point."""
        scale = self.live.array(node.inputs[1])
        return scale is not None and scale.size == 1 and self.live.constant(optional(node, 2)) is not None

    # -- in front of operators, behind the layer whose values they move -----------------------------------------

    def carry_back(self) -> None:
        """Repeats the pairs behind operators in front of them."""
        for node in self.live.nodes:
            if is_quantize(node) and self._is_plain(node):
                self._repeat(node)

    def _repeat(self, quantize: ir.Node) -> None:
        """Puts a copy of Q, Clip and DQ behind the layer from which operators bring the values that a Q reads."""
        value, passed = required(quantize, 0), list[ir.Node]()
        while self.live.is_private(value) and (maker := value.producer()) is not None:
            if not (is_data_movement(maker) or (maker.op_type == "Relu" and self._is_bounded(quantize))):
                break
            passed.append(maker)
            value = required(maker, 0)
        source = value.producer()
        is_moved = any(node.op_type != "Relu" for node in passed)
        if not is_moved or source is None or source.op_type not in _SOURCES or not self.live.is_private(value):
            return
        clip = self._clip(quantize)
        if clip is None and not all(map(is_dequantize, self.live.readers(quantize.outputs[0]))):
            return
        integers = self.live.add(source, "QuantizeLinear", [value, *quantize.inputs[1:]], quantize.name, behind=True)
        if clip is not None:
            integers = self.live.add(source, "Clip", [integers, *clip.inputs[1:]], quantize.name, behind=True)
        real = self.live.add(source, "DequantizeLinear", [integers, *quantize.inputs[1:]], quantize.name, behind=True)
        for node in (*reversed(passed), quantize):
            if node.op_type != "Relu":  # a Relu is what the quantizer's range says now
                self.live.read(node, 0, real)
                real = node.outputs[0]
        for node in passed:
            if node.op_type == "Relu":
                self.live.remove(node)

    def _is_bounded(self, quantize: ir.Node) -> bool:
        """Whether no integer of a Q represents a value below zero."""
        zero = np.asarray(self.live.array(quantize.inputs[2]))
        clip = self._clip(quantize)
        low = None if clip is None else self.live.array(clip.inputs[1])
        return bool((zero <= (np.iinfo(zero.dtype).min if low is None else low)).all())

    def _clip(self, quantize: ir.Node) -> ir.Node | None:
        readers = self.live.readers(quantize.outputs[0])
        return readers[0] if len(readers) == 1 and readers[0].op_type == "Clip" and len(readers[0].inputs) > 1 else None

    # -- behind operators, in front of the layer that reads what they move --------------------------------------

    def carry_forward(self) -> None:
        """Repeats the pairs in front of operators behind them."""
        grids: dict[ir.Value, Sequence[ir.Value | None]] = {}
        moved: list[ir.Node] = []
        for node in self.live.graph:
            if is_dequantize(node) and self._is_plain(node) and self.live.constant(node.inputs[0]) is None:
                grids[node.outputs[0]] = node.inputs[1:3]
            elif is_data_movement(node) and (source := required(node, 0)) in grids:
                grids[node.outputs[0]] = grids[source]
                moved.append(node)
        wanted: set[ir.Value] = set()
        for node in reversed(moved):
            value = node.outputs[0]
            readers = self.live.readers(value)
            if any(self._profits(r, value) or (is_data_movement(r) and r.outputs[0] in wanted) for r in readers):
                wanted.add(value)
        for node in moved:
            value, grid = node.outputs[0], grids[node.outputs[0]]
            if value in wanted and not any(map(is_quantize, self.live.readers(value))):
                base = value.name
                real = self.live.hand_over(value, f"{base}_moved")
                integers = self.live.add(node, "QuantizeLinear", [value, *grid], base, behind=True)
                self.live.add(node, "DequantizeLinear", [integers, *grid], base, behind=True, output=real)

    def _profits(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether a node can run on integers where the value is one of a DQ."""
        if is_quantize(node):
            return True
        if node.op_type in ("Add", "Concat", "Mul"):
            makers = [other.producer() for other in node.inputs if other is not None and other is not value]
            return all(is_dequantize(maker) for maker in makers if maker is not None)
        weight = node.inputs[1] if node.op_type in FLOAT_LAYERS and node.inputs[0] is value else None
        maker = None if weight is None else weight.producer()
        return maker is not None and is_dequantize(maker)


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
