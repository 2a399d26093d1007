"""Makers of images, of made-up writing, and the choice between photographs and writing.

Images: made-up photographs and writing, brought to what the model takes.

What made-up pictures show: photographs alone, or writing too, whichever the net answers to.

A trained net is excited by what it was trained on: its last layers vary more over such pictures, and so do its answers.
Measured on trained nets, writing excites the last third of the layers of a text detector and of a classifier of text
lines 1.5 to 2 times as much as photographs do, and their answers more than 2.5 times; those of nets for photographs 0.8
to 1.25 times. A text recognizer is excited 1.1 times as much, but takes pictures of one line, which are wide and low.

Made-up writing: lines of marks made of strokes, on paper or over photographs, the same on every platform.

What nets that find or read text answer to is not in photographs: strokes of one width and colour, in groups of one
height, in rows. No alphabet is meant. A mark is two to four strokes, straight or bent, between the points of a grid of
three by three: characters have about three strokes, whatever the script (M. A. Changizi and S. Shimojo, "Character
complexity and redundancy in writing systems over human history", 2005).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.draws import Draws
from kenosis_ort.calibration.synthetic.kinds import InputInfo
from kenosis_ort.calibration.synthetic.leaves import Pixels, photograph, pink
from kenosis_ort.calibration.synthetic.maker import Array, Maker, SyntheticSample
from kenosis_ort.calibration.table_format import Known
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.constants import LAYERS

Doubles = npt.NDArray[np.float64]

_ONE_LINE = (2.5, 96)  # width by height from which on, and height up to which, a picture is of one line
_SMALLEST = 7  # pixels a mark is high
_OVER_PHOTOGRAPHS = 50  # percent
_DARK_PAPER = 15  # percent
_CONTRAST = (70, 200)  # between ink and ground, in brightness
_GRID = (0.0, 0.5, 1.0)


def page(draws: Draws, height: int, width: int) -> Pixels:
    """A picture of shape (3, height, width), red, green and blue from 0 to 255."""
    if draws.chance(_OVER_PHOTOGRAPHS):
        ground = photograph(draws, height, width).astype(np.int32)
    else:
        ground = _paper(draws, height, width)
    covered = np.zeros((height, width))
    for top, size in _rows(draws, height, width):
        _write(draws, covered, top, size)
    ink: npt.NDArray[np.int32] = np.rint(covered * 256).astype(np.int32)
    mixed = (ground * (256 - ink) + _colour(draws, ground, ink)[:, None, None] * ink) >> 8
    pixels: Pixels = np.clip(mixed, 0, 255).astype(np.uint8)
    return pixels


def is_line(height: int, width: int) -> bool:
    """Whether a picture of that size shows one line of writing, if any."""
    return width >= _ONE_LINE[0] * height and height <= _ONE_LINE[1]


def _paper(draws: Draws, height: int, width: int) -> npt.NDArray[np.int32]:
    dark = draws.chance(_DARK_PAPER)
    bright = draws.integer(5, 90) if dark else draws.integer(150, 255)
    tint = draws.integers(-18, 18, (3,)).astype(np.int32)
    uneven = pink(draws, (height, width), axes=2, fading=150) * draws.integer(0, 12) >> 8
    return np.asarray(bright + tint[:, None, None] + uneven[None], np.int32)


def _rows(draws: Draws, height: int, width: int) -> list[tuple[int, int]]:
    """The lines: where each begins from above, and how high its marks are, in pixels."""
    if is_line(height, width):
        size = max(height * draws.integer(45, 80) // 100, 1)
        return [((height - size) // 2 + draws.integer(-2, 2) * height // 48, size)]
    largest = max(height // draws.integer(4, 18), _SMALLEST)
    rows, top = [], draws.integer(0, largest)
    while top + _SMALLEST < height:
        size = max(largest * draws.integer(50, 100) // 100, _SMALLEST)
        if draws.chance(80):
            rows.append((top, size))
        top += size * draws.integer(120, 220) // 100
    return rows


def _write(draws: Draws, ink: Doubles, top: int, size: int) -> None:
    """Writes one line: words of marks of one height, width, weight and slant."""
    width = ink.shape[1]
    across = max(size * draws.integer(38, 75) // 100, 2)
    thick = max(size * draws.integer(8, 19) / 100, 1.0)
    slant = draws.integer(-2, 25) / 100 if draws.chance(30) else 0.0
    at = draws.integer(0, width // 3)
    end = width - draws.integer(0, width // 4)
    while at + across < end:
        for _ in range(draws.integer(1, 9)):
            if at + across >= end:
                break
            low = draws.integer(0, 99) < 60  # most marks of many scripts leave the upper part free
            _mark(draws, ink, (top + (size * 3 // 10 if low else 0), top + size), (at, at + across), thick, slant)
            at += across + max(int(thick) + draws.integer(0, 2), 1)
        at += across * draws.integer(60, 130) // 100


def _mark(
    draws: Draws, ink: Doubles, rows: tuple[int, int], columns: tuple[int, int], thick: float, slant: float
) -> None:
    """Draws two to four strokes into a box."""
    height, width = ink.shape
    reach = int(thick) + 2
    lean = int(slant * (rows[1] - rows[0])) + 1
    top, bottom = max(rows[0] - reach, 0), min(rows[1] + reach, height)
    left, right = max(columns[0] - reach, 0), min(columns[1] + reach + lean, width)
    if bottom <= top or right <= left:
        return
    tall, wide = float(max(rows[1] - rows[0] - 1, 1)), float(max(columns[1] - columns[0] - 1, 1))
    y = np.arange(top, bottom, dtype=np.float64)[:, None] - rows[0]
    x = np.arange(left, right, dtype=np.float64)[None, :] - columns[0] - slant * (tall - y)
    drawn = ink[top:bottom, left:right]
    for _ in range(draws.integer(2, 4)):
        ends = draws.integers(0, 2, (4,))
        (y0, x0), (y1, x1) = ((_GRID[ends[i]] * tall, _GRID[ends[i + 1]] * wide) for i in (0, 2))
        if draws.chance(35):
            distance = _from_bow(y, x, (tall / 2, wide / 2), draws.integer(0, 4), (tall, wide))
        else:
            distance = _from_segment(y, x, (y0, x0), (y1, x1))
        np.maximum(drawn, np.clip(thick / 2 + 0.5 - distance, 0.0, 1.0), out=drawn)


def _from_segment(y: Doubles, x: Doubles, start: tuple[float, float], end: tuple[float, float]) -> Doubles:
    """The distance of each point from a straight stroke."""
    dy, dx = end[0] - start[0], end[1] - start[1]
    length = dy * dy + dx * dx
    along = np.clip(((y - start[0]) * dy + (x - start[1]) * dx) / length, 0.0, 1.0) if length else np.zeros(1)
    py, px = y - start[0] - along * dy, x - start[1] - along * dx
    return np.asarray(np.sqrt(py * py + px * px))


def _from_bow(y: Doubles, x: Doubles, centre: tuple[float, float], side: int, box: tuple[float, float]) -> Doubles:
    """About the distance from an ellipse that fills the box, or from one half of it."""
    v, u = (y - centre[0]) / max(box[0] / 2, 0.5), (x - centre[1]) / max(box[1] / 2, 0.5)
    distance = np.abs(np.sqrt(u * u + v * v) - 1.0) * (min(box) / 2)
    away = (v > 0.2, v < -0.2, u > 0.2, u < -0.2)
    return np.asarray(distance if side == len(away) else np.where(away[side], box[0] + box[1], distance))


def _colour(draws: Draws, ground: npt.NDArray[np.int32], ink: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """A colour that stands out from the ground below the writing."""
    weight = max(int(ink.sum(dtype=np.int64)), 1)
    below = int((ground.sum(axis=0, dtype=np.int64) * ink).sum()) // (3 * weight)
    contrast = draws.integer(*_CONTRAST)
    bright = below - contrast if below > 127 else below + contrast
    tint = draws.integers(-40, 40, (3,)) if draws.chance(40) else np.zeros(3, np.int64)
    return np.clip(bright + tint, 0, 255).astype(np.int32)


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
        """The values of pixels of shape (channels, height, width)."""
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

    def values(self, sample: SyntheticSample) -> Array:
        return self.brought(self.pictures(sample), self.ways[sample.index % len(self.ways)])

    def shown(self, sample: SyntheticSample, *, writing: bool) -> Array:
        """The array of a sample that shows photographs alone, or writing alone."""
        pictures = self._drawn(sample, page if writing else photograph)
        return self.brought(pictures, self.ways[sample.index % len(self.ways)]).astype(self.info.dtype)

    def pictures(self, sample: SyntheticSample) -> npt.NDArray[np.uint8]:
        """The pictures of a sample, of shape (count, channels, height, width)."""
        # Not in turns: whoever takes every second or fourth sample has to get some of both (the Thue-Morse sequence).
        odd = bin(sample.index // len(self.ways)).count("1") % 2
        return self._drawn(sample, *((page, photograph) if odd and self.writing else (photograph, page)))

    def _drawn(self, sample: SyntheticSample, *subjects: Subject) -> npt.NDArray[np.uint8]:
        """Pictures of the subjects in turn."""
        height, width = self.size
        channels = self.shape[-1 if self.info.channels_last else -3]
        count = math.prod(self.shape) // max(height * width * channels, 1)
        kinds = subjects if self.writing else subjects[:1]
        return np.stack([self._pixels(sample, number, channels, kinds[number % len(kinds)]) for number in range(count)])

    def brought(self, pictures: npt.NDArray[np.uint8], way: Preprocessing) -> Array:
        """Pictures as the model takes them, of the input's shape."""
        out = np.stack([way.apply(picture) for picture in pictures])
        return (out.transpose(0, 2, 3, 1) if self.info.channels_last else out).reshape(self.shape)

    def _pixels(self, sample: SyntheticSample, number: int, channels: int, subject: Subject) -> npt.NDArray[np.uint8]:
        colour = subject(sample.draws(self.info.name, sample.step, number), *self.size)
        if channels == 3:
            return colour
        if channels == 4:
            return np.concatenate([colour, np.full_like(colour[:1], 255)])
        grey = (colour * np.array([77, 150, 29], np.int32)[:, None, None]).sum(axis=0) >> 8
        return np.broadcast_to(grey.astype(np.uint8), (channels, *grey.shape))


