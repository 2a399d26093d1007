"""What every measure keeps, what intervals hold, and what measure an output gets by operator, shape and values."""

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from kenosis_ort.accuracy import detections, find_measures, measures, quantile


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return (e / e.sum(axis=axis, keepdims=True)).astype(np.float32)


def sigmoid(x):
    return (1 / (1 + np.exp(-x))).astype(np.float32)


def boxes_of(rng, count):
    """Boxes by their corners."""
    low = rng.uniform(0, 80, (1, count, 2))
    return np.concatenate([low, low + rng.uniform(5, 20, (1, count, 2))], axis=-1).astype(np.float32)


def _scores(*shape, into=np.float32):
    """Function that makes an output of this shape from noisy scores."""
    return lambda rng, noise: {"y": into(rng.normal(size=shape) * 3 + noise * rng.normal(size=shape))}


def _ids(rng, noise):
    x = rng.integers(0, 50, (1, 12))
    return {"y": np.where(rng.uniform(size=x.shape) < 0.3 * noise, 1 + x, x)}


def _boxes(rng, noise):
    boxes = boxes_of(rng, 6)
    scores = rng.uniform(size=(1, 6, 3)) * np.array([1.0, 0.6, 0.3])
    return {"y": boxes + 8 * noise * rng.normal(size=boxes.shape), "s": scores}


CASES = [
    (measures.ClassAgreement("y"), _scores(2, 5)), (measures.TokenAgreement("y"), _scores(1, 7, 11)),
    (measures.YesOrNo("y"), _scores(1, 1, into=sigmoid)), (measures.SameTokens("y"), _ids),
    (measures.MaskOverlap("y"), _scores(1, 1, 9, 9, into=sigmoid)),
    (measures.ClassOverlap("y", 1, 4), _scores(1, 4, 8, 8, into=lambda x: softmax(x, 1))),
    (detections.DetectionF1(detections.BoxLayout("y", "s", score_columns=(0, 1, 2))), _boxes),
    (measures.RelativeError("y"), _scores(2, 5)),
]  # fmt: skip
by_measure = pytest.mark.parametrize(
    ("measure", "make"), CASES, ids=[type(m).__name__ + str(i) for i, (m, _) in enumerate(CASES)]
)


def _outputs(make, seed, noise, count):
    return [make(np.random.default_rng([seed, i]), noise) for i in range(count)]


def _measured(measure, outputs, reference):
    return measures.measure_pairs([measure], zip(outputs, reference, strict=True))[0]


@by_measure
@given(seed=st.integers(0, 2**16), noise=st.floats(0.0, 3.0), count=st.integers(1, 12))
def test_bounds_and_interval(measure, make, seed, noise, count):
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
def test_the_reference_itself_is_perfect(measure, make, seed, count):
    reference = _outputs(make, seed, 0.0, count)
    found = _measured(measure, reference, reference)
    assert found.value == found.float_value == (1.0 if found.higher_is_better else 0.0)
    assert found.loss == found.loss_for(0.005) == 0.0
    assert found.expected in (None, 1.0)


@by_measure
def test_noise_costs(measure, make):
    reference = _outputs(make, 3, 0.0, 30)
    less, more = (_measured(measure, _outputs(make, 3, noise, 30), reference).loss for noise in (0.3, 2.0))
    assert less < more


@by_measure
def test_values_that_are_no_numbers_and_other_shapes_are_lost(measure, make):
    reference = _outputs(make, 5, 0.0, 3)
    spoilt = [lambda x: np.full_like(x, np.nan) if x.dtype.kind == "f" else x + 1]
    if not isinstance(measure, detections.DetectionF1):  # boxes without scores are no output of any model
        spoilt.append(lambda x: x[:, :0] if x.ndim < 4 else x[:, :, :0])
    for spoil in spoilt:
        outputs = [{name: spoil(value) for name, value in entry.items()} for entry in reference]
        assert _measured(measure, outputs, reference).loss > 0.4


def test_expected_agreement_is_what_many_samples_say():
    """Margins and noise of few samples tell the loss that many show, closer than counting these few."""
    rng = np.random.default_rng(0)
    margin, noise = 6.0, 0.55
    scores = rng.normal(size=(40_000, 10)).astype(np.float32) * margin
    noisy = scores + noise * rng.normal(size=scores.shape).astype(np.float32)

    def of_rows(count, start=0):
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


