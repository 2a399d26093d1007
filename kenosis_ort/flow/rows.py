"""Batches: taken apart into rows, or made of a fixed size.

Batches taken apart: a feed of 32 rows is 32 samples to passes that are fitted to some and evaluated on others.

Whether the rows of a batch are samples of their own is not assumed but tried: the outputs for the last rows alone have
to be those rows of the outputs for more of them. A sequence along the first axis, or a mean over it, fails that.

Symbolic dimensions of a model for a runtime that takes none: a batch of any size becomes one, others are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.passes.evaluator import Rows

_TOOL: Final = "python -m onnxruntime.tools.make_dynamic_shape_fixed"


def with_static_shapes(loaded: LoadedModel, target: str) -> tuple[LoadedModel, tuple[str, ...]]:
    """A model without symbolic dimensions, and what was done, in sentences.

    The first dimension of an input is taken for the batch and becomes 1.

    Args:
        loaded: The model; not changed.
        target: Name of the target, for messages.

    Raises:
        UnsupportedModelError: Another dimension is symbolic, or an input's number of dimensions is not known.
    """
    given = {tensor.name for tensor in loaded.proto.graph.initializer}
    inputs = [info for info in loaded.proto.graph.input if info.name not in given]
    opened = [info for info in inputs if not _is_static(info)]
    for info in opened:
        dims = info.type.tensor_type.shape.dim
        if not info.type.tensor_type.HasField("shape") or any(not d.dim_value for d in dims[1:]):
            example = ",".join(str(d.dim_value or ("1" if i == 0 else "N")) for i, d in enumerate(dims)) or "1,3,N,N"
            raise UnsupportedModelError(
                f"target '{target}' takes static shapes alone, and input '{info.name}' is {_text(info)}",
                where=loaded.name,
                fix=f"{_TOOL} --input_name {info.name} --input_shape {example} (numbers for N) model.onnx fixed.onnx, "
                "and samples of that shape",
            )
    if not opened:
        return loaded, ()
    proto = copy_model(loaded.proto)
    names = {info.name for info in opened}
    for info in proto.graph.input:
        if info.name in names:
            batch = info.type.tensor_type.shape.dim[0]
            if batch.dim_param:
                _set_everywhere(proto.graph, batch.dim_param, 1)
            batch.dim_value = 1
    shown = ", ".join(f"'{info.name}' {_text(info)}" for info in opened)
    note = f"Target '{target}' takes static shapes alone: the batch is 1 in the file (inputs were {shown})."
    return replace(loaded, proto=proto), (note,)


def _set_everywhere(graph: onnx.GraphProto, symbol: str, size: int) -> None:
    """Gives a symbolic dimension its size, wherever the graph names it."""
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param == symbol:
                dim.dim_value = size


def _is_static(info: onnx.ValueInfoProto) -> bool:
    tensor = info.type.tensor_type
    return tensor.HasField("shape") and all(dim.dim_value for dim in tensor.shape.dim)


def _text(info: onnx.ValueInfoProto) -> str:
    """A shape in words."""
    if not info.type.tensor_type.HasField("shape"):
        return "of unknown shape"
    return f"[{', '.join(d.dim_param or str(d.dim_value or '?') for d in info.type.tensor_type.shape.dim)}]"


_log = logging.getLogger(__name__)

Feed = Mapping[str, Any]
Run = Callable[[Feed], Sequence[Any]]
_TRIED = 8  # parts of a batch, two of which are run to know whether its rows are samples
_ALIKE = 1e-3  # relative; another batch size may take another kernel


@dataclass(frozen=True)
class Division:
    """Division of feeds into samples.

    Attributes:
        rows: By feed, numbers of the rows of each piece; no piece where the feed stays as it is.
        is_full: The model takes no other number of rows: those of a piece are repeated until the batch is full.
    """

    rows: tuple[tuple[range, ...], ...]
    is_full: bool = False

    def of(self, feeds: Sequence[Feed]) -> list[Feed]:
        """The pieces of all feeds, in order; those that hold no row twice are `Rows`."""
        made: list[Feed] = []
        for feed, pieces in zip(feeds, self.rows, strict=True):
            cut = [{name: value[rows] for name, value in feed.items()} for rows in self._filled(feed, pieces)]
            made += cut if self.is_full else map(Rows, cut)
            made += () if pieces else (feed,)
        return made

    def _filled(self, feed: Feed, pieces: Sequence[range]) -> list[Any]:
        """The rows of each piece as arrays are asked for them, without a copy where they are not repeated."""
        if self.is_full:
            return [np.resize(rows, rows_of(feed)) for rows in pieces]
        return [slice(rows.start, rows.stop) for rows in pieces]


def find_division(run: Run, feeds: Sequence[Feed], *, count: int) -> Division:
    """Division of feeds into as many samples as wanted, as far as their rows allow it.

    Args:
        run: Runs the float model.
        feeds: The feeds, arrays of shape (rows, ...).
        count: Number of samples that is enough.
    """
    whole = Division(tuple(() for _ in feeds))
    rows = [rows_of(feed) for feed in feeds]
    if not feeds or len(feeds) >= count or 1 in rows:
        return whole
    parts = [_pieces(n, min(n, -(-count // len(feeds)))) for n in rows]
    tried = _pieces(rows[0], min(max(len(parts[0]), _TRIED), rows[0]))
    for full in (False, True):
        if _independent(run, feeds[0], Division((tried,), full)):
            return Division(tuple(parts), full)
    return whole


def _pieces(rows: int, count: int) -> tuple[range, ...]:
    ends = [rows * (place + 1) // count for place in range(count)]
    return tuple(map(range, (0, *ends), ends))


def rows_of(feed: Feed) -> int:
    """The number of rows that all arrays of a feed share; 1 where they share none.

    An array of one axis counts as none: the bytes of a compressed picture, of which a part is no picture.
    """
    sizes = {len(value) if isinstance(value, np.ndarray) and value.ndim > 1 else 0 for value in feed.values()}
    return sizes.pop() if len(sizes) == 1 and 0 not in sizes else 1


def _independent(run: Run, feed: Feed, division: Division) -> bool:
    """Whether the last piece gives equal outputs alone and behind the piece before it, or in a full batch."""
    before, piece = division.of([feed])[-2:]
    more = feed if division.is_full else {name: np.concatenate([before[name], piece[name]]) for name in feed}
    size = len(division.rows[0][-1])
    try:
        whole, alone = run(more), run(piece)
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        _log.debug("a batch is not taken apart: %s", error)
        return False
    return all(_samerows_of(a, b, size) for a, b in zip(whole, alone, strict=True))


def _samerows_of(whole: Any, alone: Any, size: int) -> bool:
    """Whether the first rows of one output are the last rows of the other."""
    if not isinstance(whole, np.ndarray) or not isinstance(alone, np.ndarray):
        return False  # sequences and maps
    a, b = whole, alone
    if a.dtype.kind not in "fiub" or not a.ndim or a.ndim != b.ndim or len(a) < size or len(b) < size:
        return False
    x, y = a[-size:].astype(np.float64), b[:size].astype(np.float64)
    return x.shape == y.shape and np.allclose(x, y, rtol=_ALIKE, atol=_ALIKE * float(np.abs(x).max(initial=0.0)))
