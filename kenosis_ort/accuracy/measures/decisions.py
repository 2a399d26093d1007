"""Agreement of decisions: the largest class score, the token at each position, yes or no at one half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kenosis_ort.accuracy.measures.model import Float64, Measure, Outputs, share

_LEAST_PROBABILITY = 1e-9


@dataclass(frozen=True)
class Agreement(Measure):
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
    def name(self) -> str:
        return f"{self.what} agreement with the float model in output '{self.output}'"

    @property
    def unit(self) -> str:
        return "share of decisions" if self.what == "top-1" else "share of tokens"

    @property
    def independent(self) -> bool:
        return self.what == "top-1"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = _rows(actual[self.output]), _rows(expected[self.output])
        same = int((_winners(a) == _winners(b)).sum()) if a.shape == b.shape else 0
        return np.array([same, max(len(a), len(b))], np.float64)

    def value(self, sums: Float64) -> Float64:
        return share(sums)

    def details(self, actual: Outputs, expected: Outputs) -> Float64 | None:
        """Returns by row the margin between the two best classes, and the noise on their difference."""
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
        """Returns the agreement that follows from margins and noise, for classes.

        Another class wins where noise on the difference of the two best scores exceeds their margin. The noise is
        taken as normal with the root mean square seen over all rows, so that samples of which none flips tell apart
        losses far below one over their number.
        """
        if not details:
            return None
        margin, noise = np.concatenate(details).T
        spread = math.sqrt(float(np.mean(noise**2)))
        return 1.0 if spread == 0.0 else 1.0 - float(np.mean([_tail(m / spread) for m in margin]))

    def _scores(self, array: Float64) -> Float64:
        rows = _rows(array)
        return np.log(np.maximum(rows, _LEAST_PROBABILITY)) if self.logarithms else rows


@dataclass(frozen=True)
class YesOrNo(Measure):
    """Share of values on the same side of one half as the float model's."""

    output: str

    @property
    def name(self) -> str:
        return f"agreement with the float model at 0.5 in output '{self.output}'"

    @property
    def unit(self) -> str:
        return "share of decisions"

    @property
    def independent(self) -> bool:
        return True

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = actual[self.output] >= 0.5, expected[self.output] >= 0.5
        same = int((a == b).sum()) if a.shape == b.shape else 0
        return np.array([same, max(a.size, b.size)], np.float64)

    def value(self, sums: Float64) -> Float64:
        return share(sums)


@dataclass(frozen=True)
class SameTokens(Measure):
    """Share of integers that are the same as the float model's."""

    output: str

    @property
    def name(self) -> str:
        return f"token agreement with the float model in output '{self.output}'"

    @property
    def unit(self) -> str:
        return "share of tokens"

    def sums(self, actual: Outputs, expected: Outputs) -> Float64:
        a, b = actual[self.output], expected[self.output]
        same = int((a == b).sum()) if a.shape == b.shape else 0
        return np.array([same, max(a.size, b.size)], np.float64)

    def value(self, sums: Float64) -> Float64:
        return share(sums)


def _rows(array: Float64) -> Float64:
    """Returns scores as (rows, classes): the classes are the last axis, or the last but axes of one element."""
    shape = array.shape
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return np.asarray(array, np.float64).reshape(math.prod(shape[:-1]), shape[-1])


def _winners(rows: Float64) -> Float64:
    """Returns the place of the largest score of each row; -1 where one is no number."""
    return np.asarray(np.where(np.isnan(rows).any(axis=1), -1, rows.argmax(axis=1)))


def _tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2.0))
