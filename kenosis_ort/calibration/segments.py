"""Cutting a graph into parts, so that the tensors observed in one part fit a byte budget.

A part is a run of nodes in graph order. It returns the tensors observed in it and the values that later parts read;
those are fed to them. So the float model is computed once, whatever the number of parts. A model of many weights is cut
into parts of fewer as well, where few values cross.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx

from kenosis_ort.calibration.session import Segment, constant_values
from kenosis_ort.graph.external_data import content_bytes
from kenosis_ort.graph.walk import read_names

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
