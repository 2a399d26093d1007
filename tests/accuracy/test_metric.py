"""Metrics of the caller's: which shapes are taken, what they are told, what is said where they are wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.accuracy.metric import Budget, check_metric, part_bounds
from kenosis_ort.errors import ArgumentTypeError, OptionError

LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
REFERENCE = [{"y": np.eye(3)[label][None]} for label in LABELS]


def labelled(outputs: Any, reference: Any, indices: Any) -> float:
    """Top-1 against labels."""
    del reference
    return float(np.mean([o["y"].argmax() == LABELS[i] for o, i in zip(outputs, indices, strict=True)]))


class Accuracy:
    """The same in the manner of torchmetrics."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.right = 0

    def update(self, outputs: Any, reference: Any, index: int) -> None:
        self.right += int(outputs["y"].argmax() == LABELS[index])
        self.seen.append(index)

    def compute(self) -> float:
        return self.right / len(self.seen)

    def reset(self) -> None:
        self.seen, self.right = [], 0


def _pairs(indices: Sequence[int], wrong: int = 0) -> list[Any]:
    outputs = [{"y": np.roll(REFERENCE[i]["y"], n < wrong, axis=1)} for n, i in enumerate(indices)]
    return [(o, REFERENCE[i]) for o, i in zip(outputs, indices, strict=True)]


@pytest.mark.parametrize("metric", [labelled, Accuracy()])
def test_labels_are_found_by_the_samples_numbers(metric: Any) -> None:
    checked = check_metric(metric)
    assert checked.takes_indices
    indices = [7, 2, 9, 0]
    assert checked.score(_pairs(indices), indices).value == 1.0
    assert checked.score(_pairs(indices, wrong=1), indices).value == 0.75
    assert checked.score(_pairs(indices, wrong=1), [i + 1 if i < 9 else 1 for i in indices]).value < 0.5


def test_both_kinds_say_the_same_of_the_parts_too() -> None:
    indices = list(range(10))
    metric = Accuracy()
    metric.update(*_pairs([0])[0], 0)
    told, updated = (check_metric(m).score(_pairs(indices, wrong=3), indices) for m in (labelled, metric))
    assert told == updated
    assert metric.seen == [], "reset before and after"
    assert len(told.parts) == 5
    assert np.mean(told.parts) == pytest.approx(told.value)


def test_metrics_of_two_arguments_go_on_and_indices_with_a_default_are_told() -> None:
    class Called:
        def __call__(self, outputs: Any, reference: Any) -> float:
            return 1.0

    for metric, value in (
        (lambda outputs, reference: float(len(outputs) == len(reference) == 4), 1.0),
        (lambda outputs, reference, threshold=0.5: threshold, 0.5),
        (Called(), 1.0),
        (lambda *a: float(len(a)), 2.0),
    ):
        checked = check_metric(metric)
        assert not checked.takes_indices
        assert checked.score(_pairs([0, 1, 2, 3]), [0, 1, 2, 3]).value == value
    told = check_metric(lambda outputs, reference, indices=(): float(sum(indices)))
    assert told.score(_pairs([3, 4]), [3, 4]).value == 7.0


class Broken(Accuracy):
    def update(self, outputs: Any, reference: Any, index: int) -> None:
        raise KeyError("logits")


class NoReset:
    def update(self, outputs: Any, reference: Any) -> None: ...

    def compute(self) -> float:
        return 0.0


@pytest.mark.parametrize(("metric", "message"), [
    (lambda outputs: 0.0, "takes \\(outputs\\)"), (lambda a, b, c, d: 0.0, "takes \\(a, b, c, d\\)"),
    (lambda a, b, *, labels: 0.0, "labels"), (Accuracy, "is a class"), (NoReset(), "no reset"),
    ("accuracy", "cannot be called"), (0.5, "cannot be called"),
])  # fmt: skip
def test_wrong_shapes_are_refused_at_once(metric: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message) as caught:
        check_metric(metric)
    assert "metric" in str(caught.value)


@pytest.mark.parametrize(("metric", "message"), [
    (lambda o, r: float("nan"), "returned nan"), (lambda o, r: None, "returned NoneType"),
    (lambda o, r: 1 / 0, "raised ZeroDivisionError"), (lambda o, r: np.array([1.0, 2.0]), "returned ndarray"),
    (Broken(), "raised KeyError"),
])  # fmt: skip
def test_a_broken_metric_is_said(metric: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_metric(metric).score(_pairs([0, 1]), [0, 1])


def test_a_metric_that_parts_break_has_no_interval() -> None:
    def whole_only(outputs: Any, reference: Any) -> float:
        if len(outputs) < 10:
            raise ValueError("only one class present")
        return 0.7

    found = check_metric(whole_only).score(_pairs(range(10)), list(range(10)))
    assert (found.value, found.parts) == (0.7, ())


@given(st.integers(0, 300))
def test_parts_are_all_samples_once(count: int) -> None:
    bounds = part_bounds(count)
    assert [i for a, b in bounds for i in range(a, b)] == (list(range(count)) if bounds else [])
    assert all(b - a >= 2 for a, b in bounds)
    assert len(bounds) <= 10


@given(st.floats(0, 1), st.floats(-1, 1))
def test_budget(allowed: float, lost: float) -> None:
    assert Budget(allowed).holds(lost) == (lost <= allowed + 1e-9 * (1 + allowed))


@pytest.mark.parametrize("loss", [-0.1, float("nan"), float("inf")])
def test_a_budget_that_is_none(loss: float) -> None:
    with pytest.raises(OptionError, match="is not a loss"):
        Budget(loss)
