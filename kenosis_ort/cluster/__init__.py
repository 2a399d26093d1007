"""Calibration on many machines: shards as tasks of a Dask cluster, with the bytes that one process would make."""

from kenosis_ort.cluster.client import Cluster, ShardDone

__all__ = ["Cluster", "ShardDone"]
