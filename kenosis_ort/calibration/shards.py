"""Calibration data in parts, each of which can be read by itself, on another machine too."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from kenosis_ort.calibration.feeds import Feed, InputSpec, sample_feeds
from kenosis_ort.calibration.reader_base import OwnReader, source_files
from kenosis_ort.calibration.readers import ArrayReader
from kenosis_ort.errors import ArgumentTypeError, CalibrationError, OptionError
from kenosis_ort.storage.paths import absolute


class Shards(OwnReader):
    """Calibration data in parts; as a reader it yields the samples of one part after the other.

    Args:
        source: A sequence of parts, each a path that `ArrayReader` reads (an ``.npz`` or ``.npy`` file or a folder of
            them), a reader, or an iterable of feeds; or a function that returns one of these for the number of a part.
            Paths are as the machine sees them that reads the part.
        count: Number of parts; for a function alone.
        batch_size: Samples a feed, for paths.

    Raises:
        OptionError: There is no part, or a number of parts where the source says it.
        ArgumentTypeError: The source is of another type.
    """

    def __init__(
        self, source: Sequence[Any] | Callable[[int], Any], count: int | None = None, *, batch_size: int = 1
    ) -> None:
        if callable(source):
            if count is None:
                raise OptionError("how many shards there are is not known", where="count", fix="Shards(function, 8)")
        elif isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
            if count is not None:
                raise OptionError("count goes with a function that makes shards", where="count", fix="leave it out")
            source = [_absolute(part) for part in source]
            count = len(source)
        else:
            raise ArgumentTypeError(
                f"shards cannot be made of a {type(source).__name__}",
                where="source",
                fix="give a list of paths, readers or iterables of feeds, or a function and a count",
            )
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise OptionError(f"count={count!r} is no number of shards", where="count", fix="give 1 or more")
        self._source = source
        self._batch_size = batch_size
        self._first = 0  # of those that these are some of
        self.count = count
        self._feeds: Iterator[Feed] | None = None
        self.inputs: frozenset[str] | None = None
        self.left_aside: tuple[str, ...] = ()

    def for_inputs(self, inputs: Collection[str]) -> Shards:
        """The same parts, from whose arrays those are left aside that are none of these, as by `ArrayReader`."""
        shards = copy(self)
        shards.inputs = frozenset(inputs)
        return shards

    @property
    def files(self) -> Sequence[Path]:
        """The files that are known to be read, on this machine."""
        if callable(self._source):
            return ()
        return [
            file
            for part in self._source
            for file in ([part] if isinstance(part, Path) and part.exists() else source_files(part))
        ]

    def part(self, number: int) -> Any:
        """Source of a part: a path, a reader, an iterable of feeds, or the function bound to its number.

        It can be sent to another machine wherever what the caller gave can.
        """
        return _Made(self._source, number) if callable(self._source) else self._source[number]

    def some(self, numbers: Sequence[int]) -> Shards:
        """Some of the parts, one behind the other, as shards of their own; messages call them what they did."""
        some = Shards([self.part(number) for number in numbers], batch_size=self._batch_size)
        some._first, some.inputs = self._first + numbers[0], self.inputs
        return some

    def name(self, number: int) -> str:
        """Name of a part in messages."""
        part, called = self.part(number), self._first + number
        return f"shard {called} ({part})" if isinstance(part, Path) else f"shard {called}"

    def opened(self, number: int) -> Iterator[Feed]:
        """Yields the feeds of a part.

        Raises:
            CalibrationError: It cannot be read; the message names it.
        """
        left: set[str] = {*self.left_aside}
        yield from opened(self.part(number), self.name(number), self._batch_size, self.inputs, left)
        self.left_aside = tuple(sorted(left))

    @property
    def batch_size(self) -> int:
        """Samples a feed, where there is a leading axis of samples."""
        return self._batch_size

    def get_next(self) -> Feed | None:
        """The next feed; None at the end of the last part."""
        if self._feeds is None:
            self._feeds = (feed for number in range(self.count) for feed in self.opened(number))
        return next(self._feeds, None)

    def rewind(self) -> None:
        """Starts over; readers that the caller gave have to start over by themselves."""
        self._feeds = None


class _Made:
    """A part that a function makes where it is read."""

    def __init__(self, function: Callable[[int], Any], number: int) -> None:
        self._function, self._number = function, number

    def __call__(self) -> Any:
        return self._function(self._number)


def opened(
    part: Any, name: str, batch_size: int, inputs: frozenset[str] | None = None, left_aside: set[str] | None = None
) -> Iterator[Feed]:
    """Yields the feeds of what `Shards.part` returned.

    Args:
        part: The part.
        name: For messages.
        batch_size: Samples a feed, for paths.
        inputs: The model's inputs; other arrays are left aside. None for all.
        left_aside: Takes the names of those.

    Raises:
        CalibrationError: It cannot be read; the message names it.
    """
    try:
        if isinstance(part, _Made):
            part = part()
        if isinstance(part, (str, os.PathLike, Mapping)):
            part = ArrayReader(part, batch_size=batch_size)
        if isinstance(part, ArrayReader) and inputs is not None:
            part = part.for_inputs(inputs)
            if left_aside is not None:
                left_aside.update(part.left_aside)
        yield from sample_feeds(part)
    except CalibrationError as error:
        where = name if error.where is None else f"{name}, {error.where}"
        raise CalibrationError(error.what, where=where, fix=error.fix) from error
    except Exception as error:  # the caller's function may raise anything
        raise CalibrationError(
            f"The shard cannot be read: {type(error).__name__}: {' '.join(str(error).split())}.",
            where=name,
            fix="Correct what makes the shard; call it alone to reproduce this.",
        ) from error


def in_shards(source: Any) -> Any:
    """A path, or a list of paths, readers or iterables of feeds, as `Shards`; other sources as they are."""
    if isinstance(source, (str, os.PathLike)):
        return Shards([source])
    if isinstance(source, (list, tuple)) and source and not any(isinstance(part, Mapping) for part in source):
        return Shards(source)
    return source


def for_model(source: Any, inputs: Iterable[InputSpec]) -> Any:
    """A source of feeds without the arrays that are no inputs of a model; readers of the caller's own as they are."""
    ours = isinstance(source, (ArrayReader, Shards))
    return source.for_inputs({spec.name for spec in inputs}) if ours else source


def _absolute(part: Any) -> Any:
    return absolute(part) if isinstance(part, (str, os.PathLike)) else part
