"""The caller's Dask client: checks before anything is computed, reports of shards, and messages to workers.

In a message, which is pickled, models stand as references: their content comes as results of tasks, which Dask sends
once a worker and makes again where one dies.
"""

import asyncio
import contextlib
import hashlib
import importlib
import io
import logging
import os
import pickle
import platform
import sys
import threading
import time
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import onnx

from kenosis_ort.errors import ArgumentTypeError, ClusterError, KenosisError, OptionError
from kenosis_ort.graph.outside import content_bytes, copy_without_weights, raw_bytes
from kenosis_ort.runtime.machine import machine

_log = logging.getLogger(__name__)

BadShards = Literal["stop", "skip"]
_WORKERS_WITHIN_S: Final = 30
_POLL_S: Final = 0.1
_PACKAGES: Final = ("kenosis_ort", "onnxruntime", "onnx", "numpy")
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


def versions() -> dict[str, str]:
    """Versions and settings that must be equal here and on every worker, for results to be equal."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}
    return {**found, **{name: str(importlib.import_module(name).__version__) for name in _PACKAGES}}


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Versions that differ, in words."""
    names = [name for name in wanted if wanted[name] != found.get(name)]
    return ", ".join(f"{name} {found.get(name, 'missing')}, not {wanted[name]}" for name in names)


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
            from kenosis_ort.cluster.client import versions
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


# ---- messages -------------------------------------------------------------------------------------------------------

_LARGE: Final = 2**14
"""Bytes from which on a weight is a content of its own: a candidate that differs in a few scales sends these."""
_KNOWN_MODELS: Final = 4
FORGOTTEN: Final = ("cancelled", "lost")
"""What Dask calls a task that the scheduler knows no more."""

lock = threading.Lock()
models: OrderedDict[str, onnx.ModelProto] = OrderedDict()


class Sender:
    """Packs functions with their arguments, of which models are sent once.

    Models become references to their content, by its digest; their larger weights are contents of their own. Contents
    are results of tasks. Those of the latest few models are kept.

    Args:
        client: Dask's.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._models: OrderedDict[int, tuple[onnx.ModelProto, str, frozenset[str]]] = OrderedDict()  # by identity
        self._bundles: dict[str, Any] = {}  # by digest, the task whose result holds a content
        self._new: dict[str, bytes] = {}

    def release(self) -> None:
        """Lets go of what was sent: the scheduler forgets the tasks that nothing else refers to."""
        self._bundles.clear()
        self._models.clear()

    def packed(self, content: Any, *, anew: bool = False) -> tuple[bytes, list[Any]]:
        """Message for a worker, and the tasks whose results go with it.

        Args:
            content: To be pickled; its models must not be changed as long as this object lives.
            anew: Send contents again whose workers died; those that the scheduler has forgotten are in any case.
        """
        if anew or any(bundle.status in FORGOTTEN for bundle in self._bundles.values()):
            self.release()
        buffer, needs = io.BytesIO(), set[str]()

        class Pickler(pickle.Pickler):  # Python 3.13 takes the method of a class alone
            def persistent_id(_, found: Any) -> str | None:  # noqa: N805
                if not isinstance(found, onnx.ModelProto):
                    return None
                digest, its_needs = self._model(found)
                needs.update(its_needs)
                return digest

        Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
        if self._new:
            with warnings.catch_warnings():  # of a large one, which has to travel
                warnings.simplefilter("ignore", UserWarning)
                bundle = self._client.submit(_identity, self._new, key=f"kenosis-{uuid.uuid4().hex}", pure=False)
            self._bundles |= dict.fromkeys(self._new, bundle)
            self._new = {}
        used = needs.union(*(needed for _, _, needed in self._models.values()))
        self._bundles = {digest: bundle for digest, bundle in self._bundles.items() if digest in used}
        return buffer.getvalue(), list({id(b): b for digest in sorted(needs) for b in [self._bundles[digest]]}.values())

    def _model(self, model: onnx.ModelProto) -> tuple[str, frozenset[str]]:
        """Digest of a model, and those of all contents that it needs; what was not sent yet is added to the message."""
        known = self._models.get(id(model))
        if known is None:
            weights = {
                at: (t.name, t.data_type, tuple(t.dims), self._put(raw_bytes(t)))
                for at, t in enumerate(model.graph.initializer)
                if _goes_apart(t)
            }
            rest = copy_without_weights(model, {name for name, *_ in weights.values()})
            head = pickle.dumps((rest.SerializeToString(), weights))
            digest = self._put(head)
            known = model, digest, frozenset({digest, *(content for *_, content in weights.values())})
            self._models[id(model)] = known
            while len(self._models) > _KNOWN_MODELS:
                self._models.popitem(last=False)
        return known[1:]

    def _put(self, content: bytes) -> str:
        digest = hashlib.blake2b(content, digest_size=32).hexdigest()
        if digest not in self._bundles:
            self._new[digest] = content
        return digest


def _goes_apart(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type != onnx.TensorProto.STRING and content_bytes(tensor) >= _LARGE


def _identity(content: Any) -> Any:
    """The argument itself: as the result of a task it is sent once a worker, and again where a worker dies."""
    return content


def unpacked(message: bytes, bundles: Sequence[Mapping[str, bytes]]) -> Any:
    """The unpacked object; the same model is the same object as long as a worker has it in memory."""

    class Unpickler(pickle.Unpickler):  # Python 3.13 takes the method of a class alone
        def persistent_load(self, digest: str) -> onnx.ModelProto:
            return _model(digest, bundles)

    return Unpickler(io.BytesIO(message)).load()


def _model(digest: str, bundles: Sequence[Mapping[str, bytes]]) -> onnx.ModelProto:
    with lock:
        if digest not in models:
            models[digest] = _made({name: content for bundle in bundles for name, content in bundle.items()}, digest)
        models.move_to_end(digest)
        while len(models) > _KNOWN_MODELS:
            models.popitem(last=False)
        return models[digest]


def _made(contents: Mapping[str, bytes], digest: str) -> onnx.ModelProto:
    """The model of a digest: its shell, with the weights that were sent apart in their places."""
    shell, weights = pickle.loads(contents[digest])
    model = onnx.ModelProto()
    model.ParseFromString(shell)
    small = list(model.graph.initializer)
    del model.graph.initializer[:]
    for at in range(len(small) + len(weights)):
        if at not in weights:
            model.graph.initializer.append(small.pop(0))
            continue
        name, data_type, dims, content = weights[at]
        model.graph.initializer.add(name=name, data_type=data_type, dims=dims, raw_data=contents[content])
    return model
