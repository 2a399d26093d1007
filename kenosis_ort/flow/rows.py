"""Batches taken apart: a feed of 32 rows is 32 samples to whoever has to fit to some and judge by others.

Whether the rows of a batch are samples of their own is not assumed but tried: the outputs for the last rows alone have
to be those rows of the outputs for more of them. A sequence along the first axis, or a mean over it, fails that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kenosis_ort.passes.evaluator import Rows

_log = logging.getLogger(__name__)

Feed = Mapping[str, Any]
Run = Callable[[Feed], Sequence[Any]]
_TRIED = 8  # parts of a batch, two of which are run to know whether its rows are samples
_ALIKE = 1e-3  # relative; another batch size may take another kernel


def as_samples(run: Run, feeds: Sequence[Feed], *, count: int) -> list[Feed]:
    """Returns feeds of fewer rows each, in order, where there are fewer feeds than wanted and their rows allow it.

    Feeds whose rows were found to be samples, none of them twice, are `Rows`.

    Where the model takes no other number of rows, some rows are repeated until the batch is full.

    Args:
        run: Runs the float model.
        feeds: The feeds, arrays of shape (rows, ...).
        count: Number of samples that is enough.
    """
    rows = {rows_of(feed) for feed in feeds}
    if not feeds or len(feeds) >= count or 1 in rows:
        return list(feeds)
    parts = [max(1, min(rows_of(feed), count // len(feeds))) for feed in feeds]
    for full in (False, True):
        if _independent(run, feeds[0], min(max(parts[0], _TRIED), rows_of(feeds[0])), full=full):
            made = [part for feed, n in zip(feeds, parts, strict=True) for part in _parts(feed, n, full=full)]
            return made if full else [Rows(part) for part in made]
    return list(feeds)


def rows_of(feed: Feed) -> int:
    """Returns the number of rows that all arrays of a feed share; 1 where they share none.

    An array of one axis counts as none: the bytes of a compressed picture, of which a part is no picture.
    """
    sizes = {len(value) if isinstance(value, np.ndarray) and value.ndim > 1 else 0 for value in feed.values()}
    return sizes.pop() if len(sizes) == 1 and 0 not in sizes else 1


def _parts(feed: Feed, count: int, *, full: bool) -> list[Feed]:
    rows = rows_of(feed)
    chosen = np.array_split(np.arange(rows), count)
    return [{name: value[np.resize(at, rows) if full else at] for name, value in feed.items()} for at in chosen]


def _independent(run: Run, feed: Feed, count: int, *, full: bool) -> bool:
    """Tells whether the last part gives what it gives behind the part before it, or with all rows in a full batch."""
    before, part = _parts(feed, count, full=full)[-2:]
    more = feed if full else {name: np.concatenate([before[name], part[name]]) for name in feed}
    kept = len(np.array_split(np.arange(rows_of(feed)), count)[-1])
    try:
        whole, alone = run(more), run(part)
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        _log.debug("a batch is not taken apart: %s", error)
        return False
    return all(_samerows_of(a, b, kept) for a, b in zip(whole, alone, strict=True))


def _samerows_of(whole: Any, alone: Any, kept: int) -> bool:
    """Tells whether the first rows of one output are the last rows of the other."""
    if not isinstance(whole, np.ndarray) or not isinstance(alone, np.ndarray):
        return False  # sequences and maps
    a, b = whole, alone
    if a.dtype.kind not in "fiub" or not a.ndim or a.ndim != b.ndim or len(a) < kept or len(b) < kept:
        return False
    x, y = a[-kept:].astype(np.float64), b[:kept].astype(np.float64)
    return x.shape == y.shape and np.allclose(x, y, rtol=_ALIKE, atol=_ALIKE * float(np.abs(x).max(initial=0.0)))