def test_relative_error_is_an_amplitude():
    signal = np.random.default_rng(1).normal(size=(1, 3, 64, 64)) + 7.0
    reference = [{"y": signal}]
    off = [{"y": signal + 0.01 * signal.std() * np.sign(np.random.default_rng(2).normal(size=signal.shape))}]
    assert _measured(measures.RelativeError("y"), off, reference).value == pytest.approx(0.01, rel=1e-6)


def test_the_output_that_lost_most_speaks():
    a, b = (measures.Measured(n, "share", v, 1.0, 9, 9) for n, v in (("a", 0.9), ("b", 0.99)))
    error = measures.Measured("e", "share", 0.3, 0.0, 9, 9, higher_is_better=False)
    assert measures.worst([b, a]) is a
    assert measures.worst([b, a, error]) is error


def test_boxes_are_matched_by_class_and_overlap():
    layout = detections.BoxLayout("boxes", "scores", label="labels")
    boxes = np.array([[0, 0, 10, 10], [1, 0, 10, 10], [50, 50, 60, 60.0]])[None]
    one = {"boxes": boxes, "scores": np.array([[0.9, 0.8, 0.7]]), "labels": np.array([[1, 1, 2]])}
    f1 = detections.DetectionF1(layout)
    assert f1.sums(one, one).tolist() == [4.0, 4.0]  # the second box is the first again
    other = {**one, "labels": np.array([[1, 1, 3]])}
    assert f1.sums(other, one).tolist() == [2.0, 4.0]
    assert f1.value(np.array([0.0, 0.0])) == 1.0
    assert detections.overlaps(boxes[0], boxes[0]).diagonal() == pytest.approx(1.0)
    assert detections.overlaps(boxes[0], boxes[0])[0, 2] == 0.0


def test_centers_columns_and_transposed_heads_are_the_same_boxes():
    corners = np.array([[10, 10, 30, 50], [60, 20, 80, 30.0]])
    centers = np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], axis=1)
    head = np.concatenate([centers, np.array([[0.9, 0.1], [0.2, 0.8]])], axis=1)[None]
    straight = detections.BoxLayout("y", "y", corners=False, score_columns=(4, 5))
    turned = detections.BoxLayout("y", "y", corners=False, score_columns=(4, 5), transposed=True)
    assert straight.boxes_of({"y": head})[0] == pytest.approx(corners)
    assert turned.boxes_of({"y": head.swapaxes(1, 2)})[0] == pytest.approx(corners)
    assert straight.scores_of({"y": head})[1].tolist() == [[0, 1]]


def test_wilson_as_published():
    """Two hundred of two hundred: the loss may be 1.9 %, and half a percent is not told."""
    assert measures.wilson(1.0, 200) == (pytest.approx(0.98115, abs=1e-5), 1.0)
    assert measures.wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


SHARE = measures.YesOrNo("y").value
INTERVALS = {
    "wilson": lambda x: measures.wilson(x.mean(), 200),
    "bootstrap": lambda x: measures.bootstrap(np.stack([x, np.ones(200)], axis=1).astype(float), SHARE),
    "parts": lambda x: measures.of_parts(x.mean(), x.reshape(10, 20).mean(axis=1), samples=200, scale=1.0),
}


@pytest.mark.parametrize("kind", INTERVALS)
def test_coverage(kind):
    seen = np.random.default_rng(0).uniform(size=(200, 200)) < 0.9
    held = [low <= 0.9 <= high for low, high in map(INTERVALS[kind], seen)]
    assert 0.88 <= np.mean(held) <= 0.995


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([0.0, 0.025, 0.9, 0.975, 1.0]))
def test_a_quantile_is_numpys(values, share):
    rows = np.array([values, values[::-1]]).T
    np.testing.assert_array_equal(quantile(rows, share), np.quantile(rows, share, axis=0))


def test_few_samples_tell_no_interval():
    assert measures.bootstrap(np.ones((measures.LEAST_SAMPLES - 1, 2)), SHARE) is None
    assert measures.of_parts(0.5, np.ones(3), samples=3, scale=1.0) is None


def test_nothing_seen_to_change_may_still_change():
    low, high = measures.of_parts(0.9, np.zeros(10), samples=300, scale=1.0) or (0.0, 0.0)
    assert 0.005 < 0.9 - low < 0.02
    assert high - 0.9 == pytest.approx(0.9 - low)


# ---- what an output is for: where operator, shape and values do not agree, the relative error -----------------------


RNG = np.random.default_rng(0)


