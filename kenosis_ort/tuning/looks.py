"""When a race is decided: looks at the paired times after some rounds, and what it takes to stop at each.

Looking often and stopping at the first verdict would make noise look like a result. So a look before the last one
asks for more than the last (Haybittle, "Repeated assessment of results in clinical trials", British Journal of
Radiology 44 (1971); Peto et al., British Journal of Cancer 34 (1976)): after three rounds the slowest of one model has
to beat the fastest of the other by a quarter, later a 99 % interval has to lie beyond the margin. The last look is
`bench.noise.compare`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kenosis_ort.bench.noise import LEAST_ROUNDS, MARGIN, Comparison, Verdict, compare, interval_rank

CLEAR: Final = 1.25
"""A factor that a machine fit for timing does not put between two models by chance, round after round."""
LEAST_LOOK: Final = 3
"""Rounds before which nothing is decided."""
NOISY_SPREAD: Final = 1.25
"""Upper by lower end of an interval beyond which the machine, not the difference, is to blame for no verdict."""
_INTERIM_CONFIDENCE: Final = 0.99
_SAME_ROUNDS: Final = 12


@dataclass(frozen=True)
class Looks:
    """How many rounds a race has, and after which of them it may end.

    Attributes:
        rounds: Rounds after which to look, rising; the last number is the most rounds that are made.
        further: Looks after them, for a race whose noise interval still holds the ratio at which a decision turns,
            where the same net is to be decided the same way the next time.
    """

    rounds: tuple[int, ...]
    further: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        """Rounds at most."""
        return self.rounds[-1]


FULL: Final = Looks((3, 8, 12, 16, 21))
REPEATABLE: Final = Looks(FULL.rounds, (31, 45, 61))
SCREENING: Final = Looks((3, 8))


def early(reference: Sequence[float], own: Sequence[float], border: float | None = None) -> Comparison | None:
    """Returns the comparison if it is clear before the last look, else None.

    Args:
        reference: Time of the reference model by round.
        own: Time of the model in question by round.
        border: Ratio at which the caller's decision turns; None where all that matters is which of them is faster.

    Returns:
        The comparison with a verdict; its interval is the 99 % one, or all ratios where few rounds were enough.
    """
    rounds = len(own)
    if rounds < LEAST_LOOK or min(*reference, *own) <= 0:  # a time of zero: the clock is too coarse to be sure
        return None
    logs = sorted(math.log(theirs / ours) for theirs, ours in zip(reference, own, strict=True))
    plain = compare(reference, own)
    if max(own) * CLEAR < min(reference):
        return Comparison(plain.ratio, math.exp(logs[0]), math.exp(logs[-1]), Verdict.FASTER)
    if max(reference) * CLEAR < min(own):
        return Comparison(plain.ratio, math.exp(logs[0]), math.exp(logs[-1]), Verdict.SLOWER)
    rank = interval_rank(rounds, _INTERIM_CONFIDENCE)
    if rank is not None:
        low, high = logs[rank - 1], logs[-rank]
        margin = math.log(MARGIN)
        if low > margin or high < -margin:
            verdict = Verdict.FASTER if low > 0 else Verdict.SLOWER
            return Comparison(plain.ratio, math.exp(low), math.exp(high), verdict)
        found = Comparison(plain.ratio, math.exp(low), math.exp(high), plain.verdict)
        if border is not None and not holds(found, border) and not too_noisy(found, rounds):
            return found
    return plain if rounds >= _SAME_ROUNDS and plain.verdict is Verdict.SAME else None


def holds(comparison: Comparison, border: float) -> bool:
    """Tells whether more rounds may decide on which side of a border a ratio lies."""
    return comparison.low <= border <= comparison.high


def too_noisy(comparison: Comparison, rounds: int) -> bool:
    """Tells whether the machine kept a race from being decided, rather than the difference being small.

    Args:
        comparison: What the race found.
        rounds: Rounds it had.
    """
    if comparison.verdict is not Verdict.NOISY:
        return False
    return rounds < LEAST_ROUNDS or comparison.high > NOISY_SPREAD * comparison.low
