"""A layer of integer weights with what is multiplied and added to its outputs: the arithmetic of `runtime_form`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Double = npt.NDArray[np.float64]

LARGEST_SUM: Final = 2**31 - 1
"""What an int32 sum of products holds."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer with quantized weights, and what is multiplied and added to its outputs.

    Attributes:
        integers: The weights as they are stored.
        axis: Their output channels' axis.
        centred: Integers less the zero point, shape (channels, others).
        zero: Zero point by channel.
        scale: Scale by channel.
        factor: What the outputs are multiplied by, by channel.
        bias: What is then added to them.
        data_scale: Scale of the data, None where they are not quantized by one.
        data_reach: Largest distance of the data's integers from their zero point.
    """

    integers: npt.NDArray[Any]
    axis: int
    centred: npt.NDArray[np.int64]
    zero: npt.NDArray[np.int64]
    scale: Double
    factor: Double
    bias: Double
    data_scale: float | None
    data_reach: int

    @property
    def channels(self) -> int:
        """Number of output channels."""
        return len(self.scale)

    def folded(self) -> Layer | None:
        """Returns the layer with its factors in scales and integers; None where they do not fit there."""
        flipped = self.centred * np.where(self.factor < 0, -1, 1)[:, None] * (self.factor != 0)[:, None]
        limits = np.iinfo(self.integers.dtype)
        stored = flipped + self.zero[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            scale = (self.scale * np.abs(self.factor)).astype(np.float32)
        empty = ~flipped.any(axis=1)
        usable = np.isfinite(scale) & (scale > 0)
        if (stored < limits.min).any() or (stored > limits.max).any() or not (usable | empty).all():
            return None
        if not np.isfinite(self.bias.astype(np.float32)).all():
            return None
        if empty.any():
            scale = np.where(empty, scale[~empty].max() if not empty.all() else np.float32(1), scale)
        ones = np.ones(len(scale))
        return replace(self, centred=flipped, scale=scale.astype(np.float64), factor=ones)

    def headroom(self, reach: npt.NDArray[np.int64], largest_pair: int | None) -> int:
        """Returns the largest power of two by which the integers may be multiplied.

        Args:
            reach: Largest sum of products by channel.
            largest_pair: What the sum of two products may be, see `kenosis_ort.targets.model.DataTypes`.
        """
        largest = int(np.abs(self.centred).max(initial=0))
        if not largest or self.zero.any() or self.integers.dtype != np.int8:
            return 1
        factor, most = 1, LARGEST_SUM if largest_pair is None else largest_pair
        while (
            2 * factor * largest <= 127
            and 2 * (2 * factor * largest) * (self.data_reach + 128) <= most
            and 2 * factor * int(reach.max(initial=0)) < LARGEST_SUM // 2
        ):
            factor *= 2
        return factor
