"""Interleaved timing: fresh sessions in random order, one thread, medians.

A ratio of two models is the median over rounds of (baseline's block median / variant's block median); in a round
every model gets one fresh session and one block, in random order, so slow drifts of the machine hit all alike.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort


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


def session(path: str | Path, *, threads: int = 1) -> ort.InferenceSession:
    """Loads a model with full optimization on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def block(runner: ort.InferenceSession, feed: Mapping[str, Any], *, seconds: float, least: int = 5) -> float:
    """Runs a session for about ``seconds`` and returns the median seconds of one run."""
    for _ in range(2):
        runner.run(None, feed)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < least:
        start = time.perf_counter()
        runner.run(None, feed)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


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
    """
    order = random.Random(seed)
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        names = list(models)
        order.shuffle(names)
        for name in names:
            runner = session(models[name], threads=threads)
            taken[name].append(block(runner, feed, seconds=seconds))
            del runner
            gc.collect()
    result = {}
    for name, times in taken.items():
        ratios = [base / own for base, own in zip(taken[baseline], times, strict=True)]
        result[name] = Timing(statistics.median(times) * 1e3, statistics.median(ratios), _half_iqr(ratios))
    return result


def _half_iqr(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4)
    return (quartiles[2] - quartiles[0]) / 2
