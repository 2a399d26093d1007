"""Work of a worker: one shard through the float model, which is unpacked once a worker and cached for the next."""

from __future__ import annotations

import importlib
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.calibration.collector import Sweep
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import Part
from kenosis_ort.calibration.readers import opened
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, ClusterError, KenosisError
from kenosis_ort.graph.external_data import MIN_EXTERNAL_BYTES, read_external_data, write_external_data
from kenosis_ort.graph.outside import content_bytes, copy_without_weights, raw_bytes
from kenosis_ort.storage.scratch import remove_leftovers

_CACHED_JOBS: Final = 2
"""Models whose sessions a worker keeps between shards."""
_PACKAGES: Final = ("kenosis_ort", "onnxruntime", "onnx", "numpy")


def versions() -> dict[str, str]:
    """Versions and settings that must be equal here and on every worker, for results to be equal."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}
    return {**found, **{name: str(importlib.import_module(name).__version__) for name in _PACKAGES}}


@dataclass(frozen=True)
class Parcel:
    """A model and the statistics to collect from it, as sent to a worker.

    Attributes:
        key: Of the job.
        versions: Of the machine that it comes from.
        shell: The model but for its larger weights.
        weights: These, by name, in the layout of ``raw_data``; or the folder of a file that the shell refers to, which
            all workers see.
        fingerprint: The model's.
        tensors: As for `kenosis_ort.calibration.collect`; the following six likewise.
        config: As above.
        providers: As above.
        custom_op_libraries: As above.
        seen_as: As above.
        channels: As above.
        keep: As above.
        defaults: Values of inputs that a feed may leave out.
        threads: Threads of a session.
    """

    key: str
    versions: Mapping[str, str]
    shell: bytes
    weights: Mapping[str, bytes] | Path
    fingerprint: str
    tensors: Sequence[str]
    config: CalibrationConfig
    providers: Sequence[Any]
    custom_op_libraries: Sequence[str]
    seen_as: Mapping[str, Callable[[Any], Any]]
    channels: Mapping[str, int]
    keep: int
    defaults: Mapping[str, Any]
    threads: int

    def model(self) -> onnx.ModelProto:
        """The model, complete in memory."""
        proto = onnx.ModelProto()
        proto.ParseFromString(self.shell)
        if isinstance(self.weights, Path):
            read_external_data(proto, self.weights / "model.onnx")
            return proto
        for tensor in proto.graph.initializer:
            if tensor.name in self.weights:
                tensor.raw_data = self.weights[tensor.name]
        return proto


def packed(proto: onnx.ModelProto, folder: Path | None) -> tuple[bytes, Mapping[str, bytes] | Path]:
    """Shell and weights of a model, as `Parcel` has them: neither is limited to the 2 GiB of one message.

    Args:
        proto: The model, complete in memory.
        folder: One that all workers see, to be kept until they are done; None where there is none.
    """
    if folder is not None:
        return write_external_data(proto, folder / "weights.bin").SerializeToString(), folder
    shell = copy_without_weights(proto, lambda _: True)
    weights = {}
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.STRING or content_bytes(tensor) < MIN_EXTERNAL_BYTES:
            shell.graph.initializer.add().CopyFrom(tensor)
            continue
        weights[tensor.name] = raw_bytes(tensor)
        shell.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return shell.SerializeToString(), weights


@dataclass(frozen=True)
class Task:
    """One shard.

    Attributes:
        number: Its place in the order of reduction.
        name: For messages.
        content: What `Shards.part` returned or a list of feeds, pickled: each attempt reads a copy of its own.
        batch_size: Samples a feed, for paths.
        first: What messages call its first sample.
        part: As for `collect`, by numbers in the shard.
        cut: A digest from which on no sample is kept: others, of shards that are done, come before.
        inputs: The model's inputs; other arrays are left aside. None for all.
    """

    number: int
    name: str
    content: bytes
    batch_size: int = 1
    first: int = 0
    part: Part = field(default_factory=dict)
    cut: int | None = None
    inputs: frozenset[str] | None = None


@dataclass(frozen=True)
class ShardOutcome:
    """Result of a shard.

    Attributes:
        table: Of its samples; None where it failed.
        failure: Why there is no table; a `ClusterError` where the worker is at fault, and not the data.
        seconds: That it took.
        worker: Address of the worker.
    """

    table: CalibrationTable | None = None
    failure: KenosisError | None = None
    seconds: float = 0.0
    worker: str = ""


def chunked(feeds: Iterable[dict[str, Any]], most: int, most_bytes: int) -> Iterator[list[dict[str, Any]]]:
    """Feeds in groups for a task each, which end where they have ``most`` of them or ``most_bytes``."""
    chunk: list[dict[str, Any]] = []
    chunk_bytes = 0
    for feed in feeds:
        chunk.append(feed)
        chunk_bytes += sum(int(getattr(value, "nbytes", 0)) for value in feed.values())
        if len(chunk) >= most or chunk_bytes >= most_bytes:
            yield chunk
            chunk, chunk_bytes = [], 0
    if chunk:
        yield chunk


def sees(path: str, content: str) -> bool:
    """Whether this machine has a file of that content."""
    try:
        return Path(path).read_text() == content
    except OSError:
        return False


@np.errstate(all="ignore")  # as in the calling process, of which this may be a thread
def sweep_shard(parcel: Parcel, task: Task) -> ShardOutcome:
    """Runs a shard through the model; whatever is wrong with its data comes back as a failure, not as an exception."""
    start = time.perf_counter()
    table: CalibrationTable | None = None
    failure: KenosisError | None = None
    try:
        check_versions(parcel.versions)
        table = _swept(parcel, task)
    except ClusterError as error:
        failure = error
    except KenosisError as error:
        failure = CalibrationError(error.what, where=_within(task.name, error.where), fix=error.fix)
    return ShardOutcome(table, failure, time.perf_counter() - start, _address())


def check_versions(wanted: Mapping[str, str]) -> None:
    """Checks that this worker, which may have joined late, is like the machine that the work comes from.

    Raises:
        ClusterError: It has other versions.
    """
    if found := differences(wanted, versions()):
        what = f"A worker that joined has other versions: {found}."
        raise ClusterError(what, where=_address() or None, fix="Install the same versions on every worker.")


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Versions that differ, in words."""
    names = [name for name in wanted if wanted[name] != found.get(name)]
    return ", ".join(f"{name} {found.get(name, 'missing')}, not {wanted[name]}" for name in names)


