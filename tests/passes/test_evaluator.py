"""What counts as better on held-out samples, and how candidates and the float model are run on them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kenosis_ort.accuracy.metric import Scored, check_metric
from kenosis_ort.calibration.feeds import LEAST_FEEDS, Rows, Sample, split_feeds
from kenosis_ort.errors import CalibrationError, VerificationError
from kenosis_ort.passes import evaluator as evaluation
from kenosis_ort.passes.contract import LEAST_HELD_OUT
from kenosis_ort.passes.evaluator import Score, least_ratio
from kenosis_ort.passes.reference import Candidates, Reference
from kenosis_ort.runtime.counting import counted
from kenosis_ort.runtime.session import Here, Running
from tests import models
from tests.flow.support import changed, run
from tests.passes.support import evaluator_of
from tests.planning import parse

ERRORS = st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=12)


@given(st.integers(0, 80))
def test_samples_to_fit_and_to_evaluate_on_are_apart(count):
    fit, held_out = split_feeds([{"x": np.array([i])} for i in range(count)])
    if count < LEAST_FEEDS:
        assert (fit, held_out) == ([], [])
        return
    assert sorted(int(f["x"][0]) for f in (*fit, *held_out)) == list(range(count))
    assert len(fit) >= len(held_out) >= (LEAST_HELD_OUT if count >= 8 else 1)


@given(ERRORS, st.integers(0, 11), st.floats(0.0, 0.999), st.floats(1e-3, 1e3))
def test_what_counts_as_better(errors, at, share, unit):
    """The error is less, and no sample's absence makes it more than 2 % more; in whatever unit."""
    at %= len(errors)
    plain = Score(unit * sum(errors), tuple(unit * e for e in errors))
    assert (plain.is_better(plain), plain.beats(plain)) == (False, False)

    def changed(total, one):
        return Score(total * plain.error, tuple(e * (one if i == at else share) for i, e in enumerate(plain.without)))

    found = [changed(*by).is_better(plain) for by in ((share, 1.015), (share, 1.025), (share, 1.45), (1.001, share))]
    assert found == [True, False, False, False]
    clear = least_ratio(len(errors))
    found = [changed(*by).beats(plain) for by in ((0.99 * clear, share), (1.01 * clear, share), (share, 1.45))]
    assert found == [True, False, False]


def test_fewer_samples_must_say_it_louder():
    ratios = [0.0, *(least_ratio(n) for n in (1, 2, 4, 8, 32, 1000)), 0.98]
    assert (ratios, ratios[1] < 0.6) == (sorted(ratios), True)


def scored(values):
    return Score(1.0, (1.0, 1.0), Scored(float(np.mean(values)), tuple(values)))


def test_a_metric_decides_where_it_is_clear():
    base = np.array([0.8, 0.7, 0.9, 0.8])
    plain, better = scored(base), scored(base + 0.05)
    assert (better.is_better(plain), better.beats(plain), plain.is_better(better)) == (True, True, False)
    unclear = scored(base + np.array([0.3, -0.2, 0.2, -0.2]))._replace(error=0.5, without=(0.5, 0.5))
    assert (unclear.beats(plain), plain.beats(unclear)) == (True, False)  # by its error
    alone = plain._replace(scored=Scored(0.8))
    assert not unclear._replace(scored=Scored(0.7)).is_better(alone)
    assert unclear._replace(scored=Scored(0.8)).is_better(alone)


# ---- of models ------------------------------------------------------------------------------------------------


def scaled(by):
    return parse("net (float[1,4] x) => (float[1,4] y) <float by> { y = Mul (x, by) }", {"by": by})


def test_score_without_each_sample():
    feeds = models.feeds(scaled(1.0), 3)
    evaluator = evaluator_of(scaled(1.0), feeds)
    rest = [evaluator_of(scaled(1.0), feeds[:at] + feeds[at + 1 :]).score(scaled(1.1)).error for at in range(3)]
    assert (evaluator.score(scaled(1.1)).without, evaluator.score(scaled(1.0)).error) == (pytest.approx(rest), 0.0)


