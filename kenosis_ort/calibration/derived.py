"""Values whose statistics follow from those of others, so that they need not be observed.

A gate such as ``Sigmoid(x)`` and the product ``x * Sigmoid(x)`` hold as many elements as ``x``, and nets with such
activations would return three times what they compute. Where only extremes are kept, and bins of a part of the
elements,
those of the function follow from those of ``x``: each end is the function's over the interval that ``x`` spans, so a
range is never narrower than what was seen, and wider only where no element came near the function's least value inside.
What a sample adds follows from this sample alone, so that tables merge as those of observed values do.

What only moves elements about, or strings values together, has the elements of others: its extremes and histogram are
theirs together, exactly, unless a histogram is of a part of the elements, which would be another part.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.statistics import Extremes, TensorStatistics
from kenosis_ort.graph.constants import LAYOUT
from kenosis_ort.graph.walk import attribute_float

Array = npt.NDArray[Any]

_SIGMOID_FLEX = -1.2784645  # where x * Sigmoid(x) is least
_LEAST_EXPONENT = -700.0  # a Sigmoid of less is 0, and its exponential no number
_HARD_SIGMOID = (0.2, 0.5)
_HARD_SWISH = (1.0 / 6.0, 0.5)


class Function(NamedTuple):
    """A gate, or the product of its input and the gate.

    Attributes:
        slope: Of a gate ``max(0, min(1, slope * x + offset))``, positive; 0.0 for a Sigmoid.
        offset: Of the same, above 0 and at most 1.
        times_input: The value is ``x * gate(x)``.
    """

    slope: float = 0.0
    offset: float = 0.0
    times_input: bool = False

    @property
    def gate_key(self) -> tuple[float, float]:
        """Key that functions of one gate have in common."""
        return self.slope, self.offset

    def gate(self, values: Array) -> Array:
        """The gate of float32 values, float32 of the same shape."""
        one = np.float32(1.0)
        with np.errstate(over="ignore", invalid="ignore"):  # infinite values are told by what comes of them
            if self.slope:
                values = np.float32(self.slope) * values + np.float32(self.offset)
                return np.asarray(np.clip(values, np.float32(0.0), one))
            return np.asarray(one / (one + np.exp(-values)))

    def of(self, seen: Extremes) -> Extremes:
        """The least and largest value over the interval that the input spans."""
        points = [seen.low, seen.high]
        flex = -self.offset / (2.0 * self.slope) if self.slope else _SIGMOID_FLEX
        if self.times_input and seen.low < flex < seen.high:
            points.append(flex)
        ends = [self._at(point) for point in points]  # a NaN stands first
        return Extremes(min(ends), max(ends), seen.count)

    def _at(self, x: float) -> float:
        if self.slope:
            gate = min(max(self.slope * x + self.offset, 0.0), 1.0)
        else:
            gate = 1.0 / (1.0 + math.exp(-x)) if x > _LEAST_EXPONENT or math.isnan(x) else 0.0
        return float(np.float32(x * gate if self.times_input else gate))


Functions = Mapping[str, Mapping[str, Function]]


def functions_of(
    graph: onnx.GraphProto, observed: Mapping[str, str], apart: Collection[str], required: Collection[str] = ()
) -> dict[str, dict[str, Function]]:
    """The observed values that are functions of other ones: by the name of that, functions by their own name.

    Args:
        graph: The graph; a name is written once in it.
        observed: Numpy types of the observed values, by name: those that nodes compute, in their order, and those fed.
        apart: Those of them that are collected in a way of their own.
        required: Those that follow from no other, but others may from them.
    """
    makers = {node.output[0]: node for node in graph.node if node.output}
    free = {name for name, dtype in observed.items() if dtype == "float32" and name not in apart}
    found: dict[str, dict[str, Function]] = {}
    made: set[str] = set()
    for name in observed:
        node = makers.get(name)
        if node is None or name not in free or name in required:
            continue
        source, function = _gate(node) or _gated(node, makers) or ("", None)
        if function is not None and source in free - made:
            found.setdefault(source, {})[name] = function
            made.add(name)
    return found


def unions_of(
    graph: onnx.GraphProto, observed: Mapping[str, str], apart: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """The observed values whose elements are those of others, all of them: by name, the names of the others.

    Extremes and counts of a union follow from those of its parts without error.

    Args:
        graph: The graph; a name is written once in it.
        observed: Numpy types of the observed values that nodes compute, by name and in their order.
        apart: Those of them that are neither unions nor parts of one.
    """
    makers = {node.output[0]: node for node in graph.node if node.output}
    free = {name: dtype for name, dtype in observed.items() if name not in apart}
    found = {}
    for name, dtype in free.items():
        node = makers.get(name)
        if node is None or node.domain not in ("", "ai.onnx") or node.op_type not in (*LAYOUT, "Concat"):
            continue
        parts = tuple(node.input if node.op_type == "Concat" else node.input[:1])
        if parts and all(free.get(part) == dtype for part in parts):
            found[name] = parts
    return found


def united(
    statistics: Mapping[str, TensorStatistics], unions: Mapping[str, Sequence[str]]
) -> dict[str, TensorStatistics]:
    """The statistics with those of unions, which come in the order of the graph."""
    found = dict(statistics)
    for name, parts in unions.items():
        of_parts = [replace(found[part], channels=None) for part in parts]
        found[name] = reduce(lambda one, other: one.merge(other, weights=(1, 1)), of_parts)
    return found


def _gate(node: onnx.NodeProto) -> tuple[str, Function] | None:
    """Input of a gate, and its function."""
    if node.domain or node.op_type not in ("Sigmoid", "HardSigmoid", "HardSwish"):
        return None
    if node.op_type == "Sigmoid":
        return node.input[0], Function()
    if node.op_type == "HardSwish":
        return node.input[0], Function(*_HARD_SWISH, times_input=True)
    slope, offset = (attribute_float(node, n, by) for n, by in zip(("alpha", "beta"), _HARD_SIGMOID, strict=True))
    return (node.input[0], Function(slope, offset)) if slope > 0.0 and 0.0 < offset <= 1.0 else None


def _gated(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto]) -> tuple[str, Function] | None:
    """The input of a gate that a product takes beside the gate's value, and the product's function."""
    if node.domain or node.op_type != "Mul":
        return None
    for value, other in (node.input, reversed(node.input)):
        gate = _gate(makers[other]) if other in makers else None
        if gate is not None and gate[0] == value and not gate[1].times_input:
            return value, Function(gate[1].slope, gate[1].offset, times_input=True)
    return None
