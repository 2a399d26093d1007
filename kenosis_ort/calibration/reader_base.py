"""The base class of the readers."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.errors import CalibrationError

Array = npt.NDArray[Any]


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
            raise CalibrationError(f"The range {start_index}..{end_index} of calibration samples is not valid.")
        self._next, self._end = start_index, min(end_index, len(self))

    def rewind(self) -> None:
        """Starts over, with all feeds."""
        self._next, self._end = 0, None


def source_files(reader: Any) -> Sequence[Path]:
    """The files that a reader of ours reads; none of another's, which nobody can know."""
    return reader.files if isinstance(reader, OwnReader) else ()
