"""Readers of images: from a folder, and what makes a model's input of pixels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.readers import Array, IndexedReader
from kenosis_ort.errors import CalibrationError
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


@dataclass(frozen=True)
class Pixels:
    """What makes a model's input of images; fields as the arguments of `ImageFolderReader`.

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
        if min(self.size) < 1:
            raise CalibrationError("size must be positive.")
        self._per_channel("mean")
        if not self._per_channel("std").all():
            raise CalibrationError("std must not be 0.")

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
