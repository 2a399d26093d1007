"""How far outputs are apart: by what they are for, by signal and noise, and by a metric of the caller's."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from kenosis_ort.accuracy.error import Deviations, OutputUse, Use, find_uses, output_error
from kenosis_ort.accuracy.metric import check_metric, is_within, part_bounds
from kenosis_ort.accuracy.outputs import compare_outputs, sqnr_db
from kenosis_ort.errors import ArgumentTypeError, OptionError, VerificationError
from tests.accuracy.test_measures import softmax
from tests.planning import parse
from tests.targets.qdq import QdqGraph, random_feeds

RNG = np.random.default_rng(0)


def detector(positions=400, classes=6, seed=0):
    """Boxes of tens of pixels, scores mostly near zero."""
    rng = np.random.default_rng(seed)
    boxes = rng.normal(0, 30, (1, positions, 4))
    scores = np.where(rng.random((1, positions, classes)) < 0.03, rng.random((1, positions, classes)), 0.001)
    return np.concatenate([boxes, scores], -1).astype(np.float32)


@pytest.mark.parametrize(("arrays", "use"), [
    ([RNG.normal(size=(4, 10)) for _ in range(3)], OutputUse(Use.CLASSES)),
    *(([softmax(RNG.normal(size=(4, 10))).reshape(4, 10, *ones) for _ in range(3)],
       OutputUse(Use.CLASSES, probabilities=True)) for ones in ((), (1, 1))),
    ([RNG.normal(size=(4, 10, 1)) for _ in range(3)], OutputUse(Use.CLASSES)),
    ([np.array([[2.0, -1.0]])] * 3, OutputUse(Use.CLASSES)),  # the sum alone makes no probabilities
    ([detector(seed=s) for s in range(3)], OutputUse(Use.POSITIONS, -1, (4, 5, 6, 7, 8, 9))),
    ([np.moveaxis(detector(seed=s), -1, 1).reshape(1, 10, 20, 20) for s in range(3)],
     OutputUse(Use.POSITIONS, 1, (4, 5, 6, 7, 8, 9))),
    *(([RNG.random(shape) for _ in range(8)], OutputUse(Use.DENSE)) for shape in ((1, 1, 20, 20), (1, 1), (4, 10))),
    ([RNG.normal(size=(2, 1, 128)) for _ in range(3)], OutputUse(Use.DENSE)),
])  # fmt: skip
def test_uses(arrays, use):
    reference = [{"y": a.astype(np.float32)} for a in arrays]
    assert find_uses(reference)["y"] == use
    assert output_error(reference, reference) == 0.0


def test_a_shift_of_all_class_scores_is_no_error():
    reference = [{"y": RNG.normal(size=(4, 10))} for _ in range(3)]
    assert output_error([{"y": r["y"] + 5.0} for r in reference], reference) < 1e-20
    assert output_error([{"y": r["y"] + RNG.normal(size=(4, 10))} for r in reference], reference) > 0.3


def test_probabilities_are_compared_by_their_log_odds_with_axes_of_one_behind_them_too():
    pairs = [softmax(RNG.normal(size=(2, 2, 10))) for _ in range(3)]
    by_odds = output_error(*([{"y": np.log(p[at] / (1 - p[at]))} for p in pairs] for at in (0, 1)))
    for ones in ((), (1,), (1, 1)):
        found = output_error(*([{"y": p[at].reshape(2, 10, *ones)} for p in pairs] for at in (0, 1)))
        assert found == pytest.approx(by_odds, rel=1e-4)


def test_small_scores_are_not_drowned_by_large_boxes():
    reference = [{"y": detector(seed=s)} for s in range(4)]
    lost = [{"y": np.concatenate([r["y"][..., :4], np.full_like(r["y"][..., 4:], 0.01)], -1)} for r in reference]
    assert output_error(lost, reference) > 0.3  # noise over signal power says 1e-4


def test_boxes_matter_where_something_is_found():
    reference = [{"y": detector(seed=s)} for s in range(4)]

    def moved(where):
        out = []
        for r in reference:
            y = r["y"].copy()
            y[..., :4] += np.where(where(y[..., 4:].max(-1, keepdims=True)), 10.0, 0.0)
            out.append({"y": y})
        return output_error(out, reference)

    assert moved(lambda best: best > 0.1) > 5 * moved(lambda best: best <= 0.1)


def test_outputs_count_alike_and_constant_ones_do_not():
    reference = [{"a": RNG.normal(size=(1, 8)), "b": RNG.normal(size=(1, 3, 4, 4)), "c": np.zeros((1, 3, 4, 4)),
                  "n": np.arange(3)} for _ in range(3)]  # fmt: skip
    actual = [{**r, "b": 0 * r["b"]} for r in reference]
    assert Deviations(actual, reference).by_output() == {"a": 0.0, "b": pytest.approx(1.0, abs=0.05)}
    assert output_error([], []) == 0.0


def test_another_rank_is_an_error():
    with pytest.raises(OptionError, match="shape"):
        output_error([{"y": np.zeros(4)}], [{"y": np.ones((1, 5)) * np.arange(5)}])


@pytest.mark.parametrize("width", [1, 4])
def test_outputs_of_as_many_rows_as_the_data_say(width):
    """Where another number of rows is found nothing is compared; where that is so for all feeds nothing is left."""
    found = np.random.default_rng(0).normal(size=(6, width))
    reference = [{"y": found}, {"y": found[:4]}, {"y": found[:0]}]
    assert output_error([{"y": found}, {"y": found[:5]}, {"y": found[:1]}], reference) == 0.0
    assert output_error([{"y": found[:1]}, {"y": found[:2]}, {"y": found[:3]}], reference) == 1.0
    assert output_error([{"y": -found}, {"y": found[:5]}, {"y": found[:1]}], reference) > 1.0


@pytest.mark.parametrize("rows", [[np.arange(5.0), np.arange(3.0)], [np.array([1.0, 2.0, -np.inf])]])
def test_columns_whose_number_depends_on_the_data_and_infinite_elements_are_equal(rows):
    reference = [{"y": row[None]} for row in rows]
    assert output_error([{"y": row[None].copy()} for row in rows], reference) == 0.0


_KINDS = {
    "classes": lambda rng: rng.normal(size=(3, 7)), "probabilities": lambda rng: softmax(rng.normal(size=(3, 7))),
    "positions": lambda rng: detector(60, seed=int(rng.integers(1000))),
    "boxes without an object": lambda rng: detector(60, seed=3) * (rng.random() < 0.5),
    "dense": lambda rng: 1e4 + rng.normal(size=(1, 2, 5, 5)),
}  # fmt: skip


@given(st.sampled_from(sorted(_KINDS)), st.integers(2, 6), st.integers(0, 10**6))
def test_the_error_without_a_sample_is_that_of_the_others(kind, count, seed):
    rng = np.random.default_rng(seed)
    reference = [{"y": _KINDS[kind](rng)} for _ in range(count)]
    actual = [{"y": r["y"] + rng.normal(0, 0.01, r["y"].shape)} for r in reference]
    uses, signals = find_uses(reference), {}
    for _ in range(2):  # with what is known of the reference the second time
        found = Deviations(iter(actual), reference, uses=uses, signals=signals)
        assert found.error() == output_error(actual, reference, uses=uses)
    for i in range(count):
        rest = [j for j in range(count) if j != i]
        alone = output_error([actual[j] for j in rest], [reference[j] for j in rest], uses=uses)
        assert found.error(without=i) == found.errors_without_each()[i] == alone


@given(st.integers(1, 5), st.integers(0, 10**6))
def test_dense_errors_are_noise_over_variance(count, seed):
    rng = np.random.default_rng(seed)
    reference = [{"y": rng.normal(7.0, 1.0, (1, 2, 3, 3))} for _ in range(count)]
    actual = [{"y": r["y"] + rng.normal(0, 0.1, r["y"].shape)} for r in reference]
    a, b = (np.concatenate([o["y"] for o in each]) for each in (actual, reference))
    assert output_error(actual, reference) == pytest.approx(((a - b) ** 2).sum() / ((b - b.mean()) ** 2).sum())


# ---- signal and noise -----------------------------------------------------------------------------------------------


finite = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=5), elements=st.floats(-100, 100, width=32))


@given(finite, st.floats(0.0009765625, 0.5, width=32))
def test_sqnr_of_equal_and_of_scaled_signals(x, error):
    assert sqnr_db(x, x) == math.inf
    if np.any(x):
        assert sqnr_db(x, x.astype(np.float64) * (1 + error)) == pytest.approx(-20 * math.log10(error), abs=1e-3)


def test_sqnr_edge_cases():
    zero, one = np.zeros(3), np.ones(3)
    assert (sqnr_db(zero, zero), sqnr_db(zero, one)) == (math.inf, -math.inf)
    assert sqnr_db(np.zeros((0, 4)), np.zeros((0, 4))) == math.inf
    masked = np.array([1.0, -math.inf, math.nan])
    assert sqnr_db(masked, masked.copy()) == math.inf
    assert sqnr_db(masked, np.array([1.0, 0.0, math.nan])) == -math.inf
    with pytest.raises(ValueError, match="shapes differ"):
        sqnr_db(zero, np.ones(4))


def _net(quantized):
    g = QdqGraph(seed=3)
    x = g.input((4, 32))
    return g.model(g.gemm(g.q(x) if quantized else x, weight="dq" if quantized else "float"))


def test_compare_outputs():
    reference, quantized = _net(False), _net(True)
    name = quantized.graph.output[0].name
    reference.graph.node[-1].output[0] = reference.graph.output[0].name = name
    feeds = [random_feeds(reference, seed) for seed in range(4)]
    (found,) = compare_outputs(reference, quantized, iter(feeds))
    assert (found.name, found.elements) == (name, 4 * 4 * 16)
    assert 25 < found.sqnr_db < 60
    assert 0.99 < found.cosine < 1
    assert (found.agreement or 0) > 0.8
    assert 0 < found.max_abs < 0.5
    (same,) = compare_outputs(reference, reference.SerializeToString(), feeds)
    assert (same.sqnr_db, same.equal, same.max_abs, same.agreement) == (math.inf, 1.0, 0.0, 1.0)


@pytest.mark.parametrize(("shape", "agreement"), [((1, 2, 2), 0.5), ((1, 2, 1, 2), 0.0)], ids=["rows", "maps"])
def test_the_largest_is_sought_among_the_last_or_among_channels(shape, agreement):
    def adds(values):
        held = np.array(values, np.float32).reshape(shape)
        return parse(f"(float{list(shape)} x) => (y) {{ y = Add (x, s) }}", {"s": held})

    (found,) = compare_outputs(adds([1, 2, 3, 4]), adds([4, 5, 3, 1]), [{"x": np.zeros(shape, np.float32)}])
    assert found.agreement == agreement


def test_samples_with_another_number_of_rows_are_counted_and_not_compared():
    def positive(shift):
        text = """(float[n] x) => (float[m] y, int64[1] k) {
            z = Add (x, s)  zero = Sub (s, s)  keep = Greater (z, zero)  y = Compress (z, keep)  k = Shape (y) }"""
        return parse(text, {"s": np.float32(shift)})

    feeds = [{"x": np.float32([1, 2, 3])}, {"x": np.float32([-0.05, 2, 3])}]
    values, count = compare_outputs(positive(0.0), positive(0.1), feeds)
    assert (values.skipped, values.samples, values.elements) == (1, 2, 3)
    assert 20 < values.sqnr_db < 40
    assert (count.skipped, count.floating, count.equal) == (0, False, 0.5)


def test_compare_outputs_refuses_other_outputs_and_bad_samples():
    reference = _net(False)
    with pytest.raises(VerificationError, match="no output"):
        compare_outputs(reference, _net(True), [])
    with pytest.raises(VerificationError, match="sample 0"):
        compare_outputs(reference, reference, [{"nothing": np.zeros(3)}])


# ---- metrics of the caller's: which shapes are taken, what they are told, what is said where they are wrong ---------


LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
REFERENCE = [{"y": np.eye(3)[label][None]} for label in LABELS]


def labelled(outputs, reference, indices):
    """Top-1 against labels."""
    del reference
    return float(np.mean([o["y"].argmax() == LABELS[i] for o, i in zip(outputs, indices, strict=True)]))


class Accuracy:
    """The same in the manner of torchmetrics."""

    def __init__(self):
        self.seen = []
        self.right = 0

    def update(self, outputs, reference, index):
        self.right += int(outputs["y"].argmax() == LABELS[index])
        self.seen.append(index)

    def compute(self):
        return self.right / len(self.seen)

    def reset(self):
        self.seen, self.right = [], 0


def _pairs(indices, wrong=0):
    outputs = [{"y": np.roll(REFERENCE[i]["y"], n < wrong, axis=1)} for n, i in enumerate(indices)]
    return [(o, REFERENCE[i]) for o, i in zip(outputs, indices, strict=True)]


def test_both_kinds_find_labels_by_the_samples_numbers_and_say_the_same_of_the_parts_too():
    metric = Accuracy()
    metric.update(*_pairs([0])[0], 0)
    for checked in map(check_metric, (labelled, metric)):
        assert checked.takes_indices
        assert checked.score(_pairs([7, 2, 9, 0], wrong=1), [7, 2, 9, 0]).value == 0.75
        assert checked.score(_pairs([7, 2, 9, 0]), [8, 3, 1, 1]).value < 0.5
        told = checked.score(_pairs(range(10), wrong=3), range(10))
        assert (told.value, told.parts) == (0.7, (0.0, 0.5, 1.0, 1.0, 1.0))
    assert metric.seen == [], "reset before and after"


def test_metrics_of_two_arguments_go_on_and_indices_with_a_default_are_told():
    for metric, value in (
        (lambda outputs, reference: float(len(outputs) == len(reference) == 4), 1.0),
        (lambda outputs, reference, threshold=0.5: threshold, 0.5),
        (lambda *a: float(len(a)), 2.0),
        (partial(lambda threshold, outputs, reference: threshold, 0.5), 0.5),
    ):
        checked = check_metric(metric)
        assert not checked.takes_indices
        assert checked.score(_pairs([0, 1, 2, 3]), [0, 1, 2, 3]).value == value
    told = check_metric(lambda outputs, reference, indices=(): float(sum(indices)))
    assert told.score(_pairs([3, 4]), [3, 4]).value == 7.0


class Broken(Accuracy):
    def update(self, outputs, reference, index):
        raise KeyError("logits")


@pytest.mark.parametrize(("metric", "message"), [
    (lambda outputs: 0.0, "takes \\(outputs\\)"), (lambda a, b, c, d: 0.0, "takes \\(a, b, c, d\\)"),
    (lambda a, b, *, labels: 0.0, "labels"), (Accuracy, "is a class"), ("accuracy", "cannot be called"),
    (0.5, "cannot be called"), (SimpleNamespace(update=max, compute=float), "no reset"),
])  # fmt: skip
def test_wrong_shapes_are_refused_at_once(metric, message):
    with pytest.raises(ArgumentTypeError, match=message) as caught:
        check_metric(metric)
    assert "metric" in str(caught.value)


@pytest.mark.parametrize(("metric", "message"), [
    (lambda o, r: float("nan"), "returned nan"), (lambda o, r: None, "returned NoneType"),
    (lambda o, r: 1 / 0, "raised ZeroDivisionError"), (lambda o, r: np.array([1.0, 2.0]), "returned ndarray"),
    (Broken(), "raised KeyError"),
])  # fmt: skip
def test_a_broken_metric_is_said(metric, message):
    with pytest.raises(OptionError, match=message):
        check_metric(metric).score(_pairs([0, 1]), [0, 1])


def test_a_metric_that_parts_break_has_no_interval():
    whole_only = check_metric(lambda outputs, reference: 1 / (len(outputs) == 10))
    found = whole_only.score(_pairs(range(10)), range(10))
    assert (found.value, found.parts) == (1.0, ())


@given(st.integers(0, 300))
def test_parts_are_all_samples_once(count):
    bounds = part_bounds(count)
    assert [i for a, b in bounds for i in range(a, b)] == (list(range(count)) if bounds else [])
    assert all(b - a >= 2 for a, b in bounds)
    assert len(bounds) <= 10


@given(st.floats(0, 1), st.floats(-1, 1))
def test_budget(allowed, lost):
    assert is_within(lost, allowed) == (lost <= allowed + 1e-9 * (1 + allowed))
