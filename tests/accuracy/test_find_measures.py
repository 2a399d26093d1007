"""What an output is for: told by operator, shape and values together; where they do not agree, the relative error."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from kenosis_ort.accuracy.find_measures import find_measures
from tests.accuracy.samples import boxes_of, sigmoid, softmax

RNG = np.random.default_rng(0)


def graph(**outputs: Sequence[str]) -> onnx.GraphProto:
    """Returns a graph whose outputs are each behind a chain of operators."""
    made = onnx.GraphProto(name="net", output=[onnx.ValueInfoProto(name=name) for name in outputs])
    for name, chain in outputs.items():
        values = ["x", *(f"{name}_{at}" for at in range(len(chain) - 1)), name]
        made.node.extend(map(helper.make_node, chain, zip(values), zip(values[1:])))
    return made


def kind(chain: Sequence[str], arrays: Sequence[Any], fed: Any = None) -> str:
    feeds = [] if fed is None else [{"x": fed}]
    found = find_measures(graph(y=chain), [{"y": np.asarray(a)} for a in arrays], feeds)
    return found[0].name.split(" ")[0] if found else ""


def normal(*shape: int, count: int = 16, scale: float = 4.0) -> list[Any]:
    return [RNG.normal(size=shape).astype(np.float32) * scale for _ in range(count)]


LANDMARKS = [(RNG.normal(size=(1, 20)) + np.arange(20) * 5).astype(np.float32) for _ in range(16)]
SMOOTH = [sigmoid(RNG.normal(size=(1, 1, 16, 16))) for _ in range(4)]

CASES: list[tuple[str, Sequence[str], Sequence[Any], Any]] = [
    ("top-1", ["Softmax"], [softmax(a) for a in normal(1, 10)], None),
    ("top-1", ["Softmax", "Reshape"], [softmax(a) for a in normal(2, 10, count=1)], None),
    ("top-1", ["LogSoftmax"], [np.log(softmax(a)) for a in normal(1, 10)], None),
    ("top-1", ["Gemm"], normal(1, 10), None),
    ("top-1", ["Gemm", "Identity"], normal(8, 10, count=2), None),
    ("top-1", ["GlobalAveragePool", "Flatten"], normal(1, 10), None),
    ("top-1", ["Conv"], normal(1, 10, 1, 1), None),
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


def _case(case: tuple[str, Sequence[str], Sequence[Any], Any]) -> str:
    return f"{case[0] or 'none'}-{'-'.join(case[1]) or 'input'}-{np.shape(case[2][0]) if len(case[2]) else ()}"


@pytest.mark.parametrize(("expected", "chain", "arrays", "fed"), CASES, ids=list(map(_case, CASES)))
def test_kinds(expected: str, chain: Sequence[str], arrays: Sequence[Any], fed: Any) -> None:
    assert kind(chain, arrays, fed) == expected


def test_a_mask_of_the_shape_of_a_picture_is_none_where_it_is_the_picture() -> None:
    masks = [sigmoid(a) for a in normal(1, 1, 16, 16, count=4, scale=20.0)]
    for fed, expected in ((masks, "relative"), (normal(1, 1, 16, 16, count=4), "mask")):
        outputs, feeds = [{"y": m} for m in masks], [{"x": f} for f in fed]
        assert find_measures(graph(y=["Sigmoid"]), outputs, feeds)[0].name.startswith(expected)


def _found(chain: dict[str, Sequence[str]], samples: Sequence[dict[str, Any]]) -> str:
    return " ".join(m.name.split(" ")[0] for m in find_measures(graph(**chain), samples))


def test_boxes_beside_scores() -> None:
    heads = {"boxes": ["Concat"], "scores": ["Softmax"]}
    scores = [softmax(RNG.normal(size=(1, 50, 3)) * 4 + np.array([3, 0, 0])) for _ in range(6)]
    assert _found(heads, [{"boxes": boxes_of(RNG, 50), "scores": s} for s in scores]) == "F1"
    offsets = normal(1, 50, 4, count=6, scale=1.0)
    assert _found(heads, [{"boxes": b, "scores": s} for b, s in zip(offsets, scores, strict=True)]) == "token"
    few = [{"boxes": boxes_of(RNG, 50), "scores": s * 0.4} for s in scores]  # nothing is found
    assert _found({**heads, "scores": ["Mul"]}, few) == "relative relative"


def test_boxes_of_changing_number_with_labels() -> None:
    heads = {"boxes": ["Gather"], "scores": ["Gather"], "labels": ["Gather"]}
    seen = [(boxes_of(RNG, n)[0], RNG.uniform(size=n).astype(np.float32), RNG.integers(0, 3, n)) for n in (4, 7, 2)]
    assert _found(heads, [dict(zip(heads, each, strict=True)) for each in seen]) == "F1"


def test_boxes_in_columns() -> None:
    def head(*, centers: bool) -> Any:
        boxes = boxes_of(RNG, 80)
        if centers:
            boxes = np.concatenate([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], axis=-1)
        return np.concatenate([boxes, RNG.uniform(size=(1, 80, 3)) ** 8], axis=-1).astype(np.float32)

    for made in (head(centers=False), head(centers=True), head(centers=True).swapaxes(1, 2)):
        assert kind(["Mul", "Concat"], [made]) == "F1"
    offsets = head(centers=True)
    offsets[..., :4] = RNG.normal(size=(1, 80, 4))
    assert kind(["Mul", "Concat"], [offsets]) == "relative"
    listed = np.concatenate([boxes_of(RNG, 20)[0], RNG.uniform(size=(20, 1)), RNG.integers(0, 9, (20, 1))], axis=-1)
    assert kind(["Gather"], [listed.astype(np.float32)]) == "F1"


def test_texts_of_any_length_have_no_columns() -> None:
    texts = [normal(1, length, 8, count=1)[0] for length in (9, 12, 5)]
    assert kind(["LayerNormalization"], texts) == "relative"
    shares = [sigmoid(a.swapaxes(-1, -2)) for a in texts]
    boxes = [np.abs(normal(1, 8, 4, count=1)[0]) for _ in texts]
    samples = [{"boxes": box, "scores": share} for box, share in zip(boxes, shares, strict=True)]
    assert "F1" not in _found({"boxes": ["Concat"], "scores": ["Sigmoid"]}, samples)


def test_features_beside_a_decision_are_not_the_measure() -> None:
    heads = {"features": ["Relu"], "logits": ["Gemm"]}
    samples = [{"features": f, "logits": y} for f, y in zip(normal(1, 32), normal(1, 10), strict=True)]
    assert _found(heads, samples) == "top-1"
