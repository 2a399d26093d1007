"""A sequence of dictionaries of arrays that goes to a temporary file where it would fill the memory."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Final, overload

import numpy as np

from kenosis_ort.storage.writing import Scratch

IN_MEMORY: Final = 2**26
"""Bytes of arrays held in memory; what comes beyond is on disk."""


class _Arrays:
    """A temporary file, which goes with the object."""

    def __init__(self) -> None:
        self.scratch = Scratch("spool")
        self.file = (self.scratch.path / "arrays").open("w+b")

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


class Spool(Sequence[dict[str, Any]]):
    """Dictionaries by number, as they were appended. The file goes with the object and the parts of it.

    Arrays are copied; what is no array of numbers stays in memory as it is.

    Args:
        memory: Bytes of arrays to hold in memory.
    """

    def __init__(self, *, memory: int = IN_MEMORY) -> None:
        self._memory = memory
        self._in_memory: list[dict[str, Any]] = []
        self._places: list[dict[str, int]] = []
        self._arrays: _Arrays | None = None

    def append(self, entry: Mapping[str, Any]) -> None:
        """Adds one dictionary.

        Raises:
            OutputError: No temporary folder can be made.
            OSError: The disk is full.
        """
        in_memory: dict[str, Any] = {}
        places: dict[str, int] = {}
        for name, value in entry.items():
            if not isinstance(value, np.ndarray) or value.dtype.hasobject:
                in_memory[name] = value
            elif value.nbytes <= self._memory:
                self._memory -= value.nbytes
                in_memory[name] = np.array(value)
            else:
                places[name] = self._written(value)
        self._in_memory.append(in_memory)
        self._places.append(places)

    def _written(self, value: np.ndarray[Any, Any]) -> int:
        self._arrays = self._arrays or _Arrays()
        place = self._arrays.file.seek(0, io.SEEK_END)
        np.lib.format.write_array(self._arrays.file, value, allow_pickle=False)
        return place

    def _entry(self, index: int) -> dict[str, Any]:
        found = dict(self._in_memory[index])
        for name, place in self._places[index].items():
            assert self._arrays is not None, "what has a place was written"
            self._arrays.file.seek(place)
            found[name] = np.lib.format.read_array(self._arrays.file, allow_pickle=False)
        return found

    def release(self, index: int) -> None:
        """Forgets what is held in memory of an entry that is not asked for again."""
        self._in_memory[index] = {}

    def __len__(self) -> int:
        return len(self._in_memory)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._entry, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Spool: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | Spool:
        if not isinstance(index, slice):
            return self._entry(range(len(self))[index])
        part = copy(self)  # of the same file
        vars(part).update(_in_memory=self._in_memory[index], _places=self._places[index])
        return part
