"""Readers of samples in files: images of a folder, tar files as webdataset writes them, and Parquet tables.

Archives are read in one pass with flat memory; of images a transform makes a model's input.
"""

from __future__ import annotations

import importlib
import io
import itertools
import os
import tarfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.feeds import Array
from kenosis_ort.calibration.readers import IndexedReader, StreamReader
from kenosis_ort.checks import path as check_path, several, whole
from kenosis_ort.errors import CalibrationError, did_you_mean
from kenosis_ort.storage.writing import absolute

if TYPE_CHECKING:
    from PIL.Image import Image


_WORDS: Final = {
    "layout": ("NCHW", "NHWC"),
    "channel_order": ("RGB", "BGR", "GRAY"),
    "resize": ("stretch", "crop", "letterbox"),
}
SUFFIXES: Final = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class ImageFolderReader(IndexedReader):
    """Feeds from a folder of images.

    The pixels from 0 to 255 are multiplied by ``scale``, then ``mean`` is subtracted and the result divided by
    ``std``, both in the order of the channels that the model gets.

    Args:
        folder: Folder; its subfolders are searched too. The images are taken in the order of their paths.
        input_name: The model's input.
        size: Height and width in pixels.
        layout: Where the channels stand.
        mean: Subtracted after scaling, one number or one a channel.
        std: Divided by at last, one number or one a channel.
        scale: Multiplied first; 1/255 by default.
        channel_order: ``"GRAY"`` gives one channel.
        resize: ``"stretch"`` ignores the aspect ratio; ``"crop"`` scales the shorter side and cuts the middle out;
            ``"letterbox"`` scales the longer side and fills the rest with ``fill``, the image in the middle.
        fill: Pixel value of the letterbox bars, 0 to 255.
        limit: Takes the first so many images only.
        batch_size: Images a feed; a rest that does not fill a feed makes a smaller one.
        dtype: Element type of the input; integer types get rounded values.

    Raises:
        CalibrationError: Pillow is not installed, the folder is missing or holds no image, an image is damaged, or an
            argument is out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        input_name: str,
        size: tuple[int, int],
        layout: Literal["NCHW", "NHWC"] = "NCHW",
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        scale: float = 1 / 255,
        channel_order: Literal["RGB", "BGR", "GRAY"] = "RGB",
        resize: Literal["stretch", "crop", "letterbox"] = "stretch",
        fill: int = 114,
        limit: int | None = None,
        batch_size: int = 1,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self._pixels = Pixels(size, layout, mean, std, scale, channel_order, resize, fill, dtype)
        most = None if limit is None else whole("limit", limit, least=1)
        self._files = _find(absolute(check_path("folder", folder)))[:most]
        self._input_name, self._batch_size = input_name, whole("batch_size", batch_size, least=1)

    @property
    def files(self) -> Sequence[Path]:
        return self._files

    def __len__(self) -> int:
        return -(-len(self._files) // self._batch_size)

    def feed(self, index: int) -> dict[str, Array]:
        start = index * self._batch_size
        files = self._files[start : start + self._batch_size]
        return {self._input_name: self._pixels.batch([self._pixels.read(file, str(file)) for file in files])}


@dataclass(frozen=True)
class Pixels:
    """Preprocessing of images for an input; fields as the arguments of `ImageFolderReader`.

    Raises:
        CalibrationError: Pillow is not installed, or a value is out of range.
    """

    size: tuple[int, int]
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0
    scale: float = 1 / 255
    channel_order: Literal["RGB", "BGR", "GRAY"] = "RGB"
    resize: Literal["stretch", "crop", "letterbox"] = "stretch"
    fill: int = 114
    dtype: npt.DTypeLike = np.float32

    def __post_init__(self) -> None:
        _require_pillow()
        for name, known in _WORDS.items():
            if getattr(self, name) not in known:
                raise CalibrationError(
                    f"{name}={getattr(self, name)!r} is not known.", fix=f"Use one of {', '.join(known)}."
                )
        if len(several("size", self.size, each=partial(whole, least=1), what="two whole numbers")) != 2:
            raise CalibrationError(f"size={self.size} is no pair.", fix="Give height and width in pixels.")
        self._per_channel("mean")
        if not self._per_channel("std").all():
            raise CalibrationError("std must not be 0.", fix="Give what the model was trained with.")

    def _per_channel(self, name: str) -> npt.NDArray[np.float32]:
        array, channels = np.asarray(getattr(self, name), np.float32).reshape(-1), 1 if self._is_grey else 3
        if array.size not in (1, channels):
            raise CalibrationError(
                f"{name} has {array.size} numbers for {channels} channels.", fix=f"Give one number or {channels}."
            )
        return array

    @property
    def _is_grey(self) -> bool:
        return self.channel_order == "GRAY"

    def batch(self, images: Sequence[Array]) -> Array:
        """Images as one array in the model's layout."""
        stacked = np.stack(images)
        return np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)) if self.layout == "NCHW" else stacked

    def read(self, file: Path | IO[bytes], where: str) -> Array:
        """One image, channels last.

        Raises:
            CalibrationError: It is damaged.
        """
        from PIL import Image

        try:
            with Image.open(file) as opened:
                image = self._fit(opened.convert("L" if self._is_grey else "RGB"))
        except (OSError, ValueError, SyntaxError) as error:
            raise CalibrationError(
                f"The image cannot be read: {error}.", where=where, fix="Remove or replace the file."
            ) from error
        pixels = np.asarray(image, np.float32).reshape(*self.size, -1)
        if self.channel_order == "BGR":
            pixels = pixels[..., ::-1]
        values: Array = (pixels * np.float32(self.scale) - self._per_channel("mean")) / self._per_channel("std")
        dtype = np.dtype(self.dtype)
        if np.issubdtype(dtype, np.integer):
            limits = np.iinfo(dtype)
            values = np.clip(np.rint(values), limits.min, limits.max)
        return values.astype(dtype)

    def _fit(self, image: Image) -> Image:
        from PIL.Image import Resampling, new

        height, width = self.size
        if self.resize == "stretch":
            return image.resize((width, height), Resampling.BILINEAR)
        ratios = (width / image.width, height / image.height)
        ratio = max(ratios) if self.resize == "crop" else min(ratios)
        scaled = image.resize(
            (max(round(image.width * ratio), 1), max(round(image.height * ratio), 1)), Resampling.BILINEAR
        )
        left, top = (width - scaled.width) // 2, (height - scaled.height) // 2
        canvas = new(image.mode, (width, height), self.fill if image.mode == "L" else (self.fill,) * 3)
        canvas.paste(scaled, (left, top))
        return canvas


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise CalibrationError(
            "Reading images needs Pillow, which is not installed.",
            fix="pip install pillow, or decode the images yourself and use ArrayReader.",
        ) from error


