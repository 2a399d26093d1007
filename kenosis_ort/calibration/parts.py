"""The float model run in parts whose observed tensors fit a byte budget.

A part is a run of nodes in graph order. It returns the tensors observed in it and the values that later parts read;
those are fed to them. So the float model is computed once, whatever the number of parts.

A model whose weights take much is run in parts of fewer weights, cut where few values cross, one part open at a time:
some samples run through the first part, and what crosses to the next is kept, in memory or on disk. So no more than the
weights of one part have to be in memory, and they are read once for some samples.
"""

import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from kenosis_ort.calibration.feeds import bytes_of
from kenosis_ort.calibration.part_session import ObservedModel, Segment, constant_values, run
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.outside import content_bytes, weight_bytes
from kenosis_ort.graph.shapes import types_of
from kenosis_ort.graph.walk import all_names, read_names, reserve_name
from kenosis_ort.runtime.session import Array, Session
from kenosis_ort.storage.spool import Spool

_log = logging.getLogger(__name__)

Sizes = Mapping[str, int]
Take = Callable[[int, dict[str, Array]], None]

MOST_TENSORS = 1000
"""Tensors observed in one part; the runtime's time to make a session grows with the square of its outputs."""
_MOST_WEIGHTS = 2**32
"""Bytes of weights in one part; a model of more is run in several."""


def estimate_bytes(proto: onnx.ModelProto, feed: Mapping[str, Any], names: Collection[str]) -> dict[str, int]:
    """The sizes in bytes of those tensors whose shape annotation is fixed by the shapes of a feed.

    Args:
        proto: The model; named sizes of its inputs take the feed's values.
        feed: Arrays by input name.
        names: Tensors to size.
    """
    symbols: dict[str, int] = {}
    for value in proto.graph.input:
        given = feed.get(value.name)
        shape = given.shape if isinstance(given, np.ndarray) else ()
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
    nodes, wanted = proto.graph.node, set(observed)
    end = 1 + max((i for i, node in enumerate(nodes) if wanted.intersection(node.output)), default=len(nodes) - 1)
    cutting = _Cutting(proto, wanted, end)
    walls = cutting.walls(types, weights) if weights else frozenset()
    return [cutting.segment(*bounds) for bounds in itertools.pairwise(cutting.bounds(sizes, budget, types, walls))]


def cut_behind(proto: onnx.ModelProto, values: Collection[str]) -> list[Segment]:
    """Cuts the graph behind each node that computes one of some values; the last part ends with the last of them."""
    nodes, wanted = proto.graph.node, set(values)
    cutting = _Cutting(proto, wanted, len(nodes))
    ends = [at + 1 for at, node in enumerate(nodes) if wanted.intersection(node.output)]
    return [cutting.segment(*bounds) for bounds in itertools.pairwise([0, *ends])]


def from_the_first_node(proto: onnx.ModelProto, part: Segment) -> Segment:
    """A part that observes the same as ``part`` but computes all of it from the graph's inputs."""
    made = {name for node in proto.graph.node[: part.end] for name in node.output}
    reads = set().union(*(read_names(node) for node in proto.graph.node[: part.end]))
    inputs = tuple(v.name for v in proto.graph.input if v.name in reads and v.name not in made)
    return Segment(0, part.end, inputs, part.observed, passed_on=())


