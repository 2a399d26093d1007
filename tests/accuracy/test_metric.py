"""Metrics of the caller's: which shapes are taken, what they are told, what is said where they are wrong."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.accuracy.metric import check_metric, is_within, part_bounds
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


class Called:
    """An object that is called as a function is."""

    def __call__(self, outputs: Any, reference: Any) -> float:
        return float(len(outputs))


def _pairs(indices: Sequence[int], wrong: int = 0) -> list[Any]:
    outputs = [{"y": np.roll(REFERENCE[i]["y"], n < wrong, axis=1)} for n, i in enumerate(indices)]
    return [(o, REFERENCE[i]) for o, i in zip(outputs, indices, strict=True)]


def test_both_kinds_find_labels_by_the_samples_numbers_and_say_the_same_of_the_parts_too() -> None:
    metric = Accuracy()
    metric.update(*_pairs([0])[0], 0)
    for checked in map(check_metric, (labelled, metric)):
        assert checked.takes_indices
        assert checked.score(_pairs([7, 2, 9, 0], wrong=1), [7, 2, 9, 0]).value == 0.75
        assert checked.score(_pairs([7, 2, 9, 0]), [8, 3, 1, 1]).value < 0.5
        told = checked.score(_pairs(range(10), wrong=3), range(10))
        assert (told.value, told.parts) == (0.7, (0.0, 0.5, 1.0, 1.0, 1.0))
    assert metric.seen == [], "reset before and after"


def test_metrics_of_two_arguments_go_on_and_indices_with_a_default_are_told() -> None:
    for metric, value in (
        (lambda outputs, reference: float(len(outputs) == len(reference) == 4), 1.0),
        (lambda outputs, reference, threshold=0.5: threshold, 0.5),
        (lambda *a: float(len(a)), 2.0),
        (partial(lambda threshold, outputs, reference: threshold, 0.5), 0.5),
        (Called(), 4.0),
    ):
        checked = check_metric(metric)
        assert not checked.takes_indices
        assert checked.score(_pairs([0, 1, 2, 3]), [0, 1, 2, 3]).value == value
    told = check_metric(lambda outputs, reference, indices=(): float(sum(indices)))
    assert told.score(_pairs([3, 4]), [3, 4]).value == 7.0


class Broken(Accuracy):
    def update(self, outputs: Any, reference: Any, index: int) -> None:
        raise KeyError("logits")


@pytest.mark.parametrize(("metric", "message"), [
    (lambda outputs: 0.0, "takes \\(outputs\\)"), (lambda a, b, c, d: 0.0, "takes \\(a, b, c, d\\)"),
    (lambda a, b, *, labels: 0.0, "labels"), (Accuracy, "is a class"), ("accuracy", "cannot be called"),
    (0.5, "cannot be called"), (SimpleNamespace(update=max, compute=float), "no reset"),
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
    whole_only = check_metric(lambda outputs, reference: 1 / (len(outputs) == 10))
    found = whole_only.score(_pairs(range(10)), range(10))
    assert (found.value, found.parts) == (1.0, ())


@given(st.integers(0, 300))
def test_parts_are_all_samples_once(count: int) -> None:
    bounds = part_bounds(count)
    assert [i for a, b in bounds for i in range(a, b)] == (list(range(count)) if bounds else [])
    assert all(b - a >= 2 for a, b in bounds)
    assert len(bounds) <= 10


@given(st.floats(0, 1), st.floats(-1, 1))
def test_budget(allowed: float, lost: float) -> None:
    assert is_within(lost, allowed) == (lost <= allowed + 1e-9 * (1 + allowed))
