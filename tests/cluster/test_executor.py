"""Passes on a cluster: the bytes of one process, whoever dies; what travels, travels once; workers of little memory."""

import os
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kenosis_ort import RECIPES, Cluster, Shards, calibrate, errors, quantize_static
from kenosis_ort.cluster import executor as cluster_executor
from kenosis_ort.cluster.client import unpacked
from kenosis_ort.cluster.executor import ClusterExecutor, Sender, rest
from kenosis_ort.runtime.session import HERE
from tests import models
from tests.cluster import ON_A_CLUSTER, in_threads, shards_of
from tests.cluster.shards_of import ALL, MODEL, wide
from tests.flow.support import changed
from tests.planning import parse

distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")

HARDEST = {"rounding": "learned", "mixed_precision": True, "accuracy_budget": 0.0, "max_float_share": 0.5}
RECIPE = replace(RECIPES["accurate"], name="all", **HARDEST)
pytestmark = ON_A_CLUSTER


def quantized(path, **options):
    quantize_static(MODEL, path, models.FeedReader(ALL), recipe=RECIPE, promise=False, **options)
    return path.read_bytes()


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return quantized(tmp_path_factory.mktemp("here") / "model.onnx")


@pytest.fixture
def works(monkeypatch):
    """Names of the functions that went to workers, a line a task."""
    seen = []
    submitted = ClusterExecutor._submitted

    def counted(self, work, *how):
        seen.append(work.__name__)
        return submitted(self, work, *how)

    monkeypatch.setattr(ClusterExecutor, "_submitted", counted)
    return seen


@pytest.mark.parametrize("workers", [2, 1, 5])
def test_passes_make_the_bytes_of_one_process(workers, client, here, works, tmp_path):
    """On two worker processes, or on threads."""
    with nullcontext(client) if workers == 2 else in_threads(workers) as executor:
        assert quantized(tmp_path / "a.onnx", executor=executor) == here
        end = time.monotonic() + 20  # the scheduler is told that results are let go of, not asked
        while executor.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)):
            assert time.monotonic() < end, "what was sent is let go of"
            time.sleep(0.05)
    assert works.count("_round_layer") > 1
    assert works.count("ran") > 10
    assert {"ran", "_round_layer", "swept"} == set(works)


def test_workers_that_die_of_a_piece_cost_nothing_but_time(client, tmp_path):
    """One death more than Dask itself takes for the piece's fault."""
    with ClusterExecutor(Cluster(client)) as executor:
        found = list(executor.map(shards_of.squared_though_killed, ((tmp_path, n) for n in range(30))))
    assert (tmp_path / "second").exists()
    assert [number for number, _ in found] == list(range(30))
    assert all((square == number**2).all() for number, square in found)


def test_a_piece_that_kills_every_worker_ends_the_call(client):
    with (
        ClusterExecutor(Cluster(client)) as executor,
        pytest.raises(errors.ClusterError, match="Every worker that was given a part of a pass died"),
    ):
        list(executor.map(shards_of.always_killed, range(3)))


def test_errors_come_back_as_they_were_raised(client):
    with ClusterExecutor(Cluster(client)) as executor:
        results = executor.map(shards_of.refused, range(4))
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(errors.CalibrationError) as caught:
            next(results)
        assert (caught.value.what, caught.value.where, caught.value.fix) == ("two is too many", "piece", "take one")
        with pytest.raises(errors.ClusterError, match="A worker failed: TypeError"):
            list(executor.map(shards_of.broken_work, [0]))


def test_a_model_runs_up_to_the_feed_that_it_refuses(client):
    given = [*ALL[:6], {name: value[..., :3] for name, value in ALL[0].items()}, ALL[7]]

    def run(executor):
        outputs = []
        with executor.open(MODEL) as opened, pytest.raises(errors.VerificationError, match="does not run"):
            outputs.extend(opened.runs(given))
        return outputs

    with ClusterExecutor(Cluster(client)) as executor:
        there = run(executor)
    for a, b in zip(there, run(HERE), strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in b)
    assert len(there) == 6


# ---- what travels ---------------------------------------------------------------------------------------------------


class _Client:
    """Stands for a client: counts the bytes that tasks take along."""

    def __init__(self):
        self.sent = 0

    def submit(self, work, content, **_):
        self.sent += sum(map(len, content.values()))
        return SimpleNamespace(content=work(content), status="pending")


