"""The measure of detectors: objects are the boxes that both models find, matched by class and overlap."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kenosis_ort.accuracy import Array, Float64, Outputs
from kenosis_ort.accuracy.measures import THRESHOLD, Measure

_MATCH = 0.5  # overlap of two boxes that are the same object
_SAME = 0.6  # overlap of two boxes of one model that are one object
_MOST = 300  # boxes a sample and class that are looked at


class BoxLayout(NamedTuple):
    """Layout of boxes and scores in the outputs.

    Attributes:
        boxes: Output with the boxes.
        scores: Output with the scores; the same as `boxes` where one output holds both.
        corners: Boxes are two corners; else center, width and height.
        score_columns: Columns of the scores; empty where the scores have no columns.
        label: Column, or output, of the class; None where the classes are the columns.
        transposed: Positions are the last axis, columns the one before.
    """

    boxes: str
    scores: str
    corners: bool = True
    score_columns: tuple[int, ...] = ()
    label: int | str | None = None
    transposed: bool = False

    def boxes_of(self, outputs: Outputs) -> Float64:
        """The boxes as corners, shape (samples, positions, 4)."""
        found = self._columns(outputs[self.boxes])[..., :4]
        if self.corners:
            return found
        center, half = found[..., :2], found[..., 2:] / 2
        return np.concatenate([center - half, center + half], axis=-1)

    def scores_of(self, outputs: Outputs) -> tuple[Float64, Array]:
        """Score and class by position, shape (samples, positions)."""
        array = outputs[self.scores]
        if not self.score_columns:
            scores = np.asarray(array, np.float64).reshape(1 if array.ndim == 1 else len(array), -1)
            labels: Array = np.zeros(scores.shape, np.int64)
        else:
            columns = self._columns(array)[..., list(self.score_columns)]
            scores, labels = columns.max(axis=-1), columns.argmax(axis=-1)
        if isinstance(self.label, str):
            labels = np.asarray(outputs[self.label]).reshape(scores.shape)
        elif self.label is not None:
            labels = self._columns(array)[..., self.label]
        return scores, np.asarray(np.round(labels), np.int64)

    def _columns(self, array: Array) -> Float64:
        shaped = np.asarray(array, np.float64)
        shaped = shaped[None] if shaped.ndim == 2 else shaped
        return shaped.swapaxes(-1, -2) if self.transposed else shaped


@dataclass(frozen=True)
class DetectionF1(Measure):
    """Twice the objects that both find over all that either finds; an object is a box after suppression of doubles."""

    layout: BoxLayout

    title = f"F1 of detections with the float model's (score {THRESHOLD:g}, IoU {_MATCH:g}) in"
    unit = "F1"

    @property
    def output(self) -> str:  # type: ignore[override]
        return self.layout.boxes

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        ours, theirs = self._found(actual), self._found(expected)
        matched, total = 0, 0
        nothing: dict[int, Float64] = {}
        for a, b in itertools.zip_longest(ours, theirs, fillvalue=nothing):
            total += sum(map(len, a.values())) + sum(map(len, b.values()))
            matched += sum(_matched(a[label], b[label]) for label in a.keys() & b.keys())
        return np.array([2 * matched, total], np.float64)

    def _found(self, outputs: Outputs) -> list[dict[int, Float64]]:
        """Boxes by class of each sample, best first."""
        boxes = self.layout.boxes_of(outputs)
        scores, labels = self.layout.scores_of(outputs)
        found = []
        for box, score, label in zip(boxes, scores, labels, strict=True):
            by_class = {}
            certain = score >= THRESHOLD
            for one in sorted(set(label[certain].tolist())):
                at = np.flatnonzero(certain & (label == one))
                order = at[np.argsort(-score[at], kind="stable")][:_MOST]
                by_class[int(one)] = _without_doubles(box[order])
            found.append(by_class)
        return found


def overlaps(a: Float64, b: Float64) -> Float64:
    """Intersection over union of boxes given by corners, shapes (n, 4) and (m, 4), as (n, m)."""
    low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    inner = np.clip(high - low, 0, None).prod(axis=-1)
    own, other = (np.clip(x[:, 2:] - x[:, :2], 0, None).prod(axis=-1) for x in (a, b))
    union = own[:, None] + other[None] - inner
    return np.asarray(np.where(union > 0, inner / np.where(union > 0, union, 1.0), 0.0))


def _without_doubles(boxes: Float64) -> Float64:
    close = overlaps(boxes, boxes) > _SAME
    chosen: list[int] = []
    gone = np.zeros(len(boxes), bool)
    for index in range(len(boxes)):
        if not gone[index]:
            chosen.append(index)
            gone |= close[index]
    return boxes[chosen]


def _matched(a: Float64, b: Float64) -> int:
    """Number of pairs of boxes of the same object, the closest first, each box in one pair."""
    overlap, count = overlaps(a, b), 0
    while overlap.size and overlap.max() >= _MATCH:
        i, j = np.unravel_index(int(overlap.argmax()), overlap.shape)
        overlap[i], overlap[:, j] = 0.0, 0.0
        count += 1
    return count
