"""What counts as better on held-out samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.passes.evaluator import LEAST_FEEDS, LEAST_HELD_OUT, Evaluator, Score, least_ratio, split_feeds
from tests import models
from tests.models import Net

ERRORS = st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=12)


@given(st.integers(0, 80))
def test_samples_to_fit_and_to_evaluate_on_are_apart(count: int) -> None:
    feeds = [{"x": np.array([i])} for i in range(count)]
    fit, held_out = split_feeds(feeds)
    if count < LEAST_FEEDS:
        assert not fit
        assert not held_out
        return
    ids = [int(f["x"][0]) for f in (*fit, *held_out)]
    assert sorted(ids) == list(range(count))
    assert len(fit) >= len(held_out) > 0
    assert count < 8 or len(held_out) >= LEAST_HELD_OUT


@given(ERRORS)
def test_nothing_beats_itself(errors: list[float]) -> None:
    score = Score(sum(errors), tuple(errors))
    assert not score.is_better(score)
    assert not score.beats(score)


@given(ERRORS, st.integers(0, 11))
def test_one_sample_alone_decides_nothing(errors: list[float], at: int) -> None:
    """A change that helps one sample and harms the rest is no better, however much it helps."""
    at %= len(errors)
    changed = [e * (0.001 if i == at else 1.01) for i, e in enumerate(errors)]

    def score(parts: list[float]) -> Score:
        return Score(sum(parts), tuple(sum(parts) - p for p in parts))

    assert not score(changed).is_better(score(errors))


def test_fewer_samples_must_say_it_louder() -> None:
    ratios = [least_ratio(n) for n in (1, 2, 4, 8, 32, 1000)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.6
    assert ratios[-1] < 0.98


def test_score_without_each_sample() -> None:
    net = Net()
    net.output(net.op("Identity", [net.input("x", [1, 4])], name="same"), [1, 4])
    off = Net()
    off.output(off.op("Mul", [off.input("x", [1, 4]), off.const(1.1)], name="same"), [1, 4])
    feeds = models.feeds(net.model(), 3)
    evaluator = Evaluator(net.model(), feeds)
    score = evaluator.score(off.model())
    alone = Evaluator(net.model(), feeds[1:]).error(off.model())
    assert len(score.without) == 3
    assert score.without[0] == pytest.approx(alone)
    assert evaluator.error(net.model()) == 0.0
