"""Constants that 8 bits hold exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.graph.qdq import exact_grid


@given(
    multiples=st.lists(st.integers(-120, 135), min_size=1, max_size=30),
    step=st.floats(1e-6, 1e6, allow_nan=False, allow_infinity=False),
)
def test_multiples_of_any_step_are_found(multiples: list[int], step: float) -> None:
    values = (np.array(multiples) * step).astype(np.float32)
    found = exact_grid(values)
    assert found is not None
    np.testing.assert_allclose(found.multiples * found.step, values, rtol=0, atol=1e-5 * float(np.abs(values).max()))
    assert found.low == min(int(found.multiples.min()), 0)
    assert max(int(found.multiples.max()), 0) - found.low <= 255


def test_the_step_is_the_coarsest_one() -> None:
    found = exact_grid(np.array([[1.0, 1.5], [2.25, 1.0]], np.float32))
    assert found is not None
    assert (found.step, found.low, found.multiples.tolist()) == (0.25, 0, [[4, 6], [9, 4]])


@pytest.mark.parametrize(
    "values",
    [[1.0, np.pi], [0.001, 1.0], [-1.0, 255.0], list(range(257)), [np.nan], [np.inf, 1.0], []],
    ids=["irrational", "too fine", "too wide", "too many", "nan", "inf", "empty"],
)
def test_others_have_none(values: list[float]) -> None:
    assert exact_grid(np.array(values, np.float32)) is None


def test_zeros_have_one() -> None:
    found = exact_grid(np.zeros(3, np.float32))
    assert found is not None
    assert found.multiples.tolist() == [0, 0, 0]
