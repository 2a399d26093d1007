"""The caller's own measure of how good outputs are, called so that what goes wrong in it is said and not swallowed.

A metric is ``metric(outputs, reference) -> float``. Both arguments are lists over the feeds, in their order, of
dictionaries from output name to array; ``reference`` comes from the float model, ``outputs`` from the model to judge.
**The result is larger for better outputs**, e.g. the accuracy against labels that the callable knows itself, the share
of decisions that agree with the reference, or a PSNR. The float model's own score is ``metric(reference, reference)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kenosis_ort.accuracy.error import Outputs
from kenosis_ort.errors import OptionError

_ROUNDING = 1e-9

Metric = Callable[[Sequence[Outputs], Sequence[Outputs]], float]
OutputError = Callable[[Sequence[Outputs], Sequence[Outputs]], float]
"""Like a metric, but 0 for equal outputs and larger for worse ones; close to additive over sources of noise."""


def call_metric(metric: Metric, outputs: Sequence[Outputs], reference: Sequence[Outputs]) -> float:
    """Returns what a metric says.

    Raises:
        OptionError: It raises, or returns no finite number.
    """
    name = getattr(metric, "__name__", type(metric).__name__)
    try:
        result = metric(outputs, reference)
    except Exception as error:
        raise OptionError(
            f"the metric raised {type(error).__name__}: {error}",
            where=f"metric '{name}'",
            fix="call it on outputs of the float model: metric(outputs, reference), lists over feeds of "
            "{output name: array}",
        ) from error
    try:
        score = float(result)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the metric returned {type(result).__name__}, not a number",
            where=f"metric '{name}'",
            fix="return one number, larger for better outputs",
        ) from error
    if not math.isfinite(score):
        raise OptionError(
            f"the metric returned {score}",
            where=f"metric '{name}'",
            fix="return a finite number for every set of outputs, e.g. 0.0 where nothing was detected",
        )
    return score


@dataclass(frozen=True)
class Budget:
    """How much of the float model's score may be lost.

    Attributes:
        loss: Largest loss, e.g. 0.005.
        relative: Whether it is a share of the float model's score, or in the score's own unit.
    """

    loss: float = 0.005
    relative: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.loss) and self.loss >= 0):
            raise OptionError(
                f"accuracy_budget={self.loss} is not a loss that can be allowed",
                where="accuracy_budget",
                fix="give a finite number from 0 up, e.g. 0.005",
            )

    def loss_of(self, score: float, float_score: float) -> float:
        """Returns what was lost, negative for a gain."""
        lost = float_score - score
        return lost / max(abs(float_score), float(np.finfo(np.float64).tiny)) if self.relative else lost

    def holds(self, score: float, float_score: float) -> bool:
        """Tells whether a score is within the budget."""
        return self.loss_of(score, float_score) <= self.loss * (1 + _ROUNDING) + _ROUNDING

    def __str__(self) -> str:
        return f"{100 * self.loss:g} % of the float score" if self.relative else f"{self.loss:g}"
