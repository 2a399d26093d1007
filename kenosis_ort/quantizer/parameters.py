"""Stage 4: scale and zero point of activations.

The range is widened to hold 0.0, which becomes exactly representable, and snapped inside the bounds of an
absorbed Relu or Clip so that the runtime's own test for absorption holds:
``(qmin - zero_point) * scale >= low`` and ``(qmax - zero_point) * scale <= high``.
Source: Kenosis paper, stage 4; the condition was measured (rules absorb-relu and absorb-clip of the target).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kenosis_ort.graph.grid import integer_bounds
from kenosis_ort.plan import RangeLimit

_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class ActivationParameters:
    """``real = scale * (quantized - zero_point)``; ``scale`` is a float32 value."""

    scale: float
    zero_point: int


def nudged_parameters(
    low: float, high: float, *, signed: bool, limit: RangeLimit | None = None, bits: int = 8
) -> ActivationParameters:
    """Asymmetric parameters for a real range.

    Args:
        low: Least real value.
        high: Largest real value.
        signed: int8 (-128..127) instead of uint8 (0..255).
        limit: Bounds of the activation to be absorbed, if any.
        bits: Width of the integers.

    Raises:
        ValueError: The range is not finite or upside down.
    """
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise ValueError(f"not a range: [{low}, {high}]")
    qmin, qmax = integer_bounds(bits, signed=signed)
    low, high = min(low, 0.0), max(high, 0.0)
    floor = limit.low if limit is not None else None
    ceiling = limit.high if limit is not None else None
    if floor is not None:
        low = min(max(low, floor), 0.0)
    if ceiling is not None:
        high = max(min(high, ceiling), 0.0)
    if high == low:  # a dead tensor: any scale is right that keeps inside the bounds; without bounds stock's, 1
        if floor is None and ceiling is None:
            return ActivationParameters(1.0, 0)
        low, high = (floor or -1.0, 0.0) if ceiling == 0.0 else (0.0, ceiling or 1.0)
    scale = (high - low) / (qmax - qmin)
    nearest = int(min(max(qmin - round(low / scale) if scale > 0 else qmin, qmin), qmax))

    def fit(zero_point: int) -> tuple[float, float, int]:
        """(what is cut off the range, scale, zero point) within the bounds."""
        step = scale
        if ceiling is not None and zero_point < qmax:
            step = min(step, ceiling / (qmax - zero_point))
        if floor is not None and zero_point > qmin:
            step = min(step, -floor / (zero_point - qmin))
        return max((qmin - zero_point) * step - low, high - (qmax - zero_point) * step, 0.0), step, zero_point

    up, down = ceiling is not None and nearest < qmax, floor is not None and nearest > qmin
    candidates = [nearest, *([nearest + 1] if up else ()), *([nearest - 1] if down else ())]
    _, scale, zero_point = min(map(fit, candidates), key=lambda fitted: fitted[0])
    stored = np.float32(min(max(scale, _SMALLEST), _LARGEST))
    if limit is not None:
        while not absorbs(float(stored), zero_point, limit, signed=signed, bits=bits) and stored > _SMALLEST:
            stored = np.nextafter(stored, np.float32(0.0), dtype=np.float32)
    return ActivationParameters(float(stored), zero_point)


def clamped(low: float, high: float, bounds: RangeLimit | None) -> tuple[float, float]:
    """The range cut to where the consumers of the value still see a difference."""
    if bounds is not None:
        floor = -math.inf if bounds.low is None else bounds.low
        ceiling = math.inf if bounds.high is None else bounds.high
        low, high = (min(max(end, floor), ceiling) for end in (low, high))
    return low, high


def absorbs(scale: float, zero_point: int, limit: RangeLimit, *, signed: bool, bits: int = 8) -> bool:
    """Whether the runtime drops a Relu or Clip of these bounds in front of Q, in its own float32 arithmetic.

    Below 8 bits it tells whether the integers keep the bounds: the runtime knows of 8 alone.

    Stricter than runtime 1.31 needs, which allows half a step; older ones do not.
    """
    qmin, qmax = integer_bounds(bits, signed=signed)
    stored = np.float32(scale)
    with np.errstate(over="ignore"):
        below = limit.low is None or np.float32(qmin - zero_point) * stored >= np.float32(limit.low)
        above = limit.high is None or np.float32(qmax - zero_point) * stored <= np.float32(limit.high)
    return bool(below and above)
