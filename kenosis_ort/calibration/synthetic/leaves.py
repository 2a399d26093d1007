"""Made-up photographs and the noise in them.

Made-up photographs: occluding shapes of all sizes with shading, texture, light and blur, in integer arithmetic.

Natural images are made of objects that occlude each other, with sizes by an inverse cube law ("dead leaves"), and
their spectra fall like 1/f; both make them look alike at every scale. See A. B. Lee, D. Mumford and J. Huang,
"Occlusion models for natural images" (2001). Brightness varies much more than hue, as in photographs, and some pictures
are dark, flat, grey, blurred or framed, as some photographs are.

Noise whose spectrum falls with frequency, as that of most natural signals does, in integer arithmetic.

A sum of octaves: random values on grids of cells of 1, 2, 4, ... points, interpolated linearly. Octaves of equal
variance give a power of ``1 / f`` along one axis and, along two, the ``1 / f**2`` of natural images (D. J. Field,
"Relations between the statistics of natural images and the response properties of cortical cells", 1987).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.synthetic.draws import Draws

UNIT = 256
"""What one standard deviation of an octave is."""
_MOST_OCTAVES = 12


def pink(draws: Draws, shape: Sequence[int], *, axes: int, fading: int = 256) -> Integers:
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
    if 0 in shape:
        return np.zeros(shape, np.int32)
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


def _grid(draws: Draws, lead: tuple[int, ...], sides: tuple[int, ...], octave: int) -> Integers:
    # A bell's deviation is about 148 units of 256.
    cells = tuple(_cells(side, octave) for side in sides)
    return (draws.bells((*lead, *cells)) // 148).astype(np.int32)


def _doubled(values: Integers, axis: int, size: int) -> Integers:
    """Values interpolated to half the distance along an axis, the first ``size`` of them."""
    moved = np.moveaxis(values, axis, 0)
    out = np.empty((2 * moved.shape[0] - 1, *moved.shape[1:]), np.int32)
    out[::2] = moved
    out[1::2] = (moved[:-1] + moved[1:]) >> 1
    return np.moveaxis(out[:size], 0, axis)


Pixels = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int32]

_SHAPES_PER_PICTURE = (60, 380)
_PERIODS = (2, 24)  # of stripes, in pixels
_FRAME_FILLS = (0, 114, 128, 255)
_SMALLEST = 0.7  # radius in pixels


@dataclass(frozen=True)
class _Shapes:
    """Attributes of the shapes of a picture, index 0 being the background."""

    colour: Integers  # (n, 3), 0 to 255
    shade: Integers  # (n, 2): change along y and x over the picture's larger side, in brightness
    texture: Integers  # (n,): deviation of fine texture, in brightness
    stripes: Integers  # (n,): amplitude of stripes, in brightness
    wave: Integers  # (n, 2): phase steps along y and x in 65536ths of a period


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
    """Which shape is seen at each pixel, and the shapes."""
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
        _paint(which, number, centres[i].tolist(), float(radii[i]), turns[i].tolist(), float(flat[i]), int(kinds[i]))
    return which, _attributes(draws, count + 1)


def _paint(
    which: npt.NDArray[np.intp],
    number: int,
    centre: list[float],
    radius: float,
    turn: list[float],
    flat: float,
    kind: int,
) -> None:
    """Puts a shape's number where it is seen: an ellipse, a rectangle or a triangle."""
    height, width = which.shape
    (cy, cx), (c, s) = centre, turn
    reach = radius * 1.42
    top, bottom = max(int(cy - reach), 0), min(int(cy + reach) + 2, height)
    left, right = max(int(cx - reach), 0), min(int(cx + reach) + 2, width)
    if bottom <= top or right <= left:
        return
    y, x = np.arange(top, bottom)[:, None] - cy, np.arange(left, right)[None, :] - cx
    u, v = y * c + x * s, x * c - y * s
    if kind == 0:
        v = v / flat
        inside = u * u + v * v <= radius * radius
    elif kind == 1:
        inside = (np.abs(u) <= radius) & (np.abs(v) <= radius * flat)
    else:
        inside = (u >= -radius * 0.5) & (np.abs(v) * 1.8 <= (radius - u) * flat)
    which[top:bottom, left:right][inside] = number


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
    period = draws.integers(*_PERIODS, (count,))
    share = draws.integers(-256, 256, (count, 2))
    wave[:] = (65536 // period)[:, None] * share // 256
    return _Shapes(
        colour=np.clip(bright[:, None] + tint, 0, 255).astype(np.int32),
        shade=(draws.bells((count, 2)) // 800).astype(np.int32),
        texture=texture.astype(np.int32),
        stripes=np.where(striped, draws.integers(8, 110, (count,)), 0).astype(np.int32),
        wave=wave.astype(np.int32),
    )


def _light(draws: Draws, height: int, width: int) -> Integers:
    """A smooth factor in 256ths."""
    strength = draws.integer(4, 28)
    field = pink(draws, (height, width), axes=2, fading=120)
    return np.clip(256 + field * strength // 128, 64, 512).astype(np.int32)


def _developed(draws: Draws, image: Integers) -> Integers:
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
        share = draws.integer(8, 40)
        across = draws.chance(50)
        edge = (width if across else height) * share // 100
        if across:
            image[:, :, width - edge :] = fill
        else:
            image[:, height - edge :, :] = fill
    return image


def _blurred(image: Integers) -> Integers:
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
