"""Work on a cluster: pieces are sent to the workers, results come back in order, each once, whoever dies."""

import hashlib
import io
import itertools
import logging
import pickle
import time
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeVar

import onnx

from kenosis_ort.cluster.client import Cluster, answering
from kenosis_ort.cluster.worker import Done, ModelRuns, chunked, done, ran, rest, versions
from kenosis_ort.errors import ClusterError
from kenosis_ort.graph.outside import content_bytes, copy_without_weights, raw_bytes
from kenosis_ort.runtime.session import Array, Closing, Executor, Running, as_array, open_session

_log = logging.getLogger(__name__)

_TOGETHER: Final = 4
"""Feeds in a task: a session is opened for the first of them on each worker."""
_LARGE: Final = 2**14
"""Bytes from which on a weight is a content of its own: a candidate that differs in a few scales sends these."""
_KNOWN_MODELS: Final = 4
_FORGOTTEN: Final = ("cancelled", "lost")
"""What Dask calls a task that the scheduler knows no more."""
_AHEAD: Final = 4
"""Tasks under way for each slot; what is done early waits on the workers, which may spill it to disk."""
_NO_WORKER_S: Final = 120.0
_POLL_S: Final = 5.0
_RESTARTS: Final = 8

T = TypeVar("T")
R = TypeVar("R")
Outcomes = Generator[tuple[T, Done | None], None, None]


class ClusterExecutor(Executor, Closing):
    """Does work on the workers of a cluster, each of which has one thread for it.

    Args:
        cluster: The cluster, checked.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._sender: Sender | None = None

    @property
    def ahead(self) -> int:
        return self.cluster.slots

    def close(self) -> None:
        """Releases what was sent, and the caches of workers."""
        if self._sender is not None:
            self._sender = None
            self.cluster.release(rest)

    def open(
        self, model: Path | onnx.ModelProto, *, threads: int = 1, custom_op_libraries: Sequence[str] = ()
    ) -> Running:
        """The model as workers run it; one in a file of this machine is run here."""
        if isinstance(model, Path):
            return open_session(model, threads=threads, custom_op_libraries=custom_op_libraries)
        return _Remote(self, model, tuple(custom_op_libraries))

    def map(self, work: Callable[[T], R], pieces: Iterable[T]) -> Iterator[R]:
        """Results of the pieces; some run at the same time, from this call on.

        Raises:
            ClusterError: The cluster cannot do the work.
            KenosisError: What the work raises; that comes while the results are iterated.
        """
        return _values(self.outcomes(work, pieces, lambda _: "a pass"))

    def outcomes(self, work: Callable[[T], Any], pieces: Iterable[T], name: Callable[[T], str]) -> Outcomes[T]:
        """Each piece with what came of it, None where every worker died that was given it; under way from this call on.

        Args:
            work: A function of a module of this package.
            pieces: What it takes; taken as there is room.
            name: The words by which messages call a piece.

        Raises:
            ClusterError: The cluster cannot do the work.
        """
        with answering(self.cluster.client):
            flight = _Flight(self.cluster, iter(pieces), lambda *how: self._submitted(work, *how), name)
        return flight.outcomes()

    def _submitted(self, work: Callable[[T], Any], piece: T, attempt: str, anew: bool) -> Any:
        """Dask's future of a piece; with ``anew`` all that it needs is sent anew, since workers died that had it."""
        self._sender = self._sender or Sender(self.cluster.client)
        message, bundles = self._sender.packed((work, piece), anew=anew)
        key = f"kenosis-{uuid.uuid4().hex}-{attempt}"
        return self.cluster.client.submit(done, message, bundles, versions(), key=key, pure=False)


class _Remote(Running):
    """A model that workers run."""

    def __init__(self, executor: ClusterExecutor, model: onnx.ModelProto, libraries: tuple[str, ...]) -> None:
        self._executor, self._model, self._libraries = executor, model, libraries

    def close(self) -> None:
        """Does nothing: workers keep few sessions, and not for long."""

    def runs(
        self, feeds: Iterable[Mapping[str, Any]], names: Sequence[str] | None = None
    ) -> Iterator[dict[str, Array]]:
        asked = None if names is None else tuple(names)
        arrays = ({name: as_array(value) for name, value in feed.items()} for feed in feeds)
        chunks = chunked(arrays, _TOGETHER)
        results = self._executor.map(ran, (ModelRuns(self._model, some, asked, self._libraries) for some in chunks))
        return _until_refused(results)


def _until_refused(results: Iterator[tuple[list[dict[str, Array]], Exception | None]]) -> Iterator[dict[str, Array]]:
    for outputs, error in results:
        yield from outputs
        if error is not None:
            raise error


def _values(outcomes: Outcomes[Any]) -> Iterator[Any]:
    with closing(outcomes):
        for _, outcome in outcomes:
            if outcome is None:
                raise ClusterError(
                    "Every worker that was given a part of a pass died, also when nothing else was under way.",
                    where="executor",
                    fix="Give workers more memory, or leave the executor out.",
                )
            if outcome.error is not None:
                raise outcome.error
            yield outcome.value


