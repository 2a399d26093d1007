"""Readers of samples in archives: tar files as webdataset writes them, and Parquet tables. One pass, flat memory."""

from __future__ import annotations

import importlib
import io
import os
import tarfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kenosis_ort.calibration.images import SUFFIXES, Pixels
from kenosis_ort.calibration.readers import Array, StreamReader
from kenosis_ort.errors import CalibrationError, did_you_mean
from kenosis_ort.storage.writing import absolute

_LARGEST: Final = 2**31
"""Bytes of one entry of an archive."""

Sample = dict[str, Array]


class _FileReader(StreamReader):
    """Feeds from one file that is read from its beginning to its end.

    Subclasses yield samples, arrays by input name without a batch axis.
    """

    def __init__(
        self, path: str | os.PathLike[str], inputs: Mapping[str, str], images: Mapping[str, Any] | None, batch_size: int
    ) -> None:
        self._path = absolute(path)
        if not self._path.is_file():
            raise CalibrationError("The calibration data does not exist.", where=str(path), fix="Check the path.")
        if not inputs:
            raise CalibrationError("No input is named.", where="inputs", fix="inputs={'name of the input': 'field'}")
        if batch_size < 1:
            raise CalibrationError(f"The batch size {batch_size} is not positive.", fix="Give a whole number above 0.")
        self._inputs, self._batch_size = dict(inputs), batch_size
        self._pixels = None if images is None else Pixels(**images)

    @property
    def files(self) -> Sequence[Path]:
        return (self._path,)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_feeds": None}  # each copy begins at the beginning

    def _stream(self) -> Iterator[dict[str, Array]]:
        batch: list[Sample] = []
        for sample in self._samples():
            batch.append(sample)
            if len(batch) == self._batch_size:
                yield self._stacked(batch)
                batch = []
        if batch:
            yield self._stacked(batch)

    def _stacked(self, samples: Sequence[Sample]) -> dict[str, Array]:
        try:
            return {name: np.stack([sample[name] for sample in samples]) for name in self._inputs}
        except ValueError as error:
            raise CalibrationError(
                f"Samples of different shapes cannot be one feed: {error}.", where=str(self._path), fix="batch_size=1"
            ) from error

    @abstractmethod
    def _samples(self) -> Iterator[Sample]:
        """Yields the samples of the file, in order."""

    def _image(self, content: bytes, where: str) -> Array:
        if self._pixels is None:
            raise CalibrationError(
                "How images are prepared was not said.", where=where, fix="images={'size': (224, 224), 'mean': ...}"
            )
        image: Array = self._pixels.batch([self._pixels.read(io.BytesIO(content), where)])[0]
        return image


