from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kenosis_ort.plan import RangeLimit
from kenosis_ort.quantizer.grids import ActivationParameters, absorbs, clamped, nudged_parameters

TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
usual = st.floats(-1e4, 1e4, width=32)


@st.composite
def ranges(draw: st.DrawFn, values: st.SearchStrategy[float] = usual) -> tuple[float, float]:
    a, b = draw(values), draw(values)
    return min(a, b), max(a, b)


@st.composite
def limits(draw: st.DrawFn) -> RangeLimit:
    """Relu, Clip with one bound, Clip with two: what the planner lets through holds 0."""
    low = draw(st.one_of(st.none(), st.just(0.0), st.floats(-100, 0, width=32)))
    high = draw(st.one_of(st.none(), st.just(6.0), st.floats(0, 100, width=32)))
    return RangeLimit("v", low, high)


def ends(p: ActivationParameters, *, signed: bool) -> tuple[float, float]:
    """Returns the least and the largest real value that the parameters can hold."""
    qmin, qmax = (-128, 127) if signed else (0, 255)
    return (qmin - p.zero_point) * p.scale, (qmax - p.zero_point) * p.scale


def is_valid(p: ActivationParameters, *, signed: bool) -> bool:
    bottom, top = ends(p, signed=signed)
    return float(np.float32(p.scale)) == p.scale and TINY <= p.scale < math.inf and bottom <= 0 <= top


@given(ranges(), st.booleans())
def test_without_a_limit_the_range_is_covered_to_half_a_step_and_no_step_is_wasted(
    range_: tuple[float, float], signed: bool
) -> None:
    """The scale is the width over 255: nothing coarser than the range asks for."""
    low, high = min(range_[0], 0.0), max(range_[1], 0.0)
    p = nudged_parameters(*range_, signed=signed)
    assert is_valid(p, signed=signed)
    bottom, top = ends(p, signed=signed)
    slack = 0.5 * p.scale * (1 + 1e-6) + 1e-6 * max(-bottom, top)
    assert bottom <= low + slack
    assert top >= high - slack
    if high - low > 255 * TINY:
        assert p.scale == pytest.approx((high - low) / 255, rel=1e-6)


@given(ranges(floats32), st.booleans(), st.one_of(st.none(), limits()))
@example((-LARGEST, LARGEST), False, None)
@example((0.0, LARGEST), True, None)
@example((0.0, 1e-45), False, None)
@example((-1e-40, 0.0), True, None)
def test_zero_is_exact_whatever_the_range(range_: tuple[float, float], signed: bool, limit: RangeLimit | None) -> None:
    """From subnormal to the largest float32: real 0.0 is the integer zero point, the scale a positive float32."""
    p = nudged_parameters(*range_, signed=signed, limit=limit)
    assert is_valid(p, signed=signed)


@given(ranges(), st.booleans(), limits())
def test_the_activation_is_absorbed_whatever_was_calibrated(
    range_: tuple[float, float], signed: bool, limit: RangeLimit
) -> None:
    p = nudged_parameters(*range_, signed=signed, limit=limit)
    tiny_bound = any(b is not None and 0 < abs(b) < 255 * TINY for b in (limit.low, limit.high))
    closed = limit.low == 0.0 and limit.high == 0.0
    if not tiny_bound and not closed:
        assert absorbs(p.scale, p.zero_point, limit, signed=signed)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 8.355), (0.0, 7.016), (0.0, 4.476), (-6.74, 6.51), (-1.44, 7.24), (-7.22, 0.26)]
)
@pytest.mark.parametrize("signed", [False, True])
def test_a_scale_that_float32_rounds_beyond_the_bounds_is_nudged_inside(low: float, high: float, signed: bool) -> None:
    """Divided by 255 and rounded to float32, the range of these Clips ends a hair outside: the Conv would be float."""
    limit = RangeLimit("v", low, high)
    plain = np.float32((high - low) / 255)
    p = nudged_parameters(low, high, signed=signed, limit=limit)
    assert absorbs(p.scale, p.zero_point, limit, signed=signed)
    assert p.scale == pytest.approx(float(plain), rel=2e-2)


