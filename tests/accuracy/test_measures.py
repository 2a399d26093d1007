"""What every measure keeps, and intervals hold what they say."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.accuracy import measured, measures
from tests.accuracy.samples import boxes_of, sigmoid, softmax


def _scores(*shape: int, into: Any = np.float32) -> Any:
    """Function that makes an output of this shape from noisy scores."""
    return lambda rng, noise: {"y": into(rng.normal(size=shape) * 3 + noise * rng.normal(size=shape))}


def _ids(rng: np.random.Generator, noise: float) -> dict[str, np.ndarray]:
    x = rng.integers(0, 50, (1, 12))
    return {"y": np.where(rng.uniform(size=x.shape) < 0.3 * noise, 1 + x, x)}


def _found(rng: np.random.Generator, noise: float) -> dict[str, np.ndarray]:
    boxes = boxes_of(rng, 6)
    scores = rng.uniform(size=(1, 6, 3)) * np.array([1.0, 0.6, 0.3])
    return {"y": boxes + 8 * noise * rng.normal(size=boxes.shape), "s": scores}


CASES: list[tuple[measured.Measure, Any]] = [
    (measures.ClassAgreement("y"), _scores(2, 5)), (measures.ClassAgreement("y", "token"), _scores(1, 7, 11)),
    (measures.YesOrNo("y"), _scores(1, 1, into=sigmoid)), (measures.SameTokens("y"), _ids),
    (measures.MaskOverlap("y"), _scores(1, 1, 9, 9, into=sigmoid)),
    (measures.ClassOverlap("y", 1, 4), _scores(1, 4, 8, 8, into=lambda x: softmax(x, 1))),
    (measures.DetectionF1(measures.BoxLayout("y", "s", score_columns=(0, 1, 2))), _found),
    (measures.RelativeError("y"), _scores(2, 5)),
]  # fmt: skip
by_measure = pytest.mark.parametrize(
    ("measure", "make"), CASES, ids=[type(m).__name__ + str(i) for i, (m, _) in enumerate(CASES)]
)


def _outputs(make: Any, seed: int, noise: float, count: int) -> list[Mapping[str, np.ndarray]]:
    return [make(np.random.default_rng([seed, i]), noise) for i in range(count)]


def _measured(measure: measured.Measure, outputs: Any, reference: Any) -> measured.Measured:
    return measured.measure_pairs([measure], zip(outputs, reference, strict=True))[0]


@by_measure
@given(seed=st.integers(0, 2**16), noise=st.floats(0.0, 3.0), count=st.integers(1, 12))
def test_bounds_and_interval(measure: measured.Measure, make: Any, seed: int, noise: float, count: int) -> None:
    found = _measured(measure, _outputs(make, seed, noise, count), _outputs(make, seed, 0.0, count))
    assert found.samples == count
    assert found.value >= 0.0
    assert not found.higher_is_better or found.value <= 1.0
    assert found.loss >= 0.0
    if found.low is not None and found.high is not None:
        assert 0.0 <= found.low <= found.value <= found.high
        assert found.best_loss <= found.loss <= found.worst_loss
    assert found.expected is None or 0.0 <= found.expected <= 1.0


@by_measure
@given(seed=st.integers(0, 2**16), count=st.integers(1, 10))
def test_the_reference_itself_is_perfect(measure: measured.Measure, make: Any, seed: int, count: int) -> None:
    reference = _outputs(make, seed, 0.0, count)
    found = _measured(measure, reference, reference)
    assert found.value == found.float_value == (1.0 if found.higher_is_better else 0.0)
    assert found.loss == found.loss_for(0.005) == 0.0
    assert found.expected in (None, 1.0)


@by_measure
@given(seed=st.integers(0, 2**16), order=st.permutations(range(9)))
def test_the_order_of_samples_is_nothing(measure: measured.Measure, make: Any, seed: int, order: list[int]) -> None:
    outputs, reference = _outputs(make, seed, 1.0, 9), _outputs(make, seed, 0.0, 9)
    one = _measured(measure, outputs, reference)
    other = _measured(measure, [outputs[i] for i in order], [reference[i] for i in order])
    assert one.value == pytest.approx(other.value, rel=1e-12)
    assert one.expected == (None if other.expected is None else pytest.approx(other.expected, rel=1e-9))


@by_measure
def test_noise_costs(measure: measured.Measure, make: Any) -> None:
    reference = _outputs(make, 3, 0.0, 30)
    less, more = (_measured(measure, _outputs(make, 3, noise, 30), reference).loss for noise in (0.3, 2.0))
    assert less < more


@by_measure
def test_values_that_are_no_numbers_and_other_shapes_are_lost(measure: measured.Measure, make: Any) -> None:
    reference = _outputs(make, 5, 0.0, 3)
    spoilt = [lambda x: np.full_like(x, np.nan) if x.dtype.kind == "f" else x + 1]
    if not isinstance(measure, measures.DetectionF1):  # boxes without scores are no output of any model
        spoilt.append(lambda x: x[:, :0] if x.ndim < 4 else x[:, :, :0])
    for spoil in spoilt:
        outputs = [{name: spoil(value) for name, value in entry.items()} for entry in reference]
        assert _measured(measure, outputs, reference).loss > 0.4


def test_expected_agreement_is_what_many_samples_say() -> None:
    """Margins and noise of few samples tell the loss that many show, closer than counting these few."""
    rng = np.random.default_rng(0)
    margin, noise = 6.0, 0.55
    scores = rng.normal(size=(40_000, 10)).astype(np.float32) * margin
    noisy = scores + noise * rng.normal(size=scores.shape).astype(np.float32)

    def of_rows(count: int, start: int = 0) -> measured.Measured:
        parts = [slice(at, at + 64) for at in range(start, start + count, 64)]
        both = ([{"y": rows[p]} for p in parts] for rows in (noisy, scores))
        return _measured(measures.ClassAgreement("y"), *both)

    many = of_rows(20_000)
    few = [of_rows(64, 64 * i) for i in range(100)]
    assert 0.005 < many.loss < 0.1
    assert 1.0 - many.expected == pytest.approx(many.loss, rel=0.15)
    assert np.std([1.0 - m.expected for m in few]) < 0.75 * np.std([m.loss for m in few])
    assert np.mean([1.0 - m.expected for m in few]) == pytest.approx(many.loss, rel=0.15)
    assert few[0].loss_for(0.005) == max(few[0].loss, 1.0 - few[0].expected)
    assert many.loss_for(0.005) == many.loss


def test_relative_error_is_an_amplitude() -> None:
    signal = np.random.default_rng(1).normal(size=(1, 3, 64, 64)) + 7.0
    reference = [{"y": signal}]
    off = [{"y": signal + 0.01 * signal.std() * np.sign(np.random.default_rng(2).normal(size=signal.shape))}]
    assert _measured(measures.RelativeError("y"), off, reference).value == pytest.approx(0.01, rel=1e-6)


def test_the_output_that_lost_most_speaks() -> None:
    a, b = (measured.Measured(n, "share", v, 1.0, 9, 9) for n, v in (("a", 0.9), ("b", 0.99)))
    error = measured.Measured("e", "share", 0.3, 0.0, 9, 9, higher_is_better=False)
    assert measured.worst([b, a]) is a
    assert measured.worst([b, a, error]) is error


def test_boxes_are_matched_by_class_and_overlap() -> None:
    layout = measures.BoxLayout("boxes", "scores", label="labels")
    boxes = np.array([[0, 0, 10, 10], [1, 0, 10, 10], [50, 50, 60, 60.0]])[None]
    one = {"boxes": boxes, "scores": np.array([[0.9, 0.8, 0.7]]), "labels": np.array([[1, 1, 2]])}
    f1 = measures.DetectionF1(layout)
    assert f1.sums(one, one).tolist() == [4.0, 4.0]  # the second box is the first again
    other = {**one, "labels": np.array([[1, 1, 3]])}
    assert f1.sums(other, one).tolist() == [2.0, 4.0]
    assert f1.value(np.array([0.0, 0.0])) == 1.0
    assert measures.overlaps(boxes[0], boxes[0]).diagonal() == pytest.approx(1.0)
    assert measures.overlaps(boxes[0], boxes[0])[0, 2] == 0.0


def test_centers_columns_and_transposed_heads_are_the_same_boxes() -> None:
    corners = np.array([[10, 10, 30, 50], [60, 20, 80, 30.0]])
    centers = np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], axis=1)
    scores = np.array([[0.9, 0.1], [0.2, 0.8]])
    head = np.concatenate([centers, scores], axis=1)[None]
    straight = measures.BoxLayout("y", "y", corners=False, score_columns=(4, 5))
    turned = measures.BoxLayout("y", "y", corners=False, score_columns=(4, 5), transposed=True)
    assert straight.boxes_of({"y": head})[0] == pytest.approx(corners)
    assert turned.boxes_of({"y": head.swapaxes(1, 2)})[0] == pytest.approx(corners)
    assert straight.scores_of({"y": head})[1].tolist() == [[0, 1]]


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_wilson_is_within_bounds_and_holds_the_share(count: int, share: float) -> None:
    low, high = measured.wilson(share, count)
    assert 0.0 <= low <= share <= high <= 1.0


def test_wilson_as_published() -> None:
    """Two hundred of two hundred: the loss may be 1.9 %, and half a percent is not told."""
    assert measured.wilson(1.0, 200) == (pytest.approx(0.98115, abs=1e-5), 1.0)
    assert measured.wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


SHARE = measures.YesOrNo("y").value
INTERVALS: dict[str, Any] = {
    "wilson": lambda x: measured.wilson(x.mean(), 200),
    "bootstrap": lambda x: measured.bootstrap(np.stack([x, np.ones(200)], axis=1).astype(float), SHARE),
    "parts": lambda x: measured.of_parts(x.mean(), x.reshape(10, 20).mean(axis=1), samples=200, scale=1.0),
}


@pytest.mark.parametrize("kind", INTERVALS)
def test_coverage(kind: str) -> None:
    seen = np.random.default_rng(0).uniform(size=(200, 200)) < 0.9
    held = [low <= 0.9 <= high for low, high in map(INTERVALS[kind], seen)]
    assert 0.88 <= np.mean(held) <= 0.995


def test_few_samples_tell_no_interval() -> None:
    assert measured.bootstrap(np.ones((measured.LEAST_SAMPLES - 1, 2)), SHARE) is None
    assert measured.of_parts(0.5, np.ones(3), samples=3, scale=1.0) is None


def test_nothing_seen_to_change_may_still_change() -> None:
    low, high = measured.of_parts(0.9, np.zeros(10), samples=300, scale=1.0) or (0.0, 0.0)
    assert 0.005 < 0.9 - low < 0.02
    assert high - 0.9 == pytest.approx(0.9 - low)
