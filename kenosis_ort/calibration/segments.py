"""What a run of the float model has to return, and in how many parts.

Cutting a graph into parts, so that the tensors observed in one part fit a byte budget.

A part is a run of nodes in graph order. It returns the tensors observed in it and the values that later parts read;
those are fed to them. So the float model is computed once, whatever the number of parts. A model of many weights is cut
into parts of fewer as well, where few values cross.

Values that are a function of one observed value, element by element: they need not be fetched to be known.

A gate such as ``Sigmoid(x)`` and the product ``x * Sigmoid(x)`` hold as many elements as ``x``, and nets with such
activations would return three times what they compute. Where only extremes are kept, and bins of a part of the
elements, those of the function follow from those of ``x``: each end is the function's over the interval that ``x``
spans, so a range is never narrower than what was seen, and wider only where no element came near the function's least
value inside. What a sample adds follows from this sample alone, so that tables merge as those of observed values do.

What only moves elements about, or strings values together, has the elements of others: its extremes and histogram are
theirs together, exactly, unless a histogram is of a part of the elements, which would be another part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.minmax import Ends, Reduction
from kenosis_ort.calibration.part_session import Segment, constant_values
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.graph.constants import LAYOUT
from kenosis_ort.graph.outside import content_bytes
from kenosis_ort.graph.walk import read_names

Array = npt.NDArray[Any]

_SIGMOID_FLEX = -1.2784645  # where x * Sigmoid(x) is least
_LEAST_EXPONENT = -700.0  # a Sigmoid of less is 0, and its exponential no number
_HARD_SIGMOID = (0.2, 0.5)
_HARD_SWISH = (1.0 / 6.0, 0.5)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Function:
    """A gate, or the product of its input and the gate.

    Attributes:
        slope: Of a gate ``max(0, min(1, slope * x + offset))``, positive; 0.0 for a Sigmoid.
        offset: Of the same, above 0 and at most 1.
        times_input: The value is ``x * gate(x)``.
    """

    slope: float = 0.0
    offset: float = 0.0
    times_input: bool = False

    def gate(self, values: Array) -> Array:
        """The gate of float32 values, float32 of the same shape."""
        one = np.float32(1.0)
        with np.errstate(over="ignore", invalid="ignore"):  # infinite values are told by what comes of them
            found: Array = (
                np.clip(np.float32(self.slope) * values + np.float32(self.offset), np.float32(0.0), one)
                if self.slope
                else one / (one + np.exp(-values))
            )
        return found

    def of(self, seen: Reduction) -> Reduction:
        """The least and largest value over the interval that the input spans."""
        points = [seen.low, seen.high]
        flex = -self.offset / (2.0 * self.slope) if self.slope else _SIGMOID_FLEX
        if self.times_input and seen.low < flex < seen.high:
            points.append(flex)
        ends = [self._at(point) for point in points]  # a NaN stands first
        return Reduction(min(ends), max(ends), seen.count)

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
    given = {a.name: a.f for a in node.attribute}
    slope, offset = given.get("alpha", _HARD_SIGMOID[0]), given.get("beta", _HARD_SIGMOID[1])
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


class _Extremes(Protocol):
    """A collector of extremes, and perhaps of some elements."""

    def look(self, array: Array, ends: Ends | None = None) -> tuple[Reduction, Array]: ...

    def take(self, name: str, reduction: Reduction, some: Array) -> bool: ...

    def end_sample(self) -> None: ...

    def end_chunk(self) -> None: ...

    def statistics(self) -> dict[str, Any]: ...


class DerivingCollector:
    """Hands tensors on to another collector, and with some of them their functions.

    Args:
        inner: The other collector; it knows the functions by their names too.
        functions: By the name of the observed value, its functions by their own names.
        seen_as: By the names of such values, what stands for an element in their own statistics.
    """

    def __init__(
        self, inner: _Extremes, functions: Functions, seen_as: Mapping[str, Callable[[Array], Array]] = _NOTHING
    ) -> None:
        self._inner = inner
        self._functions = functions
        self._seen_as = seen_as

    def add(self, name: str, array: Array, ends: Ends | None = None) -> bool:
        reduction, some = self._inner.look(array, ends)
        functions = self._functions.get(name, {}) if reduction.count else {}
        gates = {(f.slope, f.offset): f for f in functions.values()}
        gated = {key: f.gate(some) for key, f in gates.items()}
        taken = []
        for made, f in functions.items():
            seen, values = f.of(reduction), gated[f.slope, f.offset]
            if f.times_input:
                values = some * values
            taken.append(self._inner.take(made, seen, np.clip(values, seen.low, seen.high)))  # they are rounded apart
        stands_for = self._seen_as.get(name)
        if stands_for is not None and reduction.count:
            low, high = stands_for(np.array([reduction.low, reduction.high], np.float32)).tolist()
            reduction, some = Reduction(low, high, reduction.count), stands_for(some)
        return self._inner.take(name, reduction, some) and all(taken)

    def end_sample(self) -> None:
        self._inner.end_sample()

    def end_chunk(self) -> None:
        self._inner.end_chunk()

    def statistics(self) -> dict[str, Any]:
        return self._inner.statistics()


MOST_TENSORS = 1000
"""Tensors observed in one part; the runtime's time to make a session grows with the square of its outputs."""

