"""The scenarios in which a model is timed: a language model's file serves prompts and single tokens alike.

What is fast for 128 rows may be slow for one. The feeds tell which lengths there are; where they show one only,
`Speed.sequence_lengths` says which there are to be, and feeds are cut or repeated to those.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.graph.constants import HEAVY
from kenosis_ort.graph.model_session import open_session

_log = logging.getLogger(__name__)

_APART: Final = 4
"""Lengths are scenarios of their own where one is this many times another."""
FEW_ROWS: Final = 8
"""Up to so many rows a linear layer's time is that of reading its weights."""
_CACHE_RANK, _CACHE_AXIS = 4, 2

Feed = Mapping[str, Any]


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


@dataclass(frozen=True)
class _Length:
    """Axis of an input that is not the batch and shows the length of a feed."""

    name: str
    axis: int

    def of(self, feed: Feed) -> int:
        return int(np.shape(feed[self.name])[self.axis])


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
                name = f"{open_lengths[0].name} of length {length}"
                found.append(Scenario(name, [feed], linear and _rows(feed) <= FEW_ROWS))
        if found:
            return found, missing
        return [Scenario("", feeds, linear and _rows(feeds[0]) <= FEW_ROWS)], missing
    notes = ["no input of the model is of open length: timed as the samples are"] if lengths else []
    for where in open_lengths:
        ordered = sorted(feeds, key=where.of)
        short, long = where.of(ordered[0]), where.of(ordered[-1])
        if long >= _APART * max(short, 1):
            ends = ((short, ordered[0]), (long, ordered[-1]))
            few = [linear and _rows(feed) <= FEW_ROWS for _, feed in ends]
            return [Scenario(f"{where.name} of length {n}", [f], w) for (n, f), w in zip(ends, few, strict=True)], notes
    return [Scenario("", feeds, linear and _rows(feeds[0]) <= FEW_ROWS)], notes


def _is_linear(model: onnx.ModelProto) -> bool:
    heavy = [node.op_type for node in model.graph.node if node.op_type in HEAVY]
    return bool(heavy) and set(heavy) <= {"MatMul", "Gemm"}


def _rows(feed: Feed) -> int:
    """Number of rows of the first input that linear layers read: tokens, or vectors."""
    first = np.asarray(next(iter(feed.values())))
    return int(np.prod(first.shape if first.dtype.kind in "iu" else first.shape[:-1], dtype=np.int64))


def _lengths(model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[_Length]:
    """The open axes, but for the batch and those of caches, in the order of the inputs."""
    found = []
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == _CACHE_RANK or any(value.name not in feed for feed in feeds):
            continue
        found += [_Length(value.name, at) for at, d in enumerate(dims) if at and not d.HasField("dim_value")]
    return [where for where in found if all(np.ndim(feed[where.name]) > where.axis for feed in feeds)]


def _of_length(
    model: onnx.ModelProto, feeds: Sequence[Feed], where: _Length, length: int, libraries: Sequence[str]
) -> Feed | None:
    """A feed of a length: one that has it, or the nearest, cut or repeated; None if the model refuses it."""
    nearest = min(feeds, key=lambda feed: abs(where.of(feed) - length))
    if where.of(nearest) == length:
        return nearest
    made = _resized(model, nearest, where.of(nearest), length)
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
