"""Feeds that models are timed on: those of each length that a net is to serve, and single samples of batches.

A language model's file serves prompts and single tokens alike: what is fast for 128 rows may be slow for one. The feeds
tell which lengths there are; where they show one only, `Speed.sequence_lengths` says which there are to be, and feeds
are cut or repeated to those.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.flow.request import Request
from kenosis_ort.graph import constants
from kenosis_ort.passes.evaluator import Feed
from kenosis_ort.runtime.session import open_session

_log = logging.getLogger(__name__)
_RACE_FEEDS: Final = 2
_APART: Final = 4
"""Lengths are scenarios of their own where one is this many times another."""
FEW_ROWS: Final = 8
"""Up to so many rows a linear layer's time is that of reading its weights."""
_CACHE_RANK, _CACHE_AXIS = 4, 2


@dataclass(frozen=True)
class Scenario:
    """Feeds that a model is timed on.

    Attributes:
        name: What tells it from the others, as a report says it; "" where there is one only.
        feeds: The feeds.
        few_rows: Its linear layers read a few rows at once, as for single tokens.
    """

    name: str
    feeds: Sequence[Feed]
    few_rows: bool


_Axis = tuple[str, int]
"""Input and axis, not the batch, that show the length of a feed."""


def _length(feed: Feed, where: _Axis) -> int:
    return int(np.shape(feed[where[0]])[where[1]])


def scenarios(
    model: onnx.ModelProto, feeds: Sequence[Feed], lengths: Sequence[int] = (), *, libraries: Sequence[str] = ()
) -> tuple[list[Scenario], list[str]]:
    """The scenarios that feeds show, the shortest first, and notes on those that they cannot show.

    Args:
        model: The float model.
        feeds: At least one.
        lengths: Lengths to time; where none are given, those of the feeds.
        libraries: Libraries with custom operators to register.
    """
    linear = _is_linear(model)
    open_lengths = _lengths(model, feeds)
    if lengths and open_lengths:
        found, missing = [], []
        for length in sorted(set(lengths)):
            feed = _of_length(model, feeds, open_lengths[0], length, libraries)
            if feed is None:
                missing.append(f"no feed of length {length} could be made of the samples: not timed for it")
            else:
                name = f"{open_lengths[0][0]} of length {length}"
                found.append(Scenario(name, [feed], linear and _rows(feed) <= FEW_ROWS))
        if found:
            return found, missing
        return [Scenario("", feeds, linear and _rows(feeds[0]) <= FEW_ROWS)], missing
    notes = ["no input of the model is of open length: timed as the samples are"] if lengths else []
    for where in open_lengths:
        ordered = sorted(feeds, key=partial(_length, where=where))
        short, long = _length(ordered[0], where), _length(ordered[-1], where)
        if long >= _APART * max(short, 1):
            ends = ((short, ordered[0]), (long, ordered[-1]))
            few = [linear and _rows(feed) <= FEW_ROWS for _, feed in ends]
            return [Scenario(f"{where[0]} of length {n}", [f], w) for (n, f), w in zip(ends, few, strict=True)], notes
    return [Scenario("", feeds, linear and _rows(feeds[0]) <= FEW_ROWS)], notes


def _is_linear(model: onnx.ModelProto) -> bool:
    heavy = [node.op_type for node in model.graph.node if node.op_type in constants.HEAVY]
    return bool(heavy) and set(heavy) <= {"MatMul", "Gemm"}


def _rows(feed: Feed) -> int:
    """Number of rows of the first input that linear layers read: tokens, or vectors."""
    first = np.asarray(next(iter(feed.values())))
    return int(np.prod(first.shape if first.dtype.kind in "iu" else first.shape[:-1], dtype=np.int64))


def _lengths(model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[_Axis]:
    """The open axes, but for the batch and those of caches, in the order of the inputs."""
    found = []
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == _CACHE_RANK or any(value.name not in feed for feed in feeds):
            continue
        found += [(value.name, at) for at, d in enumerate(dims) if at and not d.HasField("dim_value")]
    return [where for where in found if all(np.ndim(feed[where[0]]) > where[1] for feed in feeds)]


def _of_length(
    model: onnx.ModelProto, feeds: Sequence[Feed], where: _Axis, length: int, libraries: Sequence[str]
) -> Feed | None:
    """A feed of a length: one that has it, or the nearest, cut or repeated; None if the model refuses it."""
    nearest = min(feeds, key=lambda feed: abs(_length(feed, where) - length))
    if _length(nearest, where) == length:
        return nearest
    made = _resized(model, nearest, _length(nearest, where), length)
    try:
        open_session(model, custom_op_libraries=libraries).run(None, made)
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        _log.info("no feed of length %d: %s", length, error)
        return None
    return made


def _resized(model: onnx.ModelProto, feed: Feed, now: int, length: int) -> dict[str, Any]:
    """A feed of another length on each open axis that counts tokens, with those in a cache or without."""
    caches = [v for v in model.graph.input if len(v.type.tensor_type.shape.dim) == _CACHE_RANK and v.name in feed]
    past = max((np.shape(feed[v.name])[_CACHE_AXIS] for v in caches), default=0)
    sizes = {now: length, now + past: length + past}
    made = dict(feed)
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in feed or len(dims) == _CACHE_RANK:
            continue
        array = np.asarray(feed[value.name])
        for axis in range(1, array.ndim):
            wanted = sizes.get(array.shape[axis])
            if wanted is not None and axis < len(dims) and not dims[axis].HasField("dim_value"):
                array = np.take(array, np.arange(wanted) % max(array.shape[axis], 1), axis)
        made[value.name] = array
    return made


def single_samples(model: onnx.ModelProto, request: Request, feeds: Sequence[Any]) -> list[Any]:
    """Feeds of one sample each where the batch is open: calibration likes large batches, deployment small ones.

    A feed with which the model runs only as a whole stays whole.
    """
    defaults = {i.name for i in model.graph.initializer}
    free = {
        value.name
        for value in model.graph.input
        if value.name not in defaults
        and value.type.tensor_type.shape.dim
        and not value.type.tensor_type.shape.dim[0].HasField("dim_value")
    }
    opened = cache(lambda: open_session(model, custom_op_libraries=request.custom_op_libraries))
    return [_cut(opened, feed, free) for feed in feeds[:_RACE_FEEDS]]


def _cut(
    opened: Callable[[], ort.InferenceSession], feed: Mapping[str, Any], free: Collection[str]
) -> Mapping[str, Any]:
    sizes = {len(feed[name]) for name in free if name in feed}
    if len(sizes) != 1 or sizes == {1}:
        return feed
    one = {name: value[:1] if name in free else value for name, value in feed.items()}
    try:
        opened().run(None, one)
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        _log.info("timed on whole batches: %s", error)
        return feed
    return one
