"""Feeds that the float model computes itself: states that come back to it, and what the bodies in it read.

Recorded data of a recurrent net, a voice detector or a language model with a cache often hold the inputs proper only.
With zeros or random numbers for the states, the ranges of all that depends on them would be wrong.

The runtime returns no value from within a body of ``If``, ``Loop`` and ``Scan``. So the model around it returns what
the body reads from outside, and the body runs as a model of its own: a branch where its condition holds, a loop once an
iteration, fed with the states that it wrote before.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.calibration.feeds import Array, Feed, sample_feeds
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, run
from kenosis_ort.errors import CalibrationError, did_you_mean, last_gate
from kenosis_ort.graph.bodies import Body, state_pairs
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import attribute, attribute_int
from kenosis_ort.runtime.session import open_session


class StateLoop:
    """A model whose states come back to it.

    Args:
        proto: The float model.
        links: Output by name of the input that it replaces in the next step.
        settings: How to run it.

    Attributes:
        states: By input name, as the model computed them last; none in front of a sequence.
    """

    def __init__(self, proto: onnx.ModelProto, links: Mapping[str, str], settings: SessionSettings) -> None:
        self._links = dict(links)
        self._outputs = list(dict.fromkeys(links.values()))
        with ObservedModel(proto, settings) as model:
            self._session = model.session(self._outputs)
        self.states: dict[str, Any] = {}

    def advance(self, feed: Mapping[str, Any], number: int) -> None:
        """Runs one step.

        Args:
            feed: All inputs, states among them.
            number: What messages call the sample.

        Raises:
            CalibrationError: The model does not run.
        """
        found = run(self._session, self._outputs, feed, number)
        self.states = {name: found[output] for name, output in self._links.items()}


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
        links = {name: output for output, name in self._states.items()}
        self._loop = StateLoop(proto, links, SessionSettings((), tuple(custom_op_libraries), threads))
        self._count = 0

    def _check(self, outputs: set[str], given: bool) -> None:
        for output, name in self._states.items():
            for what, value, known in (("output", output, outputs), ("input", name, set(self._inputs))):
                if value not in known:
                    raise CalibrationError(
                        f"A state names an {what} that the model does not have.{did_you_mean(value, sorted(known))}",
                        where=f"'{value}'",
                        fix=f"There are: {', '.join(sorted(known))}.",
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
            return None
        if self._steps is not None and self._count % self._steps == 0:
            self._loop.states = {}
        complete = {**self._loop.states, **feed}
        for name in self._states.values():
            if name not in complete:
                complete[name] = self._first(name)
        self._loop.advance(complete, self._count)
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


Feeds = Callable[[], Iterator[Feed]]
"""Begins anew with every call."""


def body_feeds(
    outer: onnx.ModelProto, owner: onnx.NodeProto, body: Body, feeds: Feeds, *, custom_op_libraries: Sequence[str] = ()
) -> Feeds:
    """Feeds of a body, run by run.

    Args:
        outer: The float model around it.
        owner: The node that owns the body.
        body: The body.
        feeds: What feeds the model around it.
        custom_op_libraries: Libraries with custom operators to register.
    """
    runs = {"If": _branch, "Loop": _iterations, "Scan": _slices}[owner.op_type]
    wanted = tuple(dict.fromkeys(name for name in (*owner.input, *body.captured) if name))
    computed = {name for node in outer.graph.node for name in node.output}
    source = [name for name in wanted if name in computed]

    def fed() -> Iterator[Feed]:
        session = open_session(outer, custom_op_libraries=custom_op_libraries, further=source)
        inner = cache(lambda: open_session(body.model, custom_op_libraries=custom_op_libraries))
        for feed in feeds():
            values = dict(zip(source, session.run(source, dict(feed)), strict=True)) if source else {}
            values.update({name: feed[name] for name in wanted if name in feed})
            values.update({name: stored for name, stored in constants.items() if name not in values})
            yield from runs(owner, body, values, {name: values[name] for name in body.captured}, inner)

    constants = {t.name: array_in(t) for t in outer.graph.initializer if t.name in wanted}
    return fed


Opener = Callable[[], ort.InferenceSession]
"""Returns the one session of a body."""


def _branch(owner: onnx.NodeProto, body: Body, values: Feed, captured: Feed, _: Opener) -> Iterator[Feed]:
    if bool(np.asarray(values[owner.input[0]]).reshape(-1)[0]) == (body.place.attribute == "then_branch"):
        yield captured


def _iterations(owner: onnx.NodeProto, body: Body, values: Feed, captured: Feed, opened: Opener) -> Iterator[Feed]:
    names = _inputs(body)
    most = int(np.asarray(values[owner.input[0]]).reshape(-1)[0]) if owner.input[0] else None
    going = bool(np.asarray(values[owner.input[1]]).reshape(-1)[0]) if owner.input[1:2] and owner.input[1] else True
    states: list[Any] = [values[name] for name in owner.input[2:]]
    outputs = [value.name for value in body.model.graph.output][: 1 + len(states)]
    number = 0
    while going and (most is None or number < most):
        given = (np.array(number, np.int64), np.array(going), *states)
        feed = {**captured, **dict(zip(names, given, strict=True))}
        yield feed
        condition, *states = _run(opened(), outputs, feed)
        going = bool(np.asarray(condition).reshape(-1)[0])
        number += 1


def _slices(owner: onnx.NodeProto, body: Body, values: Feed, captured: Feed, opened: Opener) -> Iterator[Feed]:
    names, count = _inputs(body), attribute_int(owner, "num_scan_inputs", 1)
    given = [values[name] for name in owner.input]
    states, scanned = given[: len(given) - count], given[len(given) - count :]
    axes, backwards = (_integers(owner, f"scan_input_{what}", count) for what in ("axes", "directions"))
    outputs = [value.name for value in body.model.graph.output][: len(states)]
    length = scanned[0].shape[axes[0]]
    for step in range(length):
        at = [length - 1 - step if back else step for back in backwards]
        parts = [np.take(array, i, axis) for array, i, axis in zip(scanned, at, axes, strict=True)]
        feed = {**captured, **dict(zip(names, (*states, *parts), strict=True))}
        yield feed
        states = _run(opened(), outputs, feed)


def _inputs(body: Body) -> list[str]:
    """The names of the body's own inputs."""
    return [v.name for v in body.model.graph.input][: len(body.model.graph.input) - len(body.captured)]


def _run(session: ort.InferenceSession, outputs: Sequence[str], feed: Feed) -> list[Any]:
    wanted = {value.name for value in session.get_inputs()}
    return list(session.run(list(outputs), {name: value for name, value in feed.items() if name in wanted}))


def _integers(node: onnx.NodeProto, name: str, count: int) -> list[int]:
    found = attribute(node, name)
    return [0] * count if found is None else list(found.ints)