class _Cutting:
    """The first nodes of a graph, to be cut.

    Args:
        proto: The model.
        wanted: Tensors to observe.
        end: Number of the nodes.
    """

    def __init__(self, proto: onnx.ModelProto, wanted: set[str], end: int) -> None:
        constants, _ = constant_values(proto)
        self._nodes, self._wanted = proto.graph.node[:end], wanted
        self._initializers = proto.graph.initializer
        self._reads = [set(read_names(node)) - constants for node in self._nodes]
        self._last_use = {name: at for at, names in enumerate(self._reads) for name in names}

    def bounds(self, sizes: Sizes, budget: int, types: Mapping[str, int], walls: Collection[int]) -> list[int]:
        """The nodes that a part begins with, and the end; arguments as for `cut`."""
        found = [0]
        live_bytes, count = 0, 0
        untyped_until = 0  # no cut before this node: a value without a type is alive
        for index, node in enumerate(self._nodes):
            here = [sizes.get(name, 0) for name in node.output if name in self._wanted]
            full = (live_bytes and live_bytes + sum(here) > budget) or count + len(here) > MOST_TENSORS
            if index in walls or (full and count and index >= untyped_until):
                found.append(index)
                live_bytes, count = 0, 0
            live_bytes += sum(here)
            count += len(here)
            untyped = [self._last_use.get(name, 0) + 1 for name in node.output if not types.get(name)]
            untyped_until = max([untyped_until, *untyped])
        return [*found, len(self._nodes)]

    def walls(self, types: Mapping[str, int], most: int) -> frozenset[int]:
        """The nodes that a part begins with so that none has more bytes of weights, where that is possible.

        Of the places in the second half of a part the last one is taken across which the fewest values go.
        """
        sizes = {tensor.name: content_bytes(tensor) for tensor in self._initializers}
        crossing, unfit = ([0] * (len(self._nodes) + 2) for _ in range(2))  # changes from node to node
        for index, node in enumerate(self._nodes):
            for name in node.output:
                for place, change in ((index + 1, 1), (self._last_use.get(name, index) + 1, -1)):
                    crossing[place] += change
                    unfit[place] += 0 if types.get(name) else change
        crossing, unfit = (list(itertools.accumulate(changes)) for changes in (crossing, unfit))  # alive before each
        walls: set[int] = set()
        start, live_bytes = 0, 0
        behind = [0]  # bytes of weights of the part in front of each node
        for index, node in enumerate(self._nodes):
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

    def segment(self, start: int, end: int) -> Segment:
        """The part from one node up to, and without, another."""
        made = dict.fromkeys(name for node in self._nodes[start:end] for name in node.output if name)
        return Segment(
            start,
            end,
            inputs=tuple(sorted(set().union(*self._reads[start:end]) - made.keys())),
            observed=tuple(name for name in made if name in self._wanted),
            passed_on=tuple(name for name in made if self._last_use.get(name, -1) >= end),
        )


@dataclass
class _Stage:
    """One part of the graph; its session is made when the values it reads are there."""

    part: Segment
    last_use: frozenset[str]  # inputs that no later stage reads
    session: Session | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.part.observed, *self.part.passed_on)))