@pytest.mark.parametrize(("rows", "parts"), [(6, 6), (20, 16), (1, 1)])
def test_each_part_of_a_batch_of_samples_is_left_out_in_turn(rows, parts):
    """The rows of a batch that are samples count as such; those of one that may not be do not."""
    model = models.with_free_batch(models.residual_block())
    feeds = models.feeds(model, 2, dims={"n": rows})
    other = changed(model, stem_w=1.01)
    whole, apart = evaluator_of(model, feeds).score(other), evaluator_of(model, [Rows(f) for f in feeds]).score(other)
    assert (len(whole.without), len(apart.without), apart.error) == (2, 2 * parts, pytest.approx(whole.error))
    assert (whole.without == apart.without) == (rows == 1)


def test_an_output_without_rows_is_in_no_part():
    whole = {"y": np.arange(6), "loss": np.float32(2)}
    found = list(evaluation._parts([whole, whole], [1, 3]))
    assert found[0] is whole
    assert [{name: rows.tolist() for name, rows in part.items()} for part in found[1:]] == [
        {"y": [0, 1]}, {"y": [2, 3]}, {"y": [4, 5]}
    ]  # fmt: skip


def classifier(noise=0.0):
    """A linear classifier of ten features, its weights off by some noise."""
    weights = 4 * models.normal((10, 4)) + noise * models.normal((10, 4), seed=1)
    return parse("net (float[1,10] x) => (float[1,4] y) <float[10,4] w> { y = MatMul (x, w) }", {"w": weights})


def test_what_is_lost_is_told_in_what_the_output_is_for():
    evaluator = evaluator_of(classifier(), models.feeds(classifier(), 64))
    found, same = evaluator.measured(classifier(1.0)), evaluator.measured(classifier())
    assert found.measure.startswith("top-1 agreement")
    assert (found.samples, found.counted, found.float_value) == (64, 64, 1.0)
    assert 0.0 < found.loss < 0.5
    assert found.low < found.value < found.high
    assert same.loss == 0.0 < same.worst_loss < 0.07  # 64 samples do not tell half a percent


def test_losses_are_measured_on_validation_data_and_changes_compared_on_the_rest(monkeypatch):
    worse, feeds = classifier(1.0), models.feeds(classifier(), 40, seed=7)
    validation = [Sample(feed, i) for i, feed in enumerate(feeds)]
    labels = [outputs[0].argmax() for outputs in run(classifier(), feeds)]
    seen = []

    def metric(outputs, reference, indices):
        seen[:] = list(indices)
        return float(np.mean([o["y"].argmax() == labels[i] for o, i in zip(outputs, indices, strict=True)]))

    def evaluator():
        return evaluator_of(classifier(), validation[::10], metric=check_metric(metric), validation=validation)

    found = evaluator().measured(worse)
    assert (found.measure, found.samples, found.float_value) == ("metric 'metric'", 40, 1.0)
    assert found.loss > 0.0
    assert found.best_loss <= found.loss <= found.worst_loss
    assert 0.0 <= found.low <= found.high <= 1.0
    monkeypatch.setattr("kenosis_ort.passes.evaluator._REFERENCE_BYTES", 0)
    again = evaluator()
    assert again.measured(worse) == found
    again.score(worse)
    assert seen == [0, 10, 20, 30]  # the four that changes are compared on, by their own numbers


# ---- candidates -----------------------------------------------------------------------------------------------


def test_a_candidate_is_loaded_once_and_run_once_on_a_sample():
    a, b, c = scaled(1.0), scaled(2.0), scaled(3.0)
    feeds, candidates = models.feeds(a, 3), Candidates()
    with counted() as counts:
        first = list(candidates.outputs(a, feeds[:2]))
        list(candidates.outputs(b, feeds))
        again = list(candidates.outputs(a, feeds))
    assert (counts.total.sessions, counts.total.runs) == (2, 6)
    np.testing.assert_equal([outputs["y"] for outputs in again], [feed["x"] for feed in feeds])
    assert all(x is y for x, y in zip(first, again, strict=False))
    with counted() as counts:
        list(candidates.outputs(c, feeds, keep=False))
        list(candidates.outputs(c, feeds, keep=False))
        for known, outputs in zip(again, candidates.outputs(a, feeds), strict=True):
            assert known is outputs  # not among the latest two any more, and remembered
    assert (counts.total.sessions, counts.total.runs) == (1, 6)
    with counted() as counts:
        list(candidates.outputs(a, models.feeds(a, 1, seed=9)))  # its session was let go of
    assert (counts.total.sessions, counts.total.runs) == (1, 1)
    (one,), (other,) = candidates.outputs(a, feeds[:1]), candidates.outputs(scaled(1.0), feeds[:1])
    assert one is not other, "equal candidates are told apart by identity"


