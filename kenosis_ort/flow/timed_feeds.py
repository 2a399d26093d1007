"""Feeds that a model is timed on: one sample each, and one feed for each length that a net is to serve.

A language model's file serves prompts and single tokens alike: what is fast for 128 rows may be slow for one. The
feeds tell which lengths there are; where they show one only, `Speed.sequence_lengths` says which there are to be, and
feeds are cut or repeated to those. Batches are taken apart, since calibration likes them large and deployment does
not.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import onnx

from kenosis_ort.calibration.feeds import Feed
from kenosis_ort.flow.request import Request
from kenosis_ort.graph import constants
from kenosis_ort.runtime.session import Session, open_session

_log = logging.getLogger(__name__)
_RACE_FEEDS: Final = 2
_APART: Final = 4
"""Lengths are scenarios of their own where one is this many times another."""


FEW_ROWS: Final = 8
"""Up to so many rows a linear layer's time is that of reading its weights."""


_CACHE_RANK, _CACHE_AXIS = 4, 2
_Axis = tuple[str, int]
"""Input and axis, not the batch, that show the length of a feed."""


class Scenario(NamedTuple):
    """Feeds that a model is timed on.

    Attributes:
        name: What tells it from the others, as a report says it; "" where there is one only.
        feeds: The feeds.
        few_rows: Its linear layers read a few rows at once, as for single tokens.
    """

    name: str
    feeds: Sequence[Feed]
    few_rows: bool


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
    heavy = {node.op_type for node in model.graph.node if node.op_type in constants.HEAVY}
    linear = bool(heavy) and heavy <= {"MatMul", "Gemm"}

    def scenario(feeds: Sequence[Feed], length: int, where: _Axis | None = None) -> Scenario:
        name = "" if where is None else f"{where[0]} of length {length}"
        return Scenario(name, feeds, linear and _rows(feeds[0]) <= FEW_ROWS)

    axes = _open_axes(model, feeds)
    if lengths and axes:
        made = {n: _of_length(model, feeds, axes[0], n, libraries) for n in sorted(set(lengths))}
        lost = [n for n, feed in made.items() if feed is None]
        notes = [f"no feed of length {n} could be made of the samples: not timed for it" for n in lost]
        found = [scenario([feed], n, axes[0]) for n, feed in made.items() if feed is not None]
        return found or [scenario(feeds, 0)], notes
    notes = ["no input of the model is of open length: timed as the samples are"] if lengths else []
    for where in axes:
        ends = sorted(feeds, key=partial(_length, where=where))[:: max(len(feeds) - 1, 1)]
        sizes = [_length(feed, where) for feed in ends]
        if sizes[-1] >= _APART * max(sizes[0], 1):
            return [scenario([feed], n, where) for feed, n in zip(ends, sizes, strict=True)], notes
    return [scenario(feeds, 0)], notes


def _rows(feed: Feed) -> int:
    """Number of rows of the first input that linear layers read: tokens, or vectors."""
    first = np.asarray(next(iter(feed.values())))
    return int(np.prod(first.shape if first.dtype.kind in "iu" else first.shape[:-1], dtype=np.int64))


def _open_axes(model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[_Axis]:
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
    opened = partial(open_session, model, custom_op_libraries=libraries)
    return made if _takes(opened, made, f"no feed of length {length}") else None


def _takes(opened: Callable[[], Session], feed: Feed, otherwise: str) -> bool:
    """Whether a model runs on a feed."""
    try:
        opened().run(None, dict(feed))
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        _log.info("%s: %s", otherwise, error)
        return False
    return True


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
    opened = cache(partial(open_session, model, custom_op_libraries=request.custom_op_libraries))
    found = []
    for feed in feeds[:_RACE_FEEDS]:
        sizes = {len(feed[name]) for name in free if name in feed}
        one = {name: value[:1] if name in free else value for name, value in feed.items()}
        is_batch = len(sizes) == 1 and sizes != {1}
        found.append(one if is_batch and _takes(opened, one, "timed on whole batches") else feed)
    return found