@given(ranges(), st.booleans(), limits())
def test_inside_its_bounds_the_range_is_covered(range_: tuple[float, float], signed: bool, limit: RangeLimit) -> None:
    """What the activation lets through is representable to a step, where one bound alone could cost that much."""
    p = nudged_parameters(*range_, signed=signed, limit=limit)
    low, high = min(range_[0], 0.0), max(range_[1], 0.0)
    if limit.low is not None:
        low = max(low, limit.low)
    if limit.high is not None:
        high = min(high, limit.high)
    bottom, top = ends(p, signed=signed)
    step = max(p.scale, (high - low) / 255) * (1 + 1e-5) + 1e-5 * max(-bottom, top)
    assert bottom <= low + step
    assert top >= high - step


@pytest.mark.parametrize(
    ("range_", "bounds", "signed", "zero_point", "scale"),
    [
        *(((low, 4.0), (0.0, None), signed, least, 4 / 255) for low in (0.0, -3.0)
          for signed, least in ((False, 0), (True, -128))),
        # The runtime keeps a Clip(0, 6) in float at 6.02/255, by a fraction of a percent.
        *(((0.0, high), (0.0, 6.0), False, 0, min(high, 6.0) / 255) for high in (5.0, 6.0, 6.02, 8.0)),
        ((-1.0, 1.0), (-1.0, 1.0), False, 128, 1 / 128),
    ],
)  # fmt: skip
def test_behind_an_activation(range_: Any, bounds: Any, signed: bool, zero_point: int, scale: float) -> None:
    p = nudged_parameters(*range_, signed=signed, limit=RangeLimit("v", *bounds))
    assert (p.zero_point, p.scale) == (zero_point, pytest.approx(scale))
    assert bounds[1] is None or np.float32(255 - p.zero_point) * np.float32(p.scale) <= np.float32(bounds[1])


def test_a_clip_that_is_symmetric_about_zero() -> None:
    """Clip(-1, 1): 1/128 is absorbed, 2/255 and 1/127 are not."""
    limit = RangeLimit("v", -1.0, 1.0)
    assert absorbs(1 / 128, 128, limit, signed=False)
    assert not absorbs(2 / 255, 128, limit, signed=False)
    assert not absorbs(1 / 127, 128, limit, signed=False)


@pytest.mark.parametrize("signed", [False, True])
def test_a_dead_tensor(signed: bool) -> None:
    """All zeros: stock's scale of 1 without bounds, and one that absorbs with them."""
    assert nudged_parameters(0.0, 0.0, signed=signed) == ActivationParameters(1.0, 0)
    for bounds in ((0.0, 6.0), (0.0, None), (None, 6.0), (-1.0, 0.0), (None, 0.0)):
        limit = RangeLimit("v", *bounds)
        p = nudged_parameters(0.0, 0.0, signed=signed, limit=limit)
        assert absorbs(p.scale, p.zero_point, limit, signed=signed), bounds


@pytest.mark.parametrize("range_", [(1.0, 0.0), (math.nan, 1.0), (0.0, math.inf), (-math.inf, 0.0)])
def test_what_is_no_range_is_an_error(range_: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="not a range"):
        nudged_parameters(*range_, signed=False)


@given(ranges(), st.one_of(st.just((None, None)), st.just((-8.0, None)), ranges()))
def test_clamped_lies_inside_both(range_: tuple[float, float], bounds: tuple[float | None, float | None]) -> None:
    assert clamped(*range_, None) == range_
    low, high = clamped(*range_, RangeLimit("v", *bounds))
    least, most = -math.inf if bounds[0] is None else bounds[0], math.inf if bounds[1] is None else bounds[1]
    assert least <= low <= high <= most
    overlap = max(range_[0], least), min(range_[1], most)
    if overlap[0] <= overlap[1]:
        assert (low, high) == overlap
