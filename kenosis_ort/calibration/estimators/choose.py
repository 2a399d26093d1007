"""The choice between sets of ranges by what the whole net makes of them.

No estimator wins on every net: over a dozen nets the best one is 1 to 6 dB ahead of another that is itself best
elsewhere. The predicted error of a tensor does not tell, because what is clipped is worth more or less to the net than
what is rounded; the measured error of the outputs does. Where there is time, tensors on which two sets differ are tried
in halves, so that a net may keep the range of one estimator here and of another there. Mixtures fit the few samples
they are judged on all too well (on two of six nets by 0.2 and 0.7 dB), so they need a second set of samples to agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kenosis_ort.errors import OptionError

Range = tuple[float, float]
Evaluate = Callable[[Mapping[str, Range]], float]
_GAIN = 0.98  # a smaller improvement is within what another handful of samples would say


@dataclass(frozen=True)
class RangeChoice:
    """The ranges chosen and what they were chosen from.

    Attributes:
        method: The candidate taken for the net.
        ranges: (low, high) by tensor name.
        error: What `evaluate` said of them.
        errors: What it said of each candidate, by method; infinity where it was not finite.
        exceptions: Method by name of the tensors that take another candidate's range.
        evaluations: How often `evaluate` was called.
    """

    method: str
    ranges: Mapping[str, Range]
    error: float
    errors: Mapping[str, float]
    exceptions: Mapping[str, str] = field(default_factory=dict)
    evaluations: int = 0


def choose_ranges(
    candidates: Mapping[str, Mapping[str, Range]],
    evaluate: Evaluate,
    *,
    evaluations: int | None = None,
    confirm: Evaluate | None = None,
    weight: Callable[[str, Range, Range], float] | None = None,
    gain: float = _GAIN,
) -> RangeChoice:
    """Chooses the candidate with the least error, and from the others what improves it.

    Args:
        candidates: Ranges by tensor name, by method; the first is kept unless another is better by `gain`. Candidates
            with the same ranges are evaluated once.
        evaluate: The error of the net under these ranges on samples that the ranges were not made from, 0 for none,
            e.g. noise power over signal power. It is not called with anything but mixtures of the candidates.
        evaluations: How often `evaluate` may be called. None: once a candidate, which leaves nothing for mixtures.
        confirm: The same error on yet other samples, for mixtures: one is taken only if this falls too.
        weight: How much a tensor is worth trying, by name and the two ranges; by default how much the ranges differ.
        gain: What share of the first candidate's error another may leave at most to take its place.

    Returns:
        The choice; ranges of the first candidate where nothing else is better, or where no error is finite.

    Raises:
        OptionError: There is no candidate.
    """
    if not candidates:
        raise OptionError("There are no candidate ranges to choose from.", fix="Name at least one range estimator.")
    budget = len(candidates) if evaluations is None else max(evaluations, 1)
    scored: dict[tuple[tuple[str, Range], ...], float] = {}

    def score(ranges: Mapping[str, Range]) -> float | None:
        key = tuple(sorted(ranges.items()))
        if key not in scored:
            if len(scored) >= budget:
                return None
            error = float(evaluate(dict(ranges)))
            scored[key] = error if math.isfinite(error) else math.inf
        return scored[key]

    errors: dict[str, float] = {}
    best = next(iter(candidates))
    for method, ranges in candidates.items():
        error = score(ranges)
        if error is not None:
            errors[method] = error
            better = error < errors[best] * (gain if best == next(iter(candidates)) else _GAIN)
            if better:
                best = method
    others = sorted((m for m in errors if m != best), key=lambda m: errors[m])
    mixed, exceptions, least = _mix(candidates, best, others, errors[best], score, confirm, weight or _difference)
    return RangeChoice(best, mixed, least, errors, exceptions, len(scored))


def _mix(
    candidates: Mapping[str, Mapping[str, Range]],
    best: str,
    others: Sequence[str],
    least: float,
    score: Callable[[Mapping[str, Range]], float | None],
    confirm: Evaluate | None,
    weight: Callable[[str, Range, Range], float],
) -> tuple[dict[str, Range], dict[str, str], float]:
    """Takes over ranges of other candidates, in halves of the tensors in order of weight, while the error falls.

    At last the best one's own are tried again on what was taken over in company.
    """
    ranges = dict(candidates[best])
    exceptions: dict[str, str] = {}
    confirmed: float | None = None  # not asked for before there is something to confirm
    for other in (*others, best):
        theirs = candidates[other]
        differing = [name for name in ranges if name in theirs and theirs[name] != ranges[name]]
        differing.sort(key=lambda name: -weight(name, ranges[name], theirs[name]))
        waiting = _halves(differing)
        while waiting:
            group = waiting.pop(0)
            tried = {**ranges, **{name: theirs[name] for name in group}}
            error = score(tried)
            if error is None:
                return ranges, exceptions, least
            better = error < _GAIN * least
            if better and confirm is not None:
                before = confirm(dict(ranges)) if confirmed is None else confirmed
                after = confirm(dict(tried))
                better = after < before
                confirmed = after if better else before
            if better:
                ranges, least = tried, error
                exceptions.update(dict.fromkeys(group, other))
                exceptions = {name: method for name, method in exceptions.items() if method != best}
            elif len(group) > 1:
                waiting += _halves(group)
    return ranges, exceptions, least


def _halves(names: Sequence[str]) -> list[Sequence[str]]:
    """Returns the two halves; the whole has been evaluated already."""
    middle = (len(names) + 1) // 2
    return [half for half in (names[:middle], names[middle:]) if half]


def _difference(_: str, a: Range, b: Range) -> float:
    """Returns how much of the wider range the narrower one leaves out."""
    width = max(a[1] - a[0], b[1] - b[0])
    return (abs(a[0] - b[0]) + abs(a[1] - b[1])) / width if width > 0 else 0.0
