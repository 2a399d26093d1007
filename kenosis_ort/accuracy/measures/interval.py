"""95 % intervals: how far a value may be from what many samples would say."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Interval = tuple[float, float]

_Z = 1.959964
_DRAWS = 400
LEAST_SAMPLES = 8  # resampling fewer tells of these samples only
LEAST_PARTS = 4
_STUDENT = {3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # 97.5 % by degrees of freedom


def wilson(share: float, count: int) -> Interval:
    """Returns the interval of a share of independent decisions.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).

    Args:
        share: The share seen, 0..1.
        count: Number of decisions, 1 or more.
    """
    spread = _Z * _Z / count
    center = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(min(center - half, share), 0.0), min(max(center + half, share), 1.0)


def bootstrap(parts: Float64, value: Callable[[Float64], Float64]) -> Interval | None:
    """Returns the interval of a value of sums over samples, by drawing samples anew; None for fewer than eight.

    Draws are the same on every call. Source: B. Efron, Bootstrap methods, Annals of Statistics 7 (1979), percentiles;
    widened for few samples, of which resampling knows too little of the spread.

    Args:
        parts: Sums by sample, shape (samples, k).
        value: Makes values of shape (...) of sums of shape (..., k).
    """
    count = len(parts)
    if count < LEAST_SAMPLES:
        return None
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_DRAWS)
    values = value(weights @ parts)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, (0.025, 0.975))
    whole = float(value(parts.sum(axis=0)))
    wider = (1.0 + 1.38 / (count - 1)) * math.sqrt(count / (count - 1))  # Student's factor over the normal one
    return whole - wider * max(whole - float(low), 0.0), whole + wider * max(float(high) - whole, 0.0)


def of_parts(value: float, parts: Float64, *, samples: int, scale: float) -> Interval | None:
    """Returns the interval of a value whose parts, of like size, were evaluated by themselves; None for few parts.

    The parts' standard error with Student's factor: exact for means, near for metrics that are no mean. Parts without
    any spread say that nothing was seen to change, which some samples cannot exclude: then as for a share of them.

    Args:
        value: Of all parts.
        parts: What varies by part: the values, or their differences from others on the same samples.
        samples: Number of samples in all parts.
        scale: Size of the values.
    """
    count = len(parts)
    if count < LEAST_PARTS:
        return None
    if np.ptp(parts) == 0.0:
        half = scale * (1.0 - wilson(1.0, samples)[0])
        return value - half, value + half
    half = _STUDENT[min(count - 1, 9)] * float(parts.std(ddof=1)) / math.sqrt(count)
    return value - half, value + half
