"""Which maker makes up which input.

Inputs of a few numbers that follow from the others: sizes, scales, lengths, rates, switches, initial states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import onnx
from onnx import TensorProto

from kenosis_ort.calibration.part_session import SessionSettings
from kenosis_ort.calibration.synthetic import maker
from kenosis_ort.calibration.synthetic.draws import Draws
from kenosis_ort.calibration.synthetic.kinds import InputInfo, InputKind
from kenosis_ort.calibration.synthetic.maker import (
    SAMPLE_RATE,
    Array,
    FixedMaker,
    Maker,
    MaskMaker,
    PositionMaker,
    RangeMaker,
    SegmentMaker,
    SyntheticSample,
    TokenMaker,
)
from kenosis_ort.calibration.synthetic.pictures import ImageMaker, Preprocessing
from kenosis_ort.calibration.synthetic.pixels import choose_ways, given_way
from kenosis_ort.calibration.synthetic.real import Feeds, loudest_of, moments_of, pixels_of
from kenosis_ort.calibration.synthetic.stem import MOST_GROUPS, Stem, ValueMoments, fit_moments
from kenosis_ort.calibration.table_format import Known
from kenosis_ort.errors import CalibrationError


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

    def values(self, sample: SyntheticSample) -> Array:
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

    def values(self, sample: SyntheticSample) -> Array:
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

    def values(self, sample: SyntheticSample) -> Array:
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


_PLAIN = SessionSettings()
_IMAGE_SIZE = (224, 224)
_PCM = 32767.0
_RANGE_DEVIATIONS = 6.0  # standard deviations that a given range of features holds
_FITS = 0.5  # misfit from which on fitted features are no better than a guess

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Wishes:
    """What the caller says about the values.

    Attributes:
        ranges: Lowest and highest value by input name.
        pixels: Preprocessing of images that have no range of their own; None if nothing was said.
    """

    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    pixels: Preprocessing | None = None

    @classmethod
    def parse(
        cls,
        ranges: Mapping[str, tuple[float, float]] | None,
        range_: tuple[float, float] | None,
        mean: float | Sequence[float] | None,
        std: float | Sequence[float] | None,
    ) -> Wishes:
        """Checks and gathers the caller's arguments.

        Raises:
            CalibrationError: A range is empty or infinite, mean or deviation of the wrong size, or a deviation is 0.
        """
        checked = {name: _range(name, value) for name, value in (ranges or {}).items()}
        pixels = None
        if range_ is not None or mean is not None or std is not None:
            wanted = None if range_ is None else _range("input_range", range_)
            pixels = given_way(wanted, _channels("mean", mean), _channels("std", std))
            if 0.0 in pixels.std:
                raise CalibrationError("std must not be 0.", fix="Give the deviation that pixels are divided by.")
        return cls(checked, pixels)

    def check(self, infos: Sequence[InputInfo]) -> None:
        """Refuses inputs of no known kind, and preprocessing without an image.

        Raises:
            CalibrationError: Such an input, by name.
        """
        for info in infos:
            no_numbers = info.element_type in (0, TensorProto.STRING)
            if info.kind is None and (no_numbers or info.name not in self.ranges):
                raise _unknown(info, possible=not no_numbers)
        if self.pixels is not None and not any(i.kind is InputKind.IMAGE for i in infos):
            raise CalibrationError(
                "input_range, mean and std are for images, and the model takes none.",
                fix="Give input_ranges={name: (low, high)} instead, or kinds={name: 'image'}.",
            )


def make_makers(
    proto: onnx.ModelProto,
    infos: Sequence[InputInfo],
    shapes: Shapes,
    wishes: Wishes,
    *,
    links: Mapping[str, str],
    real: Feeds = (),
    settings: SessionSettings = _PLAIN,
) -> dict[str, Maker]:
    """A maker for each input, by name.

    Args:
        proto: The model.
        infos: Its inputs.
        shapes: Their shapes.
        wishes: What the caller says.
        links: Outputs that take the place of states, by name of the input.
        real: Real samples, whose scale is taken over.
        settings: How to run the model.
    """
    padded = any(i.kind in (InputKind.MASK, InputKind.LENGTH) for i in infos)
    past = max((_past_steps(i, shapes[i.name]) for i in infos if i.kind is InputKind.PAST), default=0)
    out: dict[str, Maker] = {}
    for info in infos:
        shape = shapes[info.name]
        if info.kind is InputKind.IMAGE:
            out[info.name] = _image(proto, info, shape, wishes, real, settings)
        elif info.kind is InputKind.AUDIO:
            out[info.name] = _audio(info, shape, wishes.ranges.get(info.name), real)
        elif info.kind in (InputKind.SERIES, InputKind.FEATURES):
            out[info.name] = _field(proto, info, shape, wishes.ranges.get(info.name), real)
        elif info.name in wishes.ranges:
            low, high = wishes.ranges[info.name]
            out[info.name] = RangeMaker(info, shape, low=low, high=high)
        elif info.kind is InputKind.TOKENS:
            out[info.name] = TokenMaker(info, shape, padded=padded and not past)
        elif info.kind is InputKind.MASK:
            out[info.name] = MaskMaker(info, shape, padded=not past)
        elif info.kind is InputKind.POSITIONS:
            out[info.name] = PositionMaker(info, shape, start=past)
        elif info.kind is InputKind.LENGTH:
            out[info.name] = LengthMaker(info, shape, most=_longest(info, infos, shapes), padded=True)
        elif info.kind is InputKind.IMAGE_SIZE:
            out[info.name] = ImageSizeMaker(info, shape, size=_image_size(out))
        elif info.kind in (InputKind.STATE, InputKind.PAST):
            maker = StateMaker(info, shape)
            maker.fed_back = info.name in links
            out[info.name] = maker
        else:
            simple: dict[InputKind, type[ScaleMaker | SegmentMaker | RateMaker | BooleanMaker]] = {
                InputKind.SEGMENTS: SegmentMaker,
                InputKind.SCALE: ScaleMaker,
                InputKind.SAMPLE_RATE: RateMaker,
            }
            out[info.name] = simple.get(info.kind or InputKind.BOOLEAN, BooleanMaker)(info, shape)
    return out


def _image(
    proto: onnx.ModelProto,
    info: InputInfo,
    shape: tuple[int, ...],
    wishes: Wishes,
    real: Feeds,
    settings: SessionSettings,
) -> Maker:
    given = wishes.pixels
    if info.name in wishes.ranges:
        given = Preprocessing(*wishes.ranges[info.name], name="as given")
    if given is not None:
        return ImageMaker(info, shape, ways=[given], known=Known.GIVEN)
    if real:
        return ImageMaker(info, shape, ways=[pixels_of(real, info)], known=Known.REAL)
    plain = ImageMaker(info, shape, ways=[Preprocessing()], known=Known.GUESS)
    pictures = lru_cache(maxsize=None)(lambda index: plain.pictures(SyntheticSample(0, index)))
    choice = choose_ways(
        proto, info, lambda way, index: plain.brought(pictures(index), way).astype(info.dtype), settings
    )
    return ImageMaker(info, shape, ways=choice.ways, known=choice.known)


def _audio(info: InputInfo, shape: tuple[int, ...], given: tuple[float, float] | None, real: Feeds) -> Maker:
    if given is not None:
        return maker.AudioMaker(info, shape, low=given[0], high=given[1], known=Known.GIVEN)
    if real:
        top = loudest_of(real, info.name)
        return maker.AudioMaker(info, shape, low=-top, high=top, known=Known.REAL)
    if info.element_type == TensorProto.INT16:
        return maker.AudioMaker(info, shape, low=-_PCM, high=_PCM, known=Known.GRAPH)
    return maker.AudioMaker(info, shape, low=-1.0, high=1.0, known=Known.CONVENTION)


def _field(
    proto: onnx.ModelProto, info: InputInfo, shape: tuple[int, ...], given: tuple[float, float] | None, real: Feeds
) -> Maker:
    if given is not None:
        middle, width = np.asarray(given).mean(), (given[1] - given[0]) / _RANGE_DEVIATIONS
        return maker.FieldMaker(
            info, shape, mean=np.asarray(middle), spread=np.asarray(width), known=Known.GIVEN, limits=given
        )
    if real and len(shape) > 1:
        mean, spread = moments_of(real, info.name, _group_axis(info, shape))
        return maker.FieldMaker(info, shape, mean=mean, spread=spread, known=Known.REAL)
    stem = Stem(proto, info.name)
    found: ValueMoments | None = None
    if stem.point is not None and stem.point.mean is not None and len(shape) > 1:

        def noise(index: int) -> Array:
            return maker.field(Draws(0, index, "fit"), shape)

        found = fit_moments(stem, shape, _group_axis(info, shape), noise, info.dtype)
    if found is None:
        return maker.FieldMaker(info, shape, mean=np.zeros(()), spread=np.ones(()), known=Known.GUESS)
    known = Known.STATISTICS if found.misfit <= _FITS else Known.GUESS
    return maker.FieldMaker(info, shape, mean=found.mean, spread=found.spread, known=known)


def _group_axis(info: InputInfo, shape: tuple[int, ...]) -> int:
    """The axis of the features: fixed, the shortest, and not that of time or the batch."""
    fixed = [axis for axis, dim in enumerate(info.shape) if axis and isinstance(dim, int) and 1 < dim <= MOST_GROUPS]
    axes = fixed or [axis for axis in range(1, len(shape)) if shape[axis] > 1] or [len(shape) - 1]
    return min(axes, key=lambda axis: shape[axis])


def _past_steps(info: InputInfo, shape: tuple[int, ...]) -> int:
    """The number of steps that past keys and values hold: the size of the dynamic axis behind the batch."""
    free = [size for dim, size in zip(info.shape[1:], shape[1:], strict=True) if not isinstance(dim, int)]
    return free[0] if free else (shape[-2] if len(shape) > 1 else 0)


def _longest(info: InputInfo, infos: Sequence[InputInfo], shapes: Shapes) -> int:
    """The number of steps of the input that a length belongs to."""
    timed = [i for i in infos if i.name != info.name and len(shapes[i.name]) > 1 and i.kind is not InputKind.STATE]
    axes = {i.name: next((a for a, d in enumerate(i.shape) if a and not isinstance(d, int)), 1) for i in timed}
    return max((shapes[i.name][axes[i.name]] for i in timed), default=1)


def _image_size(makers: Mapping[str, Maker]) -> tuple[int, int]:
    images = [maker.size for maker in makers.values() if isinstance(maker, ImageMaker)]
    return images[0] if images else _IMAGE_SIZE


def _range(name: str, value: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = (float(end) for end in value)
    except (TypeError, ValueError) as error:
        raise CalibrationError(f"The range {value!r} is no pair of numbers.", where=name) from error
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise CalibrationError(f"The range ({low}, {high}) is not finite or upside down.", where=name)
    return low, high


def _channels(name: str, value: float | Sequence[float] | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    numbers = tuple(float(v) for v in np.asarray(value, np.float64).reshape(-1))
    if len(numbers) not in (1, 3, 4) or not np.isfinite(numbers).all():
        raise CalibrationError(f"{name}={value!r} must be one number, or one a channel.")
    return numbers


def _unknown(info: InputInfo, *, possible: bool) -> CalibrationError:
    because = f": {info.reason}" if info.reason else ""
    fix = "Give a reader of real data, such as ArrayReader."
    if possible:
        kinds = ", ".join(kind.value for kind in InputKind)
        fix = (
            f"Give SyntheticReader(kinds={{'{info.name}': kind}}), the kind one of {kinds}; or "
            f"input_ranges={{'{info.name}': (low, high)}}; or a reader of real data."
        )
    return CalibrationError(
        f"What the input '{info.name}' ({info.describe()}) is for cannot be told{because}, so no data can be made up.",
        where=f"input '{info.name}'",
        fix=fix,
    )
