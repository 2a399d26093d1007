"""What calibration costs on many workers: a model of cost beside what is measured here, and bytes compared.

A sweep costs its samples on the workers, at the rate of one worker alone, and on the client the merging of a table for
each shard; one worker more costs its start and its sessions. The constants are measured: one process for the rate, one
merge, one start. Then the same data are calibrated on 1, 2, ... worker processes, and the model is simulated for each:
shards go to the first worker that is free.

    python benchmarks/scale_model.py                       # 1 and 2 workers
    python benchmarks/scale_model.py --workers 1 2 4 --samples 512 --shards 32
    python benchmarks/scale_model.py --plan 1000 10000 100 # models, samples, machines: by the constants measured here

Needs the extra dask. Workers beyond the processors of the machine share them, which the model knows.
"""

from __future__ import annotations

import argparse
import heapq
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from kenosis_ort import Shards, calibrate
from tests import models

SIZE, CHANNELS, DEPTH = 64, 32, 12


@dataclass(frozen=True)
class Samples:
    """Makes shards of random pictures; workers run it."""

    name: str
    each: int

    def __call__(self, number: int) -> list[dict[str, Any]]:
        """Returns the samples of a shard."""
        rng = np.random.default_rng(number)
        return [{self.name: rng.standard_normal((1, CHANNELS, SIZE, SIZE), np.float32)} for _ in range(self.each)]


@dataclass(frozen=True)
class Constants:
    """Seconds.

    Attributes:
        sample: Of one sample through the float model and the collectors, on one thread.
        shard: Of a shard beside its samples: its task, and its table merged on the client.
        start: Until the first shard runs: checks, the model sent, its sessions made.
    """

    sample: float
    shard: float
    start: float


def simulated(constants: Constants, shards: int, each: int, workers: int, processors: int) -> float:
    """Returns the seconds that a sweep takes: the next shard goes to the worker that is free first."""
    slower = max(1.0, workers / processors)
    free = [0.0] * workers
    merged = 0.0
    for _ in range(shards):
        done = heapq.heappop(free) + each * constants.sample * slower
        heapq.heappush(free, done)
        merged = max(merged, done) + constants.shard
    return constants.start + merged


def measured(model: onnx.ModelProto, shards: Shards, client: Any) -> tuple[float, str]:
    """Returns the seconds of a sweep on a cluster, and its table."""
    start = time.perf_counter()
    table = calibrate(model, shards, executor=client)
    return time.perf_counter() - start, table.to_json()


def main() -> None:
    """Measures, simulates and prints."""
    from distributed import Client, LocalCluster

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--plan", type=int, nargs=3, metavar=("MODELS", "SAMPLES", "MACHINES"))
    args = parser.parse_args()
    model = models.conv_relu_chain(DEPTH, channels=CHANNELS, size=SIZE)
    each = args.samples // args.shards
    shards = Shards(Samples(model.graph.input[0].name, each), args.shards)
    processors = len(os.sched_getaffinity(0))
    calibrate(model, Shards(Samples(model.graph.input[0].name, 2), 1))  # imports and the runtime's first session
    start = time.perf_counter()
    here = calibrate(model, shards).to_json()
    alone = time.perf_counter() - start
    print(f"{args.samples} samples in {args.shards} shards, one process: {alone:.1f} s; {processors} processors")
    rows: list[tuple[int, float, bool]] = []
    constants = None
    for workers in args.workers:
        with (
            LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            client.wait_for_workers(workers)
            calibrate(model, Shards(Samples(model.graph.input[0].name, 1), workers), executor=client)  # imports
            if constants is None:  # three unknowns, three sweeps of one worker
                (one, _), (few, _) = (
                    measured(model, Shards(Samples(model.graph.input[0].name, n), k), client)
                    for n, k in ((1, 1), (1, 9))
                )
                whole, table = measured(model, shards, client)
                shard = max(0.0, (few - one) / 8)
                sample = max(1e-9, (whole - one - shard * (args.shards - 1)) / (args.samples - 1))
                constants = Constants(sample, max(0.0, shard - sample), one)
                rows.append((workers, whole, table == here))
                continue
            seconds, table = measured(model, shards, client)
            rows.append((workers, seconds, table == here))
    assert constants is not None
    found = f"a sample {constants.sample * 1e3:.1f} ms, a shard {constants.shard * 1e3:.1f} ms"
    print(f"{found}, a start {constants.start:.2f} s")
    print(f"{'workers':>8s} {'s':>7s} {'model s':>8s} {'bytes':>8s}")
    for workers, seconds, same in rows:
        told = simulated(constants, args.shards, each, workers, processors)
        print(f"{workers:8d} {seconds:7.1f} {told:8.1f} {'equal' if same else 'DIFFER':>8s}", flush=True)
    if args.plan:
        count, samples, machines = args.plan
        seconds = count * simulated(constants, max(1, samples // 100), 100, 1, 1) / machines
        print(f"{count} models of this size x {samples} samples on {machines} machines: {seconds / 3600:.1f} h")


if __name__ == "__main__":
    main()
