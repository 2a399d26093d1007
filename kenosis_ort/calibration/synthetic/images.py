"""Images: made-up photographs and writing, brought to what the model takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.provenance import Known
from kenosis_ort.calibration.synthetic.draws import Draws
from kenosis_ort.calibration.synthetic.kinds import InputInfo
from kenosis_ort.calibration.synthetic.leaves import photograph
from kenosis_ort.calibration.synthetic.maker import Array, Maker, Sample
from kenosis_ort.calibration.synthetic.pages import page

Subject = Callable[[Draws, int, int], npt.NDArray[np.uint8]]
"""Makes a picture of red, green and blue of some height and width."""


@dataclass(frozen=True)
class Preprocessing:
    """How pixels become the values of an input: mapped to a range, then the mean subtracted, then divided.

    Attributes:
        low: What black becomes.
        high: What white becomes.
        mean: Subtracted then, one number or one a channel.
        std: Divided by at last, one number or one a channel.
        name: For people.
    """

    low: float = 0.0
    high: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    name: str = ""

    def apply(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
        """Returns the values of pixels of shape (channels, height, width)."""
        scaled = self.low + pixels.astype(np.float64) * ((self.high - self.low) / 255.0)
        mean, std = (_per_channel(v, len(pixels)) for v in (self.mean, self.std))
        values: npt.NDArray[np.float64] = (scaled - mean) / std
        return values

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and largest value of any channel."""
        count = max(len(self.mean), len(self.std))
        mean, std = (np.resize(np.asarray(v, np.float64), count) for v in (self.mean, self.std))
        ends = [(end - m) / s for end in (self.low, self.high) for m, s in zip(mean, std, strict=True)]
        return float(min(ends)), float(max(ends))


def _per_channel(values: tuple[float, ...], channels: int) -> npt.NDArray[np.float64]:
    if len(values) in (1, channels):
        return np.asarray(values, np.float64)[:, None, None]
    return np.full((1, 1, 1), sum(values) / len(values))  # grey pictures of a net with colours' mean


class ImageMaker(Maker):
    """Made-up photographs.

    Args:
        info: The input, with channels first or last, with or without batch axis.
        shape: Its shape.
        ways: Preprocessing of the pixels; several are used in turn.
        known: How well it is known.

    Attributes:
        writing: Half of the pictures show writing.
    """

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, ways: Sequence[Preprocessing], known: Known) -> None:
        super().__init__(info, shape)
        self.ways = tuple(ways)
        self.known = known
        self.writing = False

    @property
    def says(self) -> str:
        ranges = " and ".join(f"{way.name} ({way.ends[0]:.3g} to {way.ends[1]:.3g})" for way in self.ways)
        return f"images{', half of them of writing' if self.writing else ''}, pixels {ranges}"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        height, width = self.shape[-3:-1] if self.info.channels_last else self.shape[-2:]
        return height, width

    def values(self, sample: Sample) -> Array:
        return self.brought(self.pictures(sample), self.ways[sample.index % len(self.ways)])

    def shown(self, sample: Sample, *, writing: bool) -> Array:
        """Returns the array of a sample that shows photographs alone, or writing alone."""
        pictures = self._drawn(sample, page if writing else photograph)
        return self.brought(pictures, self.ways[sample.index % len(self.ways)]).astype(self.info.dtype)

    def pictures(self, sample: Sample) -> npt.NDArray[np.uint8]:
        """Returns the pictures of a sample, of shape (count, channels, height, width)."""
        # Not in turns: whoever takes every second or fourth sample has to get some of both (the Thue-Morse sequence).
        odd = bin(sample.index // len(self.ways)).count("1") % 2
        return self._drawn(sample, *((page, photograph) if odd and self.writing else (photograph, page)))

    def _drawn(self, sample: Sample, *subjects: Subject) -> npt.NDArray[np.uint8]:
        """Returns pictures of the subjects in turn."""
        height, width = self.size
        channels = self.shape[-1 if self.info.channels_last else -3]
        count = math.prod(self.shape) // max(height * width * channels, 1)
        kinds = subjects if self.writing else subjects[:1]
        return np.stack([self._pixels(sample, number, channels, kinds[number % len(kinds)]) for number in range(count)])

    def brought(self, pictures: npt.NDArray[np.uint8], way: Preprocessing) -> Array:
        """Returns pictures as the model takes them, of the input's shape."""
        out = np.stack([way.apply(picture) for picture in pictures])
        return (out.transpose(0, 2, 3, 1) if self.info.channels_last else out).reshape(self.shape)

    def _pixels(self, sample: Sample, number: int, channels: int, subject: Subject) -> npt.NDArray[np.uint8]:
        colour = subject(sample.draws(self.info.name, sample.step, number), *self.size)
        if channels == 3:
            return colour
        if channels == 4:
            return np.concatenate([colour, np.full_like(colour[:1], 255)])
        grey = (colour * np.array([77, 150, 29], np.int32)[:, None, None]).sum(axis=0) >> 8
        return np.broadcast_to(grey.astype(np.uint8), (channels, *grey.shape))
