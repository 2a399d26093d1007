"""Samples of a call: read once, some kept, batches taken apart; held-out data, and the table that stands in for them.

Whether the rows of a batch are samples of their own is not assumed but tried: the outputs for the last rows alone have
to be those rows of the outputs for more of them. A sequence along the first axis, or a mean over it, fails that.

A calibration cache is used where it belongs, refused where not, and written for the next run. A table is of the weights
as they came, and holds samples beside the ranges: passes that change weights say what becomes of ranges, and those that
need data have it. So a run with a table does what one with the reader does.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import onnx

from kenosis_ort.calibration import cached_samples, readers
from kenosis_ort.calibration.feeds import InputSpec, Sample, bytes_of, check_feed, input_specs, sample_feeds
from kenosis_ort.calibration.statistics import CalibrationConfig
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationCacheError, CalibrationError
from kenosis_ort.flow.request import Request
from kenosis_ort.graph import bodies, constants
from kenosis_ort.passes.evaluator import Feed, Rows
from kenosis_ort.quantizer.stock import CalibrationDataReader
from kenosis_ort.storage.spool import Spool
from kenosis_ort.storage.writing import is_possible

_log = logging.getLogger(__name__)
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


_AHEAD = 8  # times the bytes that are kept are read ahead; what lies beyond these is on disk
_COMPARED_FEEDS = 4
_MEASURED_FEEDS = 1024  # what is lost is measured on; their bytes are bounded as well
_FEEDS_OF_BODIES = 4096  # their bytes are bounded as well


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
        self.reader = readers.for_model(reader, itertools.chain(*inputs))
        self.is_whole = is_whole
        self.cached = cached_samples.CachedSamples(keep, budget)
        self._inputs = inputs
        self._defaults = defaults
        self._keep = keep
        self._budget = budget
        self._left: Iterator[Sample] = self._checked()
        self._ahead = _Ahead(budget)
        self._ended = False
        self._count = 0
        self.last: Sample | None = None
        self.failure: Exception | None = None

    @property
    def feeds(self) -> list[Sample]:
        """The cached feeds, in the order of their digests."""
        return self.cached.samples

    @property
    def left_aside(self) -> str:
        """What stands in the data beside the model's inputs, one sentence; empty where nothing does."""
        names = self.reader.left_aside if isinstance(self.reader, (readers.ArrayReader, readers.Shards)) else ()
        return f"Left aside in the data, no input of the model: {', '.join(names)}." if names else ""

    def some(self, count: int) -> list[Sample]:
        """At most so many of the cached feeds: those that would be kept where so many are to be."""
        return self.feeds[:count]

    def peek(self, count: int) -> list[Sample]:
        """The next few feeds, which `get_next` still hands out; fewer if the byte budget or the data ends."""
        while len(self._ahead) < count and self._ahead.bytes < self._budget and self._read_ahead():
            pass
        return list(itertools.islice(self._ahead, count))

    def foreseen(self, count: int) -> list[int] | None:
        """Indices, among feeds not handed out yet, of those that `some` will return once all are.

        Reads ahead for that; None where there is more data than can be put aside, or feeds were handed out.
        """
        while self.last is None and self._ahead.bytes < _AHEAD * self._budget and self._read_ahead():
            pass
        if self.last is not None or not self._ended:
            return None
        cached = cached_samples.CachedSamples(self._keep, self._budget, copies=False)
        for place, (digest, size) in enumerate(self._ahead.known):
            cached.add(Sample({"": np.broadcast_to(np.uint8(0), size)}, place, digest))  # of its size, without data
        return [sample.index for sample in cached.samples[:count] if sample.index is not None]

    def ahead(self, places: Sequence[int]) -> list[Sample]:
        """Some of the feeds that were read but not handed out yet, by their place among these."""
        return [self._ahead[place] for place in places]

    def _read_ahead(self) -> bool:
        """Puts the next feed aside; True if there was one."""
        feed = None if self._ended else self._read()
        if feed is not None:
            self._ahead.append(feed)
        return feed is not None

    def get_next(self) -> Sample | None:
        feed = self._ahead.popleft() if self._ahead else self._read()
        if feed is None:
            return None
        self.last = feed
        self.cached.add(feed)
        return feed

    def again(self) -> KeepingReader:
        """A reader that begins anew with the cached feeds, and goes on with those that were not handed out."""
        fresh = KeepingReader(
            self.reader,
            self._inputs,
            keep=self._keep,
            defaults=self._defaults,
            budget=self._budget,
            is_whole=self.is_whole,
        )
        fresh._left = itertools.chain(self.feeds, self._ahead, self._left)
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
        self._ahead.clear()
        self._ended = False
        self._left = self._checked()

    def _checked(self) -> Iterator[Sample]:
        for feed in sample_feeds(self.reader):
            checked = {**self._defaults, **check_feed(feed, *self._inputs, self._count)}
            number = feed.index if isinstance(feed, Sample) else self._count
            yield Sample(checked, number, cached_samples.feed_digest(checked))
            self._count += 1


