"""Tests on a real cluster: worker processes of this machine, which all modules of the folder share."""

import pytest

# Closed connections of killed workers are collected late, and warn then.
ON_A_CLUSTER = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.xdist_group("dask"),
]
