"""Inputs of a few numbers that follow from the others: sizes, scales, lengths, rates, switches, initial states."""

from __future__ import annotations

import numpy as np

from kenosis_ort.calibration.provenance import Known
from kenosis_ort.calibration.synthetic.kinds import InputInfo
from kenosis_ort.calibration.synthetic.maker import Array, FixedMaker, Maker, Sample
from kenosis_ort.calibration.synthetic.series import SAMPLE_RATE


class ImageSizeMaker(FixedMaker):
    """Height and width of the image, as detectors of PaddlePaddle take them.

    Args:
        info: The input.
        shape: Its shape.
        size: Height and width in pixels.
    """

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, size: tuple[int, int]) -> None:
        super().__init__(info, shape)
        self._size = size

    @property
    def says(self) -> str:
        return f"the image's height and width, {self._size[0]} x {self._size[1]}"

    @property
    def constant(self) -> Array:
        return np.resize(self._size, self.shape)


class ScaleMaker(Maker):
    """Ratio of the resized to the original image: 1 in the first sample, then 0.4 to 1.6."""

    @property
    def says(self) -> str:
        return "scale factors from 0.4 to 1.6"

    def values(self, sample: Sample) -> Array:
        return np.full(self.shape, 1.0 if sample.index == 0 else sample.draws(self.info.name).integer(40, 160) / 100)


class LengthMaker(Maker):
    """Numbers of steps of the other inputs.

    Args:
        info: The input.
        shape: Its shape.
        most: Largest number of steps.
        padded: Whether shorter ones occur.
    """

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, most: int, padded: bool) -> None:
        super().__init__(info, shape)
        self._most, self._padded = most, padded

    @property
    def says(self) -> str:
        return f"lengths up to {self._most}"

    def values(self, sample: Sample) -> Array:
        count = max(int(np.prod(self.shape)), 1)
        lengths = sample.sentence_lengths(count, self._most) if self._padded else [self._most] * count
        return np.array(lengths).reshape(self.shape)


class RateMaker(FixedMaker):
    """The sample rate of audio."""

    known = Known.CONVENTION

    @property
    def says(self) -> str:
        return f"a sample rate of {SAMPLE_RATE} Hz"

    @property
    def constant(self) -> Array:
        return np.full(self.shape, SAMPLE_RATE)


class BooleanMaker(Maker):
    """True and False in turn, so that both branches are seen."""

    @property
    def says(self) -> str:
        return "true and false in turn"

    def values(self, sample: Sample) -> Array:
        return np.full(self.shape, sample.index % 2 == 0)


class StateMaker(FixedMaker):
    """Initial states: zero. Later ones come from the model's own outputs, see `feedback`."""

    fed_back = False
    """Whether an output of the model takes its place after the first step."""

    @property
    def known(self) -> Known:  # type: ignore[override]
        """A zero state tells nothing about the ranges of a recurrent net."""
        return Known.GRAPH if self.fed_back else Known.GUESS

    @property
    def says(self) -> str:
        return "states, zero at first and then the model's own" if self.fed_back else "states, all zero"

    @property
    def constant(self) -> Array:
        return np.zeros(self.shape)
