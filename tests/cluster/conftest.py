"""The cluster that the tests share: two worker processes, which a nanny starts again when they die."""

import multiprocessing

import pytest


@pytest.fixture(scope="package")
def processes():
    """A cluster of two worker processes, forked from one that has imported everything: many are killed."""
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    settings = {
        "distributed.worker.multiprocessing-method": method,
        "distributed.scheduler.allowed-failures": 1,
        "distributed.worker.memory.terminate": False,
        "distributed.deploy.lost-worker-timeout": "10 minutes",  # a busy machine takes long to start one again
    }
    with dask.config.set(settings):
        if method == "forkserver":
            imported = ["distributed.nanny", "kenosis_ort.cluster.executor", "tests.cluster.shards_of"]
            distributed.utils.get_mp_context().set_forkserver_preload(imported)
        with distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        ) as cluster:
            yield cluster


@pytest.fixture
def client(processes):
    """A client of it, with both workers there."""
    import distributed

    with distributed.Client(processes, set_as_default=False) as client:
        client.wait_for_workers(2)
        yield client
