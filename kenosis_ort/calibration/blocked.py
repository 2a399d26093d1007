"""Values that the runtime does not hand out as they are: in blocks of channels, or within bodies.

Activations as the runtime's convolutions lay them out, so that they need not be put in order to be looked at.

Kernels for pictures keep the channels in blocks: those of one block lie side by side at each place. Where such a value
leaves the graph, the runtime puts it in order first, a pass over memory that takes longer than some convolutions.
Extremes do not ask for order, extremes by channel and single elements can be had from either one.

What the bodies of ``If``, ``Loop`` and ``Scan`` are fed with when the model around them runs on calibration data.

The runtime returns no value from within a body. So the model around it returns what the body reads from outside, and
the body runs as a model of its own: a branch where its condition holds, a loop once an iteration, fed with the
states that it wrote before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper

from kenosis_ort.graph.bodies import Body
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import attribute, attribute_int, read_names
from kenosis_ort.runtime.limits import fact_of_processor
from kenosis_ort.runtime.session import TENSOR_TYPES, open_session

Feed = Mapping[str, Any]
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

    def fed() -> Iterator[Feed]:
        session, source = _returning(outer, wanted, custom_op_libraries)
        inner = None
        for feed in feeds():
            values = dict(zip(source, session.run(list(source), dict(feed)), strict=True)) if source else {}
            values.update({name: feed[name] for name in wanted if name in feed})
            values.update({name: stored for name, stored in constants.items() if name not in values})
            if owner.op_type != "If" and inner is None:
                inner = open_session(body.model, custom_op_libraries=custom_op_libraries)
            captured = {name: values[name] for name in body.captured}
            yield from runs(owner, body, values, captured, inner)

    constants = {t.name: array_in(t) for t in outer.graph.initializer if t.name in wanted}
    return fed


def value_types(
    outer: onnx.ModelProto, names: Sequence[str], custom_op_libraries: Sequence[str] = ()
) -> dict[str, onnx.TypeProto]:
    """The types of values of a main graph, as declared or else as the runtime infers them."""
    graph = outer.graph
    known = {v.name: v.type for v in (*graph.value_info, *graph.input, *graph.output) if v.type.WhichOneof("value")}
    missing = [name for name in names if name not in known and any(name in node.output for node in graph.node)]
    if missing:
        session, source = _returning(outer, missing, custom_op_libraries)
        described = {value.name: value for value in session.get_outputs()}
        for name in source:
            kind = TENSOR_TYPES.get(described[name].type)
            if kind is not None:
                known[name] = onnx.helper.make_tensor_type_proto(kind, described[name].shape or None)
    return {name: known[name] for name in names if name in known}


def _returning(
    outer: onnx.ModelProto, wanted: Sequence[str], libraries: Sequence[str]
) -> tuple[ort.InferenceSession, tuple[str, ...]]:
    """A session of the model that returns those of the values that its nodes compute, and which they are."""
    computed = {name for node in outer.graph.node for name in node.output}
    source = tuple(name for name in wanted if name in computed)
    return open_session(outer, custom_op_libraries=libraries, further=source), source


def _branch(
    owner: onnx.NodeProto, body: Body, values: Feed, captured: Feed, _: ort.InferenceSession | None
) -> Iterator[Feed]:
    if bool(np.asarray(values[owner.input[0]]).reshape(-1)[0]) == (body.place.attribute == "then_branch"):
        yield captured


def _iterations(
    owner: onnx.NodeProto, body: Body, values: Feed, captured: Feed, session: ort.InferenceSession | None
) -> Iterator[Feed]:
    assert session is not None
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
        condition, *states = _run(session, outputs, feed)
        going = bool(np.asarray(condition).reshape(-1)[0])
        number += 1


def _slices(
    owner: onnx.NodeProto, body: Body, values: Feed, captured: Feed, session: ort.InferenceSession | None
) -> Iterator[Feed]:
    assert session is not None
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
        states = _run(session, outputs, feed)


def _inputs(body: Body) -> list[str]:
    """The names of the body's own inputs."""
    return [v.name for v in body.model.graph.input][: len(body.model.graph.input) - len(body.captured)]


