"""What counts as better on held-out samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.accuracy.metric import Scored, check_metric
from kenosis_ort.calibration.feeds import Sample
from kenosis_ort.passes.evaluator import LEAST_FEEDS, LEAST_HELD_OUT, Evaluator, Rows, Score, least_ratio, split_feeds
from kenosis_ort.runtime.session import open_session
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
    changed = [e * (0.001 if i == at else 1.03) for i, e in enumerate(errors)]

    def score(parts: list[float]) -> Score:
        return Score(sum(parts), tuple(sum(parts) - p for p in parts))

    assert not score(changed).is_better(score(errors))


@given(ERRORS, st.integers(0, 11), st.floats(0.0, 0.999), st.floats(1e-3, 1e3))
def test_what_counts_as_better(errors: list[float], at: int, share: float, unit: float) -> None:
    """The error is less, and no sample's absence makes it more than 2 % more; in whatever unit."""
    at %= len(errors)
    plain = Score(unit * sum(errors), tuple(unit * e for e in errors))

    def changed(total: float, one: float) -> Score:
        return Score(total * plain.error, tuple(e * (one if i == at else share) for i, e in enumerate(plain.without)))

    assert changed(share, 1.015).is_better(plain)
    assert not changed(share, 1.025).is_better(plain)
    assert not changed(share, 1.45).is_better(plain)
    assert not changed(share, 1.45).beats(plain)
    assert not changed(1.001, share).is_better(plain)
    clear = least_ratio(len(errors))
    assert changed(0.99 * clear, share).beats(plain)
    assert not changed(1.01 * clear, share).beats(plain)


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


def _classifier(noise: float = 0.0) -> onnx.ModelProto:
    """A linear classifier of ten features, its weights off by some noise."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(10, 4)).astype(np.float32) * 4
    net = Net()
    off = weights + noise * np.random.default_rng(1).normal(size=weights.shape).astype(np.float32)
    net.output(net.op("MatMul", [net.input("x", [1, 10]), net.const(off)], name="head"), [1, 4])
    return net.model()


def test_what_is_lost_is_told_in_what_the_output_is_for() -> None:
    float_model, feeds = _classifier(), models.feeds(_classifier(), 64)
    found = Evaluator(float_model, feeds).measured(_classifier(1.0))
    assert found is not None
    assert found.measure.startswith("top-1 agreement")
    assert (found.samples, found.counted, found.float_value) == (64, 64, 1.0)
    assert 0.0 < found.loss < 0.5
    assert found.low < found.value < found.high
    same = Evaluator(float_model, feeds).measured(float_model)
    assert same is not None
    assert same.loss == 0.0
    assert 0.0 < same.worst_loss < 0.07  # 64 samples do not tell half a percent


def test_losses_are_measured_on_validation_data_and_changes_compared_on_the_rest(monkeypatch: Any) -> None:
    float_model, worse = _classifier(), _classifier(1.0)
    validation = [Sample(feed, i) for i, feed in enumerate(models.feeds(float_model, 40, seed=7))]
    seen: list[int] = []

    def metric(outputs: Any, reference: Any, indices: Any) -> float:
        seen[:] = list(indices)
        return float(np.mean([_top(o) == _label(validation[i]) for o, i in zip(outputs, indices, strict=True)]))

    evaluator = Evaluator(float_model, validation[::10], metric=check_metric(metric), validation=validation)
    found = evaluator.measured(worse)
    assert found is not None
    assert (found.samples, found.float_value) == (40, 1.0)
    assert found.measure == "metric 'metric'"
    assert found.loss > 0.0
    assert found.best_loss <= found.loss <= found.worst_loss
    assert 0.0 <= found.low <= found.high <= 1.0
    monkeypatch.setattr("kenosis_ort.passes.evaluator._REFERENCE_BYTES", 0)
    again = Evaluator(float_model, validation[::10], metric=check_metric(metric), validation=validation)
    assert again.measured(worse) == found
    again.score(worse)
    assert seen == [20, 30]  # the last part of the four that changes are compared on, by their own numbers


def _top(outputs: Any) -> int:
    return int(next(iter(outputs.values())).argmax())


def _label(feed: Any) -> int:
    session = open_session(_classifier())
    return int(session.run(None, dict(feed))[0].argmax())


def _scored(values: Any) -> Score:
    return Score(1.0, (1.0, 1.0), Scored(float(np.mean(values)), tuple(values)))


def test_a_metric_decides_where_it_is_clear() -> None:
    base = np.array([0.8, 0.7, 0.9, 0.8])
    plain, better = _scored(base), _scored(base + 0.05)
    assert better.is_better(plain)
    assert better.beats(plain)
    assert not plain.is_better(better)
    unclear = replace(_scored(base + np.array([0.3, -0.2, 0.2, -0.2])), error=0.5, without=(0.5, 0.5))
    assert unclear.beats(plain)  # by its error
    assert not plain.beats(unclear)
    alone = replace(plain, scored=Scored(0.8))
    lower = replace(unclear, scored=Scored(0.7))
    assert not lower.is_better(alone)
    assert replace(unclear, scored=Scored(0.8)).is_better(alone)


@pytest.mark.parametrize(("rows", "parts"), [(6, 6), (20, 16), (1, 1)])
def test_each_part_of_a_batch_of_samples_is_left_out_in_turn(rows: int, parts: int) -> None:
    """The rows of a batch that are samples count as such; those of one that may not be do not."""
    model = models.ALL["residual_block"]()
    inputs = model.graph.input[0]
    shape = [rows, *(d.dim_value for d in inputs.type.tensor_type.shape.dim[1:])]
    inputs.type.tensor_type.shape.dim[0].dim_param = "batch"
    rng = np.random.default_rng(0)
    feeds = [{inputs.name: rng.normal(size=shape).astype(np.float32)} for _ in range(2)]
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    weights = next(t for t in changed.graph.initializer if len(t.dims) == 4)
    moved = onnx.numpy_helper.to_array(weights) * np.float32(1.01)
    weights.CopyFrom(onnx.numpy_helper.from_array(moved, weights.name))
    whole, apart = Evaluator(model, feeds).score(changed), Evaluator(model, [Rows(f) for f in feeds]).score(changed)
    assert len(whole.without) == 2
    assert len(apart.without) == 2 * parts
    assert apart.error == pytest.approx(whole.error)
    assert (whole.without == apart.without) == (rows == 1)
