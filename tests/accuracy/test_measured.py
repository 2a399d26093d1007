"""Intervals hold what they say: about 95 % of the draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.accuracy.measured import LEAST_SAMPLES, bootstrap, of_parts, wilson
from kenosis_ort.accuracy.measures import YesOrNo


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_wilson_is_within_bounds_and_holds_the_share(count: int, share: float) -> None:
    low, high = wilson(share, count)
    assert 0.0 <= low <= share <= high <= 1.0


def test_wilson_as_published() -> None:
    """Two hundred of two hundred: the loss may be 1.9 %, and half a percent is not told."""
    low, high = wilson(1.0, 200)
    assert low == pytest.approx(0.98115, abs=1e-5)
    assert high == 1.0
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


@pytest.mark.parametrize("kind", ["wilson", "bootstrap", "parts"])
def test_coverage(kind: str) -> None:
    rng, truth, held = np.random.default_rng(0), 0.9, 0
    for _ in range(200):
        seen = rng.uniform(size=200) < truth
        value = float(seen.mean())
        if kind == "wilson":
            interval = wilson(value, 200)
        elif kind == "bootstrap":
            interval = bootstrap(np.stack([seen, np.ones(200)], axis=1).astype(float), YesOrNo("y").value)
        else:
            interval = of_parts(value, seen.reshape(10, 20).mean(axis=1), samples=200, scale=1.0)
        assert interval is not None
        held += interval[0] <= truth <= interval[1]
    assert 0.88 <= held / 200 <= 0.995


def test_few_samples_tell_no_interval() -> None:
    assert bootstrap(np.ones((LEAST_SAMPLES - 1, 2)), YesOrNo("y").value) is None
    assert of_parts(0.5, np.ones(3), samples=3, scale=1.0) is None


def test_nothing_seen_to_change_may_still_change() -> None:
    low, high = of_parts(0.9, np.zeros(10), samples=300, scale=1.0) or (0.0, 0.0)
    assert 0.005 < 0.9 - low < 0.02
    assert high - 0.9 == pytest.approx(0.9 - low)
