"""What a worker does: it unpacks a message, does its work, and keeps models and their sessions for the next one.

A message is a function with its argument, pickled, in which models stand as references: their content comes as results
of tasks, which Dask sends once a worker and makes again where one dies.
"""

import importlib
import io
import pickle
import platform
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.calibration.collector import Sweep
from kenosis_ort.calibration.feeds import Part, bytes_of
from kenosis_ort.calibration.readers import opened
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, ClusterError, KenosisError, VerificationError
from kenosis_ort.runtime.session import Array, Session, open_session
from kenosis_ort.storage.writing import remove_leftovers

_MOST_KEPT: Final = 2
"""Models whose sessions a worker keeps."""
_KNOWN_MODELS: Final = 4
_CHUNK_BYTES: Final = 2**22
_PACKAGES: Final = ("kenosis_ort", "onnxruntime", "onnx", "numpy")

_lock = threading.Lock()
_models: OrderedDict[str, onnx.ModelProto] = OrderedDict()
_sessions: deque[tuple[onnx.ModelProto, tuple[str, ...], Session]] = deque(maxlen=_MOST_KEPT)
_sweeps: dict[str, list[Sweep]] = {}


def rest() -> None:
    """Lets go of models and sessions."""
    with _lock:
        idle = [sweep for known in _sweeps.values() for sweep in known]
        for cached in (_models, _sessions, _sweeps):
            cached.clear()
    for sweep in idle:
        sweep.close()


# ---- messages -------------------------------------------------------------------------------------------------------


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
        work, piece = unpacked(message, bundles)
        return Done(work(piece), None, time.perf_counter() - start, _address())
    except KenosisError as error:
        return Done(None, error, time.perf_counter() - start, _address())


def unpacked(message: bytes, bundles: Sequence[Mapping[str, bytes]]) -> Any:
    """The unpacked object; the same model is the same object as long as a worker has it in memory."""

    class Unpickler(pickle.Unpickler):  # Python 3.13 takes the method of a class alone
        def persistent_load(self, digest: str) -> onnx.ModelProto:
            return _model(digest, bundles)

    return Unpickler(io.BytesIO(message)).load()


def _model(digest: str, bundles: Sequence[Mapping[str, bytes]]) -> onnx.ModelProto:
    with _lock:
        if digest not in _models:
            _models[digest] = _made({name: content for bundle in bundles for name, content in bundle.items()}, digest)
        _models.move_to_end(digest)
        while len(_models) > _KNOWN_MODELS:
            _models.popitem(last=False)
        return _models[digest]


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


def versions() -> dict[str, str]:
    """Versions and settings that must be equal here and on every worker, for results to be equal."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}
    return {**found, **{name: str(importlib.import_module(name).__version__) for name in _PACKAGES}}


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Versions that differ, in words."""
    names = [name for name in wanted if wanted[name] != found.get(name)]
    return ", ".join(f"{name} {found.get(name, 'missing')}, not {wanted[name]}" for name in names)


def _address() -> str:
    from distributed import get_worker

    try:
        return str(get_worker().address)
    except ValueError:  # not on a worker
        return ""


# ---- runs of a model ------------------------------------------------------------------------------------------------


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
    with _lock:
        for known, its_libraries, session in _sessions:
            if known is model and its_libraries == libraries:
                return session
        session = open_session(model, custom_op_libraries=libraries)
        _sessions.append((model, libraries, session))
        return session


# ---- shards of a calibration ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepJob:
    """A model and the statistics to collect from it.

    Attributes:
        key: Unique.
        model: The model.
        fingerprint: Of the model.
        points: What is observed, pickled: with functions of the caller's.
        defaults: Values of inputs that a feed may leave out.
    """

    key: str
    model: onnx.ModelProto
    fingerprint: str
    points: bytes
    defaults: Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One shard.

    Attributes:
        name: For messages.
        content: What `Shards.part` returned or a list of feeds, pickled: each attempt reads a copy of its own.
        batch_size: Samples a feed, for paths.
        first: What messages call its first sample.
        part: As for `collect`, by numbers in the shard.
        cut: A digest from which on no sample is kept: others, of shards that are done, come before.
        inputs: The model's inputs; other arrays are left aside. None for all.
    """

    name: str
    content: bytes
    batch_size: int = 1
    first: int = 0
    part: Part = field(default_factory=dict)
    cut: int | None = None
    inputs: frozenset[str] | None = None


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


def swept(given: tuple[SweepJob, Task]) -> CalibrationTable:
    """Runs a shard through the model.

    Raises:
        CalibrationError: Something is wrong with its data.
    """
    job, task = given
    try:
        content = pickle.loads(task.content)  # of the caller's own client, as Dask itself does
        with _sweep_of(job) as sweep:
            sweep.start_again(task.part, task.cut)
            feeds = opened(content, task.name, task.batch_size, task.inputs)
            sweep.read(({**job.defaults, **feed} for feed in feeds), first=task.first)
            return sweep.table(job.fingerprint)
    except KenosisError as error:
        where = error.where or task.name
        where = where if where.startswith(task.name) else f"{task.name}, {where}"
        raise CalibrationError(error.what, where=where, fix=error.fix) from error


@contextmanager
def _sweep_of(job: SweepJob) -> Iterator[Sweep]:
    """Lends sessions of the model, those of an earlier shard where they are free."""
    with _lock:
        known = _sweeps.get(job.key)
        sweep = known.pop() if known else None
    if sweep is None:
        remove_leftovers()  # of workers that were killed here
        sweep = Sweep(job.model, pickle.loads(job.points))
    try:
        yield sweep
    finally:
        sweep.start_again()  # holds no statistics while it is idle
        with _lock:
            _sweeps.setdefault(job.key, []).append(sweep)
            old = [each for key in list(_sweeps)[:-_MOST_KEPT] for each in _sweeps.pop(key)]
        for each in old:
            each.close()
