"""Constants that an 8-bit grid holds exactly."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_LEVELS = 255
_TOLERANCE = 1e-6  # of the largest value: what float32 leaves of a quotient such as 25 / 9


class ExactGrid(NamedTuple):
    """Values as multiples of one step.

    Attributes:
        step: The step, positive.
        low: The least multiple among the values and 0.
        multiples: Which multiple each value is, of the shape of the values.
    """

    step: float
    low: int
    multiples: npt.NDArray[np.int64]


def exact_grid(values: npt.NDArray[np.generic]) -> ExactGrid | None:
    """Returns the coarsest grid of at most 256 steps, 0 among them, that holds all values; None if there is none.

    Args:
        values: Finite numbers of any shape.
    """
    numbers = np.asarray(values, np.float64)
    distinct = np.unique(numbers)
    if not distinct.size or not np.isfinite(distinct).all():
        return None
    largest = float(np.abs(distinct).max())
    if largest == 0.0:
        return ExactGrid(1.0, 0, np.zeros(numbers.shape, np.int64))
    if distinct.size > _LEVELS + 1:
        return None
    for count in range(1, _LEVELS + 1):
        scaled = distinct * (count / largest)
        whole = np.rint(scaled)
        if max(whole[-1], 0.0) - min(whole[0], 0.0) > _LEVELS:
            return None
        if np.abs(scaled - whole).max() <= _TOLERANCE * count:
            return ExactGrid(
                largest / count, int(min(whole[0], 0.0)), np.rint(numbers * (count / largest)).astype(np.int64)
            )
    return None