Sizes = Mapping[str, int]


def estimate_bytes(proto: onnx.ModelProto, feed: Mapping[str, Any], names: Collection[str]) -> dict[str, int]:
    """The sizes in bytes of those tensors whose shape annotation is fixed by the shapes of a feed.

    Args:
        proto: The model; named sizes of its inputs take the feed's values.
        feed: Arrays by input name.
        names: Tensors to size.
    """
    symbols: dict[str, int] = {}
    for value in proto.graph.input:
        shape = getattr(feed.get(value.name), "shape", ())
        if callable(shape):  # the runtime's OrtValue
            shape = shape()
        for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=False):
            if dim.dim_param:
                symbols[dim.dim_param] = int(size)
    out: dict[str, int] = {}
    for value in (*proto.graph.value_info, *proto.graph.output, *proto.graph.input):
        tensor = value.type.tensor_type
        if value.name not in names or not tensor.HasField("shape"):
            continue
        sizes = [d.dim_value if d.HasField("dim_value") else symbols.get(d.dim_param, -1) for d in tensor.shape.dim]
        if all(size >= 0 for size in sizes):
            width = 2 if tensor.elem_type == onnx.TensorProto.FLOAT16 else 4
            out[value.name] = math.prod(sizes) * width
    return out


def cut(
    proto: onnx.ModelProto,
    observed: Collection[str],
    sizes: Sizes,
    types: Mapping[str, int],
    budget: int,
    *,
    weights: int = 0,
) -> list[Segment]:
    """Cuts the graph where the observed tensors reach the budget, or 1000, and where weights reach theirs.

    Args:
        proto: The model.
        observed: Tensors to return, all computed by nodes of the main graph.
        sizes: Their sizes in bytes; 0 where not known.
        types: Element types of values, 0 for what is no tensor. There is no cut across a value without one.
        budget: Bytes that the tensors observed in one part may have together; one alone may exceed it.
        weights: Bytes that the weights of one part may have together; those of one node may exceed it. 0 for any.

    Returns:
        The parts that matter, in order; the first starts at node 0.
    """
    nodes = proto.graph.node
    constants, _ = constant_values(proto)
    reads = [set(read_names(node)) - constants for node in nodes]
    last_use: dict[str, int] = {}
    wanted = set(observed)
    end = 1 + max((i for i, node in enumerate(nodes) if wanted.intersection(node.output)), default=len(nodes) - 1)
    for index, names in enumerate(reads[:end]):
        for name in names:
            last_use[name] = index
    walls = _walls(proto, nodes[:end], last_use, types, weights) if weights else frozenset()
    bounds = _bounds(nodes[:end], wanted, sizes, budget, last_use, types, walls)
    return [_segment(nodes, reads, bound, wanted, last_use) for bound in bounds]


