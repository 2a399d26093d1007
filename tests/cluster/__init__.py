"""Tests on a real cluster: worker processes of this machine, which all modules of the folder share."""

from contextlib import contextmanager

import pytest

# Closed connections of killed workers are collected late, and warn then.
ON_A_CLUSTER = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"), pytest.mark.xdist_group("dask"),
]  # fmt: skip


@contextmanager
def in_threads(workers):
    """A client of some workers in threads of this process, which start at once."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, processes=False, dashboard_address=":0") as local,
        Client(local, set_as_default=False) as client,
    ):
        yield client