def test_outputs_beyond_the_bytes_that_are_kept_are_computed_again(monkeypatch):
    model = scaled(1.0)
    feeds, candidates = models.feeds(model, 3), Candidates()
    monkeypatch.setattr("kenosis_ort.passes.reference._MOST_OUTPUTS", 2 * 4 * 4)  # of two samples of four floats
    with counted() as counts:
        list(candidates.outputs(model, feeds))
        list(candidates.outputs(model, feeds))
    assert counts.total.runs == 4


class Eager(Here, Running):
    """Asks for some feeds before the first outputs are looked at, as a cluster does; a model is a number."""

    ahead = 0

    def __init__(self, ahead, model=""):
        self.ahead, self.model, self.opened = ahead, model, list[str]()

    def open(self, model, **_):
        self.opened.append(model)
        return Eager(self.ahead, model)

    def close(self):
        pass

    def runs(self, feeds, names=None):
        feeds = iter(feeds)
        early = list(itertools.islice(feeds, self.ahead))
        return ({"y": np.array([float(self.model), feed["x"]])} for feed in itertools.chain(early, feeds))


@given(st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 3), max_size=9), st.integers(0, 4))
def test_what_is_known_and_what_is_computed_ahead_come_in_the_order_of_the_feeds(first, second, ahead):
    candidates, feeds = Candidates(executor=Eager(ahead)), [{"x": number} for number in range(4)]
    for numbers in (first, second):
        found = list(candidates.outputs("1", [feeds[n] for n in numbers]))
        assert [int(outputs["y"][1]) for outputs in found] == numbers


@given(st.integers(0, 5), st.integers(0, 6))
def test_candidates_come_in_their_order_and_no_more_are_made_than_there_is_room_for(count, ahead):
    executor = Eager(ahead)
    candidates = Candidates(executor=executor)
    for number, outputs in enumerate(candidates.each((str(n) for n in range(count)), [{"x": 0}, {"x": 1}])):
        assert len(executor.opened) == min(count, number + 1 + ahead)
        assert [found["y"].tolist() for found in outputs] == [[number, 0], [number, 1]]


# ---- the float model ------------------------------------------------------------------------------------------


def relu(outputs="float[1,4] y"):
    return parse(f"(float[1,4] x) => ({outputs}) {{ y = Relu (x) r = RandomNormalLike (x) }}")


@pytest.mark.parametrize(("stays_open", "sessions"), [(True, 1), (False, 2)])
def test_each_sample_is_run_once_and_the_first_twice_to_find_random_outputs(stays_open, sessions):
    reference, feeds = Reference(relu(), stays_open=stays_open), models.feeds(relu(), 3)
    with counted() as counts:
        first = reference.outputs(feeds)
        again = reference.outputs(feeds[::-1])[::-1]
        (alone,) = reference.run(feeds[0])
    assert (counts.total.sessions, counts.total.runs) == (sessions, 5)
    np.testing.assert_equal([*(x for a in first for x in a.values()), alone],
                            [np.maximum(feed["x"], 0) for feed in (*feeds, feeds[0])])  # fmt: skip
    assert all(a[name] is b[name] for a, b in zip(first, again, strict=True) for name in a)


def test_random_outputs_are_found_out_once():
    reference, feeds = Reference(relu("float[1,4] y, float[1,4] r")), models.feeds(relu(), 2)
    with counted() as counts:
        assert reference.random(feeds[0]) == reference.random(feeds[1]) == {"r"}
    assert counts.total.runs == 2


def test_what_does_not_run_is_told():
    with pytest.raises(CalibrationError, match="does not run") as told:
        Reference(relu()).outputs([*models.feeds(relu(), 1), {"x": np.zeros((1, 5), np.float32)}])
    assert told.value.where == "held-out sample 1"
    broken = relu()
    broken.graph.node[0].op_type = "Unheard"
    with pytest.raises(VerificationError):
        Reference(broken).outputs(models.feeds(relu(), 1))
