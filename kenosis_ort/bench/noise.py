"""Comparison of two series of paired timings: a ratio, its noise interval and a verdict.

In every round each model is timed once, so the rounds give paired observations: the logarithm of (reference's time /
own time). The ratio is their median. The interval is the distribution-free one of the median (the sign test turned
around): of n sorted observations the k-th and the (n + 1 - k)-th enclose the true median unless fewer than k of n
fall on one side of it, which happens with probability ``2 * P(Binomial(n, 1/2) < k)``. It supposes nothing about the
shape of the noise, needs no random numbers, and exchanging the two series or scaling both changes nothing but the
sign. Source: Thompson, "On confidence ranges for the median", Annals of Mathematical Statistics 7 (1936), 122-128.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

CONFIDENCE: Final = 0.95
MARGIN: Final = 1.02
"""Speeds within this factor count as equal: code placement and memory layout alone move a session that much."""
LEAST_ROUNDS: Final = 6
"""With fewer, no interval of median reaches `CONFIDENCE`."""
_LEAST_TIME: Final = 1e-9


class Verdict(str, Enum):
    """Verdict of a comparison of two times."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no difference"
    NOISY = "too noisy"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class SpeedComparison:
    """One model's speed relative to another's.

    Attributes:
        ratio: Median over the rounds of (reference's time / own time); above 1 is faster than the reference.
        low: Lower end of the noise interval of the ratio.
        high: Its upper end.
        verdict: ``no difference`` where the whole interval lies within the factor `MARGIN` of 1; ``faster`` or
            ``slower`` where it lies on one side of 1 and the ratio beyond the margin; ``too noisy`` otherwise, and
            with fewer than `LEAST_ROUNDS` rounds.
    """

    ratio: float
    low: float
    high: float
    verdict: Verdict


def compare(reference: Sequence[float], own: Sequence[float]) -> SpeedComparison:
    """Compares two series of times.

    Args:
        reference: Time of the reference model by round, in any unit.
        own: Time of the model in question by round, in the same unit.

    Raises:
        ValueError: The series are empty or of different length.
    """
    if not reference or len(reference) != len(own):
        raise ValueError(f"the series hold {len(reference)} and {len(own)} rounds")
    logs = sorted(
        math.log(max(theirs, _LEAST_TIME)) - math.log(max(ours, _LEAST_TIME))
        for theirs, ours in zip(reference, own, strict=True)
    )
    rank = interval_rank(len(logs))
    low, high = logs[(rank or 1) - 1], logs[-(rank or 1)]
    middle = statistics.median(logs)
    verdict = Verdict.NOISY if rank is None else _verdict(low, middle, high, math.log(MARGIN))
    return SpeedComparison(math.exp(middle), math.exp(low), math.exp(high), verdict)


def interval_rank(rounds: int, confidence: float = CONFIDENCE) -> int | None:
    """K such that the k-th smallest and k-th largest observation enclose the median; None with too few.

    Args:
        rounds: Number of observations.
        confidence: Least probability of enclosing it, 0..1.
    """
    tail, rank = 0.0, 0
    while rank < rounds:
        tail += math.comb(rounds, rank) / 2**rounds  # exact integers first: no underflow however many rounds
        if 1 - 2 * tail < confidence:
            break
        rank += 1
    return rank or None


def _verdict(low: float, middle: float, high: float, margin: float) -> Verdict:
    """The verdict for a log ratio and its interval."""
    if -margin <= low and high <= margin:
        return Verdict.SAME
    if low > 0 and middle > margin:
        return Verdict.FASTER
    if high < 0 and middle < -margin:
        return Verdict.SLOWER
    return Verdict.NOISY
