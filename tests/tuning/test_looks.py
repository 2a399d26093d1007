"""When a race may end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kenosis_ort.bench.noise import MARGIN, Comparison, Verdict, compare
from kenosis_ort.tuning.looks import CLEAR, FULL, LEAST_LOOK, SCREENING, early, too_noisy

ratios = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=25)


@given(ratios)
def test_exchanging_the_series_mirrors_the_verdict(times: list[float]):
    assume(all(abs(abs(math.log(t)) - math.log(limit)) > 1e-9 for t in times for limit in (MARGIN, CLEAR)))
    there, back = early(times, [1.0] * len(times)), early([1.0] * len(times), times)
    mirrored = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER, Verdict.SAME: Verdict.SAME}
    if there is None:
        assert back is None
    else:
        assert back.verdict is mirrored[there.verdict]
        assert back.ratio == pytest.approx(1 / there.ratio)
        assert back.low == pytest.approx(1 / there.high)


@given(ratios)
def test_an_early_verdict_is_never_against_the_whole_interval(times: list[float]):
    found = early(times, [1.0] * len(times))
    if found is not None:
        assert len(times) >= LEAST_LOOK
        assert found.low <= found.ratio <= found.high
        assert found.verdict is not Verdict.NOISY
        if found.verdict is Verdict.FASTER:
            assert found.low > 1
        if found.verdict is Verdict.SLOWER:
            assert found.high < 1


@pytest.mark.parametrize(("times", "verdict"), [
    ([2.0] * 2, None),
    ([2.0] * 3, Verdict.FASTER),
    ([0.5] * 3, Verdict.SLOWER),
    ([1.2] * 3, None),
    ([2.0, 2.0, 1.1], None),
    ([2.0, 2.0, 1.3], Verdict.FASTER),
    ([1.1] * 7, None),
    ([1.1] * 8, Verdict.FASTER),
    ([1.1] * 7 + [0.9], None),
    ([1.1] * 15 + [0.9], Verdict.FASTER),
    ([1.0] * 8, None),
    ([1.0] * 12, Verdict.SAME),
    ([0.0] * 12, None),
])  # fmt: skip
def test_what_it_takes(times: list[float], verdict: Verdict | None):
    found = early(times, [1.0] * len(times))
    assert (None if found is None else found.verdict) is verdict


def test_three_rounds_are_not_enough_where_the_times_themselves_wander():
    assert early([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) is None
    assert early([2.0, 2.1, 2.0], [1.0, 1.1, 1.0]) is not None


def test_looking_several_times_does_not_turn_noise_into_results():
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(1000):
        times = np.exp(rng.normal(0, 0.15, FULL.most)).tolist()
        same = [1.0] * FULL.most
        found = next((f for n in FULL.rounds if (f := early(times[:n], same[:n]))), None) or compare(times, same)
        wrong += found.verdict in (Verdict.FASTER, Verdict.SLOWER)
    assert wrong / 1000 < 0.08


def test_the_looks_begin_where_something_can_be_decided():
    assert FULL.rounds[0] == SCREENING.rounds[0] == LEAST_LOOK
    assert list(FULL.rounds) == sorted(set(FULL.rounds))
    assert CLEAR > 1


@pytest.mark.parametrize(("comparison", "rounds", "noisy"), [
    (Comparison(1.0, 0.7, 1.4, Verdict.NOISY), 21, True),
    (Comparison(0.98, 0.96, 1.01, Verdict.NOISY), 21, False),
    (Comparison(0.98, 0.96, 1.01, Verdict.NOISY), 4, True),
    (Comparison(2.0, 1.3, 4.0, Verdict.FASTER), 3, False),
])  # fmt: skip
def test_whether_the_machine_is_to_blame(comparison: Comparison, rounds: int, noisy: bool):
    assert too_noisy(comparison, rounds) is noisy


def test_a_race_about_a_border_ends_where_it_is_clear_on_which_side_the_ratio_lies():
    reference = [1.0] * 8
    own = [0.99, 1.0, 0.985, 0.995, 0.99, 1.0, 0.99, 0.985]
    assert early(reference, own) is None
    found = early(reference, own, border=0.98)
    assert found is not None
    assert found.low > 0.98
    assert early(reference, [*own[:-1], 1.03], border=0.98) is None
    assert early(reference[:5], own[:5], border=0.98) is None
