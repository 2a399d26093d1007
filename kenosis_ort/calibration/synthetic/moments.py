"""Mean and deviation of features, fitted so that the first BatchNormalization sees the statistics it has stored.

The front is linear, so its response to each group of inputs (a feature, a channel) is measured once: to a constant, and
to noise. Means follow by regularized least squares, with neighbouring groups taken to be alike where the statistics
leave it open; variances, which are not negative, by multiplicative updates (M. E. Daube-Witherspoon and G. Muehllehner,
1986). Neither needs gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.synthetic.draws import Draws
from kenosis_ort.calibration.synthetic.smooth_noise import deviation, pink
from kenosis_ort.calibration.synthetic.stem import Stem, StemPoint

Doubles = npt.NDArray[np.float64]

MOST_GROUPS = 2048
_NOISE = 0.01  # of the stored means, as a share of the prior's variance
_ROUNDS = 30  # few, so that what the statistics leave open stays even
_TRIALS = 24
_DEAD = 1e-3  # channels whose stored deviation is below that share of the median are left out
_STEPS = 64.0


@dataclass(frozen=True)
class ValueMoments:
    """Mean and deviation of an input's values, broadcasting to its shape without the first axis.

    Attributes:
        mean: Means.
        spread: Standard deviations.
        misfit: What remains between measured and stored statistics, see `misfit`.
    """

    mean: Doubles
    spread: Doubles
    misfit: float


def misfit(point: StemPoint, responses: list[Doubles]) -> float:
    """How far the statistics at a BatchNormalization are from the stored ones.

    The median over the live channels of ``ln(s / s0)**2 + ((m - m0) / s0)**2``: 0 for equal statistics, 0.5 for half or
    double the deviation.
    """
    assert point.mean is not None
    assert point.deviation is not None
    values = np.concatenate(responses, axis=1)
    live = point.deviation > _DEAD * np.median(point.deviation)
    mean, spread = values.mean(axis=1), np.maximum(values.std(axis=1), 1e-12)
    cost = np.log(spread / point.deviation) ** 2 + ((mean - point.mean) / point.deviation) ** 2
    return float(np.median(cost[live]))


def fit_moments(
    stem: Stem, shape: tuple[int, ...], axis: int, sample: Callable[[int], Doubles], dtype: npt.DTypeLike
) -> ValueMoments | None:
    """Fits mean and deviation of each group along an axis.

    Args:
        stem: A front that ends at a BatchNormalization.
        shape: Shape of the input, batch first.
        axis: Of the groups.
        sample: Noise of unit variance and the shape, by index.
        dtype: Of the input.

    Returns:
        Mean and deviation; None where there are too many groups, or nothing arrives.
    """
    point, groups = stem.point, shape[axis]
    if point is None or point.mean is None or point.deviation is None or groups > MOST_GROUPS:
        return None
    target, spread = point.mean, point.deviation
    live = spread > _DEAD * np.median(spread)
    base = stem.respond([np.zeros(shape, dtype)])[0].mean(axis=1)
    constant, variance = np.empty((len(target), groups)), np.empty((len(target), groups))
    noise = _noise(shape, axis)
    for group in range(groups):
        one, noisy = np.zeros(shape), np.zeros(shape)
        here = tuple(group if a == axis else slice(None) for a in range(len(shape)))
        one[here], noisy[here] = 1.0, noise[here]
        first, second = stem.respond([one.astype(dtype), noisy.astype(dtype)])
        constant[:, group] = first.mean(axis=1) - base
        variance[:, group] = ((second - base[:, None]) ** 2).mean(axis=1)
    scaled, wanted = constant[live] / spread[live, None], (target - base)[live] / spread[live]
    means = _smooth_solution(scaled, wanted)
    squares = _positive_solution(variance[live] / spread[live, None] ** 2)
    outline = tuple(groups if a == axis else 1 for a in range(1, len(shape)))
    mean, deviations = means.reshape(outline), np.sqrt(squares).reshape(outline)
    if not np.isfinite(deviations).all() or not deviations.any():
        return None
    trials = [sample(i) for i in range(_TRIALS)]
    measured = np.concatenate(stem.respond((mean + deviations * t).astype(dtype) for t in trials), axis=1).std(axis=1)
    deviations = deviations * np.exp(np.median(np.log(spread[live] / np.maximum(measured[live], 1e-12))))
    # Rounded, so that the last bits of the runtime's sums, which depend on the processor, do not matter.
    unit = _power_of_two(float(np.median(deviations))) / _STEPS
    mean, deviations = np.rint(mean / unit) * unit, np.maximum(np.rint(deviations / unit), 1.0) * unit
    rest = misfit(point, stem.respond((mean + deviations * t).astype(dtype) for t in trials))
    return ValueMoments(mean, deviations, rest)


def _noise(shape: tuple[int, ...], axis: int) -> Doubles:
    """Noise of unit variance, smooth along the axes that are no groups."""
    moved = [size for a, size in enumerate(shape) if a not in (0, axis)]
    values = pink(Draws(0, "trial"), (shape[0], shape[axis], *moved), axes=min(len(moved), 2))
    return np.moveaxis(values / deviation(values), 1, axis)


def _smooth_solution(matrix: Doubles, wanted: Doubles) -> Doubles:
    """The likeliest x with ``matrix @ x = wanted``, up to noise, of values that are alike among neighbours."""
    groups = matrix.shape[1]
    distance = np.subtract.outer(np.arange(groups), np.arange(groups)) / max(groups / 16, 1.0)
    prior = 1.0 + 0.5 / (1.0 + distance**2) + 0.1 * np.eye(groups)
    spread = matrix @ prior @ matrix.T
    noise = _NOISE * float(np.trace(spread)) / len(spread) + 1e-30
    solution: Doubles = prior @ matrix.T @ np.linalg.solve(spread + noise * np.eye(len(spread)), wanted)
    return solution


def _positive_solution(matrix: Doubles) -> Doubles:
    """X >= 0 that brings ``matrix @ x`` near 1 everywhere."""
    x = np.full(matrix.shape[1], 1.0 / max(float(matrix.sum(axis=1).mean()), 1e-30))
    pull = matrix.sum(axis=0)
    for _ in range(_ROUNDS):
        x = x * pull / np.maximum(matrix.T @ (matrix @ x), 1e-30)
    return x


def _power_of_two(value: float) -> float:
    return float(2.0 ** np.round(np.log2(max(value, 1e-30))))
