"""The range with the smallest mean of ``|x - Q(x)|**p``: rounding inside weighed against clipping outside.

``p = 2`` is the mean squared error, the noise that a linear consumer adds up. A larger ``p`` counts what is clipped for
more: outliers are few but carry the signal (``p = 2.4`` in "LAPQ: Loss Aware Post-training Quantization", Nahshan et
al., 2019, https://arxiv.org/abs/1911.07190, which finds the best ``p`` between 2 and 4).
"""

from __future__ import annotations

import numpy as np

from kenosis_ort.calibration.estimators.sketch import Doubles, Range, Sketch

_COARSE = np.geomspace(1.0, 1.0 / 64.0, 19)
_STEPS = (1.26, 1.12, 1.06, 1.03)  # one coarse step apart, then finer


def least_error_range(values: Sketch, *, power: float = 2.0, levels: int = 256) -> Range:
    """Returns the range with the smallest mean error.

    Both ends are scaled down together over a coarse grid, then one after the other over ever finer ones. The full
    range is among the candidates, so that the result is never worse than it.

    Args:
        values: The distribution.
        power: Exponent, at least 1.
        levels: Number of levels of the quantization grid, 256 for 8 bits.
    """
    full = np.array([values.low, values.high])
    if not values.mass.size or not values.high > values.low:
        return values.low, values.high
    candidates = np.array([values.shrunk(float(share)) for share in _COARSE])
    errors = values.errors(candidates, power=power, levels=levels)
    best, least = candidates[int(errors.argmin())], float(errors.min())
    moving = [end for end, used in enumerate((values.low < 0.0, values.high > 0.0)) if used]
    for step in _STEPS:
        for end in moving:
            tried = _around(best, full, end, step)
            errors = values.errors(tried, power=power, levels=levels)
            if errors.min() < least:
                best, least = tried[int(errors.argmin())], float(errors.min())
    return float(best[0]), float(best[1])


def _around(best: Doubles, full: Doubles, end: int, step: float) -> Doubles:
    """Returns ranges with one end a few steps inward and outward, never beyond the full range."""
    tried = np.repeat(best[None], 4, axis=0)
    tried[:, end] *= np.array([step**-2, 1 / step, step, step**2])
    inner = min(0.0, full[1]) if end == 0 else max(0.0, full[0])
    tried[:, end] = np.clip(tried[:, end], min(full[end], inner), max(full[end], inner))
    return tried
