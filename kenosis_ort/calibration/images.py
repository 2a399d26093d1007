"""Readers: their base class, and the one of image files.

A reader of image files.

The base class of the readers.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.errors import CalibrationError
from kenosis_ort.storage.writing import absolute

if TYPE_CHECKING:
    from PIL.Image import Image

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


SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


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
        if min(batch_size, 1 if limit is None else limit) < 1:
            raise CalibrationError("limit and batch_size must be positive.")
        self._pixels = Pixels(size, layout, mean, std, scale, channel_order, resize, fill, dtype)
        self._files = _find(absolute(folder))[:limit]
        self._input_name, self._batch_size = input_name, batch_size

    @property
    def files(self) -> Sequence[Path]:
        return self._files

    def __len__(self) -> int:
        return -(-len(self._files) // self._batch_size)

    def feed(self, index: int) -> dict[str, Array]:
        start = index * self._batch_size
        files = self._files[start : start + self._batch_size]
        return {self._input_name: self._pixels.batch([self._pixels.read(file, str(file)) for file in files])}


class Pixels:
    """What makes a model's input of images; arguments as for `ImageFolderReader`.

    Raises:
        CalibrationError: Pillow is not installed, or an argument is out of range.
    """

    def __init__(
        self,
        size: tuple[int, int],
        layout: Literal["NCHW", "NHWC"] = "NCHW",
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        scale: float = 1 / 255,
        channel_order: Literal["RGB", "BGR", "GRAY"] = "RGB",
        resize: Literal["stretch", "crop", "letterbox"] = "stretch",
        fill: int = 114,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        _require_pillow()
        for name, value, known in (
            ("layout", layout, ("NCHW", "NHWC")),
            ("channel_order", channel_order, ("RGB", "BGR", "GRAY")),
            ("resize", resize, ("stretch", "crop", "letterbox")),
        ):
            if value not in known:
                raise CalibrationError(f"{name}={value!r} is not known.", fix=f"Use one of {', '.join(known)}.")
        if min(size) < 1:
            raise CalibrationError("size must be positive.")
        channels = 1 if channel_order == "GRAY" else 3
        self._mean, self._std = (_per_channel(n, v, channels) for n, v in (("mean", mean), ("std", std)))
        if not self._std.all():
            raise CalibrationError("std must not be 0.")
        self._size, self._layout, self._scale = size, layout, np.float32(scale)
        self._order, self._resize, self._fill = channel_order, resize, fill
        self._dtype = np.dtype(dtype)

    def batch(self, images: Sequence[Array]) -> Array:
        """Images as one array in the model's layout."""
        stacked = np.stack(images)
        return np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)) if self._layout == "NCHW" else stacked

    def read(self, file: Path | IO[bytes], where: str) -> Array:
        """One image, channels last.

        Raises:
            CalibrationError: It is damaged.
        """
        from PIL import Image

        try:
            with Image.open(file) as opened:
                image = self._fit(opened.convert("L" if self._order == "GRAY" else "RGB"))
        except (OSError, ValueError, SyntaxError) as error:
            raise CalibrationError(
                f"The image cannot be read: {error}.", where=where, fix="Remove or replace the file."
            ) from error
        pixels = np.asarray(image, np.float32).reshape(*self._size, -1)
        if self._order == "BGR":
            pixels = pixels[..., ::-1]
        values: Array = (pixels * self._scale - self._mean) / self._std
        if np.issubdtype(self._dtype, np.integer):
            limits = np.iinfo(self._dtype)
            values = np.clip(np.rint(values), limits.min, limits.max)
        return values.astype(self._dtype)

    def _fit(self, image: Image) -> Image:
        from PIL.Image import Resampling, new

        height, width = self._size
        if self._resize == "stretch":
            return image.resize((width, height), Resampling.BILINEAR)
        ratios = (width / image.width, height / image.height)
        ratio = max(ratios) if self._resize == "crop" else min(ratios)
        scaled = image.resize(
            (max(round(image.width * ratio), 1), max(round(image.height * ratio), 1)), Resampling.BILINEAR
        )
        left, top = (width - scaled.width) // 2, (height - scaled.height) // 2
        canvas = new(image.mode, (width, height), self._fill if image.mode == "L" else (self._fill,) * 3)
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


def _per_channel(name: str, value: float | Sequence[float], channels: int) -> npt.NDArray[np.float32]:
    array = np.asarray(value, np.float32).reshape(-1)
    if array.size not in (1, channels):
        raise CalibrationError(
            f"{name} has {array.size} numbers for {channels} channels.", fix=f"Give one number or {channels}."
        )
    return array


def _find(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CalibrationError("The folder of images does not exist.", where=str(folder), fix="Check the path.")
    files: list[Any] = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise CalibrationError(
            "The folder holds no image.", where=str(folder), fix=f"Known kinds: {', '.join(sorted(SUFFIXES))}."
        )
    return files
