"""Made-up pictures: photographs and writing, in integer arithmetic, the same on every platform.

Natural images are made of objects that occlude each other, with sizes by an inverse cube law ("dead leaves"), and
their spectra fall like 1/f; both make them look alike at every scale. See A. B. Lee, D. Mumford and J. Huang,
"Occlusion models for natural images" (2001). Photographs are occluding shapes of all sizes with shading, texture, light
and blur. Brightness varies much more than hue, and some pictures are dark, flat, grey, blurred or framed.

What nets that find or read text answer to is not in photographs: strokes of one width and colour, in groups of one
height, in rows. Writing is lines of marks made of strokes, on paper or over photographs; no alphabet is meant. A mark
is two to four strokes, straight or bent, between the points of a grid of three by three: characters have about three
strokes, whatever the script (M. A. Changizi and S. Shimojo, "Character complexity and redundancy in writing systems
over human history", 2005).

Random numbers and noise are the same on every platform and with every release of numpy. Only the bit stream of PCG64
and the seed sequence are used, which numpy promises to keep; everything made from it is integer arithmetic or a single
correctly rounded operation of IEEE 754 (+, -, *, /, sqrt), never a function of the platform's mathematical library or a
sum whose order depends on the processor.

Noise whose spectrum falls with frequency, as that of most natural signals does, is a sum of octaves: random values on
grids of cells of 1, 2, 4, ... points, interpolated linearly. Octaves of equal variance give a power of ``1 / f`` along
one axis and, along two, the ``1 / f**2`` of natural images (D. J. Field, "Relations between the statistics of natural
images and the response properties of cortical cells", 1987).
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Units = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]

_LANE = 16
_LANES = 64 // _LANE
BELL_DEVIATION = math.sqrt(_LANES * (2 ** (2 * _LANE) - 1) / 12)
"""Standard deviation of `Draws.bells`, about 37837."""


class Draws:
    """A stream of random numbers.

    Args:
        key: What the stream depends on: non-negative integers and texts.
    """

    def __init__(self, *key: int | str) -> None:
        numbers = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
        self._bits = np.random.PCG64(np.random.SeedSequence(numbers))

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """Random 64-bit words."""
        return np.asarray(self._bits.random_raw(count), np.uint64)

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Integers:
        """Numbers from ``low`` to ``high``, both included, at most 2**32 of them different."""
        span = np.uint64(high - low + 1)
        words = self.words(math.prod(shape)) >> np.uint64(32)
        numbers: Integers = (words * span >> np.uint64(32)).astype(np.int64).reshape(tuple(shape)) + low
        return numbers

    def integer(self, low: int, high: int) -> int:
        """One number from ``low`` to ``high``, both included."""
        return int(self.integers(low, high, (1,))[0])

    def chance(self, percent: int) -> bool:
        """True in so many cases of a hundred."""
        return self.integer(0, 99) < percent

    def fractions(self, shape: Sequence[int]) -> Doubles:
        """Numbers from 0 to 1, 1 not included, in steps of 2**-32."""
        words = self.words(math.prod(shape)) >> np.uint64(32)
        fractions: Doubles = words.astype(np.float64).reshape(tuple(shape)) * 2.0**-32
        return fractions

    def bytes(self, shape: Sequence[int]) -> npt.NDArray[np.int32]:
        """Numbers from 0 to 255."""
        size = math.prod(shape)
        return self._lanes(size, np.uint8)[:size].astype(np.int32).reshape(tuple(shape))

    def bells(self, shape: Sequence[int]) -> npt.NDArray[np.int32]:
        """Nearly normal numbers of mean 0: sums of four uniform ones, so of at most 3.5 deviations.

        Their standard deviation is `BELL_DEVIATION`.
        """
        lanes = self._lanes(math.prod(shape) * _LANES, np.uint16).reshape(-1, _LANES).astype(np.int32)
        sums: npt.NDArray[np.int32] = lanes[:, 0] + lanes[:, 1] + lanes[:, 2] + lanes[:, 3] - 2 * (2**_LANE - 1)
        return sums.reshape(tuple(shape))

    def _lanes(self, count: int, kind: npt.DTypeLike) -> npt.NDArray[np.unsignedinteger[npt.NBitBase]]:
        dtype = np.dtype(kind)
        words = self.words(-(-count * dtype.itemsize // 8)).astype("<u8")
        lanes: npt.NDArray[np.unsignedinteger[npt.NBitBase]] = words.view(dtype.newbyteorder("<"))
        return lanes


UNIT = 256
"""What one standard deviation of an octave is."""
_MOST_OCTAVES = 12


def pink(draws: Draws, shape: Sequence[int], *, axes: int, fading: int = 256) -> Units:
    """Noise of about zero mean, in units of `UNIT`, correlated along the last axes.

    Args:
        draws: Source of randomness.
        shape: Sizes.
        axes: Number of trailing axes along which it is correlated; independent along the others.
        fading: Deviation of an octave in 256ths of the next coarser one: 256 for pink noise, less for smoother.

    Returns:
        An array of the shape; the deviation of the sum is about ``UNIT`` times the root of the number of octaves where
        they do not fade.
    """
    shape = tuple(shape)
    lead, sides = shape[: len(shape) - axes], shape[len(shape) - axes :]
    octaves = min((max(*sides, 2) - 1).bit_length(), _MOST_OCTAVES) if axes else 1
    values = _grid(draws, lead, sides, octaves - 1)
    for octave in range(octaves - 2, -1, -1):
        for axis in range(len(lead), len(shape)):
            values = _doubled(values, axis, _cells(sides[axis - len(lead)], octave))
        # Interpolation takes about a third of the variance along each axis off the octave before.
        finer = _grid(draws, lead, sides, octave)
        weight = 256
        for _ in range(octaves - 1 - octave):
            weight = weight * fading >> 8
        values += finer * weight >> 8
    return values


def deviation(values: npt.NDArray[np.int32]) -> int:
    """The standard deviation of integers, rounded down and at least 1, by exact sums."""
    wide = values.astype(np.int64).reshape(-1)
    count = max(wide.size, 1)
    total, squares = int(wide.sum()), int((wide * wide).sum())
    spread: int = math.isqrt(max(count * squares - total * total, 0)) // count
    return max(spread, 1)


def _cells(side: int, octave: int) -> int:
    return -(-side // (1 << octave)) + (1 if octave else 0)


def _grid(draws: Draws, lead: tuple[int, ...], sides: tuple[int, ...], octave: int) -> Units:
    # A bell's deviation is about 148 units of 256.
    cells = tuple(_cells(side, octave) for side in sides)
    return (draws.bells((*lead, *cells)) // 148).astype(np.int32)


def _doubled(values: Units, axis: int, size: int) -> Units:
    """Values interpolated to half the distance along an axis, the first ``size`` of them."""
    moved = np.moveaxis(values, axis, 0)
    out = np.empty((2 * moved.shape[0] - 1, *moved.shape[1:]), np.int32)
    out[::2] = moved
    out[1::2] = (moved[:-1] + moved[1:]) >> 1
    return np.moveaxis(out[:size], 0, axis)


Pixels = npt.NDArray[np.uint8]
Span = tuple[int, int]

_SHAPES_PER_PICTURE = (60, 380)
_PERIODS = (2, 24)  # of stripes, in pixels
_FRAME_FILLS = (0, 114, 128, 255)
_SMALLEST = 0.7  # radius in pixels

_ONE_LINE = (2.5, 96)  # width by height from which on, and height up to which, a picture is of one line
_LEAST_MARK = 7  # pixels a mark is high
_OVER_PHOTOGRAPHS = 50  # percent
_DARK_PAPER = 15  # percent
_CONTRAST = (70, 200)  # between ink and ground, in brightness
_GRID = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class _Shapes:
    """Attributes of the shapes of a picture, index 0 being the background."""

    colour: Units  # (n, 3), 0 to 255
    shade: Units  # (n, 2): change along y and x over the picture's larger side, in brightness
    texture: Units  # (n,): deviation of fine texture, in brightness
    stripes: Units  # (n,): amplitude of stripes, in brightness
    wave: Units  # (n, 2): phase steps along y and x in 65536ths of a period


def photograph(draws: Draws, height: int, width: int) -> Pixels:
    """A picture of shape (3, height, width), red, green and blue from 0 to 255."""
    which, shapes = _scene(draws, height, width)
    side = max(height, width)
    y, x = np.arange(height, dtype=np.int32)[:, None], np.arange(width, dtype=np.int32)[None, :]
    brightness = shapes.shade[:, 0].take(which) * (2 * y - height)
    brightness += shapes.shade[:, 1].take(which) * (2 * x - width)
    brightness //= 2 * side
    brightness += shapes.texture.take(which) * pink(draws, (height, width), axes=2, fading=draws.integer(190, 290)) >> 8
    sharp = draws.chance(50)
    if shapes.stripes.any():
        phase = (shapes.wave[:, 0].take(which) * y + shapes.wave[:, 1].take(which) * x) & 0xFFFF
        triangle = np.abs(phase - 0x8000) - 0x4000  # -16384 to 16384
        if sharp:
            triangle = np.where(triangle > 0, 0x4000, -0x4000)
        brightness += shapes.stripes.take(which) * triangle >> 14
    light = _light(draws, height, width)
    image = np.empty((3, height, width), np.int32)
    for channel, colour in zip(image, shapes.colour.T, strict=True):
        np.add(colour.take(which), brightness, out=channel)
        channel *= light
        channel >>= 8
    image = _developed(draws, image)
    return np.clip(image, 0, 255).astype(np.uint8)


def _scene(draws: Draws, height: int, width: int) -> tuple[npt.NDArray[np.intp], _Shapes]:
    """Number of the shape that is seen at each pixel, and the shapes."""
    count = draws.integer(*_SHAPES_PER_PICTURE)
    side = max(height, width)
    smallest, largest = max(side / draws.integer(20, 90), _SMALLEST), side / 1.6
    u = draws.fractions((count,))
    radii = 1 / np.sqrt(u / (smallest * smallest) + (1 - u) / (largest * largest))
    # Larger ones tend to lie behind; the order is that of a depth drawn for each.
    order = np.argsort(-(radii * draws.integers(2, 8, (count,))), kind="stable")
    centres = draws.fractions((count, 2)) * (height * 1.2, width * 1.2) - (height * 0.1, width * 0.1)
    turns = draws.integers(-1000, 1000, (count, 2)).astype(np.float64)
    lengths = np.sqrt(turns[:, 0] * turns[:, 0] + turns[:, 1] * turns[:, 1])
    turns = np.where(lengths[:, None] > 0, turns / np.maximum(lengths, 1.0)[:, None], (1.0, 0.0))
    flat = draws.integers(2, 8, (count,)) / 8.0
    kinds = draws.integers(0, 2, (count,))
    which = np.zeros((height, width), np.intp)
    for number, i in enumerate(order.tolist(), 1):
        # The shape's number where it is seen: an ellipse, a rectangle or a triangle.
        radius, (cy, cx), (c, s) = float(radii[i]), centres[i], turns[i]
        reach = radius * 1.42
        top, bottom = max(int(cy - reach), 0), min(int(cy + reach) + 2, height)
        left, right = max(int(cx - reach), 0), min(int(cx + reach) + 2, width)
        if bottom <= top or right <= left:
            continue
        y, x = np.arange(top, bottom)[:, None] - cy, np.arange(left, right)[None, :] - cx
        u, v = y * c + x * s, x * c - y * s
        if kinds[i] == 0:
            v = v / flat[i]
            inside = u * u + v * v <= radius * radius
        elif kinds[i] == 1:
            inside = (np.abs(u) <= radius) & (np.abs(v) <= radius * flat[i])
        else:
            inside = (u >= -radius * 0.5) & (np.abs(v) * 1.8 <= (radius - u) * flat[i])
        which[top:bottom, left:right][inside] = number
    return which, _attributes(draws, count + 1)


def _attributes(draws: Draws, count: int) -> _Shapes:
    # The mean of two uniform numbers and an extreme now and then: brightness is spread, black and white are common.
    bright = (draws.bytes((count, 2)).sum(axis=1) * 5 >> 3) - 32
    extreme = draws.integers(0, 99, (count,))
    bright = np.where(extreme < 8, 4, np.where(extreme > 91, 250, bright))
    vivid = draws.integer(10, 60)
    tint = draws.bells((count, 3)) // 1024 * vivid // 40  # a deviation of 9 to 55
    strong = draws.integers(0, 99, (count,)) < draws.integer(0, 12)
    tint = np.where(strong[:, None], tint * 2, tint)
    tint -= tint.sum(axis=1, keepdims=True) // 4
    smooth = draws.integers(0, 99, (count,)) < 45
    texture = np.where(smooth, 1, draws.integers(2, draws.integer(4, 30), (count,)))
    striped = draws.integers(0, 99, (count,)) < draws.integer(0, 25)
    wave = np.zeros((count, 2), np.int64)
    period, share = draws.integers(*_PERIODS, (count,)), draws.integers(-256, 256, (count, 2))
    wave[:] = (65536 // period)[:, None] * share // 256
    return _Shapes(
        colour=np.clip(bright[:, None] + tint, 0, 255).astype(np.int32),
        shade=(draws.bells((count, 2)) // 800).astype(np.int32),
        texture=texture.astype(np.int32),
        stripes=np.where(striped, draws.integers(8, 110, (count,)), 0).astype(np.int32),
        wave=wave.astype(np.int32),
    )


def _light(draws: Draws, height: int, width: int) -> Units:
    """A smooth factor in 256ths."""
    strength = draws.integer(4, 28)
    field = pink(draws, (height, width), axes=2, fading=120)
    return np.clip(256 + field * strength // 128, 64, 512).astype(np.int32)


def _developed(draws: Draws, image: Units) -> Units:
    """The picture with its own exposure, contrast, saturation, blur, grain and frame."""
    _, height, width = image.shape
    size = height * width
    if draws.chance(12):
        image[:] = image.sum(axis=0) // 3
    means = image.reshape(3, -1).sum(axis=1, dtype=np.int64) // size
    middle = int(means.sum()) // 3
    contrast, target = draws.integer(90, 330), draws.integer(60, 175)
    if draws.chance(60):
        contrast = draws.integer(200, 300)
    image = ((image - middle) * contrast >> 8) + target
    image = np.clip(image, 0, 255)
    for _ in range(min(draws.integer(0, 7) - 3, math.isqrt(size) // 40)):  # half of them are sharp
        image = _blurred(image)
    if draws.chance(50):
        image = image + (draws.bells((height, width)) * draws.integer(1, 7) >> 15)
    if draws.chance(12):
        fill = _FRAME_FILLS[draws.integer(0, len(_FRAME_FILLS) - 1)]
        share, across = draws.integer(8, 40), draws.chance(50)
        edge = (width if across else height) * share // 100
        if across:
            image[:, :, width - edge :] = fill
        else:
            image[:, height - edge :, :] = fill
    return image


def _blurred(image: Units) -> Units:
    for axis in (1, 2):
        rows = image.swapaxes(1, axis)
        out = np.empty_like(rows)
        out[:, 1:-1] = rows[:, :-2] + rows[:, 2:]
        out[:, 0] = rows[:, 0] + rows[:, 1]
        out[:, -1] = rows[:, -2] + rows[:, -1]
        out += 2 * rows + 2
        out >>= 2
        image = out.swapaxes(1, axis)
    return image


# ---- writing ---------------------------------------------------------------------------------------------------------


def page(draws: Draws, height: int, width: int) -> Pixels:
    """A picture of shape (3, height, width), red, green and blue from 0 to 255."""
    if draws.chance(_OVER_PHOTOGRAPHS):
        ground = photograph(draws, height, width).astype(np.int32)
    else:
        ground = _paper(draws, height, width)
    covered = np.zeros((height, width))
    for top, size in _rows(draws, height, width):
        _write(draws, covered, top, size)
    ink: Units = np.rint(covered * 256).astype(np.int32)
    mixed = (ground * (256 - ink) + _colour(draws, ground, ink)[:, None, None] * ink) >> 8
    pixels: Pixels = np.clip(mixed, 0, 255).astype(np.uint8)
    return pixels


def is_line(height: int, width: int) -> bool:
    """Whether a picture of that size shows one line of writing, if any."""
    return width >= _ONE_LINE[0] * height and height <= _ONE_LINE[1]


def _paper(draws: Draws, height: int, width: int) -> Units:
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
    largest = max(height // draws.integer(4, 18), _LEAST_MARK)
    rows, top = [], draws.integer(0, largest)
    while top + _LEAST_MARK < height:
        size = max(largest * draws.integer(50, 100) // 100, _LEAST_MARK)
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
    at, end = draws.integer(0, width // 3), width - draws.integer(0, width // 4)
    while at + across < end:
        for _ in range(draws.integer(1, 9)):
            if at + across >= end:
                break
            low = draws.integer(0, 99) < 60  # most marks of many scripts leave the upper part free
            _mark(draws, ink, (top + (size * 3 // 10 if low else 0), top + size), (at, at + across), thick, slant)
            at += across + max(int(thick) + draws.integer(0, 2), 1)
        at += across * draws.integer(60, 130) // 100


def _mark(draws: Draws, ink: Doubles, rows: Span, columns: Span, thick: float, slant: float) -> None:
    """Draws two to four strokes into a box."""
    height, width = ink.shape
    reach = int(thick) + 2
    lean = int(slant * (rows[1] - rows[0])) + 1
    top, bottom = max(rows[0] - reach, 0), min(rows[1] + reach, height)
    left, right = max(columns[0] - reach, 0), min(columns[1] + reach + lean, width)
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


def _colour(draws: Draws, ground: Units, ink: Units) -> Units:
    """A colour that stands out from the ground below the writing."""
    weight = max(int(ink.sum(dtype=np.int64)), 1)
    below = int((ground.sum(axis=0, dtype=np.int64) * ink).sum()) // (3 * weight)
    contrast = draws.integer(*_CONTRAST)
    bright = below - contrast if below > 127 else below + contrast
    tint = draws.integers(-40, 40, (3,)) if draws.chance(40) else np.zeros(3, np.int64)
    return np.clip(bright + tint, 0, 255).astype(np.int32)
