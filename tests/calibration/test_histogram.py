"""The growing histogram: exact counts, exact merging, whatever the order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kenosis_ort.calibration.histogram import HALF, Histogram, exponent_of, extremes, fold
from tests.calibration.support import histogram_of as build

values = hnp.arrays(
    np.float32,
    st.integers(0, 300),
    elements=st.sampled_from([-1.0, 0.0, 1.0]).flatmap(
        lambda s: st.integers(-40, 60).map(lambda e: s * 1.375 * 2.0**e)
    ),
) | hnp.arrays(
    np.float32, st.integers(0, 300), elements=st.floats(-8, 8, width=32).map(lambda v: v if abs(v) > 1e-6 else 0.0)
)


@given(values)
@settings(deadline=None)
def test_every_value_is_in_its_bin(data: np.ndarray) -> None:
    histogram = build(data)
    assert histogram.total == data.size
    if not data.size:
        return
    exact = np.floor(np.ldexp(data.astype(np.float64), -histogram.exponent) * HALF).astype(int) + HALF
    np.testing.assert_array_equal(histogram.counts, np.bincount(exact, minlength=2 * HALF))


@given(values, values, values)
@settings(deadline=None)
def test_order_and_split_do_not_matter(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    whole = build(np.concatenate([a, b, c]))
    assert build(c, a, b) == whole
    parts = [build(p) for p in (a, b, c)]
    assert parts[0].merge(parts[1]).merge(parts[2]) == whole
    assert parts[2].merge(parts[0].merge(parts[1])) == whole


@given(values)
@settings(deadline=None)
def test_bins_are_narrow(data: np.ndarray) -> None:
    top = float(np.abs(data).max(initial=0.0))
    histogram = build(data)
    if top > 1e-28:
        assert histogram.width <= top / 2048
        assert top < 2.0**histogram.exponent


@given(st.floats(1e-20, 1e20), st.integers(0, 140))
def test_fold_keeps_the_total(magnitude: float, steps: int) -> None:
    rng = np.random.default_rng(int(magnitude) % 97)
    histogram = build((rng.standard_normal(50) * magnitude).astype(np.float32))
    folded = fold(histogram.counts, steps)
    assert folded.sum() == 50
    assert folded[HALF:].sum() == histogram.counts[HALF:].sum()  # nothing crosses zero


def test_larger_than_a_block_and_of_any_shape() -> None:
    data = np.random.default_rng(0).standard_normal((3, 50, 1000)).astype(np.float32)
    assert build(data) == build(*data)
    assert build(data[:, ::2]).total == data.size // 2


def test_float16() -> None:
    data = np.random.default_rng(0).standard_normal(1000).astype(np.float16)
    assert build(data) == build(data.astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_refused(bad: float) -> None:
    data = np.zeros(100_000, np.float32)
    data[99_999] = bad
    assert not extremes(data).is_finite


def test_exponent_is_strict() -> None:
    assert exponent_of(1.0) == 1
    assert exponent_of(0.999) == 0
    assert exponent_of(0.0) == -100


def test_rebin_keeps_the_total_and_the_zero_edge() -> None:
    data = np.concatenate([np.zeros(1000), np.linspace(-3, 3, 601)]).astype(np.float32)
    histogram = build(data)
    counts = histogram.rebin(np.linspace(-3, 3, 129))
    assert counts.sum() == data.size
    assert counts[64:].sum() == (data >= 0).sum()
    assert histogram.rebin(np.linspace(0, 3, 65), magnitudes=True).sum() == data.size


def test_counts_are_checked_and_frozen() -> None:
    with pytest.raises(ValueError, match="8192 bins"):
        Histogram(0, np.zeros(3, np.int64))
    histogram = build(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="read-only"):
        histogram.counts[0] = 1