_log = logging.getLogger(__name__)

_TRIALS: Final = 8
_EXCITED: Final = 1.4  # times the deviation over photographs, from which on writing is what a net is for
_EXCITED_BY_LINES: Final = 1.0
_ANSWERS: Final = 2.0  # the same of an output
_MOST_LAYERS: Final = 16
_NOTHING: Final = 1e-9


def shows_writing(proto: onnx.ModelProto, makers: Sequence[Maker], settings: SessionSettings) -> bool:
    """Whether half of a net's pictures had better show writing.

    Args:
        proto: The model.
        makers: Of its inputs; of any but a single picture nothing is found out.
        settings: How to run the model.
    """
    maker = makers[0] if makers else None
    if not isinstance(maker, ImageMaker) or len(makers) > 1:
        return False
    try:
        photographs, pages = (_excitement(proto, maker, settings, writing=shown) for shown in (False, True))
    except CalibrationError as error:
        _log.info("photographs alone: %s", error)
        return False
    layers, answers = (
        (np.asarray(b) + _NOTHING) / (np.asarray(a) + _NOTHING) for a, b in zip(photographs, pages, strict=True)
    )
    excited = float(np.exp(np.mean(np.log(layers)))) if layers.size else 1.0
    answered = float(answers.max(initial=0.0))
    _log.info("writing excites the last layers %.2f times as much as photographs, answers %.2f", excited, answered)
    return excited >= (_EXCITED_BY_LINES if is_line(*maker.size) else _EXCITED) or answered >= _ANSWERS


