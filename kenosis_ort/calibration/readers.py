"""The readers of calibration data: of arrays here, of images in `images`."""

from __future__ import annotations

import lzma
import os
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from kenosis_ort.calibration.images import ImageFolderReader
from kenosis_ort.calibration.reader_base import Array, IndexedReader
from kenosis_ort.errors import CalibrationError
from kenosis_ort.storage.paths import absolute, regular

__all__ = ["ArrayReader", "ImageFolderReader", "IndexedReader"]


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
        if batch_size < 1:
            raise CalibrationError(f"The batch size {batch_size} is not positive.", fix="Give a whole number above 0.")
        self._batch_size = batch_size
        self._arrays: dict[str, Array] = {}
        self._feeds: Sequence[Mapping[str, Any]] = ()
        self._files: list[Path] = []
        self._sources: Sequence[Path] = ()
        self._left_aside: frozenset[str] = frozenset()
        if isinstance(source, (str, os.PathLike)):
            where = os.fspath(source)
            self._open(absolute(source), input_name)
        elif isinstance(source, Mapping):
            self._arrays = {str(name): np.asarray(array) for name, array in source.items()}
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
            raise CalibrationError("The calibration data holds no sample.", where=where)
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