def graph(**outputs):
    """Returns a graph whose outputs are each behind a chain of operators."""
    made = onnx.GraphProto(name="net", output=[onnx.ValueInfoProto(name=name) for name in outputs])
    for name, chain in outputs.items():
        values = ["x", *(f"{name}_{at}" for at in range(len(chain) - 1)), name]
        made.node.extend(map(onnx.helper.make_node, chain, zip(values), zip(values[1:])))
    return made


def kind_of(chain, arrays, fed=None):
    feeds = [] if fed is None else [{"x": fed}]
    found = find_measures.find_measures(graph(y=chain), [{"y": np.asarray(a)} for a in arrays], feeds)
    return found[0].name.split(" ")[0] if found else ""


def normal(*shape, count=16, scale=4.0):
    return [RNG.normal(size=shape).astype(np.float32) * scale for _ in range(count)]


LANDMARKS = [(RNG.normal(size=(1, 20)) + np.arange(20) * 5).astype(np.float32) for _ in range(16)]
SMOOTH = [sigmoid(RNG.normal(size=(1, 1, 16, 16))) for _ in range(4)]

KINDS = [
    ("top-1", ["Softmax"], [softmax(a) for a in normal(1, 10)], None),
    ("top-1", ["Softmax", "Reshape"], [softmax(a) for a in normal(2, 10, count=1)], None),
    ("top-1", ["LogSoftmax"], [np.log(softmax(a)) for a in normal(1, 10)], None),
    ("top-1", ["Gemm"], normal(1, 10), None), ("top-1", ["Gemm", "Identity"], normal(8, 10, count=2), None),
    ("top-1", ["GlobalAveragePool", "Flatten"], normal(1, 10), None), ("top-1", ["Conv"], normal(1, 10, 1, 1), None),
    ("relative", ["Gemm"], normal(1, 10, count=4), None),  # too few rows to tell
    ("relative", ["Gemm"], normal(1, 64, scale=0.5), None),  # an embedding: no winner
    ("relative", ["Gemm"], LANDMARKS, None),
    ("relative", ["Gemm"], [a + np.eye(10)[0] * 50 for a in normal(1, 10)], None),  # always the same
    ("relative", ["Gemm"], normal(1, 10), np.zeros((1, 10))),  # a reconstruction
    ("relative", ["LayerNormalization"], normal(1, 10), None), ("relative", ["Tanh"], normal(1, 10), None),
    ("relative", [], normal(1, 10), None),  # nothing is known of what makes it
    ("mask", ["Sigmoid"], [sigmoid(a) for a in normal(1, 1, 16, 16, count=4, scale=20.0)], None),
    ("mask", ["Conv", "Sigmoid"], [sigmoid(a) for a in normal(1, 16, 16, count=4, scale=20.0)], None),
    ("relative", ["Sigmoid"], SMOOTH, None),  # a depth map
    ("relative", ["Sigmoid"], [a * 0.4 for a in SMOOTH], None),  # nothing beyond one half
    ("relative", ["Conv"], [sigmoid(a) for a in normal(1, 1, 16, 16, count=4, scale=20.0)], None),  # a picture
    ("agreement", ["Sigmoid"], [sigmoid(a) for a in normal(1, 1)], None),
    ("agreement", ["Sigmoid", "ReduceMean"], [sigmoid(a) for a in normal(1, 1)], None),
    ("class", ["Softmax"], [softmax(a, 1) for a in normal(1, 5, 16, 16, count=3)], None),
    ("class", ["Softmax"], [softmax(a) for a in normal(1, 16, 16, 5, count=3)], None),
    ("class", ["ArgMax"], [RNG.integers(0, 5, (1, 16, 16)) for _ in range(3)], None),
    ("class", ["Resize"], normal(1, 5, 16, 16, count=3), np.zeros((1, 3, 16, 16))),
    ("relative", ["DepthToSpace"], normal(1, 3, 16, 16, count=3), np.zeros((1, 3, 8, 8))),
    ("token", ["Softmax"], [softmax(a) for a in normal(1, 30, 40, count=3)], None),
    ("token", ["MatMul"], normal(1, 12, 1200, count=3, scale=8.0), None),
    ("relative", ["MatMul"], normal(1, 12, 256, count=3), None),  # hidden states
    ("token", ["ArgMax"], [RNG.integers(0, 50, (1, 12)) for _ in range(3)], None),
    ("", ["TopK"], [RNG.integers(0, 50, (1, 12)) for _ in range(3)], None),
    ("relative", ["Gemm"], [np.full((1, 10), np.nan, np.float32), *normal(1, 10)], None),
    ("", ["Gemm"], [np.ones((1, 10), np.float32)] * 3, None),  # constant
    ("", ["Softmax"], [], None),
]  # fmt: skip


