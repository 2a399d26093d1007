"""The caller's Dask client: checks before anything is computed, and reports of shards."""

import asyncio
import contextlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from kenosis_ort.cluster.worker import differences, versions
from kenosis_ort.errors import ArgumentTypeError, ClusterError, KenosisError, OptionError
from kenosis_ort.runtime.limits import machine

_log = logging.getLogger(__name__)

BadShards = Literal["stop", "skip"]
_WORKERS_WITHIN_S: Final = 30
_POLL_S: Final = 0.1
_INSTALL: Final = "pip install 'kenosis-ort[dask]'"


@dataclass(frozen=True)
class ShardDone:
    """One shard that is done.

    Attributes:
        name: The shard.
        worker: Address of the worker that read it.
        samples: Feeds in it; 0 where it failed.
        seconds: That it took there.
        done: Shards done so far.
        total: Shards in all; None where that is not known.
        left_s: Estimate of what the rest takes, in seconds; None where that is not known.
        failure: Why the shard was left out, None for one that was read.
    """

    name: str
    worker: str
    samples: int
    seconds: float
    done: int
    total: int | None
    left_s: float | None
    failure: str | None = None

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {self.total}"
        left = "" if self.left_s is None else f", about {self.left_s:.0f} s left"
        read = f"{self.samples} samples in {self.seconds:.1f} s"
        what = read if self.failure is None else f"left out: {self.failure}"
        return f"{self.name} on {self.worker}: {what}; {self.done}{of} shards done{left}"


