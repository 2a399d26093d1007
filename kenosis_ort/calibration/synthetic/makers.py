"""Makers of inputs by kind, as a table: tokens and what goes with them, sound, features, images, numbers that follow.

Inputs of a few numbers follow from the others: sizes, scales, lengths, rates, switches, initial states.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from kenosis_ort.calibration.feeds import Array, Known
from kenosis_ort.calibration.part_session import SessionSettings
from kenosis_ort.calibration.synthetic.drawing import BELL_DEVIATION, Doubles, Draws, deviation, pink
from kenosis_ort.calibration.synthetic.kinds import InputInfo, InputKind, Maker, SyntheticSample
from kenosis_ort.calibration.synthetic.pixels import ImageMaker, Preprocessing, image_maker
from kenosis_ort.calibration.synthetic.stem import MOST_GROUPS, Stem, fit_moments

Range = tuple[float, float]
Shape = tuple[int, ...]
Values = Callable[[SyntheticSample], Array]

SAMPLE_RATE: Final = 16_000
_UNKNOWN_ROWS: Final = 1000
_ZIPF_PERCENT: Final = 75
_HIDDEN: Final = -10_000.0  # what additive masks add where nothing may be seen; finite in float16
_IMAGE_SIZE: Final = (224, 224)
_PCM: Final = 32767.0
_RANGE_DEVIATIONS: Final = 6.0  # standard deviations that a given range of features holds
_FITS: Final = 0.5  # misfit from which on fitted features are no better than a guess
_LEAST_SPREAD: Final = 1e-6

# Numbers of rows that only vocabularies of one family have: first token, last token, padding.
_BERT, _ROBERTA = (101, 102, 0), (0, 2, 1)
_FAMILIES = {
    **dict.fromkeys((30522, 28996, 119547, 105879, 21128, 30524, 31102), _BERT),
    **dict.fromkeys((50265, 250002, 32005, 64001, 52000), _ROBERTA),
}


@dataclass(frozen=True)
class Surroundings:
    """A model's inputs together, and what is known about them.

    Attributes:
        proto: The model.
        infos: Its inputs.
        shapes: Their shapes.
        ranges: Lowest and highest value by input name, from the caller.
        pixels: Preprocessing of images that have no range of their own; None if nothing was said.
        links: Outputs that take the place of states, by name of the input.
        real: Real samples, whose scale is taken over.
        settings: How to run the model.
    """

    proto: onnx.ModelProto
    infos: Sequence[InputInfo]
    shapes: Mapping[str, Shape]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    pixels: Preprocessing | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    real: Sequence[Mapping[str, Array]] = ()
    settings: SessionSettings = field(default_factory=SessionSettings)

    @property
    def past(self) -> int:
        """The number of steps that past keys and values hold: the size of the dynamic axis behind the batch."""
        found = [0]
        for info in self.infos:
            if info.kind is InputKind.PAST:
                shape = self.shapes[info.name]
                free = [size for dim, size in zip(info.shape[1:], shape[1:], strict=True) if not isinstance(dim, int)]
                found.append(free[0] if free else (shape[-2] if len(shape) > 1 else 0))
        return max(found)

    @property
    def padded(self) -> bool:
        """Whether sentences are of mixed lengths: a mask or lengths say where each ends."""
        return not self.past and any(i.kind in (InputKind.MASK, InputKind.LENGTH) for i in self.infos)

    def longest(self, name: str) -> int:
        """The number of steps of the input that a length belongs to."""
        timed = [i for i in self.infos if i.name != name and len(self.shapes[i.name]) > 1]
        timed = [i for i in timed if i.kind is not InputKind.STATE]
        axes = {i.name: next((a for a, d in enumerate(i.shape) if a and not isinstance(d, int)), 1) for i in timed}
        return max((self.shapes[i.name][axes[i.name]] for i in timed), default=1)


def make_makers(around: Surroundings) -> dict[str, Maker]:
    """A maker for each input, by name."""
    return {info.name: _maker(info, around.shapes[info.name], around) for info in around.infos}


def _maker(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:
    if info.name in around.ranges and info.kind not in _OF_A_RANGE:
        return _numbers(info, shape, *around.ranges[info.name])
    return _MAKERS[info.kind or InputKind.BOOLEAN](info, shape, around)


def _numbers(info: InputInfo, shape: Shape, low: float, high: float) -> Maker:
    """Numbers spread evenly over a range that the caller gave."""

    def values(sample: SyntheticSample) -> Array:
        draws = sample.draws(info.name, sample.step)
        if np.issubdtype(info.dtype, np.floating):
            return low + draws.fractions(shape) * (high - low)
        return draws.integers(int(low), int(high), shape)

    return Maker(info, shape, values, f"numbers from {low:g} to {high:g}", known=Known.GIVEN, natural=False)


# ---- tokens and what goes with them ----------------------------------------------------------------------------------


def _tokens(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:
    """Token ids within the table: words of Zipf-like frequency between special tokens, padded to mixed lengths.

    Frequent words have small ids in most vocabularies; a quarter of the ids are spread evenly, so that rare rows are
    seen too.
    """
    rows, padded = info.rows or _UNKNOWN_ROWS, around.padded
    steps, sentences = shape[-1] if shape else 1, math.prod(shape[:-1])
    first, last, padding = _FAMILIES.get(rows, (None, None, 0))

    def values(sample: SyntheticSample) -> Array:
        draws = sample.draws(info.name, sample.step)
        # Uniform within an octave drawn evenly: the probability of a rank falls like its inverse.
        octaves = draws.integers(0, (rows - 1).bit_length(), (sentences, steps))
        within = draws.fractions((sentences, steps))
        zipf = np.floor((1 + within) * (1 << octaves)).astype(np.int64) - 1
        even = draws.integers(0, rows - 1, (sentences, steps))
        ids = np.where(draws.integers(0, 99, even.shape) < _ZIPF_PERCENT, zipf % rows, even)
        lengths = sample.sentence_lengths(sentences, steps) if padded else [steps] * sentences
        for row, length in zip(ids, lengths, strict=True):
            if first is not None and last is not None and length > 2:
                row[0], row[length - 1] = first, last
            row[length:] = padding
        return ids.reshape(shape)

    known = Known.GRAPH if info.rows else Known.CONVENTION
    says = f"tokens, ids below {rows}" + (", padded to mixed lengths" if padded else "")
    return Maker(info, shape, values, says, known=known, natural=False)


def _mask(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:
    """Masks of the sentences' lengths: one for words and zero for padding, or what hides padding when added."""
    padded = around.padded

    def values(sample: SyntheticSample) -> Array:
        steps, sentences = shape[-1] if shape else 1, shape[0] if len(shape) > 1 else 1
        lengths = sample.sentence_lengths(sentences, steps) if padded else [steps] * sentences
        seen = np.arange(steps)[None, :] < np.array(lengths)[:, None]
        outline = (sentences, *[1] * (len(shape) - 2), steps)
        shown = seen.reshape(outline[len(outline) - len(shape) :])
        return np.where(shown, 0.0, _HIDDEN) if info.additive else shown.astype(np.int64)

    kind = "a mask that is added" if info.additive else "a mask"
    return Maker(info, shape, values, f"{kind}, {'padding of mixed lengths' if padded else 'nothing hidden'}")


