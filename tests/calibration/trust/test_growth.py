"""Extension of ranges: never narrower, more for deeper tensors, nothing where nothing varies."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.calibration.trust.assess import extend, growth_between

ENDS = st.tuples(st.floats(-1e4, 1e4), st.floats(0, 1e4)).map(lambda p: (p[0], p[0] + p[1]))
GROUPS = st.lists(ENDS, min_size=1, max_size=6)


@settings(deadline=None)
@given(groups=GROUPS, shallow=st.floats(0, 1), more=st.floats(0, 1))
def test_extension_holds_the_measured_range_and_grows_with_depth(
    groups: list[tuple[float, float]], shallow: float, more: float
) -> None:
    one, two = extend(groups, shallow), extend(groups, min(shallow + more, 1.0))
    assert one.measured == (min(g[0] for g in groups), max(g[1] for g in groups))
    assert two.extended[0] <= one.extended[0] <= one.measured[0]
    assert one.measured[1] <= one.extended[1] <= two.extended[1]
    width = one.measured[1] - one.measured[0]
    assert two.extended[1] - two.measured[1] <= 0.5 * width + 1e-9
    assert 0 <= one.spread <= 1


def test_inputs_constants_and_single_groups_are_not_extended() -> None:
    for groups, depth in (([(0.0, 1.0), (0.0, 2.0)], 0.0), ([(3.0, 3.0)] * 4, 1.0), ([(0.0, 5.0)], 1.0)):
        growth = extend(groups, depth)
        assert growth.extended == growth.measured


def test_the_fit_predicts_the_growth_of_the_largest_value() -> None:
    rng = np.random.default_rng(0)
    reached: list[float] = []
    for _ in range(200):
        values = rng.gumbel(10, 1, (4, 100)).max(axis=1)
        reached.append(extend([(0.0, float(v)) for v in values], 1.0).extended[1])
    expected = 10 + math.log(4000) + 0.5772
    assert abs(np.mean(reached) - expected) < 0.5


@settings(deadline=None)
@given(groups=st.lists(ENDS, min_size=2, max_size=6), real=ENDS, count=st.integers(1, 64))
def test_real_ranges_are_kept_and_extended_no_further_than_the_made_up_ones(
    groups: list[tuple[float, float]], real: tuple[float, float], count: int
) -> None:
    made_up = extend(groups, 0.5)
    low, high = growth_between(real, made_up, count, 64)
    assert min(real[0], made_up.extended[0]) <= low <= real[0]
    assert real[1] <= high <= max(real[1], made_up.extended[1])
