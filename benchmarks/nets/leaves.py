"""Random images and signals with the statistics of natural ones.

Natural images are made of objects that occlude each other (the dead leaves model: discs of random place and colour,
with radii by an inverse cube law) and their spectra fall with frequency like 1/f; both are scale-invariant. See A. B.
Lee, D. Mumford and J. Huang, "Occlusion models for natural images" (2001), for the model, and D. J. Field (1987) for
the spectra.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

_TEXTURE = 0.06
_DISCS = 400


def pink_noise(rng: np.random.Generator, shape: Sequence[int], *, axes: int, power: float = 1.0) -> Doubles:
    """Returns noise of zero mean and unit variance whose amplitude falls like ``1 / f**power``.

    Args:
        rng: Source of randomness.
        shape: Sizes.
        axes: Number of trailing axes along which it is correlated, each on its own for the others.
        power: 0 gives white noise.
    """
    shape = tuple(shape)
    white = rng.standard_normal(shape)
    last = tuple(range(len(shape) - axes, len(shape)))
    if not last or white.size == 0:
        return white
    frequencies = np.meshgrid(*(np.fft.fftfreq(shape[a]) for a in last), indexing="ij")
    radius = np.sqrt(np.asarray(sum(f**2 for f in frequencies)))
    radius.flat[0] = np.inf  # no constant part
    noise: Doubles = np.fft.ifftn(np.fft.fftn(white, axes=last) / radius**power, axes=last).real
    spread = noise.std(axis=last, keepdims=True)
    return noise / np.where(spread > 0, spread, 1.0)


def dead_leaves(rng: np.random.Generator, height: int, width: int) -> Doubles:
    """Returns a colour image of shape (3, height, width), values 0 to 1: occluding discs with texture and light."""
    image = np.empty((3, height, width))
    image[:] = _colours(rng, 1)[0][:, None, None]
    side = max(height, width)
    smallest, largest = max(side / 64, 0.7), side / 2.2
    # radii by inverse transform of the inverse cube law, the largest farthest behind
    u = rng.random(_DISCS)
    radii = np.sort(1 / np.sqrt(u / smallest**2 + (1 - u) / largest**2))[::-1]
    centres = rng.random((_DISCS, 2)) * (height, width)
    for radius, (cy, cx), colour in zip(radii, centres, _colours(rng, _DISCS), strict=True):
        top, bottom = max(int(cy - radius), 0), min(int(cy + radius) + 2, height)
        left, right = max(int(cx - radius), 0), min(int(cx + radius) + 2, width)
        y, x = np.ogrid[top:bottom, left:right]
        inside = (y - cy) ** 2 + (x - cx) ** 2 <= radius**2
        image[:, top:bottom, left:right][:, inside] = colour[:, None]
    light = 1 + 0.25 * pink_noise(rng, (height, width), axes=2, power=1.5)
    texture = _TEXTURE * pink_noise(rng, (3, height, width), axes=2)
    return np.clip(image * light + texture, 0.0, 1.0)


def _colours(rng: np.random.Generator, count: int) -> Doubles:
    """Returns colours of shape (count, 3): brightness varies much more than hue, as in photographs."""
    brightness = rng.beta(1.1, 1.3, (count, 1))
    tint = rng.standard_normal((count, 3)) * 0.12
    colours: Doubles = np.clip(brightness + tint - tint.mean(axis=1, keepdims=True) * 0.5, 0.0, 1.0)
    return colours
