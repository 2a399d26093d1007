"""Noise whose spectrum falls with frequency, as that of most natural signals does, in integer arithmetic.

A sum of octaves: random values on grids of cells of 1, 2, 4, ... points, interpolated linearly. Octaves of equal
variance give a power of ``1 / f`` along one axis and, along two, the ``1 / f**2`` of natural images (D. J. Field,
"Relations between the statistics of natural images and the response properties of cortical cells", 1987).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.synthetic.draws import Draws

Integers = npt.NDArray[np.int32]

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
