"""Random numbers that are the same on every platform and with every release of numpy.

Only the bit stream of PCG64 and the seed sequence are used, which numpy promises to keep; everything made from it is
integer arithmetic or a single correctly rounded operation of IEEE 754 (+, -, *, /, sqrt), never a function of the
platform's mathematical library or a sum whose order depends on the processor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
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
