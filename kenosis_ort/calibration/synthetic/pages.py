"""Made-up writing: lines of marks made of strokes, on paper or over photographs, the same on every platform.

What nets that find or read text answer to is not in photographs: strokes of one width and colour, in groups of one
height, in rows. No alphabet is meant. A mark is two to four strokes, straight or bent, between the points of a grid of
three by three: characters have about three strokes, whatever the script (M. A. Changizi and S. Shimojo, "Character
complexity and redundancy in writing systems over human history", 2005).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.synthetic.draws import Draws
from kenosis_ort.calibration.synthetic.leaves import Pixels, photograph
from kenosis_ort.calibration.synthetic.smooth_noise import pink

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
