"""Calibration in parts of the model, and with states fed back.

The float model run in parts whose observed tensors fit a byte budget.

A model whose weights take much is run in parts of fewer weights, one part open at a time: some samples run through the
first part, and what crosses to the next is kept, in memory or on disk. So no more than the weights of one part have to
be in memory, and they are read once for some samples.

Calibration data for nets with states: the float model's own states are fed back from one step to the next.

Recorded data of a recurrent net, a voice detector or a language model with a cache often hold the inputs proper only.
With zeros or random numbers for the states, the ranges of all that depends on them would be wrong.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.calibration.blocked import as_blocked
from kenosis_ort.calibration.feeds import sample_feeds
from kenosis_ort.calibration.part_session import ObservedModel, Segment, SessionSettings, run
from kenosis_ort.calibration.segments import MOST_TENSORS, cut, estimate_bytes, from_the_first_node
from kenosis_ort.errors import CalibrationError, did_you_mean, last_gate
from kenosis_ort.graph.bodies import state_pairs
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.outside import weight_bytes
from kenosis_ort.storage.spool import Spool


class ClosedLoopReader(CalibrationDataReader):  # type: ignore[misc]
    """Completes feeds with the states that the float model computed on the feed before.

    A feed that holds a state itself starts a new sequence with it; so does every ``steps``-th feed.

    Args:
        model: The float model, as a path or in memory.
        reader: A ``CalibrationDataReader`` or an iterable of feeds, without the states or with those of the first
            step of each sequence; read once.
        states: Input name by output name; by default what `state_pairs` finds.
        initial: First states by input name. By default zeros; a size that is not fixed is 1 on the first axis (the
            batch) and 0 on others (an empty cache).
        steps: Number of feeds in a sequence; None for one sequence, or those that the feeds' own states start.
        custom_op_libraries: Shared libraries with custom operators to register.
        threads: Threads of the runtime; 0 leaves it to the runtime.

    Raises:
        CalibrationError: A state is no input or output of the model, or there is none.
    """

    @last_gate
    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto,
        reader: Any,
        *,
        states: Mapping[str, str] | None = None,
        initial: Mapping[str, Array] | None = None,
        steps: int | None = None,
        custom_op_libraries: Sequence[str] = (),
        threads: int = 0,
    ) -> None:
        proto = load_model(model, ask_runtime=False).proto
        self._states = dict(state_pairs(proto) if states is None else states)
        self._inputs = {v.name: v for v in proto.graph.input}
        self._check({v.name for v in proto.graph.output}, states is not None)
        if steps is not None and steps < 1:
            raise CalibrationError(
                f"A sequence of {steps} feeds is not possible.", fix="Give steps=1 or more, or None."
            )
        self._initial = {name: np.asarray(value) for name, value in (initial or {}).items()}
        self._steps = steps
        self._reader = reader
        self._left: Iterator[Mapping[str, Any]] | None = None
        self._model = ObservedModel(proto, SessionSettings((), tuple(custom_op_libraries), threads))
        self._session = self._model.session(list(self._states))
        self._current: dict[str, Any] = {}
        self._count = 0

    def _check(self, outputs: set[str], given: bool) -> None:
        for output, name in self._states.items():
            for what, value, known in (("output", output, outputs), ("input", name, set(self._inputs))):
                if value not in known:
                    raise CalibrationError(
                        f"A state names an {what} that the model does not have.{did_you_mean(value, sorted(known))}",
                        where=f"'{value}'",
                    )
        if not self._states:
            raise CalibrationError(
                "No state is fed back." if given else "No output of the model is clearly the next value of an input.",
                fix="Give states={output name: input name}.",
            )

    def __len__(self) -> int:
        return len(self._reader)

    def get_next(self) -> dict[str, Any] | None:
        """The next feed with its states, None at the end."""
        if self._left is None:
            self._left = iter(sample_feeds(self._reader))
        feed = next(self._left, None)
        if feed is None:
            self._model.close()
            return None
        names = list(self._states.values())
        if self._steps is not None and self._count % self._steps == 0:
            self._current = {}
        complete = dict(feed)
        for name in names:
            if name not in complete:
                complete[name] = self._current[name] if name in self._current else self._first(name)
        computed = run(self._session, list(self._states), complete, self._count)
        self._current = dict(zip(names, computed, strict=True))
        self._count += 1
        return complete

    def _first(self, name: str) -> Array:
        if name in self._initial:
            return self._initial[name]
        tensor = self._inputs[name].type.tensor_type
        if not tensor.HasField("shape"):
            raise CalibrationError(
                "The shape of a first state is not known.", where=f"input '{name}'", fix="Give initial={name: array}."
            )
        dims = list(enumerate(tensor.shape.dim))
        shape = [d.dim_value if d.HasField("dim_value") else int(axis == 0) for axis, d in dims]
        return np.zeros(shape, helper.tensor_dtype_to_np_dtype(tensor.elem_type))


_log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Take = Callable[[int, "dict[str, Array]"], None]

_MOST_WEIGHTS = 2**32
"""Bytes of weights in one part; a model of more is run in several."""
_LITTLE = 2**22
"""Bytes of weights that are written in no time."""


@dataclass
class _Stage:
    """One part of the graph; its session is made when the values it reads are there."""

    part: Segment
    last_use: frozenset[str]  # inputs that no later stage reads
    session: ort.InferenceSession | None = None
    in_blocks: Mapping[str, str] = field(default_factory=dict)  # outputs that come so, and what they are called then

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
        any_order: Of the tensors those that may be handed out as `kenosis_ort.calibration.blocked.Blocked`.

    Attributes:
        is_heavy: Its weights are too many for one part: it is run on several feeds at a time.
    """

    def __init__(
        self,
        model: ObservedModel,
        proto: onnx.ModelProto,
        computed: Mapping[str, str],
        types: Mapping[str, int],
        budget: int,
        any_order: Collection[str] = (),
    ) -> None:
        self._any_order = frozenset(any_order)
        self._sizes: Mapping[str, int] = {}
        self._model = model
        self._proto = proto
        self._computed = computed
        self._types = types
        self._budget = budget
        self._prefix = _free_prefix(proto)
        self.is_heavy = weight_bytes(proto) > _MOST_WEIGHTS
        self._stages: list[_Stage] = []
        self._planned_bytes = -1

    def run(self, feed: Mapping[str, Any], sample: int, take: Callable[[dict[str, Array]], None]) -> None:
        """Runs the model.

        Args:
            feed: Values by input name.
            sample: Index of the sample, for messages.
            take: Called with the results of each part, by tensor name; must not keep them.

        Raises:
            CalibrationError: The model fails on the feed.
        """
        if not self._computed:
            return
        self._plan(feed, sample)
        values: dict[str, Any] = {}
        at = 0
        while at < len(self._stages):
            stage = self._stages[at]
            try:
                results = self._run_stage(stage, {**feed, **values}, sample)
            except CalibrationError as error:
                if all(stage.part.start == 0 for stage in self._stages[at:]):
                    raise
                _log.info("part %d cannot run by itself, the rest runs from the first node on: %s", at, error)
                self._uncut(at)
                continue
            for name in stage.last_use:
                values.pop(name, None)
            values.update({name: results[name] for name in stage.part.passed_on})
            take({name: results[name] for name in stage.part.observed})
            del results
            at += 1

    def run_all(self, feeds: Sequence[Mapping[str, Any]], numbers: Sequence[int], take: Take) -> None:
        """Runs the model on several feeds, part by part; a part is closed before the next is opened.

        Args:
            feeds: Values by input name.
            numbers: Indexes of the samples that they are of, for messages.
            take: Called with a place in ``feeds`` and the results of a part there; must not keep them.

        Raises:
            CalibrationError: The model fails on a feed.
        """
        if not self._computed:
            return
        for place, feed in enumerate(feeds):
            self._plan(feed, numbers[place])
        alive: Sequence[Mapping[str, Any]] = [{} for _ in feeds]
        for at in range(len(self._stages)):
            alive = self._run_through(at, feeds, numbers, alive, take)

    def _run_through(
        self,
        at: int,
        feeds: Sequence[Mapping[str, Any]],
        numbers: Sequence[int],
        alive: Sequence[Mapping[str, Any]],
        take: Take,
    ) -> Spool:
        """Runs all feeds through one part; returns the values that are alive behind it."""
        behind = Spool()
        for place, feed in enumerate(feeds):
            values = alive[place]
            try:
                results = self._run_stage(self._stages[at], {**feed, **values}, numbers[place])
            except CalibrationError as error:
                if self._stages[at].part.start == 0:
                    raise
                _log.info("part %d cannot run by itself, the rest runs from the first node on: %s", at, error)
                self._uncut(at)
                results = self._run_stage(self._stages[at], feed, numbers[place])
            stage = self._stages[at]
            live = {name: value for name, value in values.items() if name not in stage.last_use}
            behind.append({**live, **{name: results[name] for name in stage.part.passed_on}})
            take(place, {name: results[name] for name in stage.part.observed})
        self._stages[at].session = None
        return behind

    def _run_stage(self, stage: _Stage, values: Mapping[str, Any], sample: int) -> dict[str, Array]:
        if stage.session is None:
            alone = self.is_heavy or len(self._stages) == 1
            asked, free = (stage.part, stage.outputs, values), self._free(stage.part)
            if free:
                stage.session, stage.in_blocks = self._model.segment_in_blocks(*asked, free, alone=alone)
            else:
                stage.session = self._model.segment(*asked, alone=alone)
        inputs = {name: values[name] for name in stage.session.inputs if name in values}
        blocks = stage.in_blocks
        names = list(dict.fromkeys(blocks.get(name, name) for name in stage.outputs))
        found = dict(zip(names, run(stage.session, names, inputs, sample), strict=True))
        return {n: as_blocked(found[blocks[n]]) if n in blocks else found[n] for n in stage.outputs}

    def _free(self, part: Segment) -> frozenset[str]:
        """Values that may stay in blocks; none where the weights outweigh the savings: they are written anew."""
        if self.is_heavy or not self._model.has_blocks:
            return frozenset()
        free = self._any_order.intersection(part.observed).difference(part.passed_on)
        saved = sum(self._sizes.get(name, 0) for name in free)
        return free if weight_bytes(self._proto) <= max(saved, _LITTLE) else frozenset()

    def _uncut(self, at: int) -> None:
        """Makes the stages from one on compute all they need from the graph's inputs."""
        self._stages[at:] = [_Stage(from_the_first_node(self._proto, s.part), frozenset()) for s in self._stages[at:]]

    def _plan(self, feed: Mapping[str, Any], sample: int) -> None:
        """Cuts the graph into stages for feeds of this size; again only when a larger one comes."""
        size = sum(_bytes(value) for value in feed.values())
        if size <= self._planned_bytes:
            return
        self._planned_bytes = size
        sizes = estimate_bytes(self._proto, feed, set(self._computed))
        unsized = [name for name in self._computed if name not in sizes]
        if unsized:
            sizes.update(self._measure(unsized, feed, sample))
        self._sizes = sizes
        if self.is_heavy or sum(sizes.values()) > self._budget or len(sizes) > MOST_TENSORS:
            untyped = [n for node in self._proto.graph.node for n in node.output if n and n not in self._types]
            try:
                self._types = {**self._types, **self._model.ask_types(untyped)}
            except CalibrationError as error:
                _log.info("the graph is not cut across values of unknown type: %s", error)
        weights = _MOST_WEIGHTS if self.is_heavy else 0
        parts = cut(self._proto, self._computed, sizes, self._types, self._budget, weights=weights)
        if [stage.part for stage in self._stages] == parts:
            return
        if len(parts) > 1:
            _log.info("%d tensors of %d bytes are observed in %d parts", len(sizes), sum(sizes.values()), len(parts))
        self._stages = []
        for index, part in enumerate(parts):
            later = {name for rest in parts[index + 1 :] for name in rest.inputs}
            self._stages.append(_Stage(part, frozenset(name for name in part.inputs if name not in later)))

    def _measure(self, names: Sequence[str], feed: Mapping[str, Any], sample: int) -> dict[str, int]:
        """The sizes in bytes of tensors, by a run that returns nothing else."""
        outputs = [f"{self._prefix}size/{index}" for index in range(len(names))]
        nodes = [helper.make_node("Size", [n], [o], name=o) for n, o in zip(names, outputs, strict=True)]
        counts = run(self._model.session(outputs, nodes), outputs, dict(feed), sample)
        widths = {name: np.dtype(self._computed[name]).itemsize for name in names}
        return {name: int(count) * widths[name] for name, count in zip(names, counts, strict=True)}


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    return int(getattr(value.numpy() if isinstance(value, ort.OrtValue) else value, "nbytes", 0))


def _free_prefix(proto: onnx.ModelProto) -> str:
    prefix = "kenosis_calibration"
    graph = proto.graph
    names = [t.name for t in graph.initializer] + [v.name for v in graph.input]
    names += [name for node in graph.node for name in (node.name, *node.output)]
    while any(name.startswith(prefix) for name in names):
        prefix += "_"
    return prefix + "/"
