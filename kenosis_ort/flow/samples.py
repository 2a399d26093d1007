"""A reader that hands another reader's feeds on and keeps some for the passes that need data again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

from kenosis_ort.calibration.cached_samples import (
    MOST_BYTES,
    MOST_FOR_PASSES,
    CachedSamples,
    bytes_of,
    digest_of,
    feed_digest,
)
from kenosis_ort.calibration.feeds import InputSpec, Sample, check_feed, sample_feeds
from kenosis_ort.calibration.readers import ArrayReader, Shards, for_model
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.bodies import owners
from kenosis_ort.graph.constants import default_inputs, meant_as_defaults
from kenosis_ort.quantizer.stock import CalibrationDataReader
from kenosis_ort.storage.spool import Spool

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
        budget: int = MOST_BYTES,
        is_whole: bool = True,
    ) -> None:
        self.reader = for_model(reader, itertools.chain(*inputs))
        self.is_whole = is_whole
        self.cached = CachedSamples(keep, budget)
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
        names = self.reader.left_aside if isinstance(self.reader, (ArrayReader, Shards)) else ()
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
        cached = CachedSamples(self._keep, self._budget, copies=False)
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
            digests = (digests + digest_of(feed)) % 2**256
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
            yield Sample(checked, number, feed_digest(checked))
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
        self._entries.append((feed.index, digest_of(feed), size))
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
    if any(True for _ in owners(model)):
        return _FEEDS_OF_BODIES
    if for_all or request.cache_path is not None:
        return max(feeds_wanted(request), MOST_FOR_PASSES)
    return max(feeds_wanted(request), _MEASURED_FEEDS if request.executor is None else 0)


def with_open_defaults(proto: onnx.ModelProto, request: Request, data: KeepingReader | None) -> Request:
    """The request with the inputs of a default value that stay inputs: those that are fed, or meant to be."""
    listed = default_inputs(proto)
    if not listed:
        return request
    fed = {name for feed in ([] if data is None else data.peek(1)) for name in feed}
    return replace(request, open_defaults=frozenset(listed) & {*meant_as_defaults(proto), *fed})


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
