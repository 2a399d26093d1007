"""Audio, other series, and vectors of features."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.provenance import Known
from kenosis_ort.calibration.synthetic.draws import BELL_DEVIATION, Draws
from kenosis_ort.calibration.synthetic.kinds import InputInfo
from kenosis_ort.calibration.synthetic.maker import Array, Maker, SyntheticSample
from kenosis_ort.calibration.synthetic.smooth_noise import deviation, pink

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
