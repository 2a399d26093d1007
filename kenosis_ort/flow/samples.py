"""Samples of a call: read once, some kept, batches taken apart; and those that the caller holds out.

Whether the rows of a batch are samples of their own is not assumed but tried: the outputs for the last rows alone have
to be those rows of the outputs for more of them. A sequence along the first axis, or a mean over it, fails that.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx

from kenosis_ort.calibration import cached_samples, readers
from kenosis_ort.calibration.feeds import (
    Feed,
    InputSpec,
    Rows,
    Sample,
    bytes_of,
    check_feed,
    input_specs,
    no_sample,
    sample_feeds,
)
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.constants import meant_as_defaults
from kenosis_ort.quantizer.stock import CalibrationDataReader
from kenosis_ort.storage.spool import Spool

_log = logging.getLogger(__name__)
Run = Callable[[Feed], Sequence[Any]]
_TRIED = 8  # parts of a batch, two of which are run to know whether its rows are samples
_ALIKE = 1e-3  # relative; another batch size may take another kernel


class Division(NamedTuple):
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
    return all(_end_alike(a, b, size) for a, b in zip(whole, alone, strict=True))


def _end_alike(whole: Any, alone: Any, size: int) -> bool:
    """Whether the first rows of one output are the last rows of the other."""
    if not isinstance(whole, np.ndarray) or not isinstance(alone, np.ndarray):
        return False  # sequences and maps
    a, b = whole, alone
    if a.dtype.kind not in "fiub" or not a.ndim or a.ndim != b.ndim or len(a) < size or len(b) < size:
        return False
    x, y = a[-size:].astype(np.float64), b[:size].astype(np.float64)
    return x.shape == y.shape and np.allclose(x, y, rtol=_ALIKE, atol=_ALIKE * float(np.abs(x).max(initial=0.0)))


_AHEAD = 8  # times the bytes that are kept are read ahead; what lies beyond these is on disk


class _Place(NamedTuple):
    """A feed that was read ahead: its number in the spool and in the reader, digest and bytes."""

    number: int
    sample: int | None
    digest: int
    bytes: int


class KeepingReader(CalibrationDataReader):  # type: ignore[misc]
    """Reads a reader once and keeps those feeds whose content has the least digests, within a budget.

    What is cached does not depend on the order of the feeds: see `CachedSamples`.

    Args:
        reader: The caller's reader.
        inputs: The model's inputs, those that must be fed and those with a default value: each feed is checked
            against them as it is read, so that all that follow see arrays of the model's types.
        defaults: Values of inputs that a feed may leave out and that are to be in every feed all the same.
        keep: Number of feeds to keep at most.
        budget: Bytes to keep at most; a single feed larger than it is not kept.
        is_whole: The reader has all samples; else it stands in for one, with those that a calibration table holds.

    Attributes:
        cached: Feeds cached so far.
        last: The feed that was handed out last; None before the first.
        failure: What reading or checking a feed raised; None if nothing did.
    """

    def __init__(
        self,
        reader: CalibrationDataReader | Sequence[Mapping[str, Any]],
        inputs: tuple[Sequence[InputSpec], Sequence[InputSpec]],
        *,
        keep: int,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        budget: int = cached_samples.MOST_BYTES,
        is_whole: bool = True,
    ) -> None:
        self._settings: dict[str, Any] = {"keep": keep, "defaults": defaults, "budget": budget, "is_whole": is_whole}
        self.reader = readers.for_model(reader, itertools.chain(*inputs))
        self.is_whole = is_whole
        self.cached = cached_samples.CachedSamples(keep, budget)
        self._inputs = inputs
        self._defaults = defaults
        self._keep = keep
        self._budget = budget
        self._left: Iterator[Sample] = self._checked()
        self._ended = False
        self._count = 0
        self.last: Sample | None = None
        self.failure: Exception | None = None
        self._forget_those_ahead()

    def _forget_those_ahead(self) -> None:
        """Begins anew with feeds that were read but not handed out yet; what does not fit into memory is on disk."""
        self._spool, self._bytes_ahead = Spool(memory=self._budget), 0
        self._ahead: deque[_Place] = deque()

    @property
    def feeds(self) -> list[Sample]:
        """The cached feeds, in the order of their digests."""
        return self.cached.samples

    @property
    def notes(self) -> list[str]:
        """Notes on arrays in the data that are no input of the model; of shards known once they are read."""
        names = self.reader.left_aside if isinstance(self.reader, (readers.ArrayReader, readers.Shards)) else ()
        return [f"Left aside in the data, no input of the model: {', '.join(names)}."] if names else []

    def peek(self, count: int) -> list[Sample]:
        """The next few feeds, which `get_next` still hands out; fewer if the byte budget or the data ends."""
        while len(self._ahead) < count and self._bytes_ahead < self._budget and self._read_ahead():
            pass
        return self.ahead(range(min(count, len(self._ahead))))

    def foreseen(self, count: int) -> list[int] | None:
        """Indices, among feeds not handed out yet, of those that will be kept first of all once all are.

        Reads ahead for that; None where there is more data than can be put aside, or feeds were handed out.
        """
        while self.last is None and self._bytes_ahead < _AHEAD * self._budget and self._read_ahead():
            pass
        if self.last is not None or not self._ended:
            return None
        cached = cached_samples.CachedSamples(self._keep, self._budget, copies=False)
        for place, each in enumerate(self._ahead):
            data = np.broadcast_to(np.uint8(0), each.bytes)  # of its size, without data
            cached.add(Sample({"": data}, place, each.digest))
        return [sample.index for sample in cached.samples[:count] if sample.index is not None]

    def ahead(self, places: Sequence[int]) -> list[Sample]:
        """Some of the feeds that were read but not handed out yet, by their place among these."""
        return [self._put_aside(self._ahead[place]) for place in places]

    def _put_aside(self, place: _Place) -> Sample:
        return Sample(self._spool[place.number], place.sample, place.digest)

    def _read_ahead(self) -> bool:
        """Puts the next feed aside; True if there was one."""
        feed = None if self._ended else self._read()
        if feed is None:
            return False
        size, digest = bytes_of(feed), cached_samples.digest_of(feed)
        self._ahead.append(_Place(len(self._spool), feed.index, digest, size))
        self._spool.append(feed)
        self._bytes_ahead += size
        return True

    def get_next(self) -> Sample | None:
        if self._ahead:
            first = self._ahead.popleft()
            feed: Sample | None = self._put_aside(first)
            self._spool.release(first.number)
            self._bytes_ahead -= first.bytes
            if not self._ahead:
                self._forget_those_ahead()
        else:
            feed = self._read()
        if feed is None:
            return None
        self.last = feed
        self.cached.add(feed)
        return feed

    def again(self) -> KeepingReader:
        """A reader that begins anew with the cached feeds, and goes on with those that were not handed out."""
        fresh = KeepingReader(self.reader, self._inputs, **self._settings)
        fresh._left = itertools.chain(self.feeds, map(self._put_aside, self._ahead), self._left)
        return fresh

    def _read(self) -> Sample | None:
        try:
            feed = next(self._left, None)
        except Exception as error:
            self.failure = error
            raise
        self._ended = feed is None
        return feed

    def read_all(self) -> int:
        """Reads all feeds, for those to keep, where a table takes the place of calibration.

        Returns:
            The sum of their digests, as a calibration table has it.
        """
        digests = 0
        while (feed := self.get_next()) is not None:
            digests = (digests + cached_samples.digest_of(feed)) % 2**256
        return digests

    def __len__(self) -> int:
        return len(self.reader)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.reader.set_range(start_index=start_index, end_index=end_index)
        self._forget_those_ahead()
        self._ended = False
        self._left = self._checked()

    def _checked(self) -> Iterator[Sample]:
        holds_something = not self._inputs[0]
        for feed in sample_feeds(self.reader):
            checked = {**self._defaults, **check_feed(feed, *self._inputs, self._count)}
            number = feed.index if isinstance(feed, Sample) else self._count
            yield Sample(checked, number, cached_samples.feed_digest(checked))
            holds_something = holds_something or any(np.size(value) for value in checked.values())
            self._count += 1
        if self._count and not holds_something:
            raise no_sample("no sample with elements")


_LOOKED_AT = 32  # feeds that candidates are compared on
_LOOKED_AT_BYTES = 2**26


class Validation(Spool):
    """Held-out feeds.

    Args:
        reader: The caller's reader, or another source of feeds; it is read to its end.
        model: The float model, whose inputs the feeds are checked against.

    Raises:
        CalibrationError: The reader fails, yields nothing, or a feed does not fit the model.
        OutputError: There is no room for temporary files.
    """

    def __init__(self, reader: Any, model: onnx.ModelProto) -> None:
        super().__init__()
        self._digests: set[int] = set()
        inputs, defaults = input_specs(model), meant_as_defaults(model)
        try:
            for number, feed in enumerate(sample_feeds(readers.for_model(reader, itertools.chain(*inputs)))):
                checked = {**defaults, **check_feed(feed, *inputs, number)}
                self._digests.add(cached_samples.feed_digest(checked))
                self.append(checked)
        except CalibrationError as error:
            where = "eval_reader" if error.where is None else f"eval_reader, {error.where}"
            raise CalibrationError(error.what, where=where, fix=error.fix) from error
        if not len(self):
            raise CalibrationError(
                "the reader of evaluation data yields no sample",
                where="eval_reader",
                fix="pass a reader at its beginning, and not the one that calibration reads",
            )

    def shared(self, feeds: Iterable[Mapping[str, Any]]) -> int:
        """Number of the given feeds that are among these."""
        return sum(cached_samples.feed_digest(feed) in self._digests for feed in feeds)

    def some(self) -> list[Sample]:
        """A few with their numbers, spread over all of them, that fit in memory."""
        found: list[Sample] = []
        size = 0
        for place in range(0, len(self), -(-len(self) // _LOOKED_AT)):
            feed = Sample(self[place], place)
            size += sum(int(getattr(value, "nbytes", 0)) for value in feed.values())
            if found and size > _LOOKED_AT_BYTES:
                break
            found.append(feed)
        return found
