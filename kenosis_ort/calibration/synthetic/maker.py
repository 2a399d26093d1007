"""The base class of what makes up the values of one input."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.provenance import Known
from kenosis_ort.calibration.synthetic.draws import Draws
from kenosis_ort.calibration.synthetic.kinds import InputInfo

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SyntheticSample:
    """One feed to be made up: everything random in it depends on nothing else.

    Attributes:
        seed: Of the reader.
        index: Of the feed; for recurrent nets of the sequence.
        step: Of a sequence.
        steps: Number of steps of a sequence, 1 where nothing is recurrent.
    """

    seed: int
    index: int
    step: int = 0
    steps: int = 1

    def draws(self, *key: int | str) -> Draws:
        """Random numbers that depend on the sample's index and a key, not on its step."""
        return Draws(self.seed, self.index, *key)

    def sentence_lengths(self, count: int, most: int) -> list[int]:
        """The lengths of so many sentences, the same for tokens, masks and whatever else belongs to them.

        A quarter of the samples are of full length, so that every position is seen.
        """
        draws = Draws(self.seed, self.index, self.step, "lengths")
        if self.index % 4 == 0:
            return [most] * count
        return [draws.integer(max(most // 4, 1), most) for _ in range(count)]


class Maker(abc.ABC):
    """Makes up the values of one input.

    Args:
        info: The input.
        shape: Its shape.
    """

    known = Known.GRAPH
    """How well the scale of the values is known."""

    natural = True
    """Whether the values are like those in nature, or leave nothing open; not so for random tokens and features."""

    def __init__(self, info: InputInfo, shape: tuple[int, ...]) -> None:
        self.info = info
        self.shape = shape

    @property
    @abc.abstractmethod
    def says(self) -> str:
        """What is made up, for people."""

    @abc.abstractmethod
    def values(self, sample: SyntheticSample) -> Array:
        """Values that broadcast to the shape, of any type of numbers."""

    def make(self, sample: SyntheticSample) -> Array:
        """The array of one sample, of the input's shape and type."""
        values = self.values(sample)
        dtype = self.info.dtype
        if np.issubdtype(dtype, np.integer) and not np.issubdtype(values.dtype, np.integer):
            limits = np.iinfo(dtype)
            values = np.clip(np.rint(values), limits.min, limits.max)
        return np.array(np.broadcast_to(values, self.shape), dtype, order="C")


class FixedMaker(Maker):
    """Makes up the same values for every sample."""

    @property
    @abc.abstractmethod
    def constant(self) -> Array:
        """The values, which broadcast to the shape."""

    def values(self, sample: SyntheticSample) -> Array:  # noqa: ARG002
        return self.constant


class RangeMaker(Maker):
    """Numbers spread evenly over a range that the caller gave.

    Args:
        info: The input.
        shape: Its shape.
        low: Smallest value.
        high: Largest value.
    """

    known = Known.GIVEN
    natural = False

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, low: float, high: float) -> None:
        super().__init__(info, shape)
        self._low, self._high = low, high

    @property
    def says(self) -> str:
        return f"numbers from {self._low:g} to {self._high:g}"

    def values(self, sample: SyntheticSample) -> Array:
        draws = sample.draws(self.info.name, sample.step)
        if np.issubdtype(self.info.dtype, np.floating):
            return self._low + draws.fractions(self.shape) * (self._high - self._low)
        return draws.integers(int(self._low), int(self._high), self.shape)
