import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.accuracy.error import Deviations, OutputUse, Use, find_uses, output_error
from kenosis_ort.errors import OptionError
from tests.accuracy.samples import softmax

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
    "classes": lambda rng: rng.normal(size=(3, 7)),
    "probabilities": lambda rng: softmax(rng.normal(size=(3, 7))),
    "positions": lambda rng: detector(60, seed=int(rng.integers(1000))),
    "boxes without an object": lambda rng: detector(60, seed=3) * (rng.random() < 0.5),
    "dense": lambda rng: 1e4 + rng.normal(size=(1, 2, 5, 5)),
}


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
        assert found.error(without=i) == alone


@given(st.integers(1, 5), st.integers(0, 10**6))
def test_dense_errors_are_noise_over_variance(count, seed):
    rng = np.random.default_rng(seed)
    reference = [{"y": rng.normal(7.0, 1.0, (1, 2, 3, 3))} for _ in range(count)]
    actual = [{"y": r["y"] + rng.normal(0, 0.1, r["y"].shape)} for r in reference]
    a, b = (np.concatenate([o["y"] for o in each]) for each in (actual, reference))
    assert output_error(actual, reference) == pytest.approx(((a - b) ** 2).sum() / ((b - b.mean()) ** 2).sum())
