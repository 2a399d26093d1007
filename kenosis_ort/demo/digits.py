"""The shipped net and its images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import numpy.typing as npt

INPUT_NAME = "image"
_PIXEL_MAX = np.float32(16)


@dataclass(frozen=True)
class Digits:
    """Images as the net takes them.

    Attributes:
        calibration: float32 (100, 1, 8, 8), from 0 to 1, from the training split.
        images: float32 (600, 1, 8, 8), from 0 to 1, held out from training.
        labels: int64 (600,), the digits that `images` show.
    """

    calibration: npt.NDArray[np.float32]
    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


@contextmanager
def model_path() -> Iterator[Path]:
    """Yields the path of the trained float net, on disk for the duration of the block."""
    with as_file(files("kenosis_ort.demo").joinpath("digits_cnn.onnx")) as path:
        yield path


def load_digits() -> Digits:
    """Returns the shipped images."""
    with as_file(files("kenosis_ort.demo").joinpath("digits.npz")) as path, np.load(path, allow_pickle=False) as data:
        return Digits(
            calibration=_as_input(data["calibration_images"]),
            images=_as_input(data["test_images"]),
            labels=data["test_labels"].astype(np.int64),
        )


def _as_input(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    images: npt.NDArray[np.float32] = pixels[:, None].astype(np.float32) / _PIXEL_MAX
    return images