@dataclass(frozen=True)
class Cluster:
    """A Dask client, and what to do about its shards. Where a call takes ``executor``, the client alone does too.

    Args:
        client: A ``distributed.Client``, not an asynchronous one.
        bad_shards: ``"stop"``: data that cannot be read or run ends the call with an error that names its shard;
            ``"skip"``: the shard is left out whole, with a warning.
        on_shard: Called with a `ShardDone` for each shard, in their order.

    Raises:
        ArgumentTypeError: It is no client.
        OptionError: An argument is out of range.
    """

    client: Any
    bad_shards: BadShards = "stop"
    on_shard: Callable[[ShardDone], None] | None = None

    def __post_init__(self) -> None:
        distributed = sys.modules.get("distributed")  # who has a client has imported it
        if distributed is None or not isinstance(self.client, distributed.Client):
            raise ArgumentTypeError(
                f"executor takes a Dask client, not {type(self.client).__name__}",
                where="executor",
                fix=f"{_INSTALL}, then executor=distributed.Client(address)",
            )
        if self.client.asynchronous:
            raise ArgumentTypeError(
                "the Dask client is an asynchronous one", where="executor", fix="make it with asynchronous=False"
            )
        if self.bad_shards not in get_args(BadShards):
            raise OptionError(f"bad_shards={self.bad_shards!r} is unknown", where="bad_shards", fix="'stop' or 'skip'")

    @property
    def dashboard(self) -> str:
        """Address of Dask's own page about the cluster; empty where it has none."""
        return str(self.client.dashboard_link or "")

    def workers(self) -> dict[str, Any]:
        """The scheduler's record of each worker by address."""
        return dict(self.client.scheduler_info(n_workers=-1)["workers"])

    @property
    def slots(self) -> int:
        """Tasks that run at a time."""
        return max(1, sum(int(worker["nthreads"]) for worker in self.workers().values()))

    def release(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has each worker release its caches; they are small and expire, so a failure is no error."""
        if self.client.status == "running":
            try:
                self.client.run(function, *arguments, on_error="ignore")
            except Exception as error:  # whatever a scheduler that goes away raises
                _log.debug("workers keep what they have: %s", error)

    def check(self, custom_op_libraries: Sequence[str] = ()) -> None:
        """Checks that the cluster can do the work, before anything is computed.

        Raises:
            ClusterError: The scheduler does not answer, there is no worker, or workers lack the package, have another
                version of it or of what results depend on, or lack a library of custom operators.
        """
        if self.client.status != "running":
            raise ClusterError(
                f"The Dask client is {self.client.status}.", where="executor", fix="Make a new client of the cluster."
            )
        with answering(self.client):
            found = self._answers(_probe(list(custom_op_libraries)))
        wanted = versions()
        bad = {address: why for address, info in found.items() if (why := _wrong(info, wanted))}
        if bad:
            raise ClusterError(
                f"{len(bad)} of {len(found)} workers cannot do what this process does: "
                + "; ".join(f"{address}: {why}" for address, why in sorted(bad.items())),
                where="executor",
                fix="Install the same versions on every worker, and libraries of custom operators at the same path.",
            )
        _log.info("%d workers; dashboard: %s", len(found), self.dashboard or "none")

    def _answers(self, probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Answers of workers by address, without those that die meanwhile: their replacements are checked later.

        Raises:
            ClusterError: For some time there is none, or none that lives long enough to answer.
        """
        deadline = time.monotonic() + _WORKERS_WITHIN_S
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                self.client.wait_for_workers(1, timeout=left_s)
            found = self.client.run(probe, on_error="return")
            living = {at: info for at, info in found.items() if not isinstance(info, (OSError, asyncio.TimeoutError))}
            if living:
                return living
            time.sleep(_POLL_S)
        raise ClusterError(
            f"The Dask cluster has no worker that answers, after {_WORKERS_WITHIN_S} seconds.",
            where=str(self.client.scheduler.address),
            fix="Start workers: dask worker ADDRESS.",
        )


def as_cluster(executor: Any) -> Cluster | None:
    """Executor for an ``executor`` argument; None for None.

    Raises:
        ArgumentTypeError: It is neither a client nor a `Cluster`.
    """
    return executor if executor is None or isinstance(executor, Cluster) else Cluster(executor)


def _probe(libraries: list[str]) -> Callable[[], dict[str, Any]]:
    """A function that tells about a worker; one without this package can run it, since it travels by value."""

    def probe() -> dict[str, Any]:
        import traceback

        try:
            from kenosis_ort.cluster.worker import versions
        except Exception:  # whatever an installation may lack
            return {"missing": traceback.format_exc(limit=0).strip().splitlines()[-1]}
        return {"versions": versions(), "lacks": [path for path in libraries if not os.path.exists(path)]}

    return probe


def _wrong(info: Any, wanted: dict[str, str]) -> str:
    """Description of what is wrong with a worker; empty for nothing."""
    if isinstance(info, BaseException):
        return f"does not answer: {type(info).__name__}: {info}"
    if "missing" in info:
        return f"kenosis-ort is not installed ({info['missing']})"
    differing = differences(wanted, info["versions"])
    lacks = f"no file {', '.join(info['lacks'])}" if info["lacks"] else ""
    return "; ".join(part for part in (differing, lacks) if part)


@contextlib.contextmanager
def answering(client: Any) -> Iterator[None]:
    """Makes one error of all that a scheduler which went away raises."""
    try:
        yield
    except KenosisError:
        raise
    except (OSError, TimeoutError, RuntimeError) as error:  # CommClosedError is an OSError
        if isinstance(error, RuntimeError) and client.status == "running":
            raise
        raise ClusterError(
            f"The Dask scheduler went away: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            where=str(getattr(client.scheduler, "address", "executor")),
            fix="Start the cluster again and repeat the call; nothing was written.",
        ) from error


@contextlib.contextmanager
def connected(address: str, *, timeout_s: float = 10.0, resources: Mapping[str, float] | None = None) -> Iterator[Any]:
    """Yields a client of a cluster, and closes what it made.

    Args:
        address: ``tcp://host:port`` of a scheduler; ``local`` for one worker a processor on this machine, ``local:N``
            for N.
        timeout_s: For the scheduler to answer.
        resources: What each worker offers that is started here; on a machine whose processors they share out.

    Raises:
        OptionError: It is spelled otherwise, or Dask is not installed.
        ClusterError: Nobody answers.
    """
    count = _local_workers(address)
    try:
        dask, distributed = importlib.import_module("dask"), importlib.import_module("distributed")
    except ImportError as error:
        raise OptionError("Dask is not installed", where=address, fix=_INSTALL) from error
    if count is None:
        try:
            asyncio.run(asyncio.wait_for(_asked(address), timeout_s))
            client = distributed.Client(address, timeout=timeout_s, set_as_default=False)
        except (OSError, TimeoutError, ValueError, asyncio.TimeoutError) as error:
            raise ClusterError(
                f"No Dask scheduler answers: {' '.join(str(error).split())[:300] or f'silent for {timeout_s:g} s'}.",
                where=address,
                fix="Check the address, host:port, and that dask scheduler runs there.",
            ) from error
        with client:
            yield client
        return
    processors = machine().cores
    if resources and count > processors:
        raise OptionError(f"{count} workers would share {processors} processors", where=address, fix="start fewer")
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10 minutes"}),  # a busy machine starts one slowly
        distributed.LocalCluster(
            n_workers=count or processors, threads_per_worker=1, processes=True, resources=dict(resources or {})
        ) as local,
        distributed.Client(local, set_as_default=False) as client,
    ):
        yield client


async def _asked(address: str) -> None:
    """Asks who is at an address: a client of Dask's that finds nobody waits for long, here and where it is ended.

    Raises:
        ValueError: It is no address, or what is there is no scheduler.
        OSError: Nobody is there.
    """
    from distributed.core import rpc
    from distributed.security import Security

    arguments = Security().get_connection_args("client")
    async with rpc(address, connection_args=arguments) as there:
        identity = await there.identity()
    if identity.get("type") != "Scheduler":
        raise ValueError(f"a {str(identity.get('type')).lower()} is there")


def _local_workers(address: str) -> int | None:
    """The number of workers to start here, 0 for as many as suit; None where the address is a scheduler's."""
    kind, _, rest = address.partition(":")
    if kind != "local":
        if not rest:
            raise OptionError(f"'{address}' is no address of a Dask scheduler", fix="host:port, local or local:N")
        return None
    if rest and not (rest.isascii() and rest.isdigit() and int(rest) > 0):
        raise OptionError(f"'{address}' says no number of workers", fix="local:4 for four")
    return int(rest) if rest else 0