class StagedModel:
    """Runs the float model and hands out the observed tensors.

    Args:
        model: The model.
        proto: The model with its shape annotations.
        computed: Tensors that nodes compute, in graph order, with their numpy types.
        types: Element types of values, 0 for what is no tensor.
        budget: Bytes of observed tensors that may be held at a time.

    Attributes:
        is_heavy: Its weights are too many for one part: it is best run on several feeds at a time.
    """

    def __init__(
        self,
        model: ObservedModel,
        proto: onnx.ModelProto,
        computed: Mapping[str, str],
        types: Mapping[str, int],
        budget: int,
    ) -> None:
        self._model, self._proto, self._computed, self._types = model, proto, computed, types
        self._budget = budget
        self.is_heavy = weight_bytes(proto) > _MOST_WEIGHTS
        self._stages: list[_Stage] = []
        self._planned_bytes = -1

    def run(self, feeds: Sequence[Mapping[str, Any]], numbers: Sequence[int], take: Take) -> None:
        """Runs the model on feeds together, part by part; one of a heavy model is closed before the next is opened.

        Args:
            feeds: Values by input name.
            numbers: Indexes of the samples that they are of, for messages.
            take: Called with a place in ``feeds`` and the results of a part there, by tensor name; must not keep them.

        Raises:
            CalibrationError: The model fails on a feed.
        """
        if not self._computed:
            return
        for feed, number in zip(feeds, numbers, strict=True):
            self._plan(feed, number)
        alive: list[dict[str, Any]] | Spool = [{} for _ in feeds]
        for at in range(len(self._stages)):
            behind: list[dict[str, Any]] | Spool = Spool() if self.is_heavy else []
            for place, feed in enumerate(feeds):
                values = alive[place]
                if isinstance(alive, list):
                    alive[place] = {}  # what no later part reads is let go
                results = self._results(at, feed, values, numbers[place])
                stage = self._stages[at]
                live = {name: value for name, value in values.items() if name not in stage.last_use}
                behind.append({**live, **{name: results[name] for name in stage.part.passed_on}})
                take(place, {name: results[name] for name in stage.part.observed})
                del values, live, results
            alive = behind
            if self.is_heavy:
                self._stages[at].session = None

    def _results(self, at: int, feed: Mapping[str, Any], values: Mapping[str, Any], number: int) -> dict[str, Array]:
        """Results of a part; one that cannot run by itself, and those behind it, run from the first node on."""
        try:
            return self._run_stage(self._stages[at], {**feed, **values}, number)
        except CalibrationError as error:
            if self._stages[at].part.start == 0:
                raise
            _log.info("part %d cannot run by itself, the rest runs from the first node on: %s", at, error)
        parts = [from_the_first_node(self._proto, stage.part) for stage in self._stages[at:]]
        self._stages[at:] = [_Stage(part, frozenset()) for part in parts]
        return self._run_stage(self._stages[at], feed, number)

    def _run_stage(self, stage: _Stage, values: Mapping[str, Any], sample: int) -> dict[str, Array]:
        if stage.session is None:
            alone = self.is_heavy or len(self._stages) == 1
            stage.session = self._model.segment(stage.part, stage.outputs, values, alone=alone)
        inputs = {name: values[name] for name in stage.session.inputs if name in values}
        return run(stage.session, stage.outputs, inputs, sample)

    def _plan(self, feed: Mapping[str, Any], sample: int) -> None:
        """Cuts the graph into stages for feeds of this size; again only when a larger one comes."""
        size = bytes_of(feed)
        if size <= self._planned_bytes:
            return
        self._planned_bytes = size
        sizes = estimate_bytes(self._proto, feed, set(self._computed))
        if unsized := [name for name in self._computed if name not in sizes]:
            sizes.update(self._measure(unsized, feed, sample))
        if self.is_heavy or sum(sizes.values()) > self._budget or len(sizes) > MOST_TENSORS:
            untyped = [n for node in self._proto.graph.node for n in node.output if n and n not in self._types]
            asked = types_of(self._proto, untyped, self._model.settings.custom_op_libraries)
            self._types = {**self._types, **{name: kind.tensor_type.elem_type for name, kind in asked.items()}}
        weights = _MOST_WEIGHTS if self.is_heavy else 0
        parts = cut(self._proto, self._computed, sizes, self._types, self._budget, weights=weights)
        if [stage.part for stage in self._stages] == parts:
            return
        if len(parts) > 1:
            _log.info("%d tensors of %d bytes are observed in %d parts", len(sizes), sum(sizes.values()), len(parts))
        last = {name: part for part in parts for name in part.inputs}
        self._stages = [_Stage(p, frozenset(name for name in p.inputs if last[name] is p)) for p in parts]

    def _measure(self, names: Sequence[str], feed: Mapping[str, Any], sample: int) -> dict[str, int]:
        """The sizes in bytes of tensors, by a run that returns nothing else."""
        taken = all_names(self._proto)
        outputs = [reserve_name(f"{name}/size", taken) for name in names]
        nodes = [helper.make_node("Size", [n], [o], name=o) for n, o in zip(names, outputs, strict=True)]
        counts = run(self._model.session(outputs, nodes), outputs, feed, sample)
        return {n: int(counts[o]) * np.dtype(self._computed[n]).itemsize for n, o in zip(names, outputs, strict=True)}
