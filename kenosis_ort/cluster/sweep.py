"""The sweep on a cluster: shards as tasks, their tables merged in the order of the shards.

Merging is exact, so that the table is the one that a single process makes of the same samples. Each shard is merged
once, by its number: a task that runs twice, because its worker died or its result was lost, counts once.
"""

from __future__ import annotations

import importlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import onnx

from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.calibration.collector import Progress
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import Part, sample_feeds
from kenosis_ort.calibration.readers import Shards
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.cluster.client import Cluster, ShardDone, answering
from kenosis_ort.cluster.flight import FORGOTTEN, Flight
from kenosis_ort.cluster.travel import result_of
from kenosis_ort.cluster.worker import Parcel, ShardOutcome, Task, chunked, packed, release, sweep_shard, versions
from kenosis_ort.errors import CalibrationError, ClusterError, OptionError, callers_own, warn_caller
from kenosis_ort.storage.scratch import Scratch

_log = logging.getLogger(__name__)

_CHUNK_FEEDS: Final = 64
_CHUNK_BYTES: Final = 2**23


def collect_on(
    cluster: Cluster,
    proto: onnx.ModelProto,
    source: Any,
    *,
    tensors: Sequence[str],
    config: CalibrationConfig,
    providers: Sequence[Any] = (),
    custom_op_libraries: Sequence[str] = (),
    progress: Progress | None = None,
    seen_as: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
    part: Part = MappingProxyType({}),
    channels: Mapping[str, int] = MappingProxyType({}),
    keep: int = 0,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> CalibrationTable:
    """Collects on the workers what `kenosis_ort.calibration.collect` collects here, to the bit.

    Args:
        cluster: Where to.
        proto: As for `collect`.
        source: `Shards`, which workers read; any other reader is read here, and its samples travel.
        tensors: As for `collect`.
        config: As for `collect`, without a moving average, which depends on all samples before.
        providers: As for `collect`.
        custom_op_libraries: As for `collect`; the same paths on every worker.
        progress: As for `collect`.
        seen_as: As for `collect`.
        part: As for `collect`, not with `Shards`.
        channels: As for `collect`.
        keep: As for `collect`.
        defaults: Values of inputs that a feed may leave out and that are to be in every feed.

    Raises:
        CalibrationError: As `collect`; a shard is bad, and named.
        ClusterError: The cluster cannot do the work.
        OptionError: A shard cannot be sent.
    """
    cluster.check(custom_op_libraries)
    shards = source if isinstance(source, Shards) else None
    tasks = _chunks(source, part) if shards is None else _parts(shards)
    _sent(dict(seen_as), "what calibration takes values for")
    reduction = _Reduction({tensor.name for tensor in proto.graph.initializer})
    with Scratch("parcel") as folder, answering(cluster.client):
        shell, weights = packed(proto, folder if cluster.sees(folder) else None)
        parcel = Parcel(
            key=uuid.uuid4().hex,
            versions=versions(),
            shell=shell,
            weights=weights,
            fingerprint=model_fingerprint(proto),
            tensors=tuple(tensors),
            config=config,
            providers=tuple(providers),
            custom_op_libraries=tuple(custom_op_libraries),
            seen_as=dict(seen_as),
            channels=dict(channels),
            keep=keep,
            defaults=dict(defaults),
            threads=0 if config.bit_exact else 1,
        )
        work = _Work(cluster, parcel, tasks, None if shards is None else shards.count, progress)
        try:
            for outcome in work.outcomes():
                reduction.add(outcome)
                work.cut = reduction.cut
        finally:
            work.end()
    return reduction.table()


def _parts(shards: Shards) -> Iterator[Task]:
    """The shards as tasks, after all were found to be fit to be sent."""

    def task(number: int) -> Task:
        name = shards.name(number)
        return Task(number, name, _sent(shards.part(number), name), shards.batch_size, inputs=shards.inputs)

    for number in range(shards.count):
        task(number)
    return map(task, range(shards.count))


def _chunks(reader: Any, part: Part) -> Iterator[Task]:
    """Yields the samples of a reader, some at a time, as tasks."""
    first = 0
    for number, feeds in enumerate(chunked(map(dict, sample_feeds(reader)), _CHUNK_FEEDS, _CHUNK_BYTES)):
        name = f"samples {first} to {first + len(feeds) - 1}"
        chosen = {n - first: part[n] for n in range(first, first + len(feeds)) if n in part}
        yield Task(number, name, _sent(feeds, name), first=first, part=chosen)
        first += len(feeds)


def _sent(content: Any, name: str) -> bytes:
    """Pickle of an object as Dask makes it, which prints what it cannot pickle.

    Raises:
        OptionError: It cannot be.
    """
    dumps = importlib.import_module("cloudpickle").dumps
    try:
        return bytes(dumps(content))
    except Exception as error:  # pickling calls code of the caller's
        raise OptionError(
            f"{name} cannot be sent to a worker: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            where="shards",
            fix="give paths, readers that can be pickled, or a function that opens what it needs where it runs",
        ) from error


class _Reduction:
    """Merges the tables of shards, in order.

    Args:
        constants: Names of initializers, which every shard sees whole and which count once.
    """

    def __init__(self, constants: Collection[str]) -> None:
        self._constants = constants
        self._whole: CalibrationTable | None = None
        self._part: CalibrationTable | None = None

    def add(self, outcome: ShardOutcome) -> None:
        """Takes the next shard's tables."""
        self._whole = self._merged(self._whole, outcome.table)
        self._part = self._merged(self._part, None if outcome.table is None else outcome.table.part)

    def _merged(self, so_far: CalibrationTable | None, more: CalibrationTable | None) -> CalibrationTable | None:
        if so_far is None or more is None:
            return more if so_far is None else so_far
        merged = so_far.merge(more)
        once = {name: so_far.tensors[name] for name in merged.tensors if name in self._constants}
        return replace(merged, tensors={**merged.tensors, **once}) if once else merged

    @property
    def cut(self) -> int | None:
        """The digest from which on no sample will be kept; None where nothing is known of samples."""
        return None if self._whole is None or self._whole.cached is None else self._whole.cached.cut

    def table(self) -> CalibrationTable:
        """The whole.

        Raises:
            CalibrationError: There was no sample.
        """
        if self._whole is None:
            raise CalibrationError(
                "No data is collected: no shard yields a sample.", fix="Give at least one shard that can be read."
            )
        return replace(self._whole, part=self._part)


class _Work:
    """The shards under way, and the report of each.

    Args:
        cluster: The cluster.
        parcel: What all tasks need.
        tasks: The shards.
        total: Their number, None where it is not known.
        progress: As for `collect`.

    Attributes:
        cut: As in `Task`, for those that are still to be sent.
    """

    def __init__(
        self, cluster: Cluster, parcel: Parcel, tasks: Iterator[Task], total: int | None, progress: Progress | None
    ) -> None:
        self._cluster, self._client = cluster, cluster.client
        self._parcel, self._total, self._progress = parcel, total, progress
        self._there = self._sent("")
        self._samples = self._done = 0
        self.cut: int | None = None
        self._begun = time.monotonic()
        cut = (replace(task, cut=self.cut) for task in tasks)
        self._flight = Flight(cluster, cut, self._submitted, lambda task: task.name)

    def outcomes(self) -> Iterator[ShardOutcome]:
        """Yields the results of shards; those left out are only reported.

        Raises:
            CalibrationError: A shard failed, and is not to be left out.
        """
        if self._progress is not None:
            self._progress(0, None)
        for task, found in self._flight.outcomes():
            assert found is None or isinstance(found, ShardOutcome)
            outcome = found or _deadly(task)
            self._tell(task, outcome)
            if outcome.failure is None:
                yield outcome

    def end(self) -> None:
        """Cancels the tasks that still run, and releases the workers' caches for this job."""
        self._flight.end()
        self._cluster.release(release, self._parcel.key)

    def _submitted(self, task: Task, attempt: str, anew: bool) -> Any:
        if self._there.status in FORGOTTEN:
            self._there = self._sent(f"-{attempt}")
        there = self._sent(f"-{attempt}") if anew else self._there
        return self._client.submit(sweep_shard, there, task, key=f"{there.key}-shard-{attempt}", pure=False)

    def _sent(self, attempt: str) -> Any:
        """The parcel as the result of a task, which is sent once a worker."""
        return result_of(self._client, self._parcel, f"kenosis-{self._parcel.key}{attempt}")

    def _tell(self, task: Task, outcome: ShardOutcome) -> None:
        """Reports a shard.

        Raises:
            CalibrationError: It failed, and is not to be left out.
            ClusterError: Its worker is at fault.
        """
        failure = outcome.failure
        if failure is not None:
            if isinstance(failure, ClusterError) or self._cluster.bad_shards == "stop":
                raise failure
            warn_caller(f"{task.name} was left out: {failure}")
        self._done += 1
        samples = 0 if outcome.table is None else outcome.table.samples
        self._samples += samples
        if self._progress is not None:
            self._progress(self._samples, None)
        each = (time.monotonic() - self._begun) / self._done
        left = None if self._total is None else each * (self._total - self._done)
        why = None if failure is None else failure.what
        done = ShardDone(task.name, outcome.worker, samples, outcome.seconds, self._done, self._total, left, why)
        _log.info("%s", done)
        if self._cluster.on_shard is not None:
            callers_own(self._cluster.on_shard)(done)


def _deadly(task: Task) -> ShardOutcome:
    what = "Every worker that was given this shard died, also when it ran alone."
    fix = "Give workers more memory, or make the shards smaller."
    return ShardOutcome(failure=CalibrationError(what, where=task.name, fix=fix))