def _within(name: str, where: str | None) -> str:
    return name if where is None else where if where.startswith(name) else f"{name}, {where}"


def _swept(parcel: Parcel, task: Task) -> CalibrationTable:
    content = pickle.loads(task.content)  # of the caller's own client, as Dask itself does
    with _sweep_of(parcel) as sweep:
        sweep.start_again(task.part, task.cut)
        feeds = opened(content, task.name, task.batch_size, task.inputs)
        sweep.read(({**parcel.defaults, **feed} for feed in feeds), first=task.first)
        return sweep.table(parcel.fingerprint)


_idle: dict[str, list[Sweep]] = {}
_lock = threading.Lock()


@contextmanager
def _sweep_of(parcel: Parcel) -> Iterator[Sweep]:
    """Lends sessions of the model, those of an earlier shard where they are free."""
    with _lock:
        known = _idle.get(parcel.key)
        sweep = known.pop() if known else None
    if sweep is None:
        remove_leftovers()  # of workers that were killed here
        sweep = Sweep(
            parcel.model(),
            tensors=parcel.tensors,
            config=parcel.config,
            providers=parcel.providers,
            custom_op_libraries=parcel.custom_op_libraries,
            threads=parcel.threads,
            seen_as=parcel.seen_as,
            channels=parcel.channels,
            keep=parcel.keep,
        )
    try:
        yield sweep
    finally:
        sweep.start_again()  # holds no statistics while it is idle
        with _lock:
            _idle.setdefault(parcel.key, []).append(sweep)
            old = list(_idle)[:-_CACHED_JOBS]
        for key in old:
            release(key)


def release(key: str) -> None:
    """Closes the sessions that a worker keeps for a job."""
    with _lock:
        dropped = _idle.pop(key, [])
    for sweep in dropped:
        sweep.close()


def _address() -> str:
    from distributed import get_worker

    try:
        return str(get_worker().address)
    except ValueError:  # not on a worker
        return ""
