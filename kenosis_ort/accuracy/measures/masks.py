"""Overlap of masks: intersection over union of what is above one half, or of the classes of a label map."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kenosis_ort.accuracy.measures.model import Array, Float64, Measure, Outputs, share

THRESHOLD = 0.5


@dataclass(frozen=True)
class MaskOverlap(Measure):
    """Intersection over union of the pixels above one half; 1 where there are none in either."""

    output: str

    @property
    def name(self) -> str:
        return f"mask IoU with the float model at {THRESHOLD:g} in output '{self.output}'"

    @property
    def unit(self) -> str:
        return "intersection over union"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = (np.asarray(o[self.output]) >= THRESHOLD for o in (actual, expected))
        if a.shape != b.shape:
            return np.array([0, a.sum() + b.sum(), max(a.size, b.size)], np.float64)
        return np.array([(a & b).sum(), (a | b).sum(), a.size], np.float64)

    def value(self, sums: Float64) -> Float64:
        return share(sums)

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

    @property
    def name(self) -> str:
        return f"class IoU with the float model in output '{self.output}'"

    @property
    def unit(self) -> str:
        return "mean intersection over union"

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
