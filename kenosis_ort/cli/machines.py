"""``--dask``: where the float model runs over the samples."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kenosis_ort.cli.screen import Screen

if TYPE_CHECKING:
    from kenosis_ort.cluster import Cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    where = parser.add_argument_group("many machines (needs the extra dask)")
    where.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="run the float model over the samples on the workers of the Dask scheduler at host:port; local:N starts N "
        "workers on this machine, local one a processor",
    )
    where.add_argument(
        "--skip-bad-shards", action="store_true", help="leave data out that cannot be read or run, shard by shard"
    )


@contextmanager
def executor(arguments: argparse.Namespace, screen: Screen) -> Iterator[Cluster | None]:
    """Yields what ``--dask`` names, with shards reported on stderr; None where it names nothing.

    Raises:
        OptionError: It is spelled wrong, or Dask is not installed.
        ClusterError: Nobody answers.
    """
    if arguments.dask is None:
        yield None
        return
    from kenosis_ort.cluster import Cluster
    from kenosis_ort.cluster.client import BadShards, connected

    with connected(arguments.dask) as client:
        bad: BadShards = "skip" if arguments.skip_bad_shards else "stop"
        cluster = Cluster(client, bad_shards=bad, on_shard=lambda done: screen.tell(str(done)))
        if cluster.dashboard:
            screen.tell(f"dashboard: {cluster.dashboard}")
        yield cluster
