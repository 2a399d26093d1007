"""How noisy a layer will be once its input and its weights are quantized, for factors on its input channels."""

from __future__ import annotations

import numpy as np

from kenosis_ort.accuracy.channel_statistics import ChannelStatistics
from kenosis_ort.accuracy.layers import Float64, Layer
from kenosis_ort.accuracy.links import Link

HEADROOM = 1.25
"""By how much unseen data may exceed the range seen before a grown channel becomes the largest."""
LARGEST_FACTOR = 64.0
"""Largest ratio between the factors of two channels; channels more dead than that stay near dead."""


class LinkNoise:
    """Predicted noise to signal ratio of the second layer's outputs, added up over its output channels.

    Args:
        link: The two layers.
        observed: Statistics of what the second layer reads, by channel of the first.
        second: Canonical weights of the second layer.
        per_channel: Whether weights get a scale by output channel.
        levels: Largest integer of a weight.
    """

    def __init__(
        self, link: Link, observed: ChannelStatistics, second: Float64, per_channel: bool, levels: int
    ) -> None:
        layer = link.second
        self._repeat, self._layer, self._levels, self._per_channel = link.repeat, layer, levels, per_channel
        self._low, self._high = np.minimum(observed.low, 0.0), np.maximum(observed.high, 0.0)
        self._power = np.repeat(observed.second_moment, link.repeat)
        squares = (second**2).sum(axis=2)
        signal = (squares * layer.by_group(self._power)).sum(axis=1)
        floor = max(float(signal.max(initial=0.0)) * 1e-6, float(np.finfo(np.float64).tiny))
        self._importance = 1.0 / np.maximum(signal, floor)
        self._columns = _by_input(layer, squares * self._importance[:, None], np.add)
        self._largest = np.abs(second).max(axis=2)
        rows = np.maximum(self._largest.max(axis=1, keepdims=True), float(np.finfo(np.float64).tiny))
        relative = self._largest / (rows if per_channel else rows.max())
        self._relative = _fold(_by_input(layer, relative, np.maximum), link.repeat, np.maximum)
        self._range = np.maximum(self._high - self._low, 0.0)

    def factors(self, a: float, b: float) -> Float64:
        """Returns factors ``D^-a * r^b`` that leave the largest channel as it is; dead channels keep theirs.

        Args:
            a: Exponent of the activation's range.
            b: Exponent of the largest relative weight that reads the channel.
        """
        top = float(self._range.max(initial=0.0))
        if top <= 0.0:
            return np.ones_like(self._range)
        seen = np.maximum(self._range, top / LARGEST_FACTOR)
        seen = np.where(seen < top / HEADROOM, seen * HEADROOM, np.maximum(seen, top / HEADROOM))
        column = np.maximum(self._relative, 1.0 / LARGEST_FACTOR)
        raw = (seen / top) ** -a * column**b
        scaled = raw * top / float((raw * np.minimum(seen, top)).max())
        return np.asarray(np.where(self._range > 0.0, scaled, 1.0))

    @np.errstate(over="ignore")  # a net whose values grow without end is left alone: no noise is below infinity
    def of(self, factors: Float64) -> float:
        """Returns the predicted noise for factors, infinity where it overflows."""
        inputs = np.repeat(factors, self._repeat)
        step = (float((self._high * factors).max()) - float((self._low * factors).min())) / 255.0
        rounding = step**2 / 12.0 * float((self._columns / inputs**2).sum())
        groups = self._layer.groups
        by_group = self._largest.reshape(groups, -1, self._largest.shape[1])  # no copy of the factors by output channel
        largest = (by_group / inputs.reshape(groups, 1, -1)).max(axis=2).reshape(-1)
        if not self._per_channel:
            largest = np.full_like(largest, largest.max())
        power = (self._power * inputs**2).reshape(groups, -1).sum(axis=1) * self._layer.taps
        power = np.repeat(power, largest.size // groups)
        weights = float(((largest / self._levels) ** 2 / 12.0 * power * self._importance).sum())
        return rounding + weights


def _by_input(layer: Layer, per_weight: Float64, join: np.ufunc) -> Float64:
    """Joins (output channels, input channels of the group) over output channels; returns (input channels,)."""
    grouped = per_weight.reshape(layer.groups, -1, per_weight.shape[1])
    joined: Float64 = join.reduce(grouped, axis=1).reshape(-1)
    return joined


def _fold(per_input: Float64, repeat: int, join: np.ufunc) -> Float64:
    folded: Float64 = join.reduce(per_input.reshape(-1, repeat), axis=1)
    return folded
