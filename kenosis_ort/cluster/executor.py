"""Work on a cluster: pieces are sent to the workers, results come back in order, each once, whoever dies.

A message is a function with its argument. A worker unpacks it, does its work, and keeps models and their sessions for
the next one.
"""

import itertools
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import onnx

from kenosis_ort.calibration.feeds import bytes_of
from kenosis_ort.cluster import client
from kenosis_ort.cluster.client import Cluster, Sender, answering, differences, versions
from kenosis_ort.errors import ClusterError, KenosisError, VerificationError
from kenosis_ort.runtime.session import Array, Closing, Executor, Running, Session, as_array, open_session

_log = logging.getLogger(__name__)

_TOGETHER: Final = 4
"""Feeds in a task: a session is opened for the first of them on each worker."""
_AHEAD: Final = 4
"""Tasks under way for each slot; what is done early waits on the workers, which may spill it to disk."""
_NO_WORKER_S: Final = 120.0
_POLL_S: Final = 5.0
_RESTARTS: Final = 8

_CHUNK_BYTES: Final = 2**22
MOST_KEPT: Final = 2
"""Models whose sessions a worker keeps."""

_sessions: deque[tuple[onnx.ModelProto, tuple[str, ...], Session]] = deque(maxlen=MOST_KEPT)
idle: dict[str, list[Closing]] = {}
"""What a worker keeps open beside them, by the key of the job that it is of."""

T = TypeVar("T")
R = TypeVar("R")
Outcomes = Generator[tuple[T, "Done | None"], None, None]


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
            self._sender.release()  # a frame or a cycle may still refer to it
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

    def _alone(self, number: int, piece: Any) -> "Done | None":
        """Runs a piece again when no other is under way, whose workers died; these may have died of another one."""
        _log.info("the workers of %s died: it runs again, alone", self._name(piece))
        for other, (known, future) in self._running.items():
            if other != number:
                self._outcome(known, future)
        return self._outcome(piece, self._send(piece, f"{number}-alone", True))

    def _outcome(self, piece: Any, future: Any) -> "Done | None":
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
                    if future.status not in client.FORGOTTEN:
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


def chunked(feeds: Iterable[dict[str, Any]], most: int) -> Iterator[list[dict[str, Any]]]:
    """Feeds in groups for a task each, which end where they have ``most`` of them or bytes enough."""
    chunk: list[dict[str, Any]] = []
    chunk_bytes = 0
    for feed in feeds:
        chunk.append(feed)
        chunk_bytes += bytes_of(feed)
        if len(chunk) >= most or chunk_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, chunk_bytes = [], 0
    if chunk:
        yield chunk


# ---- on the workers -------------------------------------------------------------------------------------------------


def rest() -> None:
    """Lets go of models and sessions."""
    with client.lock:
        left = [each for known in idle.values() for each in known]
        for cached in (client.models, _sessions, idle):
            cached.clear()
    for each in left:
        each.close()


@dataclass(frozen=True)
class Done:
    """Result of a piece of work.

    Attributes:
        value: What it returned.
        error: The error of ours that it raised; a `ClusterError` where the worker is at fault.
        seconds: What it took.
        worker: Address of the worker.
    """

    value: Any = None
    error: KenosisError | None = None
    seconds: float = 0.0
    worker: str = ""


@np.errstate(all="ignore")  # as in the calling process, of which this may be a thread
def done(message: bytes, bundles: Sequence[Mapping[str, bytes]], wanted: Mapping[str, str]) -> Done:
    """Does a piece of work; an error of ours is returned, not raised."""
    start = time.perf_counter()
    try:
        if found := differences(wanted, versions()):  # it may have joined late
            what = f"A worker that joined has other versions: {found}."
            raise ClusterError(what, where=_address() or None, fix="Install the same versions on every worker.")
        work, piece = client.unpacked(message, bundles)
        return Done(work(piece), None, time.perf_counter() - start, _address())
    except KenosisError as error:
        return Done(None, error, time.perf_counter() - start, _address())


def _address() -> str:
    from distributed import get_worker

    try:
        return str(get_worker().address)
    except ValueError:  # not on a worker
        return ""


@dataclass(frozen=True)
class ModelRuns:
    """A model to be run: on which feeds, for which outputs, with which libraries of custom operators."""

    model: onnx.ModelProto
    feeds: Sequence[Mapping[str, Any]]
    names: tuple[str, ...] | None
    libraries: tuple[str, ...]


def ran(given: ModelRuns) -> tuple[list[dict[str, Array]], VerificationError | None]:
    """Outputs of feeds, up to one that the runtime refuses, with its error."""
    outputs: list[dict[str, Array]] = []
    try:
        outputs.extend(_session(given.model, given.libraries).runs(given.feeds, given.names))
    except VerificationError as error:
        return outputs, error
    return outputs, None


def _session(model: onnx.ModelProto, libraries: tuple[str, ...]) -> Session:
    """A session, that of an earlier piece where the model is the same."""
    with client.lock:
        for known, its_libraries, session in _sessions:
            if known is model and its_libraries == libraries:
                return session
        session = open_session(model, custom_op_libraries=libraries)
        _sessions.append((model, libraries, session))
        return session
