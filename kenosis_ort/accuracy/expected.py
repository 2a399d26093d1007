"""A score for callers who give no metric: what share of the float model's merit can be expected to be left.

For class scores an error in percent of the signal says little: what counts is how often another class wins, and how
much worse that class is. Where the float model is calibrated, ``p1 - pj`` is the accuracy that is lost when class j is
taken for the float model's first. How often that happens is taken from the size of the noise on the difference of two
scores and the margin between them, over all samples, so that a handful of samples, of which none flips, tells losses
of a tenth of a percent apart. Other outputs score one minus their error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kenosis_ort.accuracy.error import Outputs, OutputUse, Use, errors_by_output, find_uses
from kenosis_ort.accuracy.metric import Metric

Float64 = npt.NDArray[np.float64]

_LEAST_PROBABILITY = 1e-9


def expected_metric(reference: Sequence[Outputs]) -> Metric:
    """Returns a metric that needs no labels: 1 for the float model's own outputs, less for worse ones.

    Args:
        reference: The float model's outputs, one entry a feed.
    """
    return partial(expected_score, uses=find_uses(reference))


def expected_score(
    outputs: Sequence[Outputs], reference: Sequence[Outputs], *, uses: Mapping[str, OutputUse] | None = None
) -> float:
    """Returns one minus the expected loss, averaged over the floating-point outputs.

    Args:
        outputs: What the model to judge returns, one entry a feed.
        reference: What the float model returns.
        uses: What each output is for, from `find_uses`; None finds it out.

    Raises:
        OptionError: An output has another rank than in the reference.
    """
    known = find_uses(reference) if uses is None else uses
    losses = errors_by_output(outputs, reference, uses=known)
    for name, use in known.items():
        if use.use is Use.CLASSES and name in losses:
            pairs = [(np.asarray(a[name]), np.asarray(b[name])) for a, b in zip(outputs, reference, strict=True)]
            alike = [pair for pair in pairs if pair[0].shape == pair[1].shape]
            if alike:
                actual, expected = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*alike, strict=True))
                losses[name] = expected_regret(actual, expected, probabilities=use.probabilities)
    return 1.0 - float(np.mean(list(losses.values()))) if losses else 1.0


def expected_regret(actual: Float64, expected: Float64, *, probabilities: bool = False) -> float:
    """Returns the top-1 accuracy that noise on class scores can be expected to cost, 0..1.

    Args:
        actual: Noisy scores, shape (samples, classes).
        expected: The float model's scores, of the same shape.
        probabilities: Whether they are probabilities; else they are what softmax takes.
    """
    x, y = (np.log(np.maximum(v, _LEAST_PROBABILITY)) if probabilities else v for v in (actual, expected))
    shifted = np.exp(y - y.max(axis=1, keepdims=True))
    confidence = shifted / shifted.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    first = y.argmax(axis=1)
    margin = y[rows, first][:, None] - y
    # Only classes that can win matter, and the noise on them: that on hopeless classes is often much larger.
    near = confidence >= 0.01 * confidence.max(axis=1, keepdims=True)
    near[rows, first] = False
    slip = (x - y) - (x - y)[rows, first][:, None]
    if not near.any():
        return 0.0
    spread = float(np.sqrt(np.mean(slip[near] ** 2)))
    if spread == 0.0:
        return 0.0
    flips = np.where(near, _tail(margin / spread), 0.0)
    lost = confidence[rows, first][:, None] - confidence
    return float(np.mean(np.minimum((flips * lost).sum(axis=1), confidence[rows, first])))


def _tail(x: Float64) -> Float64:
    """Returns the chance that a standard normal number exceeds x, to 1e-7.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17.
    """
    t = 1.0 / (1.0 + 0.2316419 * np.abs(x))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi) * series
    return np.asarray(np.where(x >= 0, upper, 1.0 - upper))