def _case(case):
    return f"{case[0] or 'none'}-{'-'.join(case[1]) or 'input'}-{np.shape(case[2][0]) if len(case[2]) else ()}"


@pytest.mark.parametrize(("expected", "chain", "arrays", "fed"), KINDS, ids=list(map(_case, KINDS)))
def test_kinds(expected, chain, arrays, fed):
    assert kind_of(chain, arrays, fed) == expected


def test_a_mask_of_the_shape_of_a_picture_is_none_where_it_is_the_picture():
    masks = [sigmoid(a) for a in normal(1, 1, 16, 16, count=4, scale=20.0)]
    for fed, expected in ((masks, "relative"), (normal(1, 1, 16, 16, count=4), "mask")):
        outputs, feeds = [{"y": m} for m in masks], [{"x": f} for f in fed]
        assert find_measures.find_measures(graph(y=["Sigmoid"]), outputs, feeds)[0].name.startswith(expected)


def _found(chain, samples):
    return " ".join(m.name.split(" ")[0] for m in find_measures.find_measures(graph(**chain), samples))


def test_boxes_beside_scores():
    heads = {"boxes": ["Concat"], "scores": ["Softmax"]}
    scores = [softmax(RNG.normal(size=(1, 50, 3)) * 4 + np.array([3, 0, 0])) for _ in range(6)]
    assert _found(heads, [{"boxes": boxes_of(RNG, 50), "scores": s} for s in scores]) == "F1"
    offsets = normal(1, 50, 4, count=6, scale=1.0)
    assert _found(heads, [{"boxes": b, "scores": s} for b, s in zip(offsets, scores, strict=True)]) == "token"
    few = [{"boxes": boxes_of(RNG, 50), "scores": s * 0.4} for s in scores]  # nothing is found
    assert _found({**heads, "scores": ["Mul"]}, few) == "relative relative"


def test_four_numbers_a_sample_beside_classes_are_no_boxes():
    seen = [{"four": RNG.uniform(0.2, 0.9, (1, 4)), "p": RNG.dirichlet([0.1] * 3)[None]} for _ in range(16)]
    assert "F1" not in _found({"four": ["MatMul"], "p": ["Softmax"]}, seen)


def test_boxes_of_changing_number_with_labels():
    heads = {"boxes": ["Gather"], "scores": ["Gather"], "labels": ["Gather"]}
    seen = [(boxes_of(RNG, n)[0], RNG.uniform(size=n).astype(np.float32), RNG.integers(0, 3, n)) for n in (4, 7, 2)]
    assert _found(heads, [dict(zip(heads, each, strict=True)) for each in seen]) == "F1"


def test_boxes_in_columns():
    def head(*, centers):
        boxes = boxes_of(RNG, 80)
        if centers:
            boxes = np.concatenate([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], axis=-1)
        return np.concatenate([boxes, RNG.uniform(size=(1, 80, 3)) ** 8], axis=-1).astype(np.float32)

    for made in (head(centers=False), head(centers=True), head(centers=True).swapaxes(1, 2)):
        assert kind_of(["Mul", "Concat"], [made]) == "F1"
    offsets = head(centers=True)
    offsets[..., :4] = RNG.normal(size=(1, 80, 4))
    assert kind_of(["Mul", "Concat"], [offsets]) == "relative"
    listed = np.concatenate([boxes_of(RNG, 20)[0], RNG.uniform(size=(20, 1)), RNG.integers(0, 9, (20, 1))], axis=-1)
    assert kind_of(["Gather"], [listed.astype(np.float32)]) == "F1"


def test_texts_of_any_length_have_no_columns():
    texts = [normal(1, length, 8, count=1)[0] for length in (9, 12, 5)]
    assert kind_of(["LayerNormalization"], texts) == "relative"
    shares = [sigmoid(a.swapaxes(-1, -2)) for a in texts]
    boxes = [np.abs(normal(1, 8, 4, count=1)[0]) for _ in texts]
    samples = [{"boxes": box, "scores": share} for box, share in zip(boxes, shares, strict=True)]
    assert "F1" not in _found({"boxes": ["Concat"], "scores": ["Sigmoid"]}, samples)


def test_features_beside_a_decision_are_not_the_measure():
    heads = {"features": ["Relu"], "logits": ["Gemm"]}
    samples = [{"features": f, "logits": y} for f, y in zip(normal(1, 32), normal(1, 10), strict=True)]
    assert _found(heads, samples) == "top-1"
