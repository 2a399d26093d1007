"""Measures by family: agreement of decisions, overlap of masks and label maps, found objects, relative error.

Decisions are the largest class score, the token at each position, yes or no at one half. Masks are what is above one
half, label maps the classes; objects are the boxes that both models find, matched by class and overlap. The relative
error remains where nothing is decided by the output, or nobody can tell what.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from kenosis_ort.accuracy.error import Array, Float64, Outputs, as_rows
from kenosis_ort.accuracy.measured import Measure

_LEAST_PROBABILITY = 1e-9
THRESHOLD = 0.5  # score from which on something was found
_MATCH = 0.5  # overlap of two boxes that are the same object
_SAME = 0.6  # overlap of two boxes of one model that are one object
_MOST = 300  # boxes a sample and class that are looked at


@dataclass(frozen=True)
class ClassAgreement(Measure):
    """Share of rows whose largest score is at the same place as the float model's: classes, or tokens in a sequence.

    Attributes:
        output: The output.
        what: ``top-1`` for classes, ``token`` for positions of a sequence.
        logarithms: Whether scores are made logarithms for `expected`: they are probabilities.
    """

    output: str
    what: str = "top-1"
    logarithms: bool = False

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"{self.what} agreement with the float model in"

    @property
    def unit(self) -> str:  # type: ignore[override]
        return "share of decisions" if self.what == "top-1" else "share of tokens"

    @property
    def independent(self) -> bool:  # type: ignore[override]
        return self.what == "top-1"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = _rows(actual[self.output]), _rows(expected[self.output])
        same = int((_winners(a) == _winners(b)).sum()) if a.shape == b.shape else 0
        return np.array([same, max(len(a), len(b))], np.float64)

    def details(self, actual: Outputs, expected: Outputs) -> Float64 | None:
        """Margin between the two best classes by row, and the noise on their difference."""
        if self.what != "top-1":
            return None
        a, b = (self._scores(o[self.output]) for o in (actual, expected))
        if a.shape != b.shape or b.shape[1] < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return None
        order = np.argsort(-b, axis=1, kind="stable")[:, :2]
        at, first, second = np.arange(len(b)), order[:, 0], order[:, 1]
        noise = a - b
        return np.stack([b[at, first] - b[at, second], noise[at, second] - noise[at, first]], axis=1)

    def expected(self, details: Sequence[Float64]) -> float | None:
        """The agreement that follows from margins and noise, for classes.

        Another class wins where noise on the difference of the two best scores exceeds their margin. The noise is
        taken as normal with the root mean square seen over all rows, so that samples of which none flips tell apart
        losses far below one over their number.
        """
        if not details:
            return None
        margin, noise = np.concatenate(details).T
        spread = math.sqrt(float(np.mean(noise**2)))
        return (
            1.0
            if spread == 0.0
            else 1.0 - float(np.mean([0.5 * math.erfc(m / (spread * math.sqrt(2.0))) for m in margin]))
        )

    def _scores(self, array: Float64) -> Float64:
        rows = _rows(array)
        return np.log(np.maximum(rows, _LEAST_PROBABILITY)) if self.logarithms else rows


@dataclass(frozen=True)
class SameTokens(Measure):
    """Share of integers that are the same as the float model's."""

    output: str

    title = "token agreement with the float model in"
    unit = "share of tokens"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = (self.decided(outputs[self.output]) for outputs in (actual, expected))
        same = int((a == b).sum()) if a.shape == b.shape else 0
        return np.array([same, max(a.size, b.size)], np.float64)

    @staticmethod
    def decided(values: Array) -> Array:
        """What is compared of an output's values."""
        return values


@dataclass(frozen=True)
class YesOrNo(SameTokens):
    """Share of values on the same side of one half as the float model's."""

    title = "agreement with the float model at 0.5 in"
    unit = "share of decisions"
    independent = True

    @staticmethod
    def decided(values: Array) -> Array:
        return np.asarray(values >= 0.5)