def there(sender, content):
    """Returns what a worker unpacks, and the bytes of the packet."""
    message, bundles = sender.packed(content)
    return unpacked(message, [bundle.content for bundle in bundles]), len(message)


def test_a_model_arrives_as_it_was_and_weights_travel_once():
    rest()
    client = _Client()
    sender = Sender(client)
    model = models.conv_relu_chain(24, channels=64)
    (arrived, alone), size = there(sender, (model, 1))
    assert arrived == model
    assert alone == 1
    assert size < 1000
    assert there(sender, (model, 2))[0][0] is arrived  # so that its session serves again
    zeroed = changed(model, conv0_w=0)
    before = client.sent
    assert there(sender, zeroed)[0] == zeroed
    whole = sum(len(t.raw_data) for t in model.graph.initializer)
    assert whole / 2 < before
    assert client.sent - before < whole / 3


def test_contents_of_models_before_the_latest_few_are_let_go_of():
    sender = Sender(_Client())
    for seed in range(8):
        there(sender, models.conv_relu_chain(2, channels=64, seed=seed))
        held = len(sender._bundles)
    assert held == len({digest for _, _, needs in sender._models.values() for digest in needs})
    assert len(sender._models) == 4


# ---- workers with little memory: data and results larger than it pass through, and nobody dies of it ----------------


@pytest.fixture(scope="module")
def small():
    """A client of one worker with 256 MB, of which the runtime and Python take 140."""
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}),  # a forked one takes less
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, memory_limit="256MiB", dashboard_address=":0", silence_logs=50
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


def cropping():
    """Reads 4 MB a sample, and works on 256 numbers of them."""
    return parse("""(uint8[1,4,1024,1024] x) => (float[1,4,8,8] y) <float[4,4,3,3] w, int64[2] from, int64[2] to,
        int64[2] axes> { c = Slice (x, from, to, axes)  f = Cast <to = 1> (c)
        y = Conv <pads = [1, 1, 1, 1]> (f, w) }""",
        {"to": [8, 8], "axes": [2, 3]})  # fmt: skip


def cropped(small):
    """Samples of a calibration."""
    there = calibrate(cropping(), Shards(wide, 20), executor=small, keep_samples=False)
    assert there.samples == 80
    assert there.to_json() == calibrate(cropping(), Shards(wide, 20), keep_samples=False).to_json()


def run_by_passes(small):
    """Samples of passes."""
    feeds = [feed for number in range(20) for feed in wide(number)]
    with ClusterExecutor(Cluster(small)) as executor, executor.open(cropping()) as there, HERE.open(cropping()) as here:
        for found, expected in zip(there.runs(feeds), here.runs(feeds), strict=True):
            assert all(np.array_equal(found[name], expected[name]) for name in expected)


def spilled(small):
    """Results: four of 16 MB are under way at a time, and Dask spills from 70 % of the limit on."""
    with ClusterExecutor(Cluster(small)) as executor:
        found = executor.map(shards_of.much, range(18))
        deadline = time.monotonic() + 30
        while not any(small.run(lambda dask_worker: len(dask_worker.data.slow)).values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert [array[0] for array in found] == list(range(18))


@pytest.mark.parametrize("work", [cropped, run_by_passes, spilled])
def test_what_is_larger_than_the_memory_of_a_worker_kills_none(work, small):
    before = small.run(os.getpid)
    work(small)
    assert small.run(os.getpid) == before


def test_workers_that_are_paused_for_want_of_memory_end_the_call(small, monkeypatch):
    monkeypatch.setattr(cluster_executor, "_NO_WORKER_S", 0.5)
    monkeypatch.setattr(cluster_executor, "_POLL_S", 0.2)

    def pause_from(fraction, status):
        def change(dask_worker):
            dask_worker.memory_manager.memory_pause_fraction = fraction

        small.run(change)
        while {worker["status"] for worker in small.scheduler_info()["workers"].values()} != {status}:
            time.sleep(0.05)

    with ClusterExecutor(Cluster(small)) as executor:
        pause_from(0.01, "paused")
        try:
            with pytest.raises(errors.ClusterError, match="No worker is left that runs"):
                list(executor.map(shards_of.refused, [0]))
        finally:
            pause_from(0.95, "running")
        assert list(executor.map(shards_of.refused, [0])) == [0]