class _Flight:
    """Pieces of work under way, some at a time, from the moment it is made.

    Args:
        cluster: The cluster.
        pieces: What is to be done.
        send: Sends a piece under a key that ends with the given text, and returns Dask's future; see `_submitted`.
        name: The words by which messages call a piece.
    """

    def __init__(
        self, cluster: Cluster, pieces: Iterator[Any], send: Callable[[Any, str, bool], Any], name: Callable[[Any], str]
    ) -> None:
        self._cluster, self._client = cluster, cluster.client
        self._pieces, self._send, self._name = pieces, send, name
        self._running: dict[int, tuple[Any, Any]] = {}
        self._begun = self._forgotten = 0
        self._window = _AHEAD * cluster.slots
        self._fill()

    def outcomes(self) -> Outcomes[Any]:
        try:
            for number in itertools.count():
                with answering(self._client):
                    self._fill()
                    if number not in self._running:
                        return
                    piece, future = self._running[number]
                    outcome = self._outcome(piece, future) or self._alone(number, piece)
                del self._running[number], future
                yield piece, outcome
        finally:
            self._running.clear()  # what still runs is cancelled

    def _fill(self) -> None:
        for piece in itertools.islice(self._pieces, max(0, self._window - len(self._running))):
            self._running[self._begun] = piece, self._send(piece, f"{self._begun}-{self._forgotten}", False)
            self._begun += 1

    def _alone(self, number: int, piece: Any) -> Done | None:
        """Runs a piece again when no other is under way, whose workers died; these may have died of another one."""
        _log.info("the workers of %s died: it runs again, alone", self._name(piece))
        for other, (known, future) in self._running.items():
            if other != number:
                self._outcome(known, future)
        return self._outcome(piece, self._send(piece, f"{number}-alone", True))

    def _outcome(self, piece: Any, future: Any) -> Done | None:
        """Waits for a piece; None where its workers died, more often than Dask tries.

        Raises:
            ClusterError: The scheduler is gone, no worker was there for long, or they fail for reasons of their own.
        """
        from distributed import TimeoutError as NotYet
        from distributed.scheduler import KilledWorker

        seen = time.monotonic()
        while True:
            try:
                found: Done = future.result(timeout=_POLL_S)
                return found
            except NotYet:
                pass
            except KilledWorker:
                return None
            except Exception as error:
                if self._client.status == "running":
                    if future.status not in _FORGOTTEN:
                        raise ClusterError(
                            f"A worker failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                            where=self._name(piece),
                            fix="See the worker's log; the data may be right.",
                        ) from error
                    future = self._again(piece)
                    continue
            if self._client.status != "running":
                raise ClusterError(f"The Dask client is {self._client.status}.", fix="Repeat the call with a new one.")
            if any(worker.get("status", "running") == "running" for worker in self._cluster.workers().values()):
                seen = time.monotonic()
            elif time.monotonic() - seen > _NO_WORKER_S:
                raise self._no_worker(piece, future)

    def _again(self, piece: Any) -> Any:
        """Sends a piece once more that the scheduler has forgotten.

        Raises:
            ClusterError: That happens again and again.
        """
        self._forgotten += 1
        if self._forgotten > _RESTARTS * (len(self._running) + 1):
            raise ClusterError(
                f"The Dask scheduler has forgotten what it was given, {self._forgotten} times.",
                where=self._name(piece),
                fix="See who restarts the cluster or cancels its tasks, and repeat the call; nothing was written.",
            )
        _log.info("the scheduler has forgotten %s: it is sent once more", self._name(piece))
        return self._send(piece, f"again-{self._forgotten}", False)

    def _no_worker(self, piece: Any, future: Any) -> ClusterError:
        """The error where no worker is left, with the pieces of which most died, as the scheduler counts.

        What waits on a worker counts with what it was at, and so does what it has just done.
        """

        def counted(dask_scheduler: Any) -> dict[str, int]:  # travels by value: a scheduler may be without this package
            return {str(key): known.suspicious for key, known in dask_scheduler.tasks.items()}

        counts = self._client.run_on_scheduler(counted)
        deaths = {self._name(k): counts.get(str(f.key), 0) for k, f in (*self._running.values(), (piece, future))}
        named = sorted(((name, count) for name, count in deaths.items() if count), key=lambda entry: -entry[1])
        of_what = ", ".join(f"{name} ({count} times)" for name, count in named)
        return ClusterError(
            f"No worker is left that runs, for {_NO_WORKER_S:.0f} seconds: they died, or are paused since they have no "
            f"memory left.{f' Workers died while they had {of_what}.' if named else ''}",
            where=", ".join(name for name, count in named if count == named[0][1]) or "executor",
            fix="Start workers again, with more memory, and repeat the call; nothing was written.",
        )


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

    def packed(self, content: Any, *, anew: bool = False) -> tuple[bytes, list[Any]]:
        """Message for a worker, and the tasks whose results go with it.

        Args:
            content: To be pickled; its models must not be changed as long as this object lives.
            anew: Send contents again whose workers died; those that the scheduler has forgotten are in any case.
        """
        if anew or any(bundle.status in _FORGOTTEN for bundle in self._bundles.values()):
            self._bundles.clear()
            self._models.clear()
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
            head = pickle.dumps((copy_without_weights(model, _goes_apart).SerializeToString(), weights))
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
    """Its argument: as the result of a task it is sent once a worker, and again where a worker dies."""
    return content
