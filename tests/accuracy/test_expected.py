"""The score without labels: what it says of noisy class scores is what happens to the accuracy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.accuracy.expected import _tail, expected_metric, expected_regret, expected_score

CLASSES = 10


def _logits(samples: int, seed: int = 0) -> np.ndarray:
    """Scores of a calibrated classifier of about 80 % accuracy."""
    return np.random.default_rng(seed).normal(size=(samples, CLASSES)) * 3


def _softmax(x: np.ndarray) -> np.ndarray:
    shifted = np.exp(x - x.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


@pytest.mark.parametrize(("noise", "within"), [(0.05, 0.2), (0.2, 0.2), (0.5, 0.3), (1.0, 0.6)])
def test_expected_regret_is_the_accuracy_lost(noise: float, within: float) -> None:
    """Labels are drawn from the float model's own probabilities: its confidence is right by construction."""
    rng = np.random.default_rng(1)
    y = _logits(200_000)
    p = _softmax(y)
    x = y + noise * rng.normal(size=y.shape)
    rows = np.arange(len(y))
    lost = float((p[rows, y.argmax(1)] - p[rows, x.argmax(1)]).mean())
    assert expected_regret(x, y) == pytest.approx(lost, rel=within, abs=1e-4)


def test_few_samples_tell_as_much_as_many() -> None:
    rng = np.random.default_rng(2)
    y = _logits(4000, seed=3)
    x = y + 0.3 * rng.normal(size=y.shape)
    parts = [expected_regret(x[i : i + 64], y[i : i + 64]) for i in range(0, 4000, 64)]
    assert np.std(parts) < 0.6 * np.mean(parts)
    assert np.mean(parts) == pytest.approx(expected_regret(x, y), rel=0.1)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**16), st.floats(0.01, 3.0), st.floats(-50.0, 50.0))
def test_a_shift_of_all_classes_costs_nothing_and_noise_costs_more(seed: int, noise: float, shift: float) -> None:
    rng = np.random.default_rng(seed)
    y = _logits(50, seed)
    direction = rng.normal(size=y.shape)
    assert expected_regret(y + shift, y) == pytest.approx(0.0, abs=1e-12)
    less, more = (expected_regret(y + f * noise * direction, y) for f in (0.5, 1.0))
    assert 0.0 <= less <= more + 1e-12 <= 1.0


def test_probabilities_are_judged_like_the_scores_they_come_from() -> None:
    y = _logits(300)
    x = y + 0.2 * np.random.default_rng(4).normal(size=y.shape)
    from_scores = expected_regret(x, y)
    assert expected_regret(_softmax(x), _softmax(y), probabilities=True) == pytest.approx(from_scores, rel=1e-3)


def test_scores() -> None:
    y = _logits(30).astype(np.float32)
    feeds = [{"logits": y[i : i + 10]} for i in range(0, 30, 10)]
    noisy = [{"logits": f["logits"] + 0.3 * np.sin(np.arange(100).reshape(10, 10)).astype(np.float32)} for f in feeds]
    metric = expected_metric(feeds)
    assert metric(feeds, feeds) == 1.0
    assert 0.9 < metric(noisy, feeds) < 1.0
    assert metric(noisy, feeds) == expected_score(noisy, feeds)
    dense = [{"mask": np.random.default_rng(0).normal(size=(1, 3, 9, 9)).astype(np.float32)}]
    off = [{"mask": dense[0]["mask"] * 1.1}]
    assert expected_score(off, dense) == pytest.approx(0.99, abs=1e-3)


@given(st.floats(-6.0, 6.0))
def test_tail_of_the_normal_distribution(x: float) -> None:
    assert float(_tail(np.array(x))) == pytest.approx(0.5 * math.erfc(x / math.sqrt(2)), abs=1e-7)
