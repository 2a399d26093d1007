"""Executor of passes' work on a cluster: pieces are sent to the workers, results come back in order."""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import onnx

from kenosis_ort.cluster.client import Cluster, answering
from kenosis_ort.cluster.flight import Flight
from kenosis_ort.cluster.travel import Packet, Sender, forget_models, unpacked
from kenosis_ort.cluster.worker import check_versions, chunked, versions
from kenosis_ort.errors import ClusterError, KenosisError, VerificationError
from kenosis_ort.runtime.session import Array, Closing, Executor, Running, Session, as_array, open_session

_log = logging.getLogger(__name__)

_TOGETHER: Final = 4
"""Feeds in a task: a session is opened for the first of them on each worker."""
_CHUNK_BYTES: Final = 2**22
_CACHED_SESSIONS: Final = 2

Feed = Mapping[str, Any]
T = TypeVar("T")
R = TypeVar("R")


class ClusterExecutor(Executor, Closing):
    """Does work on the workers of a cluster, each of which has one thread for it.

    Args:
        cluster: The cluster, checked.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @cached_property
    def _sender(self) -> Sender:
        return Sender(self._cluster)

    @property
    def ahead(self) -> int:
        return self._cluster.slots

    def close(self) -> None:
        """Releases the caches of workers."""
        if "_sender" not in vars(self):  # nothing was sent
            return
        self._sender.close()
        self._cluster.release(_rest)

    def open(
        self, model: Path | onnx.ModelProto, *, threads: int = 1, custom_op_libraries: Sequence[str] = ()
    ) -> Running:
        """The model as workers run it; one in a file of this machine is run here."""
        if isinstance(model, Path):
            return open_session(model, threads=threads, custom_op_libraries=custom_op_libraries)
        return _Remote(self, model, tuple(custom_op_libraries))

    def map(self, work: Callable[[T], R], pieces: Iterable[T]) -> Iterator[R]:
        """Results of the pieces; some run at the same time.

        Raises:
            ClusterError: The cluster cannot do the work.
            KenosisError: What the work raises; that comes while the results are iterated.
        """
        with answering(self._cluster.client):
            flight = Flight(self._cluster, ((work, piece) for piece in pieces), self._submitted, lambda _: "a pass")
        return self._results(flight)

    def _results(self, flight: Flight[Any]) -> Iterator[Any]:
        try:
            with answering(self._cluster.client):
                for _, done in flight.outcomes():
                    if done is None:
                        raise ClusterError(
                            "Every worker that was given a part of a pass died, also when nothing else was under way.",
                            where="executor",
                            fix="Give workers more memory, or leave the executor out.",
                        )
                    assert isinstance(done, _Done)
                    if done.error is not None:
                        raise done.error
                    yield done.value
        finally:
            flight.end()

    def _submitted(self, content: Any, attempt: str, anew: bool) -> Any:
        packet, bundles = self._sender.packed(content, anew=anew)
        key = f"kenosis-pass-{uuid.uuid4().hex}-{attempt}"
        return self._cluster.client.submit(_done, packet, bundles, versions(), key=key, pure=False)


class _Remote(Running):
    """A model that workers run."""

    def __init__(self, executor: ClusterExecutor, model: onnx.ModelProto, libraries: tuple[str, ...]) -> None:
        self._executor, self._model, self._libraries = executor, model, libraries

    def close(self) -> None:
        """Does nothing: workers keep few sessions, and not for long."""

    def runs(self, feeds: Iterable[Feed], names: Sequence[str] | None = None) -> Iterator[dict[str, Array]]:
        asked = None if names is None else tuple(names)
        arrays = ({name: as_array(value) for name, value in feed.items()} for feed in feeds)
        chunks = chunked(arrays, _TOGETHER, _CHUNK_BYTES)
        pieces = (_Runs(self._model, tuple(some), asked, self._libraries) for some in chunks)
        return _outputs(self._executor.map(_ran, pieces))


@dataclass(frozen=True)
class _Runs:
    """A model to be run: on which feeds, for which outputs, with which libraries of custom operators."""

    model: onnx.ModelProto
    feeds: tuple[Feed, ...]
    names: tuple[str, ...] | None
    libraries: tuple[str, ...]


@dataclass(frozen=True)
class _Ran:
    """Outputs of feeds, up to one that the runtime refuses."""

    outputs: tuple[dict[str, Array], ...]
    error: VerificationError | None = None


@dataclass(frozen=True)
class _Done:
    """Result of a piece of work: its value, or the error that it raised."""

    value: Any = None
    error: KenosisError | None = None


def _outputs(ran: Iterator[_Ran]) -> Iterator[dict[str, Array]]:
    for some in ran:
        yield from some.outputs
        if some.error is not None:
            raise some.error


# ---- on a worker ----------------------------------------------------------------------------------------------------

_sessions: deque[tuple[onnx.ModelProto, tuple[str, ...], Session]] = deque(maxlen=_CACHED_SESSIONS)
_lock = threading.Lock()


@np.errstate(all="ignore")
def _done(packet: Packet, bundles: Sequence[Mapping[str, bytes]], wanted: Mapping[str, str]) -> _Done:
    """Does a piece of work; an error of ours is returned, not raised."""
    try:
        check_versions(wanted)
        work, piece = unpacked(packet, bundles)
        return _Done(work(piece))
    except KenosisError as error:
        return _Done(error=error)


def _ran(given: _Runs) -> _Ran:
    outputs: list[dict[str, Array]] = []
    try:
        runner = _opened(given.model, given.libraries)
        outputs.extend(runner.runs(given.feeds, given.names))
    except VerificationError as error:
        return _Ran(tuple(outputs), error)
    return _Ran(tuple(outputs))


def _opened(model: onnx.ModelProto, libraries: tuple[str, ...]) -> Session:
    """A session, that of an earlier piece where the model is the same."""
    with _lock:
        for known, its_libraries, runner in _sessions:
            if known is model and its_libraries == libraries:
                return runner
        runner = open_session(model, threads=1, custom_op_libraries=libraries)
        _sessions.append((model, libraries, runner))
        return runner


def _rest() -> None:
    """Lets go of models and sessions."""
    with _lock:
        _sessions.clear()
    forget_models()