def _excitement(
    proto: onnx.ModelProto, maker: ImageMaker, settings: SessionSettings, *, writing: bool
) -> tuple[list[float], list[float]]:
    """The deviations of the last third of the layers, the median over their channels, and of the outputs."""
    nodes = [node for node in proto.graph.node if node.op_type in LAYERS]
    axes = {node.output[0]: -1 if node.op_type in ("Gemm", "MatMul") else 1 for node in nodes}
    layers = list(axes)[len(axes) * 2 // 3 :][-_MOST_LAYERS:]
    outputs = [v.name for v in proto.graph.output if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    names = list(dict.fromkeys([*layers, *outputs]))
    sums: dict[str, Any] = dict.fromkeys(names, 0.0)
    with ObservedModel(proto, SessionSettings(custom_op_libraries=settings.custom_op_libraries)) as model:
        session = model.session(names)
        for index in range(_TRIALS):
            feed = {maker.info.name: maker.shown(SyntheticSample(0, index), writing=writing)}
            for value, array in zip(names, run(session, names, feed, index), strict=True):
                rows = np.moveaxis(array, axes[value], 0) if value in axes and array.ndim > 1 else array[None]
                wide = rows.reshape(len(rows), -1).astype(np.float64)
                sums[value] = sums[value] + np.stack(
                    [np.full(len(wide), wide.shape[1]), wide.sum(1), (wide * wide).sum(1)]
                )
    spreads = {}
    for value, (count, total, squares) in sums.items():
        mean = total / count
        spreads[value] = np.sqrt(np.maximum(squares / count - mean * mean, 0.0))
    return [float(np.median(spreads[v])) for v in layers], [float(spreads[v].max()) for v in outputs]
