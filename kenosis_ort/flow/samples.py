"""A reader that hands another reader's feeds on and keeps some for the passes that need data again."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx

from kenosis_ort.calibration.feeds import InputSpec, Sample, check_feed, sample_feeds
from kenosis_ort.calibration.fingerprint import feed_digest
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.constants import default_inputs, meant_as_defaults
from kenosis_ort.quantizer.stock import CalibrationDataReader

_KEPT_BYTES = 64 * 2**20
_READ_AHEAD = 64
_COMPARED_FEEDS = 4

T = TypeVar("T")


class KeepingReader(CalibrationDataReader):  # type: ignore[misc]
    """Reads a reader once and keeps feeds spread evenly over the run, within a budget.

    While there is room every feed is kept; when it runs out every second one is dropped, and from then on only
    every second one kept, and so on. What is kept depends on the order of the feeds alone.

    Args:
        reader: The caller's reader.
        inputs: The model's inputs, those that must be fed and those with a default value: each feed is checked
            against them as it is read, so that all that follow see arrays of the model's types.
        defaults: Values of inputs that a feed may leave out and that are to be in every feed all the same.
        keep: Number of feeds to keep at most.
        budget: Bytes to keep at most; a single feed larger than it is not kept.

    Attributes:
        last: The feed that was handed out last; None before the first.
        failure: What reading or checking a feed raised; None if nothing did.
    """

    def __init__(
        self,
        reader: CalibrationDataReader,
        inputs: tuple[Sequence[InputSpec], Sequence[InputSpec]],
        *,
        keep: int,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        budget: int = _KEPT_BYTES,
    ) -> None:
        self.reader = reader
        self._inputs = inputs
        self._defaults = defaults
        self._keep = keep
        self._budget = budget
        self._left: Iterator[dict[str, Any]] = self._checked()
        self._ahead: deque[dict[str, Any]] = deque()
        self._kept: list[tuple[dict[str, Any], int]] = []
        self._every = 1
        self._seen = 0
        self._ended = False
        self._count = 0
        self.last: dict[str, Any] | None = None
        self.failure: Exception | None = None

    @property
    def feeds(self) -> list[dict[str, Any]]:
        """The kept feeds in the order they were read."""
        return [feed for feed, _ in self._kept]

    def some(self, count: int) -> list[dict[str, Any]]:
        """Returns at most so many of the kept feeds, spread over all of them."""
        return _spread(self.feeds, count)

    def peek(self, count: int) -> list[dict[str, Any]]:
        """Returns the next few feeds, which `get_next` still hands out; fewer if the byte budget or the data ends."""
        size = sum(_bytes(feed) for feed in self._ahead)
        while len(self._ahead) < count and size < self._budget:
            feed = self._read()
            if feed is None:
                break
            self._ahead.append(_copied(feed))
            size += _bytes(self._ahead[-1])
        return list(self._ahead)[:count]

    def foreseen(self, count: int) -> list[int] | None:
        """Returns which feeds, by their place among those not handed out yet, `some` will return once all are.

        Reads ahead for that; None where there is more data than the byte budget holds, or feeds were handed out.
        """
        while self._seen == 0 and not self._ended:
            if sum(map(_bytes, self._ahead)) >= self._budget or not self.peek(len(self._ahead) + _READ_AHEAD):
                break
        if self._seen or not self._ended:
            return None
        kept: list[tuple[int, int]] = []
        every = 1
        for at, feed in enumerate(self._ahead):
            if at % every == 0:
                kept, every = self._thinned(kept, (at, _bytes(feed)), every)
        return _spread([at for at, _ in kept], count)

    def get_next(self) -> dict[str, Any] | None:
        feed = self._ahead.popleft() if self._ahead else self._read()
        if feed is None:
            return None
        self.last = feed
        if self._seen % self._every == 0:
            self._store(feed)
        self._seen += 1
        return feed

    def again(self) -> KeepingReader:
        """Returns a reader that begins anew with the kept feeds, and goes on with those that were not handed out."""
        fresh = KeepingReader(self.reader, self._inputs, keep=self._keep, defaults=self._defaults, budget=self._budget)
        fresh._left = itertools.chain(self.feeds, list(self._ahead), self._left)
        return fresh

    def _read(self) -> dict[str, Any] | None:
        try:
            feed = next(self._left, None)
        except Exception as error:
            self.failure = error
            raise
        self._ended = feed is None
        return feed

    def read_all(self) -> int:
        """Reads all feeds, for those to keep, where a cache takes the place of calibration.

        Returns:
            The sum of their digests, as a calibration table has it.
        """
        digests = 0
        while (feed := self.get_next()) is not None:
            digests = (digests + feed_digest(feed)) % 2**256
        return digests

    def __len__(self) -> int:
        return len(self.reader)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.reader.set_range(start_index=start_index, end_index=end_index)
        self._ahead.clear()
        self._ended = False
        self._left = self._checked()

    def _checked(self) -> Iterator[dict[str, Any]]:
        for feed in sample_feeds(self.reader):
            checked = check_feed(feed, *self._inputs, self._count)
            yield Sample({**self._defaults, **checked}, self._count)
            self._count += 1

    def _store(self, feed: dict[str, Any]) -> None:
        self._kept, self._every = self._thinned(self._kept, (_copied(feed), _bytes(feed)), self._every)

    def _thinned(self, kept: list[tuple[T, int]], more: tuple[T, int], every: int) -> tuple[list[tuple[T, int]], int]:
        """Returns what is kept of feeds, each with its bytes, and one more; and of which every how many are kept."""
        if more[1] > self._budget:
            return kept, every
        kept = [*kept, more]
        while len(kept) > self._keep or sum(size for _, size in kept) > self._budget:
            kept, every = kept[::2] if len(kept) > 1 else [], every * 2
        return kept, every


def feeds_wanted(request: Request) -> int:
    """Returns how many feeds the passes and comparisons need again."""
    return max(request.recipe.samples, _COMPARED_FEEDS)


def with_open_defaults(proto: onnx.ModelProto, request: Request, data: KeepingReader | None) -> Request:
    """Returns the request with the inputs of a default value that stay inputs: those that are fed, or meant to be."""
    listed = default_inputs(proto)
    if not listed:
        return request
    fed = {name for feed in ([] if data is None else data.peek(1)) for name in feed}
    return replace(request, open_defaults=frozenset(listed) & {*meant_as_defaults(proto), *fed})


def _spread(items: list[T], count: int) -> list[T]:
    """Returns at most so many, spread over all of them."""
    return items[:: max(1, -(-len(items) // count))]


def _bytes(feed: dict[str, Any]) -> int:
    return sum(int(getattr(value, "nbytes", 0)) for value in feed.values())


def _copied(feed: dict[str, Any]) -> dict[str, Any]:
    copied = {k: np.array(v) if isinstance(v, np.ndarray) else v for k, v in feed.items()}
    return Sample(copied, feed.index) if isinstance(feed, Sample) else copied


def enough(feeds: Sequence[Mapping[str, Any]], *, rows: int, least: int) -> list[Mapping[str, Any]]:
    """Returns the first feeds that hold some number of rows, a batch counting as many; a least number of feeds."""
    found: list[Mapping[str, Any]] = []
    held = 0
    for feed in feeds:
        if held >= rows and len(found) >= least:
            break
        found.append(feed)
        held += max((len(v) for v in feed.values() if isinstance(v, np.ndarray) and v.ndim > 0), default=1)
    return found