def _find(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CalibrationError("The folder of images does not exist.", where=str(folder), fix="Check the path.")
    files: list[Any] = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise CalibrationError(
            "The folder holds no image.", where=str(folder), fix=f"Known kinds: {', '.join(sorted(SUFFIXES))}."
        )
    return files


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
        self._inputs, self._batch_size = dict(inputs), whole("batch_size", batch_size, least=1)
        self._pixels = None if images is None else Pixels(**images)

    @property
    def files(self) -> Sequence[Path]:
        return (self._path,)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_feeds": None}  # each copy begins at the beginning

    def _stream(self) -> Iterator[dict[str, Array]]:
        samples = self._samples()
        while batch := list(itertools.islice(samples, self._batch_size)):
            try:
                feed = {name: np.stack([sample[name] for sample in batch]) for name in self._inputs}
            except ValueError as error:
                raise CalibrationError(
                    f"Samples of different shapes cannot be one feed: {error}.",
                    where=str(self._path),
                    fix="batch_size=1",
                ) from error
            yield feed

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
            raise CalibrationError(
                f"An entry of {entry.size} bytes is too large for a sample.", where=where, fix="Leave it out."
            )
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
            array = array.astype(column.slice(at, 1).to_numpy(zero_copy_only=False).dtype)
        try:
            return array.reshape(self._shapes[name]) if name in self._shapes else array
        except ValueError as error:
            raise CalibrationError(
                f"{array.size} numbers are not of shape {self._shapes[name]}.",
                where=f"input '{name}', {where}",
                fix=f"Correct shapes['{name}'].",
            ) from error
