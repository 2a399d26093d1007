"""Running sums over two versions of a tensor, by channel: enough for SQNR, cosine, range and clipping."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kenosis_ort.accuracy.error import Array

Float64 = npt.NDArray[np.float64]

_RESCALED = 0.05  # mean distance of the channels' gains from 1 beyond which they are taken for a rescaling
_LEAST_COUNT = 64  # elements a channel has to have for its gain to mean anything
_EXPLAINED = 0.25  # share of the noise that may be left once it is undone


class ChannelSums:
    """Adds up a float tensor and its quantized version over samples.

    Args:
        low: Least value that the quantized one can hold, None if unknown.
        high: Largest value.
        step: Its step: what lies less than half a step beyond the range is not clipped.
    """

    def __init__(self, low: float | None = None, high: float | None = None, step: float | None = None) -> None:
        half = (step or 0.0) / 2
        self._bounds = None if low is None or high is None else (low - half, high + half)
        self._sums: Float64 | None = None
        self.least, self.largest = float("inf"), float("-inf")
        self.elements = self.clipped = self.odd = 0

    def add(self, reference: Array, actual: Array) -> bool:
        """Adds one sample.

        Args:
            reference: Float tensor; axis 1 are channels where there are two axes or more.
            actual: The other one.

        Returns:
            False, without adding, if the shapes differ.
        """
        if reference.shape != actual.shape:
            return False
        x, y = _by_channel(reference), _by_channel(actual)
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            self.odd += int(finite.size - finite.sum())
            x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
        counts, difference = np.full(x.shape[0], x.shape[1]), x - y
        sums = np.stack([counts, x.sum(1), y.sum(1), _dot(x, x), _dot(x, y), _dot(y, y), _dot(difference, difference)])
        if self._sums is None:
            self._sums = sums
        elif self._sums.shape == sums.shape:
            self._sums += sums
        else:  # the number of channels depends on the sample: one channel for all
            self._sums = self._sums.sum(1, keepdims=True) + sums.sum(1, keepdims=True)
        if x.size:
            self.least, self.largest = min(self.least, float(x.min())), max(self.largest, float(x.max()))
        self.elements += x.size
        if self._bounds is not None:
            self.clipped += int(np.count_nonzero((x < self._bounds[0]) | (x > self._bounds[1])))
        return True

    @property
    def clipping(self) -> float:
        """Share of the float tensor's elements beyond what the quantized one can hold, 0..1."""
        return self.clipped / self.elements if self.elements else 0.0

    @property
    def rms(self) -> float:
        """Root mean square of the float tensor."""
        return 0.0 if self._sums is None or not self.elements else float(np.sqrt(self._sums[3].sum() / self.elements))

    def plain(self) -> tuple[float, float]:
        """Returns SQNR in dB and cosine of the two as they are."""
        if self._sums is None:
            return float("nan"), float("nan")
        _, _, _, xx, xy, yy, dd = self._sums.sum(1)
        norm = float(np.sqrt(xx * yy))
        return _decibel(float(xx), float(dd)), float(xy) / norm if norm > 0 else float("nan")

    def result(self) -> tuple[float, float, bool]:
        """Returns SQNR in dB, cosine, and whether the channels were found rescaled and compared without that.

        Equalization multiplies the channels of inner tensors by constants, and shifts them: no error, but no match.
        """
        if self._sums is None:
            return float("nan"), float("nan"), False
        count, sx, sy, xx, xy, yy, dd = self._sums
        if len(count) < 2 or count.min() < _LEAST_COUNT:
            return (*self.plain(), False)
        n = np.maximum(count, 1)
        vx, vy, cov = xx - sx * sx / n, yy - sy * sy / n, xy - sx * sy / n
        live = (vx > 1e-9 * np.maximum(xx, 1e-300)) & (xx > 1e-6 * xx.max(initial=0.0))
        gains = np.where(live, cov / np.where(live, vx, 1.0), 1.0)
        left = np.where(live & (gains > 0), vy - gains * cov, dd)
        undone = float((left / np.where(gains > 0, gains, 1.0) ** 2).sum())
        weights = np.where(live, xx, 0.0)
        distance = float((weights * np.abs(np.log(np.clip(gains, 1e-6, 1e6)))).sum() / max(weights.sum(), 1e-300))
        if distance > _RESCALED and undone < _EXPLAINED * float(dd.sum()):
            correlation = float(np.sqrt(max(0.0, 1.0 - undone / max(float(vx.sum()), 1e-300))))
            return _decibel(float(vx.sum()), undone), correlation, True
        return (*self.plain(), False)


def _by_channel(array: Array) -> Float64:
    values = np.asarray(array, dtype=np.float64)
    if values.ndim < 2:
        return values.reshape(1, -1)
    return np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)


def _dot(x: Float64, y: Float64) -> Float64:
    out: Float64 = np.einsum("ij,ij->i", x, y)
    return out


def _decibel(signal: float, noise: float) -> float:
    if noise <= 0:
        return float("inf")
    return float(10 * np.log10(signal / noise)) if signal > 0 else float("-inf")
