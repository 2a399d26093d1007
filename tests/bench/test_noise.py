"""The arithmetic of ratio, interval and verdict."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kenosis_ort.bench.harness import CONFIDENCE, LEAST_ROUNDS, MARGIN, Verdict, compare, interval_rank

MIRRORED = {
    Verdict.FASTER: Verdict.SLOWER,
    Verdict.SLOWER: Verdict.FASTER,
    Verdict.SAME: Verdict.SAME,
    Verdict.NOISY: Verdict.NOISY,
}
times = st.floats(1e-6, 1e3)
rounds = st.lists(st.tuples(times, times), min_size=1, max_size=40)
# Series that are near each other, so that all verdicts turn up.
near = st.floats(0.9, 1.1)
close_rounds = st.lists(st.tuples(near, near), min_size=1, max_size=40)


def at_a_threshold(*ratios: float) -> bool:
    """Whether rounding alone may turn the verdict."""
    return any(math.isclose(ratio, edge, rel_tol=1e-9) for ratio in ratios for edge in (1.0, MARGIN, 1 / MARGIN))


@given(st.one_of(rounds, close_rounds))
def test_exchanging_the_series_mirrors_everything(pairs: list[tuple[float, float]]):
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    there, back = compare(a, b), compare(b, a)
    assert back.verdict is MIRRORED[there.verdict]
    assert back.ratio == pytest.approx(1 / there.ratio)
    assert back.low == pytest.approx(1 / there.high)
    assert back.high == pytest.approx(1 / there.low)


@given(st.one_of(rounds, close_rounds), st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(pairs: list[tuple[float, float]], scale: float):
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    plain, scaled = compare(a, b), compare([x * scale for x in a], [x * scale for x in b])
    assert scaled.ratio == pytest.approx(plain.ratio)
    assert (scaled.low, scaled.high) == pytest.approx((plain.low, plain.high))
    assume(not at_a_threshold(plain.low, plain.ratio, plain.high))
    assert scaled.verdict is plain.verdict


@given(st.one_of(rounds, close_rounds), st.randoms(use_true_random=False))
def test_the_order_of_the_rounds_does_not_matter(pairs: list[tuple[float, float]], order):
    shuffled = list(pairs)
    order.shuffle(shuffled)
    assert compare(*zip(*pairs, strict=True)) == compare(*zip(*shuffled, strict=True))


@given(st.lists(times, min_size=LEAST_ROUNDS, max_size=30), st.floats(0.2, 5.0))
def test_a_drift_that_hits_both_alike_is_cancelled(drift: list[float], speed: float):
    assume(not at_a_threshold(speed))
    found = compare([d * speed for d in drift], drift)
    assert found.ratio == pytest.approx(speed)
    wanted = Verdict.SAME if 1 / MARGIN < speed < MARGIN else Verdict.FASTER if speed > 1 else Verdict.SLOWER
    assert found.verdict is wanted


@given(rounds)
def test_the_ratio_lies_in_its_interval(pairs: list[tuple[float, float]]):
    found = compare([p[0] for p in pairs], [p[1] for p in pairs])
    assert found.low <= found.ratio * (1 + 1e-12)
    assert found.ratio <= found.high * (1 + 1e-12)


@given(rounds.filter(lambda pairs: len(pairs) < LEAST_ROUNDS))
def test_few_rounds_never_decide(pairs: list[tuple[float, float]]):
    assert compare([p[0] for p in pairs], [p[1] for p in pairs]).verdict is Verdict.NOISY


@given(st.lists(times, min_size=LEAST_ROUNDS, max_size=30))
def test_a_model_is_as_fast_as_itself(series: list[float]):
    found = compare(series, series)
    assert (found.ratio, found.low, found.high, found.verdict) == (1, 1, 1, Verdict.SAME)


def test_one_wild_round_does_not_turn_the_verdict():
    assert compare([2.0] * 15, [1.0] * 14 + [100.0]).verdict is Verdict.FASTER
    assert compare([1.0] * 15, [1.0] * 14 + [100.0]).verdict is Verdict.SAME


def test_a_ratio_that_swings_around_one_is_too_noisy():
    assert compare([1.0] * 16, [0.8, 1.25] * 8).verdict is Verdict.NOISY


def test_a_difference_within_the_margin_is_none():
    assert compare([1.01] * 15, [1.0] * 15).verdict is Verdict.SAME
    assert compare([1.05] * 15, [1.0] * 15).verdict is Verdict.FASTER


def test_a_lead_below_the_margin_with_a_wide_interval_is_not_called_faster():
    reference = [1.001] * 8 + [1.05] * 7
    found = compare(reference, [1.0] * 15)
    assert found.low > 1
    assert found.high > MARGIN > found.ratio
    assert found.verdict is Verdict.NOISY


def test_a_time_of_zero_is_no_error():
    assert compare([0.0] * 8, [0.0] * 8).ratio == 1


@pytest.mark.parametrize(("reference", "own"), [([], []), ([1.0], [1.0, 2.0])])
def test_series_that_do_not_pair_are_refused(reference: list[float], own: list[float]):
    with pytest.raises(ValueError, match="rounds"):
        compare(reference, own)


def test_ranks_are_those_of_the_tables():
    # Conover, Practical Nonparametric Statistics: 95 % interval of the median from ordered observations.
    assert [interval_rank(n) for n in (5, 6, 9, 10, 15, 20, 25)] == [None, 1, 2, 2, 4, 6, 8]
    assert interval_rank(LEAST_ROUNDS) == 1
    assert interval_rank(LEAST_ROUNDS - 1) is None


@given(st.integers(LEAST_ROUNDS, 400))
def test_the_rank_is_the_tightest_that_keeps_the_confidence(n: int):
    rank = interval_rank(n)
    assert rank is not None

    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    assert coverage(rank) >= CONFIDENCE > coverage(rank + 1)