class TarReader(_FileReader):
    """Feeds from a tar file as webdataset writes them: entries of one name but for the suffix are one sample.

    Args:
        path: The file, compressed or not; nothing of it is unpacked to disk.
        inputs: Suffix by input, e.g. ``{"image": "jpg", "scale": "npy"}``. What ends in ``npy`` is an array without a
            batch axis, other suffixes are of images.
        images: How images are prepared: ``size`` and other arguments of `ImageFolderReader`.
        batch_size: Samples a feed; the last one may have fewer.

    Raises:
        CalibrationError: The file is missing or damaged, a sample lacks an input, or an argument is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        inputs: Mapping[str, str],
        *,
        images: Mapping[str, Any] | None = None,
        batch_size: int = 1,
    ) -> None:
        super().__init__(path, inputs, images, batch_size)
        for name, suffix in self._inputs.items():
            if suffix != "npy" and f".{suffix}" not in SUFFIXES:
                known = ["npy", *(known.lstrip(".") for known in sorted(SUFFIXES))]
                raise CalibrationError(
                    f"'{suffix}' is no suffix that can be read.{did_you_mean(suffix, known)}",
                    where=f"input '{name}'",
                    fix=f"one of {', '.join(known)}",
                )

    def _samples(self) -> Iterator[Sample]:
        wanted = set(self._inputs.values())
        key, fields = "", dict[str, Array]()
        try:
            with tarfile.open(self._path, "r|*") as archive:
                for entry in archive:
                    folder, _, base = entry.name.rpartition("/")
                    stem, _, suffix = base.partition(".")
                    if not entry.isreg() or suffix.lower() not in wanted:
                        continue
                    if f"{folder}/{stem}" != key:
                        if fields:
                            yield self._whole(key, fields)
                        key, fields = f"{folder}/{stem}", {}
                    fields[suffix.lower()] = self._field(archive, entry)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise CalibrationError(
                f"The tar file cannot be read: {error}.", where=str(self._path), fix="Copy the file again."
            ) from error
        if fields:
            yield self._whole(key, fields)

    def _field(self, archive: tarfile.TarFile, entry: tarfile.TarInfo) -> Array:
        where = f"{entry.name} in {self._path}"
        if entry.size > _LARGEST:
            raise CalibrationError(f"An entry of {entry.size} bytes is too large for a sample.", where=where)
        opened = archive.extractfile(entry)
        content = b"" if opened is None else opened.read()
        if not entry.name.lower().endswith("npy"):
            return self._image(content, where)
        try:
            array: Array = np.load(io.BytesIO(content), allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise CalibrationError(
                f"The array cannot be read: {error}.", where=where, fix="Write it with numpy.save, of plain numbers."
            ) from error
        return array

    def _whole(self, key: str, fields: Mapping[str, Array]) -> Sample:
        lacking = [suffix for suffix in self._inputs.values() if suffix not in fields]
        if lacking:
            raise CalibrationError(
                f"A sample has no '.{lacking[0]}'.",
                where=f"'{key.lstrip('/')}' in {self._path}",
                fix="Entries of one sample have to follow one another.",
            )
        return {name: fields[suffix] for name, suffix in self._inputs.items()}


class ParquetReader(_FileReader):
    """Feeds from a Parquet file, a row a sample; needs the package ``pyarrow``.

    Args:
        path: The file.
        inputs: Column by input. Lists and numbers are arrays, binary columns hold encoded images.
        shapes: Shape of one sample by input, for lists that stand for more than one axis.
        images: As for `TarReader`.
        batch_size: Samples a feed; the last one may have fewer.

    Raises:
        CalibrationError: pyarrow is not installed, the file is missing or damaged, a column is missing or of another
            kind, or an argument is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        inputs: Mapping[str, str],
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        images: Mapping[str, Any] | None = None,
        batch_size: int = 1,
    ) -> None:
        super().__init__(path, inputs, images, batch_size)
        self._shapes = {name: tuple(shape) for name, shape in (shapes or {}).items()}
        with self._opened() as table:
            names = list(table.schema_arrow.names)
        for name, column in self._inputs.items():
            if column not in names:
                raise CalibrationError(
                    f"The file has no column '{column}'.{did_you_mean(column, names)}",
                    where=f"input '{name}', {self._path}",
                    fix=f"one of {', '.join(names)}",
                )

    def _opened(self) -> Any:
        try:
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise CalibrationError(
                "Reading Parquet needs pyarrow, which is not installed.", fix="pip install pyarrow"
            ) from error
        try:
            return parquet.ParquetFile(self._path)
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
            raise CalibrationError(
                f"The Parquet file cannot be read: {error}.", where=str(self._path), fix="Copy the file again."
            ) from error

    def _samples(self) -> Iterator[Sample]:
        row = 0
        with self._opened() as table:
            for batch in table.iter_batches(batch_size=self._batch_size, columns=sorted(set(self._inputs.values()))):
                columns = {column: batch.column(column) for column in self._inputs.values()}
                for at in range(batch.num_rows):
                    where = f"row {row} of {self._path}"
                    yield {name: self._value(name, columns[c], at, where) for name, c in self._inputs.items()}
                    row += 1

    def _value(self, name: str, column: Any, at: int, where: str) -> Array:
        entry = column[at]
        if not entry.is_valid:
            raise CalibrationError("A value is missing.", where=f"input '{name}', {where}", fix="Leave the row out.")
        value = entry.as_py() if not hasattr(entry, "values") else entry.values.to_numpy(zero_copy_only=False)
        if isinstance(value, bytes):
            return self._image(value, where)
        array = np.asarray(value)
        if array.dtype == object or array.dtype.kind not in "biuf":
            raise CalibrationError(
                f"A column of {column.type} is no array of numbers.",
                where=f"input '{name}', {where}",
                fix="Flatten nested lists, and give shapes={input: shape}.",
            )
        if not hasattr(entry, "values"):
            array = array.astype(column.type.to_pandas_dtype())
        try:
            return array.reshape(self._shapes[name]) if name in self._shapes else array
        except ValueError as error:
            raise CalibrationError(
                f"{array.size} numbers are not of shape {self._shapes[name]}.", where=f"input '{name}', {where}"
            ) from error
