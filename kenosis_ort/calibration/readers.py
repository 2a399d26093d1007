"""Readers of calibration data: their base classes, of arrays, and in shards, each of which can be read by itself."""

from __future__ import annotations

import abc
import lzma
import os
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.calibration.feeds import Array, Feed, InputSpec, Provenance, sample_feeds
from kenosis_ort.checks import whole
from kenosis_ort.errors import ArgumentTypeError, CalibrationError, OptionError
from kenosis_ort.storage.writing import absolute, regular


class OwnReader(CalibrationDataReader):  # type: ignore[misc]
    """A reader of ours, which knows what it reads."""

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """Makes ``isinstance`` mean what it says: the runtime's base class counts any class with ``get_next``."""
        return NotImplemented

    @property
    def files(self) -> Sequence[Path]:
        """The files that feeds are read from, as far as they are known."""
        return ()

    @property
    def provenance(self) -> Provenance | None:
        """Certainty of the assumptions behind made-up feeds; None of real ones."""
        return None


class IndexedReader(OwnReader):
    """A reader whose feeds can be had by index, in any order and more than once.

    Subclasses define `__len__` and `feed`.
    """

    _next = 0
    _end: int | None = None

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of feeds, whatever the range set."""

    @abc.abstractmethod
    def feed(self, index: int) -> dict[str, Array]:
        """The feed of an index from 0 to ``len(self) - 1``."""

    def get_next(self) -> dict[str, Array] | None:
        """The next feed, None at the end of the range."""
        if self._next >= (len(self) if self._end is None else self._end):
            return None
        self._next += 1
        return self.feed(self._next - 1)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Makes ``get_next`` return the feeds from ``start_index`` up to, and without, ``end_index``."""
        if not 0 <= start_index <= end_index:
            raise CalibrationError(
                f"The range {start_index}..{end_index} of calibration samples is not valid.",
                fix="0 <= start <= end",
            )
        self._next, self._end = start_index, min(end_index, len(self))

    def rewind(self) -> None:
        """Starts over, with all feeds."""
        self._next, self._end = 0, None


class StreamReader(OwnReader):
    """A reader whose feeds come one after the other, from the beginning; subclasses define `_stream`."""

    _feeds: Iterator[Feed] | None = None

    @abc.abstractmethod
    def _stream(self) -> Iterator[Feed]:
        """Yields all feeds."""

    def get_next(self) -> Feed | None:
        """The next feed, None at the end."""
        if self._feeds is None:
            self._feeds = self._stream()
        return next(self._feeds, None)

    def rewind(self) -> None:
        """Starts over; readers that the caller gave have to start over by themselves."""
        self._feeds = None


def is_made_up(reader: Any) -> bool:
    """Whether a reader makes its feeds up; code that asks does not load what they are made up with."""
    return isinstance(reader, OwnReader) and reader.provenance is not None


def source_files(reader: Any) -> Sequence[Path]:
    """The files that a reader of ours reads; none of another's, which nobody can know."""
    return reader.files if isinstance(reader, OwnReader) else ()


# ---- arrays ----------------------------------------------------------------------------------------------------------


