"""Interleaved timing by the package's own loop: fresh sessions in random order, one thread, medians.

A ratio of two models is the median over rounds of (baseline's block median / variant's block median); in a round
every model gets one fresh session and one block, in random order, so slow drifts of the machine hit all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _session import session

from kenosis_ort.bench.harness import Schedule, Timings, time_interleaved


@dataclass(frozen=True)
class Timing:
    """Result for one model.

    Attributes:
        milliseconds: Median over rounds of the block medians.
        speed: Median over rounds of baseline time / own time; above 1 is faster than the baseline.
        spread: Half the distance between the quartiles of those ratios.
    """

    milliseconds: float
    speed: float
    spread: float


def interleaved(
    models: Mapping[str, str | Path],
    feed: Mapping[str, Any],
    *,
    baseline: str,
    rounds: int = 7,
    seconds: float = 0.2,
    threads: int = 1,
    seed: int = 0,
) -> dict[str, Timing]:
    """Times several models against each other.

    Args:
        models: Name to model file.
        feed: One feed that all models take.
        baseline: The name that the ratios refer to.
        rounds: Rounds; each times every model once, with a fresh session.
        seconds: Length of a block.
        threads: Threads of a session.
        seed: Seed of the order.

    Raises:
        RuntimeError: A model does not load or run.
    """
    schedule = Schedule(rounds=rounds, deadline=float("inf"), warmup=2, seed=seed, block_s=seconds)
    timings = time_interleaved(list(models), lambda name: session(models[name], threads=threads), [feed], schedule)
    if timings.failed:
        raise RuntimeError(str(timings.failed))
    return {name: Timing(statistics.median(timings.round_ms(name)), *ratio(timings, name, baseline)) for name in models}


def ratio(timings: Timings, name: str, base: str) -> tuple[float, float]:
    """Returns by how much one is faster than another, the median over rounds, and half the quartiles' distance."""
    ratios = [b / a for a, b in zip(timings.round_ms(name), timings.round_ms(base), strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (0.0, 0.0, 0.0)
    return statistics.median(ratios), (quartiles[2] - quartiles[0]) / 2