@dataclass(frozen=True)
class RelativeError(Measure):
    """Root mean square of the error over that of the signal about its mean.

    An amplitude, as a reader takes "half a percent off" to mean, and no power: 0.005 is 46 dB, not 23.
    """

    output: str
    higher_is_better: ClassVar[bool] = False

    title = "relative error of"
    unit = "share of the signal's root mean square"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = (np.asarray(o[self.output], np.float64).ravel() for o in (actual, expected))
        finite = np.isfinite(b)
        if a.shape != b.shape:
            a = np.zeros_like(b)
        a, b = a[finite], b[finite]
        a = np.where(np.isfinite(a), a, 0.0)
        return np.array([((a - b) ** 2).sum(), b.size, b.sum(), (b**2).sum()], np.float64)

    def value(self, sums: Float64) -> Float64:
        noise, count, total, power = (sums[..., i] for i in range(4))
        variance = power - total**2 / np.maximum(count, 1.0)
        sure = variance > 1e-12 * power
        return np.asarray(np.where(sure, np.sqrt(noise / np.where(sure, variance, 1.0)), np.where(noise > 0, 1.0, 0.0)))


@dataclass(frozen=True)
class MaskOverlap(Measure):
    """Intersection over union of the pixels above one half; 1 where there are none in either."""

    output: str

    title = f"mask IoU with the float model at {THRESHOLD:g} in"
    unit = "intersection over union"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = (np.asarray(o[self.output]) >= THRESHOLD for o in (actual, expected))
        if a.shape != b.shape:
            return np.array([0, a.sum() + b.sum(), max(a.size, b.size)], np.float64)
        return np.array([(a & b).sum(), (a | b).sum(), a.size], np.float64)

    def counted(self, sums: Float64) -> int:
        return int(sums[2])


@dataclass(frozen=True)
class ClassOverlap(Measure):
    """Intersection over union of each class of a label map, the mean over the classes that occur in either.

    Attributes:
        output: Scores with the classes along an axis, or labels.
        axis: That axis; None for labels.
        classes: Number of classes; labels beyond count as the last.
    """

    output: str
    axis: int | None
    classes: int

    title = "class IoU with the float model in"
    unit = "mean intersection over union"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = (self._labels(o[self.output]) for o in (actual, expected))
        own, other = (np.bincount(x, minlength=self.classes) for x in (a, b))
        same = a[a == b] if len(a) == len(b) else a[:0]
        both = np.bincount(same, minlength=self.classes)
        return np.concatenate([both, own + other - both, [len(b)]]).astype(np.float64)

    def value(self, sums: Float64) -> Float64:
        both, either = sums[..., : self.classes], sums[..., self.classes : 2 * self.classes]
        occurs = either > 0
        overlap = np.where(occurs, both / np.where(occurs, either, 1.0), 0.0)
        count = occurs.sum(axis=-1)
        return np.asarray(np.where(count > 0, overlap.sum(axis=-1) / np.maximum(count, 1), 1.0))

    def counted(self, sums: Float64) -> int:
        return int(sums[-1])

    def _labels(self, array: Array) -> Array:
        labels = np.asarray(array) if self.axis is None else np.asarray(array).argmax(axis=self.axis)
        return np.asarray(np.clip(labels, 0, self.classes - 1).ravel(), np.int64)


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
        for sample in range(max(len(ours), len(theirs))):
            a = ours[sample] if sample < len(ours) else {}
            b = theirs[sample] if sample < len(theirs) else {}
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


def without_ones(array: Array) -> Array:
    """Scores with the classes last: behind the second axis, axes of one element at the end are left out."""
    while array.ndim > 2 and array.shape[-1] == 1:
        array = array[..., 0]
    return array


def _rows(array: Array) -> Float64:
    """Scores as (rows, classes)."""
    return as_rows(without_ones(array), -1)


def _winners(rows: Float64) -> Float64:
    """The place of the largest score of each row; -1 where one is no number."""
    return np.asarray(np.where(np.isnan(rows).any(axis=1), -1, rows.argmax(axis=1)))