def _segments(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:  # noqa: ARG001
    """Segment ids: in every second sample the latter half of a sentence belongs to segment 1."""

    def values(sample: SyntheticSample) -> Array:
        steps, sentences = shape[-1] if shape else 1, shape[0] if len(shape) > 1 else 1
        segments = np.zeros((sentences, steps), np.int64)
        if sample.index % 2 and info.rows != 1:
            for row, length in zip(segments, sample.sentence_lengths(sentences, steps), strict=True):
                row[length // 2 : length] = 1
        return segments.reshape(shape) if segments.size == np.prod(shape) else segments[0, 0]

    return Maker(info, shape, values, "segments 0 and 1")


def _positions(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:
    """Positions that count up, from the number of steps that past keys and values hold."""
    start, steps = around.past, shape[-1] if shape else 1
    positions: Array = (start + np.arange(steps)) % (info.rows or start + steps)
    return _fixed(info, shape, positions if shape else positions[0], f"positions from {start}")


def _lengths(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:
    """Numbers of steps of the other inputs."""
    most = around.longest(info.name)

    def values(sample: SyntheticSample) -> Array:
        return np.array(sample.sentence_lengths(max(math.prod(shape), 1), most)).reshape(shape)

    return Maker(info, shape, values, f"lengths up to {most}")


# ---- a few numbers that follow from the others -----------------------------------------------------------------------


def _fixed(info: InputInfo, shape: Shape, constant: Array, says: str, known: Known = Known.GRAPH) -> Maker:
    """The same values for every sample."""
    return Maker(info, shape, lambda _: constant, says, known=known)


def _image_size(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:
    """Height and width of the first image, as detectors of PaddlePaddle take them."""
    images = (i for i in around.infos if i.kind is InputKind.IMAGE)
    height, width = next((i.sides(around.shapes[i.name]) for i in images), _IMAGE_SIZE)
    return _fixed(info, shape, np.resize((height, width), shape), f"the image's height and width, {height} x {width}")


def _scale(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:  # noqa: ARG001
    """Ratio of the resized to the original image: 1 in the first sample, then 0.4 to 1.6."""

    def values(sample: SyntheticSample) -> Array:
        return np.full(shape, 1.0 if sample.index == 0 else sample.draws(info.name).integer(40, 160) / 100)

    return Maker(info, shape, values, "scale factors from 0.4 to 1.6")


def _rate(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:  # noqa: ARG001
    says = f"a sample rate of {SAMPLE_RATE} Hz"
    return _fixed(info, shape, np.full(shape, SAMPLE_RATE), says, Known.CONVENTION)


def _boolean(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:  # noqa: ARG001
    """True and False in turn, so that both branches are seen."""
    return Maker(info, shape, lambda sample: np.full(shape, sample.index % 2 == 0), "true and false in turn")


def _state(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:
    """Initial states: zero, which tells nothing about a recurrent net's ranges unless an output takes its place."""
    fed_back = info.name in around.links
    says = "states, zero at first and then the model's own" if fed_back else "states, all zero"
    return _fixed(info, shape, np.zeros(shape), says, Known.GRAPH if fed_back else Known.GUESS)


# ---- sound -----------------------------------------------------------------------------------------------------------

_PITCH: Final = (80, 300)  # of voices, in Hz
_FORMANTS: Final = ((250, 900), (900, 2400), (2300, 3500))  # in Hz
_SYLLABLE: Final = (1200, 5000)  # steps


def _audio(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:
    if info.name in around.ranges:
        return audio_maker(info, shape, *around.ranges[info.name], Known.GIVEN)
    top, known = (_PCM, Known.GRAPH) if info.element_type == TensorProto.INT16 else (1.0, Known.CONVENTION)
    if around.real:
        found = (float(np.abs(feed[info.name].astype(np.float64)).max(initial=0.0)) for feed in around.real)
        top, known = max(found) or 1.0, Known.REAL
    return audio_maker(info, shape, -top, top, known)


def audio_maker(info: InputInfo, shape: Shape, low: float, high: float, known: Known) -> Maker:
    """Waveforms: voiced and noisy stretches with syllables, pauses, and pink noise below, of all loudnesses.

    Args:
        info: The input, of floats or int16.
        shape: Its shape, the last axis that of time.
        low: Smallest value.
        high: Largest value.
        known: How well that is known.
    """
    middle, reach = (low + high) / 2, (high - low) / 2
    latest: dict[SyntheticSample, Doubles] = {}

    def values(sample: SyntheticSample) -> Array:
        steps, count = shape[-1] if shape else 1, math.prod(shape[:-1])
        whole = replace(sample, step=0)
        if whole not in latest:  # all steps of a sequence are cut from one sound
            latest.clear()
            latest[whole] = np.stack([waveform(sample.draws(info.name, n), steps * sample.steps) for n in range(count)])
        start = sample.step * steps
        return (middle + reach * latest[whole][:, start : start + steps]).reshape(shape)

    says = f"audio from {middle - reach:g} to {middle + reach:g}"
    return Maker(info, shape, values, says, known=known, natural=False)


def waveform(draws: Draws, steps: int) -> Doubles:
    """Sound of so many steps, from -1 to 1."""
    noise = pink(draws, (steps,), axes=1)
    background = noise / (4.0 * deviation(noise))
    voiced, hiss = np.zeros(steps), draws.bells((steps,)) / (3 * BELL_DEVIATION)
    envelope, breath = np.zeros(steps), np.zeros(steps)
    at = draws.integer(0, _SYLLABLE[1])
    while at < steps:
        length = draws.integer(*_SYLLABLE)
        end = min(at + length, steps)
        rise = np.arange(end - at) / length
        hump = 4 * rise * (1 - rise) * draws.integer(30, 100) / 100
        voiced[at:end] = _voice(draws, end - at)
        (breath if draws.chance(25) else envelope)[at:end] = hump
        at = end + (draws.integer(*_SYLLABLE) * 3 if draws.chance(20) else draws.integer(0, 1500))
    floor = draws.integer(1, 40) / 400
    sound = voiced * envelope + hiss * breath + background * floor
    # Loudness over three orders of magnitude, evenly by octaves.
    loudness = (1 + draws.integer(0, 1023) / 1024) / (1 << draws.integer(1, 9))
    if draws.chance(50):
        loudness = draws.integer(25, 95) / 100
    return np.clip(sound * loudness, -1.0, 1.0)


def _voice(draws: Draws, steps: int) -> Doubles:
    """A voiced sound: in each period of the pitch, decaying waves at the formants."""
    period = SAMPLE_RATE // draws.integer(*_PITCH)
    glide = draws.integer(-period // 8, period // 8)
    clock = np.arange(steps, dtype=np.int64)
    since = clock % np.maximum(period + glide * clock // max(steps, 1), 8)
    fade = 1 - since / (period + abs(glide) + 1)
    sound = np.zeros(steps)
    for number, formant in enumerate(_FORMANTS):
        phase = since * draws.integer(*formant) * 65536 // SAMPLE_RATE & 0xFFFF
        wave = 1 - np.abs(phase - 0x8000) / 0x4000
        sound += wave * fade * fade / (1.3 * (1 << number))
    return sound


# ---- features and series ---------------------------------------------------------------------------------------------


def _features(info: InputInfo, shape: Shape, around: Surroundings) -> Maker:
    """Features and series: correlated noise around a mean, each channel with its own deviation."""
    mean, spread, known, limits = np.zeros(()), np.ones(()), Known.GUESS, (-math.inf, math.inf)
    axis = _group_axis(info, shape)
    if info.name in around.ranges:
        low, high = limits = around.ranges[info.name]
        mean, spread, known = np.asarray((low + high) / 2), np.asarray((high - low) / _RANGE_DEVIATIONS), Known.GIVEN
    elif around.real and len(shape) > 1:
        mean, spread, known = *_moments_of(around.real, info.name, axis), Known.REAL
    elif len(shape) > 1:
        stem = Stem(around.proto, info.name)
        found = fit_moments(stem, shape, axis, lambda i: noise_field(Draws(0, i, "fit"), shape), info.dtype)
        if found is not None:
            mean, spread, misfit = found
            known = Known.STATISTICS if misfit <= _FITS else Known.GUESS

    def values(sample: SyntheticSample) -> Array:
        noise = noise_field(sample.draws(info.name, sample.step), shape)
        return np.clip(mean + spread * noise, *limits)

    says = f"{info.kind.value if info.kind else 'values'}, about {np.median(mean):.3g} +- {np.median(spread):.3g}"
    return Maker(info, shape, values, says, known=known, natural=False)


def _group_axis(info: InputInfo, shape: Shape) -> int:
    """The axis of the features: fixed, the shortest, and not that of time or the batch."""
    fixed = [axis for axis, dim in enumerate(info.shape) if axis and isinstance(dim, int) and 1 < dim <= MOST_GROUPS]
    axes = fixed or [axis for axis in range(1, len(shape)) if shape[axis] > 1] or [len(shape) - 1]
    return min(axes, key=lambda axis: shape[axis]) if shape else 0


def _moments_of(feeds: Sequence[Mapping[str, Array]], name: str, axis: int) -> tuple[Doubles, Doubles]:
    """Mean and deviation of each group along an axis, broadcasting to the shape without the first axis."""
    moved = [np.moveaxis(feed[name].astype(np.float64), axis, 0) for feed in feeds]
    values = np.concatenate([m.reshape(m.shape[0], -1) for m in moved], axis=1)
    outline = tuple(values.shape[0] if a == axis else 1 for a in range(1, moved[0].ndim))
    spread = np.maximum(values.std(axis=1), _LEAST_SPREAD)
    return values.mean(axis=1).reshape(outline), spread.reshape(outline)


def noise_field(draws: Draws, shape: Shape) -> Doubles:
    """Noise of about unit variance: smooth along the later axes, partly common to all, of changing strength."""
    if not shape:
        return draws.bells(()) / BELL_DEVIATION
    out = np.empty(shape)
    inner = shape[1:]
    for number in range(shape[0]):
        white = draws.bells(inner) / BELL_DEVIATION
        if not inner:
            out[number] = white
            continue
        smooth = pink(draws, inner, axes=min(len(inner), 2))
        level = draws.bells((1,))[0] / BELL_DEVIATION
        strength = draws.integer(60, 150) / 100
        out[number] = strength * (0.55 * white + 0.7 * smooth / deviation(smooth) + 0.45 * level)
    return out


def _image(info: InputInfo, shape: Shape, around: Surroundings) -> ImageMaker:
    given = around.pixels
    if info.name in around.ranges:
        given = Preprocessing(*around.ranges[info.name], name="as given")
    return image_maker(around.proto, info, shape, given, around.real, around.settings)


_OF_A_RANGE: Final = (InputKind.IMAGE, InputKind.AUDIO, InputKind.SERIES, InputKind.FEATURES)
"""Kinds whose maker knows what to do with a range."""
_MAKERS: Final[Mapping[InputKind, Callable[[InputInfo, Shape, Surroundings], Maker]]] = {
    InputKind.IMAGE: _image,
    InputKind.AUDIO: _audio,
    InputKind.SERIES: _features,
    InputKind.FEATURES: _features,
    InputKind.TOKENS: _tokens,
    InputKind.MASK: _mask,
    InputKind.POSITIONS: _positions,
    InputKind.SEGMENTS: _segments,
    InputKind.STATE: _state,
    InputKind.PAST: _state,
    InputKind.LENGTH: _lengths,
    InputKind.SCALE: _scale,
    InputKind.IMAGE_SIZE: _image_size,
    InputKind.SAMPLE_RATE: _rate,
    InputKind.BOOLEAN: _boolean,
}
