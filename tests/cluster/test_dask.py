"""Calibration on a cluster of processes that are really killed: the bytes of one process, or an error that says why."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial

import pytest

from kenosis_ort import Cluster, ShardDone, Shards, calibrate, quantize_static
from kenosis_ort.cluster import client as cluster_client, executor as cluster_executor
from kenosis_ort.cluster.client import connected, versions
from kenosis_ort.errors import ArgumentTypeError, CalibrationError, ClusterError, KenosisWarning, OptionError
from tests.cluster import ON_A_CLUSTER, in_threads, shards_of
from tests.cluster.shards_of import ALL, EACH, MODEL, SHARDS, deadly, feeds, some
from tests.models import FeedReader

distributed = pytest.importorskip("distributed")

pytestmark = ON_A_CLUSTER


@pytest.fixture(scope="module")
def whole():
    return calibrate(MODEL, FeedReader(ALL)).to_json()


def test_one_two_and_five_workers_make_the_bytes_of_one_process(client, whole, tmp_path):
    quantize_static(MODEL, tmp_path / "here.onnx", FeedReader(ALL), promise=False)
    here = (tmp_path / "here.onnx").read_bytes()

    def same(client):
        assert calibrate(MODEL, Shards(feeds, SHARDS), executor=client).to_json() == whole
        assert calibrate(MODEL, FeedReader(ALL), executor=client).to_json() == whole
        quantize_static(MODEL, tmp_path / "there.onnx", Shards(feeds, SHARDS), promise=False, executor=client)
        assert (tmp_path / "there.onnx").read_bytes() == here

    same(client)
    for workers in (1, 5):  # in threads, which start at once
        with in_threads(workers) as other:
            same(other)


def killed(client):
    """Every worker, and with them what was sent to them."""
    for pid in client.run(os.getpid).values():
        os.kill(pid, signal.SIGKILL)


def stopped(client):
    """One worker stands still for a while."""
    pid = next(iter(client.run(os.getpid).values()))
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()


def forgotten(client):
    """The scheduler forgets every task and every result, as one that restarts; here someone else cancels them."""
    keys = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
    assert keys
    client.cancel([distributed.Future(key, client=client) for key in keys], force=True)


@pytest.mark.parametrize("trouble", [killed, stopped, forgotten, None])
def test_whatever_happens_to_workers_the_bytes_are_those_of_one_process(trouble, client, processes, whole, tmp_path):
    """Or a shard kills the worker that reads it, the first time."""
    told, seen = list[ShardDone](), list[int]()

    def on_shard(entry):
        told.append(entry)
        if entry.done == 1 and trouble is not None:
            with distributed.Client(processes, set_as_default=False) as other:
                trouble(other)

    shards = Shards(partial(deadly, tmp_path, 3) if trouble is None else shards_of.slow, SHARDS)
    cluster = Cluster(client, on_shard=on_shard)
    made = calibrate(MODEL, shards, executor=cluster, progress=lambda done, _: seen.append(done))
    assert made.to_json() == whole
    assert (tmp_path / "3.died").exists() is (trouble is None)
    assert [entry.name for entry in told] == [f"shard {n}" for n in range(SHARDS)]
    assert (told[-1].done, told[-1].total, told[-1].left_s) == (SHARDS, SHARDS, 0)
    assert all(entry.worker.startswith("tcp://") and entry.samples == EACH for entry in told)
    assert seen == [EACH * n for n in range(SHARDS + 1)]


@pytest.mark.parametrize("deaths", [1, 2])
def test_workers_that_die_while_versions_are_compared_cost_time_only(client, whole, tmp_path, monkeypatch, deaths):
    asked = cluster_client._probe

    def dying(libraries):
        probe, marks = asked(libraries), [str(tmp_path / f"{at}.died") for at in range(deaths)]

        def dies():
            for mark in marks:
                try:
                    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
            return probe()

        return dies

    monkeypatch.setattr(cluster_client, "_probe", dying)
    assert calibrate(MODEL, Shards(feeds, SHARDS), executor=client).to_json() == whole
    assert len(list(tmp_path.iterdir())) == deaths


def test_a_shard_that_kills_the_last_worker_is_named(tmp_path, monkeypatch):
    """Where nobody starts workers again."""
    monkeypatch.setattr(cluster_executor, "_NO_WORKER_S", 1.0)
    monkeypatch.setattr(cluster_executor, "_POLL_S", 0.2)
    words = [sys.executable, *["-m", "distributed.cli.dask_worker", "--no-nanny", "--nthreads=1"]]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=":0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        subprocess.Popen([*words, cluster.scheduler_address], **silent) as worker,
    ):
        with pytest.raises(ClusterError, match=r"died while they had .*shard 1 \(1 times\)") as caught:
            calibrate(MODEL, Shards(partial(deadly, tmp_path, 1, always=True), 3), executor=client)
        assert worker.wait(60) == -signal.SIGKILL
    assert "shard 1" in str(caught.value.where).split(", ")


def test_a_worker_in_threads_warns_of_no_number(recwarn):
    """Such as share the process with the caller."""
    with in_threads(1) as client:
        calibrate(MODEL, Shards(shards_of.huge, 2), executor=client)
    assert [str(w.message) for w in recwarn if issubclass(w.category, RuntimeWarning)] == []


def test_a_shard_that_kills_every_worker_is_named_or_left_out(client, tmp_path):
    shards = Shards(partial(deadly, tmp_path, 1, always=True), 3)
    with pytest.warns(KenosisWarning, match=r"shard 1 was left out.*given this shard died, also when it ran alone"):
        rest = calibrate(MODEL, shards, executor=Cluster(client, bad_shards="skip"))
    assert rest.to_json() == calibrate(MODEL, [feeds(0), feeds(2)]).to_json()


def test_a_shard_without_samples_counts_for_nothing(client):
    assert calibrate(MODEL, Shards(some, 3), executor=client).to_json() == calibrate(MODEL, Shards(some, 3)).to_json()
    with pytest.raises(CalibrationError, match="no shard yields a sample"):
        calibrate(MODEL, Shards([[], []]), executor=client)


@pytest.mark.parametrize(("make", "number"), [(shards_of.bad, 2), (shards_of.broken, 1)])
def test_bad_data_stop_the_run_or_are_left_out_whole(client, make, number):
    with pytest.raises(CalibrationError) as caught:
        calibrate(MODEL, Shards(make, SHARDS), executor=client)
    assert str(caught.value.where).startswith(f"shard {number}")
    with pytest.warns(KenosisWarning, match=f"shard {number} was left out"):
        kept = calibrate(MODEL, Shards(make, SHARDS), executor=Cluster(client, bad_shards="skip"))
    good = [feeds(n) for n in range(SHARDS) if n != number]
    assert kept.to_json() == calibrate(MODEL, good).to_json()


def test_a_client_that_dies_leaves_a_cluster_that_works(client, whole):
    address = client.scheduler.address
    code = f"""
        from distributed import Client
        from kenosis_ort import Shards, calibrate
        from tests.cluster import ON_A_CLUSTER, shards_of
        if __name__ == "__main__":
            client = Client({address!r})
            calibrate(shards_of.MODEL, Shards(shards_of.slow, 1000), executor=client,
                      progress=lambda done, total: print(done, flush=True))
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert [child.stdout.readline() for _ in range(2)] == ["0\n", f"{EACH}\n"]
        child.kill()
    assert calibrate(MODEL, Shards(feeds, SHARDS), executor=client).to_json() == whole
    deadline = time.monotonic() + 20
    while any(client.processing().values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(client.processing().values()), "what the dead client wanted is computed no more"


def test_what_cannot_be_sent_is_refused_before_anything_is_computed(client):
    lock = threading.Lock()
    opened = []

    def make(number):
        with lock:
            opened.append(number)
        return feeds(number)

    with pytest.raises(OptionError, match="shard 0 cannot be sent to a worker"):
        calibrate(MODEL, Shards(make, 2), executor=client)
    assert not opened


def test_clusters_that_cannot_do_the_work_are_refused(client, monkeypatch):
    """Workers of other versions, with the list; such as lack a library, or the package."""
    with pytest.raises(ClusterError, match=r"no file /no/such\.so"):
        Cluster(client).check(["/no/such.so"])
    with monkeypatch.context() as patch:
        patch.setattr(cluster_client, "versions", lambda: {**versions(), "onnxruntime": "1.0.0"})
        with pytest.raises(ClusterError, match=r"2 of 2 workers.*tcp://.*onnxruntime 1\.\d+\.\d+, not 1\.0\.0"):
            calibrate(MODEL, Shards(feeds, SHARDS), executor=client)

    name = "kenosis_ort.cluster.client"
    client.run(lambda: sys.modules.update({name: None}))
    try:
        with pytest.raises(ClusterError, match=r"2 of 2 workers.*kenosis-ort is not installed"):
            calibrate(MODEL, Shards(feeds, SHARDS), executor=client)
    finally:
        client.run(lambda: sys.modules.pop(name))


def test_a_moving_average_is_calibrated_here(client):
    options = {"extra_options": {"CalibMovingAverage": True}}
    here = calibrate(MODEL, FeedReader(ALL), **options)
    with pytest.warns(KenosisWarning, match="calibrated here, not on the executor"):
        there = calibrate(MODEL, FeedReader(ALL), executor=client, **options)
    assert here.to_json() == there.to_json()


def test_a_closed_client_and_an_asynchronous_one(processes, tmp_path):
    client = distributed.Client(processes, set_as_default=False)
    client.close()
    reader = FeedReader(ALL)
    with pytest.raises(ClusterError, match="client is closed"):
        quantize_static(MODEL, tmp_path / "a.onnx", reader, executor=client)
    assert len(list(iter(reader.get_next, None))) == len(ALL), "nothing was read"
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match="bad_shards"):
        Cluster(client, bad_shards="maybe")
    with pytest.raises((ArgumentTypeError, AttributeError)):
        Cluster(object.__new__(distributed.Client))


def test_addresses(client):
    """One where nobody answers is told of soon, and without a client that waits for long where it ends."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        for wrong, what in (
            (f"127.0.0.1:{silent.getsockname()[1]}", "silent for 0.5 s|Timed out"),
            ("127.0.0.1:9", "No Dask scheduler answers"),
            ("127.0.0.1:port", "invalid literal"),
            ("http://127.0.0.1:1", "unknown address scheme 'http'"),
            (next(iter(client.scheduler_info()["workers"])), "a worker is there"),
        ):
            with pytest.raises(ClusterError, match=what), connected(wrong, timeout_s=0.5):
                pass
    for wrong in ("local:none", "local:0", "nonsense"):
        with pytest.raises(OptionError), connected(wrong):
            pass
    with connected(client.scheduler.address) as other:
        assert other.status == "running"