def from_the_first_node(proto: onnx.ModelProto, part: Segment) -> Segment:
    """A part that observes the same as ``part`` but computes all of it from the graph's inputs."""
    made = {name for node in proto.graph.node[: part.end] for name in node.output}
    reads = set().union(*(read_names(node) for node in proto.graph.node[: part.end]))
    inputs = tuple(v.name for v in proto.graph.input if v.name in reads and v.name not in made)
    return Segment(0, part.end, inputs, part.observed, passed_on=())


def _bounds(
    nodes: Sequence[onnx.NodeProto],
    wanted: set[str],
    sizes: Sizes,
    budget: int,
    last_use: Mapping[str, int],
    types: Mapping[str, int],
    walls: Collection[int],
) -> list[tuple[int, int]]:
    bounds: list[tuple[int, int]] = []
    start, live_bytes, count = 0, 0, 0
    untyped_until = 0  # no cut before this node: a value without a type is alive
    for index, node in enumerate(nodes):
        here = [sizes.get(name, 0) for name in node.output if name in wanted]
        full = (live_bytes and live_bytes + sum(here) > budget) or count + len(here) > MOST_TENSORS
        if index in walls or (full and count and index >= untyped_until):
            bounds.append((start, index))
            start, live_bytes, count = index, 0, 0
        live_bytes += sum(here)
        count += len(here)
        for name in node.output:
            if not types.get(name):
                untyped_until = max(untyped_until, last_use.get(name, 0) + 1)
    bounds.append((start, len(nodes)))
    return bounds


def _walls(
    proto: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    last_use: Mapping[str, int],
    types: Mapping[str, int],
    most: int,
) -> frozenset[int]:
    """The nodes that a part begins with so that none has more bytes of weights, where that is possible.

    Of the places in the second half of a part the last one is taken across which the fewest values go.
    """
    sizes = {tensor.name: content_bytes(tensor) for tensor in proto.graph.initializer}
    crossing, unfit = [0] * (len(nodes) + 2), [0] * (len(nodes) + 2)  # changes from node to node
    for index, node in enumerate(nodes):
        for name in node.output:
            for place, change in ((index + 1, 1), (last_use.get(name, index) + 1, -1)):
                crossing[place] += change
                unfit[place] += 0 if types.get(name) else change
    crossing, unfit = list(itertools.accumulate(crossing)), list(itertools.accumulate(unfit))  # alive before each node
    walls: set[int] = set()
    start, live_bytes = 0, 0
    behind = [0]  # bytes of weights of the part in front of each node
    for index, node in enumerate(nodes):
        own = sum(sizes.get(name, 0) for name in set(read_names(node)))
        if live_bytes and live_bytes + own > most:
            fit = [p for p in range(start + 1, index + 1) if not unfit[p] and 2 * behind[p - start] >= most]
            if fit:
                wall = min(fit, key=lambda place: (crossing[place], -place))
                walls.add(wall)
                live_bytes -= behind[wall - start]
                behind = [bytes_ - behind[wall - start] for bytes_ in behind[wall - start :]]
                start = wall
        live_bytes += own
        behind.append(live_bytes)
    return frozenset(walls)


def _segment(
    nodes: Sequence[onnx.NodeProto],
    reads: Sequence[set[str]],
    bounds: tuple[int, int],
    wanted: set[str],
    last_use: Mapping[str, int],
) -> Segment:
    start, stop = bounds
    made = dict.fromkeys(name for node in nodes[start:stop] for name in node.output if name)
    needed = set().union(*reads[start:stop]) - made.keys()
    return Segment(
        start,
        stop,
        inputs=tuple(sorted(needed)),
        observed=tuple(name for name in made if name in wanted),
        passed_on=tuple(name for name in made if last_use.get(name, -1) >= stop),
    )
