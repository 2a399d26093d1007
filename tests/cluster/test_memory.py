"""Workers with little memory: data and results larger than it pass through, and nobody dies of it."""

import os
import time
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort import Cluster, ClusterError, Shards, calibrate
from kenosis_ort.cluster import executor as cluster_executor
from kenosis_ort.cluster.executor import ClusterExecutor
from kenosis_ort.runtime.session import HERE
from tests.cluster import ON_A_CLUSTER, shards_of
from tests.cluster.shards_of import wide
from tests.planning import parse

distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")

pytestmark = ON_A_CLUSTER


@pytest.fixture(scope="module")
def small() -> Any:
    """A client of one worker with 256 MB, of which the runtime and Python take 140."""
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}),  # a forked one takes less
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, memory_limit="256MiB", dashboard_address=":0", silence_logs=50
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


def cropping() -> onnx.ModelProto:
    """Reads 4 MB a sample, and works on 256 numbers of them."""
    return parse("""(uint8[1,4,1024,1024] x) => (float[1,4,8,8] y) <float[4,4,3,3] w, int64[2] from, int64[2] to,
        int64[2] axes> { c = Slice (x, from, to, axes)  f = Cast <to = 1> (c)
        y = Conv <pads = [1, 1, 1, 1]> (f, w) }""",
        {"to": [8, 8], "axes": [2, 3]})  # fmt: skip


def cropped(small: Any) -> None:
    """Samples of a calibration."""
    there = calibrate(cropping(), Shards(wide, 20), executor=small, keep_samples=False)
    assert there.samples == 80
    assert there.to_json() == calibrate(cropping(), Shards(wide, 20), keep_samples=False).to_json()


def run_by_passes(small: Any) -> None:
    """Samples of passes."""
    feeds = [feed for number in range(20) for feed in wide(number)]
    with ClusterExecutor(Cluster(small)) as executor, executor.open(cropping()) as there, HERE.open(cropping()) as here:
        for found, expected in zip(there.runs(feeds), here.runs(feeds), strict=True):
            assert all(np.array_equal(found[name], expected[name]) for name in expected)


def spilled(small: Any) -> None:
    """Results: four of 16 MB are under way at a time, and Dask spills from 70 % of the limit on."""
    with ClusterExecutor(Cluster(small)) as executor:
        found = executor.map(shards_of.much, range(18))
        deadline = time.monotonic() + 30
        while not any(small.run(lambda dask_worker: len(dask_worker.data.slow)).values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert [array[0] for array in found] == list(range(18))


@pytest.mark.parametrize("work", [cropped, run_by_passes, spilled])
def test_what_is_larger_than_the_memory_of_a_worker_kills_none(work: Any, small: Any) -> None:
    before = small.run(os.getpid)
    work(small)
    assert small.run(os.getpid) == before


def test_workers_that_are_paused_for_want_of_memory_end_the_call(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_executor, "_NO_WORKER_S", 0.5)
    monkeypatch.setattr(cluster_executor, "_POLL_S", 0.2)

    def pause_from(fraction: float, status: str) -> None:
        def change(dask_worker: Any) -> None:
            dask_worker.memory_manager.memory_pause_fraction = fraction

        small.run(change)
        while {worker["status"] for worker in small.scheduler_info()["workers"].values()} != {status}:
            time.sleep(0.05)

    with ClusterExecutor(Cluster(small)) as executor:
        pause_from(0.01, "paused")
        try:
            with pytest.raises(ClusterError, match="No worker is left that runs"):
                list(executor.map(shards_of.refused, [0]))
        finally:
            pause_from(0.95, "running")
        assert list(executor.map(shards_of.refused, [0])) == [0]
