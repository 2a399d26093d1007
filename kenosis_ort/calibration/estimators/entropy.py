"""The range whose quantized distribution diverges least from the real one.

Kullback-Leibler divergence between the distribution clipped to a candidate range and the same spread evenly over each
level of the grid. Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017; here with ranges on both sides of zero,
and at the resolution of the histogram. Stock's symmetric method of that name is in `kenosis_ort.calibration.ranges`.
"""

from __future__ import annotations

import numpy as np

from kenosis_ort.calibration.estimators.sketch import Doubles, Range, Sketch

_SHARES = np.linspace(0.1, 1.0, 46)
_TINY = 1e-9


def least_divergence_range(values: Sketch, *, levels: int = 256) -> Range:
    """Returns the range with the smallest divergence; both ends are scaled together.

    Args:
        values: The distribution.
        levels: Number of levels of the quantization grid.
    """
    if not values.mass.size or not values.high > values.low:
        return values.low, values.high
    centres = (values.left + values.right) / 2
    nonzero = (values.left > 0.0) | (values.right < 0.0)  # exact zeros would outweigh all else, and cost nothing
    if not nonzero.any():
        return values.low, values.high
    centres, mass = centres[nonzero], values.mass[nonzero]
    ranges = [values.shrunk(float(share)) for share in _SHARES]
    divergences = [_divergence(centres, mass, low, high, levels) for low, high in ranges]
    return ranges[int(np.argmin(divergences))]


def _divergence(centres: Doubles, mass: Doubles, low: float, high: float, levels: int) -> float:
    inside = (centres >= low) & (centres <= high)
    if not inside.any():
        return float("inf")
    kept = mass[inside]
    reference = kept.copy()
    reference[0] += mass[centres < low].sum()
    reference[-1] += mass[centres > high].sum()
    bottom, top = min(low, 0.0), max(high, 0.0)
    level = np.rint((centres[inside] - bottom) / ((top - bottom) / (levels - 1))).astype(np.int64)
    sums, holders = np.bincount(level, kept), np.bincount(level)
    spread = (sums / np.maximum(holders, 1))[level]
    p, q = reference / reference.sum(), spread / max(float(spread.sum()), _TINY)
    return float(np.sum(p * np.log(np.maximum(p, _TINY) / np.maximum(q, _TINY))))
