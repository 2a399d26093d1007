"""Random numbers and noise that are the same on every platform and with every release of numpy.

Only the bit stream of PCG64 and the seed sequence are used, which numpy promises to keep; everything made from it is
integer arithmetic or a single correctly rounded operation of IEEE 754 (+, -, *, /, sqrt), never a function of the
platform's mathematical library or a sum whose order depends on the processor.

Noise whose spectrum falls with frequency, as that of most natural signals does, is a sum of octaves: random values on
grids of cells of 1, 2, 4, ... points, interpolated linearly. Octaves of equal variance give a power of ``1 / f`` along
one axis and, along two, the ``1 / f**2`` of natural images (D. J. Field, "Relations between the statistics of natural
images and the response properties of cortical cells", 1987).
"""

import math
import zlib
from collections.abc import Sequence

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