def _run(session: ort.InferenceSession, outputs: Sequence[str], feed: Feed) -> list[Any]:
    wanted = {value.name for value in session.get_inputs()}
    return list(session.run(list(outputs), {name: value for name, value in feed.items() if name in wanted}))


def _integers(node: onnx.NodeProto, name: str, count: int) -> list[int]:
    found = attribute(node, name)
    return [0] * count if found is None else list(found.ints)


Array = npt.NDArray[Any]

_DOMAIN = "com.microsoft.nchwc"
_REORDER = "ReorderOutput"
_BLOCKS = (4, 8, 16, 32)
MOST_PLACES = 1 << 18
"""Elements of one array whose places are kept: 2 MiB."""


class Blocked(np.ndarray[Any, Any]):
    """An array of shape (images, channels / block, height, width, block), all of it in one piece."""


@lru_cache(maxsize=1)
def block_size() -> int:
    """Number of channels of a block on this processor; found out once, see `fact_of_processor`."""
    return fact_of_processor("block", _probed_block_size, lambda size: type(size) is int and size in _BLOCKS)


def _probed_block_size() -> int:
    reorder = helper.make_node("ReorderInput", ["x"], ["y"], domain=_DOMAIN)
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4, 1, 1])
    graph = helper.make_graph([reorder], "block", [x], [onnx.ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=7)
    session = open_session(model, optimize=False)
    (y,) = session.run(None, {"x": np.zeros((1, 4, 1, 1), np.float32)})
    return int(y.shape[1])


def without_reorders(optimized: onnx.ModelProto, names: Collection[str]) -> dict[str, str]:
    """Has an optimized model return values in blocks that it would put in order first.

    Values whose channels do not fill their blocks are put in order as before: what fills up is no value.

    Args:
        optimized: As the runtime writes it; changed.
        names: Outputs that may come in blocks.

    Returns:
        By the name of an output, that of the one that takes its place; without those that stay.
    """
    graph = optimized.graph
    found = {}
    for node in graph.node:
        if node.op_type == _REORDER and node.domain == _DOMAIN and node.output[0] in names:
            attributes = {attribute.name: attribute.i for attribute in node.attribute}
            if not attributes.get("channels_last") and attributes.get("channels", 1) % block_size() == 0:
                found[node.output[0]] = node.input[0]
    if found:
        uses = Counter(name for node in graph.node for name in set(read_names(node)))
        rest = [n for n in graph.node if n.op_type != _REORDER or n.output[0] not in found or uses[n.output[0]]]
        outputs = dict.fromkeys(found.get(value.name, value.name) for value in graph.output)
        typed = {value.name: value for value in graph.output}
        returned = [typed.get(name) or onnx.ValueInfoProto(name=name) for name in outputs]
        del graph.node[:], graph.output[:]
        graph.node.extend(rest)
        graph.output.extend(returned)
    return found


def as_blocked(array: Array) -> Blocked:
    """Array that the runtime returned in blocks, in its logical shape and type."""
    images, channels, height, width = array.shape
    block = block_size()
    return array.reshape(images, channels // block, height, width, block).view(Blocked)


def in_order(array: Blocked) -> Array:
    """The elements in order, (images, channels, height, width)."""
    images, blocks, height, width, block = array.shape
    plain: Array = np.asarray(array).transpose(0, 1, 4, 2, 3).reshape(images, blocks * block, height, width)
    return plain


@lru_cache(maxsize=64)
def places(shape: tuple[int, ...], stride: int) -> npt.NDArray[np.intp]:
    """Positions in memory of every ``stride``-th element, in the order of memory.

    Args:
        shape: Of the array in blocks.
        stride: Counted in the order that the elements have without blocks.
    """
    images, blocks, height, width, block = shape
    area = height * width
    channel, place = np.divmod(np.arange(0, images * blocks * block * area, stride, dtype=np.intp), area)
    group, inside = np.divmod(channel, block)
    found = np.sort((group * area + place) * block + inside)
    found.flags.writeable = False
    return found
