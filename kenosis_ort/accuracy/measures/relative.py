"""Relative error: what remains where nothing is decided by the output, or nobody can tell what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kenosis_ort.accuracy.measures.model import Float64, Measure, Outputs


@dataclass(frozen=True)
class RelativeError(Measure):
    """Root mean square of the error over that of the signal about its mean.

    An amplitude, as a reader takes "half a percent off" to mean, and no power: 0.005 is 46 dB, not 23.
    """

    output: str
    higher_is_better: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"relative error of output '{self.output}'"

    @property
    def unit(self) -> str:
        return "share of the signal's root mean square"

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
        told = variance > 1e-12 * power
        return np.asarray(np.where(told, np.sqrt(noise / np.where(told, variance, 1.0)), np.where(noise > 0, 1.0, 0.0)))
