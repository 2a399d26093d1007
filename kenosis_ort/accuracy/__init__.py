"""Measures of what outputs are for, comparison of outputs and layers of two models, and the caller's metric.

Arrays of outputs, and arithmetic on them that stays in this thread and loads nothing.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Outputs = Mapping[str, Array]


def product(x: Array, y: Array) -> float:
    """The product of two vectors, in this thread: `x @ y` wakes others, which takes longer."""
    return float(np.einsum("i,i->", x, y))


def as_rows(array: Array, axis: int) -> Float64:
    """An array as (rows, columns), with the columns along an axis."""
    moved = np.moveaxis(array, axis, -1)
    return np.asarray(moved, np.float64).reshape(math.prod(moved.shape[:-1]), moved.shape[-1])


def quantile(rows: Float64, share: float) -> Any:
    """The quantile of rows at a share (0 to 1), as `np.quantile` along the first axis, which loads numpy.ma."""
    place, between = divmod(share * (len(rows) - 1), 1.0)
    ends = [int(place), min(int(place) + 1, len(rows) - 1)]
    low, high = np.partition(rows, ends, axis=0)[ends]
    return low + (high - low) * between if between < 0.5 else high - (high - low) * (1 - between)