class _Ahead:
    """Feeds that were read but not handed out yet, in their order; what does not fit into memory is on disk.

    Args:
        memory: Bytes to hold in memory.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.clear()

    def clear(self) -> None:
        """Forgets all of them."""
        self._spool, self._first = Spool(memory=self._memory), 0
        self._entries: list[tuple[int | None, int, int]] = []
        self.bytes = 0

    def append(self, feed: Sample) -> None:
        """Puts a copy of a feed at the end."""
        self._spool.append(feed)
        size = bytes_of(feed)
        self._entries.append((feed.index, cached_samples.digest_of(feed), size))
        self.bytes += size

    def popleft(self) -> Sample:
        """The first of them, which is none of them any more."""
        feed = self[0]
        self._spool.release(self._first)
        self._first += 1
        self.bytes -= self._entries[self._first - 1][2]
        if not len(self):
            self.clear()
        return feed

    @property
    def known(self) -> list[tuple[int, int]]:
        """Digest and bytes of each."""
        return [(digest, size) for _, digest, size in self._entries[self._first :]]

    def __getitem__(self, place: int) -> Sample:
        index, digest, _ = self._entries[self._first + place]
        return Sample(self._spool[self._first + place], index, digest)

    def __len__(self) -> int:
        return len(self._entries) - self._first

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))


def feeds_wanted(request: Request) -> int:
    """Number of feeds that the passes and comparisons need again."""
    return max(request.recipe.samples, _COMPARED_FEEDS)


def most_feeds(model: onnx.ModelProto, request: Request, *, for_all: bool = False) -> int:
    """Largest number of cached feeds: bodies of control flow are calibrated on these.

    Args:
        model: The float model.
        request: What the caller wants.
        for_all: They are to serve every recipe, as in a table that is written.
    """
    if any(True for _ in bodies.owners(model)):
        return _FEEDS_OF_BODIES
    if for_all or request.cache_path is not None:
        return max(feeds_wanted(request), cached_samples.MOST_FOR_PASSES)
    return max(feeds_wanted(request), _MEASURED_FEEDS if request.executor is None else 0)


def with_open_defaults(proto: onnx.ModelProto, request: Request, data: KeepingReader | None) -> Request:
    """The request with the inputs of a default value that stay inputs: those that are fed, or meant to be."""
    listed = constants.default_inputs(proto)
    if not listed:
        return request
    fed = {name for feed in ([] if data is None else data.peek(1)) for name in feed}
    return replace(request, open_defaults=frozenset(listed) & {*constants.meant_as_defaults(proto), *fed})


def enough(feeds: Sequence[Mapping[str, Any]], *, rows: int, least: int) -> list[Mapping[str, Any]]:
    """The first feeds that hold some number of rows, a batch counting as many; a least number of feeds."""
    found: list[Mapping[str, Any]] = []
    total = 0
    for feed in feeds:
        if total >= rows and len(found) >= least:
            break
        found.append(feed)
        total += max((len(v) for v in feed.values() if isinstance(v, np.ndarray) and v.ndim > 0), default=1)
    return found


_LOOKED_AT = 32  # feeds that candidates are compared on
_LOOKED_AT_BYTES = 2**26


class Validation(Sequence[Sample]):
    """Feeds with their numbers in the reader.

    Args:
        reader: The caller's reader, or another source of feeds; it is read to its end.
        model: The float model, whose inputs the feeds are checked against.

    Raises:
        CalibrationError: The reader fails, yields nothing, or a feed does not fit the model.
        OutputError: There is no room for temporary files.
    """

    def __init__(self, reader: Any, model: onnx.ModelProto) -> None:
        self._spool = Spool()
        self._digests: set[int] = set()
        inputs, defaults = input_specs(model), constants.meant_as_defaults(model)
        try:
            for number, feed in enumerate(sample_feeds(readers.for_model(reader, chain(*inputs)))):
                checked = {**defaults, **check_feed(feed, *inputs, number)}
                self._digests.add(cached_samples.feed_digest(checked))
                self._spool.append(checked)
        except CalibrationError as error:
            where = "eval_reader" if error.where is None else f"eval_reader, {error.where}"
            raise CalibrationError(error.what, where=where, fix=error.fix) from error
        if not len(self._spool):
            raise CalibrationError(
                "the reader of evaluation data yields no sample",
                where="eval_reader",
                fix="pass a reader at its beginning, and not the one that calibration reads",
            )

    def __len__(self) -> int:
        return len(self._spool)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        places = range(len(self))[index]
        return [self[place] for place in places] if isinstance(places, range) else Sample(self._spool[places], places)

    def shared(self, feeds: Iterable[Mapping[str, Any]]) -> int:
        """Number of the given feeds that are among these."""
        return sum(cached_samples.feed_digest(feed) in self._digests for feed in feeds)

    def some(self) -> list[Sample]:
        """A few, spread over all of them, that fit in memory."""
        found: list[Sample] = []
        size = 0
        for place in range(0, len(self), -(-len(self) // _LOOKED_AT)):
            feed = self[place]
            size += sum(int(getattr(value, "nbytes", 0)) for value in feed.values())
            if found and size > _LOOKED_AT_BYTES:
                break
            found.append(feed)
        return found


_FIX = "Delete the cache file, or name another one, so that calibration runs again."


class CalibrationCache:
    """One cache file.

    Args:
        path: The file; read if it exists.

    Attributes:
        table: What the file holds; None where it is still to be written.
        is_used: The ranges are the table's, so that nothing was calibrated.

    Raises:
        CalibrationCacheError: The file is damaged, or no calibration table, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_used = False
        with self._refusing():
            self.table = CalibrationTable.load(path) if os.path.exists(path) else None
            if self.table is None:
                _check_writable(path)

    def table_for(
        self, model: onnx.ModelProto, tensors: Sequence[str], config: CalibrationConfig, data: KeepingReader | None
    ) -> CalibrationTable | None:
        """The table for a model, after its data are found to be those at hand.

        Args:
            model: The model whose ranges are needed.
            tensors: Its tensors.
            config: How they would be calibrated.
            data: The samples at hand, or those of the table; read to their end where the table is returned.

        Returns:
            The table; None where there is none yet, or one of changed weights, and the reader is at hand.

        Raises:
            CalibrationCacheError: The table is of another model, other options or other data.
        """
        table = self.table
        has_reader = data is not None and data.is_whole
        if table is None or (table.outdated and has_reader):
            return None
        if table.outdated:
            raise self._refusal(
                "The calibration cache is of an earlier version, which had changed the weights before calibration."
            )
        with self._refusing():
            table.check_matches(cached_samples.model_fingerprint(model), replace(config, sketch=False))
            missing = [t for t in tensors if t not in table]
            if missing:
                raise CalibrationError(
                    f"the calibration cache lacks {len(missing)} tensors, '{missing[0]}' among them",
                    fix="delete the cache, or pass the options that it was made with",
                )
        if data is not None:
            found = data.read_all()
            if has_reader:
                self.check_data(f"{found:064x}")
        self.is_used = True
        return table

    def check_data(self, fingerprint: str | None) -> None:
        """Checks that the data at hand are the table's.

        Raises:
            CalibrationCacheError: They are others.
        """
        known = None if self.table is None else self.table.data_fingerprint
        if None not in (known, fingerprint) and known != fingerprint:
            raise self._refusal("The calibration cache was produced from other data.")

    def keep(self, table: CalibrationTable) -> None:
        """Writes the table for the next run.

        Raises:
            CalibrationError: The file cannot be written.
        """
        table.save(self.path)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except CalibrationError as error:
            raise CalibrationCacheError(error.what, where=str(self.path), fix=error.fix or _FIX) from error

    def _refusal(self, what: str) -> CalibrationCacheError:
        return CalibrationCacheError(what, where=str(self.path), fix=_FIX)


def _check_writable(path: Path) -> None:
    """Checks, before any sample is read, that a file can be written once all are."""
    folder = next(parent for parent in path.parents if os.path.exists(parent))
    if not is_possible(path) or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CalibrationError("The calibration cache cannot be written.", fix="Name a file in a folder of yours.")
