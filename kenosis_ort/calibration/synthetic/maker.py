"""Makers of the values of one input: their base class, tokens, audio, series and features.

The base class of what makes up the values of one input.

Tokens and what goes with them: masks, positions, segments.

Audio, other series, and vectors of features.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.synthetic.draws import BELL_DEVIATION, Draws
from kenosis_ort.calibration.synthetic.kinds import InputInfo
from kenosis_ort.calibration.synthetic.leaves import deviation, pink
from kenosis_ort.calibration.table_format import Known

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


_UNKNOWN_ROWS = 1000
_ZIPF_PERCENT = 75
_HIDDEN = -10_000.0  # what additive masks add where nothing may be seen; finite in float16

# Numbers of rows that only vocabularies of one family have: first token, last token, padding.
_BERT, _ROBERTA = (101, 102, 0), (0, 2, 1)
_FAMILIES = {
    **dict.fromkeys((30522, 28996, 119547, 105879, 21128, 30524, 31102), _BERT),
    **dict.fromkeys((50265, 250002, 32005, 64001, 52000), _ROBERTA),
}


class TokenMaker(Maker):
    """Token ids within the table: words of Zipf-like frequency between special tokens, padded to mixed lengths.

    Frequent words have small ids in most vocabularies; a quarter of the ids are spread evenly, so that rare rows are
    seen too.

    Args:
        info: The input; its rows bound the ids.
        shape: Its shape, the last axis that of the steps.
        padded: Whether the model is told by a mask or lengths where a sentence ends.
    """

    natural = False

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, padded: bool) -> None:
        super().__init__(info, shape)
        self._padded = padded
        self.known = Known.GRAPH if info.rows else Known.CONVENTION

    @property
    def says(self) -> str:
        return f"tokens, ids below {self._rows}" + (", padded to mixed lengths" if self._padded else "")

    @property
    def _rows(self) -> int:
        return self.info.rows or _UNKNOWN_ROWS

    def values(self, sample: SyntheticSample) -> Array:
        rows, steps = self._rows, self.shape[-1] if self.shape else 1
        sentences = int(np.prod(self.shape[:-1])) if self.shape else 1
        draws = sample.draws(self.info.name, sample.step)
        # Uniform within an octave drawn evenly: the probability of a rank falls like its inverse.
        octaves = draws.integers(0, (rows - 1).bit_length(), (sentences, steps))
        within = draws.fractions((sentences, steps))
        zipf = np.floor((1 + within) * (1 << octaves)).astype(np.int64) - 1
        even = draws.integers(0, rows - 1, (sentences, steps))
        ids = np.where(draws.integers(0, 99, even.shape) < _ZIPF_PERCENT, zipf % rows, even)
        family = _FAMILIES.get(rows)
        first, last, padding = family or (None, None, 0)
        lengths = sample.sentence_lengths(sentences, steps) if self._padded else [steps] * sentences
        for row, length in zip(ids, lengths, strict=True):
            if first is not None and last is not None and length > 2:
                row[0], row[length - 1] = first, last
            row[length:] = padding
        return ids.reshape(self.shape)


class MaskMaker(Maker):
    """Masks of the sentences' lengths: one for words and zero for padding, or what hides padding when added.

    Args:
        info: The input; the last axis is that of the steps.
        shape: Its shape.
        padded: Whether there are tokens of mixed lengths beside it.
    """

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, padded: bool) -> None:
        super().__init__(info, shape)
        self._padded = padded

    @property
    def says(self) -> str:
        kind = "a mask that is added" if self.info.additive else "a mask"
        return f"{kind}, {'padding of mixed lengths' if self._padded else 'nothing hidden'}"

    def values(self, sample: SyntheticSample) -> Array:
        if not self.shape:
            return np.zeros(()) if self.info.additive else np.ones(())
        steps, sentences = self.shape[-1], self.shape[0] if len(self.shape) > 1 else 1
        lengths = sample.sentence_lengths(sentences, steps) if self._padded else [steps] * sentences
        seen = np.arange(steps)[None, :] < np.array(lengths)[:, None]
        shown = seen.reshape(sentences, *[1] * max(len(self.shape) - 2, 0), steps)
        if len(self.shape) == 1:
            shown = shown[0]
        return np.where(shown, 0.0, _HIDDEN) if self.info.additive else shown.astype(np.int64)


class PositionMaker(FixedMaker):
    """Positions that count up.

    Args:
        info: The input.
        shape: Its shape.
        start: First position, the number of steps that past keys and values hold.
    """

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, start: int) -> None:
        super().__init__(info, shape)
        self._start = start

    @property
    def says(self) -> str:
        return f"positions from {self._start}"

    @property
    def constant(self) -> Array:
        steps = self.shape[-1] if self.shape else 1
        positions: Array = (self._start + np.arange(steps)) % (self.info.rows or self._start + steps)
        return positions if self.shape else positions[0]


class SegmentMaker(Maker):
    """Segment ids: in every second sample the latter half of a sentence belongs to segment 1."""

    @property
    def says(self) -> str:
        return "segments 0 and 1"

    def values(self, sample: SyntheticSample) -> Array:
        steps, sentences = self.shape[-1] if self.shape else 1, self.shape[0] if len(self.shape) > 1 else 1
        segments = np.zeros((sentences, steps), np.int64)
        if sample.index % 2 and self.info.rows != 1:
            for row, length in zip(segments, sample.sentence_lengths(sentences, steps), strict=True):
                row[length // 2 : length] = 1
        return segments.reshape(self.shape) if segments.size == np.prod(self.shape) else segments[0, 0]


Doubles = npt.NDArray[np.float64]

SAMPLE_RATE = 16_000
_PITCH = (80, 300)  # of voices, in Hz
_FORMANTS = ((250, 900), (900, 2400), (2300, 3500))  # in Hz
_SYLLABLE = (1200, 5000)  # steps


class AudioMaker(Maker):
    """Waveforms: voiced and noisy stretches with syllables, pauses, and pink noise below, of all loudnesses.

    Args:
        info: The input, of floats or int16.
        shape: Its shape, the last axis that of time.
        low: Smallest value.
        high: Largest value.
        known: How well that is known.
    """

    natural = False

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, low: float, high: float, known: Known) -> None:
        super().__init__(info, shape)
        self._middle, self._reach = (low + high) / 2, (high - low) / 2
        self.known = known
        self._latest: tuple[SyntheticSample, Doubles] | None = None

    @property
    def says(self) -> str:
        return f"audio from {self._middle - self._reach:g} to {self._middle + self._reach:g}"

    def values(self, sample: SyntheticSample) -> Array:
        steps = self.shape[-1] if self.shape else 1
        count = int(np.prod(self.shape[:-1])) if self.shape else 1
        whole = replace(sample, step=0)
        if self._latest is None or self._latest[0] != whole:  # all steps of a sequence are cut from one sound
            made = [waveform(sample.draws(self.info.name, n), steps * sample.steps) for n in range(count)]
            self._latest = whole, np.stack(made)
        start = sample.step * steps
        return (self._middle + self._reach * self._latest[1][:, start : start + steps]).reshape(self.shape)


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


class FieldMaker(Maker):
    """Features and series: correlated noise around a mean, each channel with its own deviation.

    Args:
        info: The input; the first axis is that of the samples.
        shape: Its shape.
        mean: Broadcasts to the shape without the first axis.
        spread: Standard deviation, the same.
        known: How well both are known.
        limits: Smallest and largest value.
    """

    natural = False

    def __init__(
        self,
        info: InputInfo,
        shape: tuple[int, ...],
        *,
        mean: Doubles,
        spread: Doubles,
        known: Known,
        limits: tuple[float, float] = (-math.inf, math.inf),
    ) -> None:
        super().__init__(info, shape)
        self.mean, self.spread = mean, spread
        self.known = known
        self._limits = limits

    @property
    def says(self) -> str:
        middle, width = float(np.median(self.mean)), float(np.median(self.spread))
        return f"{self.info.kind.value if self.info.kind else 'values'}, about {middle:.3g} +- {width:.3g}"

    def values(self, sample: SyntheticSample) -> Array:
        noise = field(sample.draws(self.info.name, sample.step), self.shape)
        return np.clip(self.mean + self.spread * noise, *self._limits)


def field(draws: Draws, shape: tuple[int, ...]) -> Doubles:
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