class ArrayReader(IndexedReader):
    """Feeds from numpy arrays.

    Args:
        source: One of

            * a dictionary of arrays by input name, each with a leading axis of samples;
            * an ``.npz`` file with such arrays, or an ``.npy`` file with one;
            * a folder of ``.npy`` files, one an input (the file's name without suffix), each with a leading axis of
              samples; they are mapped, not read into memory;
            * a folder of ``.npz`` files, one a feed, in the order of their names, arrays used as they are;
            * a sequence of feeds (dictionaries), used as they are.
        batch_size: Samples a feed, where there is a leading axis of samples. The last feed may have fewer.
        input_name: Name of the input for a single ``.npy`` file; its name without suffix by default.
        inputs: The model's inputs: further arrays, labels for one, are left aside, but for a sequence of feeds. None
            feeds all there are.

    Raises:
        CalibrationError: The source is missing, empty, damaged or holds Python objects, or the arrays have different
            numbers of samples.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        batch_size: int = 1,
        input_name: str | None = None,
        inputs: Collection[str] | None = None,
    ) -> None:
        self._batch_size = whole("batch_size", batch_size, least=1)
        self._arrays: dict[str, Array] = {}
        self._feeds: Sequence[Mapping[str, Any]] = ()
        self._files: list[Path] = []
        self._sources: Sequence[Path] = ()
        self._left_aside: frozenset[str] = frozenset()
        if isinstance(source, (str, os.PathLike)):
            where = os.fspath(source)
            self._open(absolute(source), input_name)
        elif isinstance(source, Mapping):
            self._arrays = {str(name): _as_array(str(name), array) for name, array in source.items()}
            where = "the dictionary of arrays"
        elif isinstance(source, Sequence):
            self._feeds, where = cast("Sequence[Mapping[str, Any]]", source), "the sequence of feeds"
        else:
            raise CalibrationError(
                f"Calibration arrays cannot be read from a {type(source).__name__}.",
                fix="Give a dictionary of arrays, a sequence of feeds, an .npz or .npy file, or a folder of them.",
            )
        self._restrict(inputs)
        self._samples = self._count(where)

    def _open(self, path: Path, input_name: str | None) -> None:
        if not os.path.exists(path):
            raise CalibrationError("The calibration data does not exist.", where=str(path), fix="Check the path.")
        if path.is_dir():
            arrays, feeds = sorted(path.glob("*.npy")), sorted(path.glob("*.npz"))
            if bool(arrays) == bool(feeds):
                what = "both .npy and .npz files" if arrays else "neither .npy nor .npz files"
                raise CalibrationError(f"The calibration folder holds {what}.", where=str(path), fix="Keep one kind.")
            self._arrays = {file.stem: _load_npy(file) for file in arrays}
            self._files = feeds
            self._sources = (*arrays, *feeds)
            return
        self._sources = (path,)
        if path.suffix.lower() == ".npy":
            self._arrays = {input_name or path.stem: _load_npy(path)}
        else:
            self._arrays = _load_npz(path)

    def _restrict(self, inputs: Collection[str] | None) -> None:
        """Leaves arrays aside that are no inputs; none where the others do not make a feed, so that they are named."""
        names = {*self._arrays} if not self._files else {*_load_npz(self._files[0])}
        if inputs is not None and names & {*inputs}:
            self._left_aside |= names - {*inputs}
            self._arrays = {name: array for name, array in self._arrays.items() if name in inputs}

    @property
    def left_aside(self) -> tuple[str, ...]:
        """Names of the arrays that are given and not in the feeds."""
        return tuple(sorted(self._left_aside))

    def for_inputs(self, inputs: Collection[str]) -> ArrayReader:
        """A reader of the same samples without the arrays that are none of these; itself where all are."""
        reader = copy(self)
        reader._restrict(inputs)  # noqa: SLF001
        return reader if reader._left_aside else self  # noqa: SLF001

    def _count(self, where: str) -> int:
        if self._files or self._feeds:
            return len(self._files) or len(self._feeds)
        scalars = [name for name, array in self._arrays.items() if array.ndim == 0]
        if scalars:
            raise CalibrationError(
                "A calibration array has no leading axis of samples.",
                where=f"array '{scalars[0]}' of {where}",
                fix="Stack the samples along axis 0.",
            )
        counts = {name: array.shape[0] for name, array in self._arrays.items()}
        if len(set(counts.values())) > 1:
            raise CalibrationError(
                f"The calibration arrays have different numbers of samples: {counts}.",
                where=where,
                fix="Give every input the same length along axis 0.",
            )
        samples = next(iter(counts.values()), 0)
        if samples == 0:
            raise CalibrationError("The calibration data holds no sample.", where=where, fix="Give at least one.")
        return samples

    @property
    def files(self) -> Sequence[Path]:
        return self._sources

    def __len__(self) -> int:
        return self._samples if self._files or self._feeds else -(-self._samples // self._batch_size)

    def feed(self, index: int) -> dict[str, Array]:
        if self._files:
            found = _load_npz(self._files[index])
            return {name: array for name, array in found.items() if name not in self._left_aside}
        if self._feeds:
            return dict(self._feeds[index])
        start = index * self._batch_size
        return {name: np.array(array[start : start + self._batch_size]) for name, array in self._arrays.items()}


_LARGE: Final = 2**30
_LARGEST_RATIO: Final = 100
_UNREADABLE: Final = (
    *(OSError, ValueError, EOFError, AttributeError, TypeError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError, SyntaxError),
)
"""What numpy and zipfile raise of files that are damaged, encrypted or none of theirs."""


def _as_array(name: str, given: Any) -> Array:
    try:
        return np.asarray(given)
    except ValueError as error:
        raise CalibrationError(f"The data of '{name}' is no array: {error}.", where=name, fix="Stack it.") from error


def _load_npy(path: Path) -> Array:
    try:
        loaded: Array = np.load(regular(path), mmap_mode="r", allow_pickle=False)
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
    return loaded


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        with regular(path).open("rb") as file:
            unfolded = sum(entry.file_size for entry in zipfile.ZipFile(file).infolist())
            if unfolded > _LARGE and unfolded > _LARGEST_RATIO * path.stat().st_size:
                raise ValueError(f"it unfolds to {unfolded / 2**30:.1f} GiB, more than {_LARGEST_RATIO} times its size")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CalibrationError:
    return CalibrationError(
        f"The calibration data cannot be read: {error}.",
        where=str(path),
        fix="Give an .npz or .npy file of plain numbers, as numpy.savez or numpy.save write it.",
    )


# ---- shards ----------------------------------------------------------------------------------------------------------


class Shards(StreamReader):
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
            source = [absolute(part) if isinstance(part, (str, os.PathLike)) else part for part in source]
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
        self.batch_size = batch_size
        self.count = count
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
        return partial(self._source, number) if callable(self._source) else self._source[number]

    def name(self, number: int) -> str:
        """Name of a part in messages."""
        part = self.part(number)
        return f"shard {number} ({part})" if isinstance(part, Path) else f"shard {number}"

    def opened(self, number: int) -> Iterator[Feed]:
        """Yields the feeds of a part.

        Raises:
            CalibrationError: It cannot be read; the message names it.
        """
        left = {*self.left_aside}
        yield from opened(self.part(number), self.name(number), self.batch_size, self.inputs, left)
        self.left_aside = tuple(sorted(left))

    def _stream(self) -> Iterator[Feed]:
        return (feed for number in range(self.count) for feed in self.opened(number))


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
        if isinstance(part, partial):
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
