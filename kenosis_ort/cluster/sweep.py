"""The sweep on a cluster: shards as tasks, their tables merged in the order of the shards, whoever ends first.

Merging is exact, so that the table is the one that a single process makes of the same samples. Each shard is merged
once, by its number: a task that runs twice, because its worker died or its result was lost, counts once.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import onnx

from kenosis_ort.calibration.collector import Progress
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import Feed, sample_feeds
from kenosis_ort.calibration.fingerprint import model_fingerprint
from kenosis_ort.calibration.shards import Shards
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.cluster.client import Cluster, ShardDone, answering
from kenosis_ort.cluster.work import Failure, Outcome, Parcel, Task, kept, packed, release, sweep_shard, versions
from kenosis_ort.errors import CalibrationError, ClusterError, OptionError, callers_own, warn_caller
from kenosis_ort.storage.scratch import Scratch

_log = logging.getLogger(__name__)

_AHEAD: Final = 4
"""Shards under way for each slot; what is done early waits on the workers, which may spill it to disk."""
_NO_WORKER_S: Final = 120.0
_POLL_S: Final = 5.0
_RESTARTS: Final = 8
_FORGOTTEN: Final = ("cancelled", "lost")  # what Dask calls a task that the scheduler knows no more
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
    part: Collection[int] = (),
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
    tasks = _chunks(source, frozenset(part)) if shards is None else _parts(shards)
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
    """Yields the shards as tasks, after all were found to be fit to be sent."""
    for number in range(shards.count):
        _sent(shards.part(number), shards.name(number))

    def tasks() -> Iterator[Task]:
        for number in range(shards.count):
            name = shards.name(number)
            yield Task(number, name, _sent(shards.part(number), name), shards.batch_size)

    return tasks()


def _chunks(reader: Any, part: frozenset[int]) -> Iterator[Task]:
    """Yields the samples of a reader, some at a time, as tasks."""
    first = 0
    feeds: list[Feed] = []
    held = 0

    def task(number: int) -> Task:
        name = f"samples {first} to {first + len(feeds) - 1}"
        chosen = tuple(n - first for n in range(first, first + len(feeds)) if n in part)
        return Task(number, name, _sent([dict(feed) for feed in feeds], name), first=first, part=chosen)

    numbers = itertools.count()
    for feed in sample_feeds(reader):
        feeds.append(feed)
        held += sum(int(getattr(value, "nbytes", 0)) for value in feed.values())
        if len(feeds) >= _CHUNK_FEEDS or held >= _CHUNK_BYTES:
            yield task(next(numbers))
            first, feeds, held = first + len(feeds), [], 0
    if feeds:
        yield task(next(numbers))


def _sent(content: Any, name: str) -> bytes:
    """Returns what travels, pickled by Dask's own means.

    Raises:
        OptionError: It cannot be.
    """
    from distributed.protocol.pickle import dumps

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

    def add(self, outcome: Outcome) -> None:
        """Takes the next shard's tables."""
        self._whole = self._merged(self._whole, outcome.table)
        self._part = self._merged(self._part, outcome.part)

    def _merged(self, so_far: CalibrationTable | None, more: CalibrationTable | None) -> CalibrationTable | None:
        if so_far is None or more is None:
            return more if so_far is None else so_far
        merged = so_far.merge(more)
        once = {name: so_far.tensors[name] for name in merged.tensors if name in self._constants}
        return replace(merged, tensors={**merged.tensors, **once}) if once else merged

    @property
    def cut(self) -> int | None:
        """The digest from which on no sample will be kept; None where nothing is known of samples."""
        return None if self._whole is None or self._whole.kept is None else self._whole.kept.cut

    def table(self) -> CalibrationTable:
        """Returns the whole.

        Raises:
            CalibrationError: There was no sample.
        """
        if self._whole is None:
            raise CalibrationError(
                "No data is collected: no shard yields a sample.", fix="Give at least one shard that can be read."
            )
        return replace(self._whole, part=self._part)


class _ForgottenError(Exception):
    """The scheduler has restarted, and knows of no task any more."""


class _Work:
    """Keeps some shards under way and hands their outcomes out in order.

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
        self._parcel, self._tasks, self._total, self._progress = parcel, tasks, total, progress
        self._there = self._sent("")
        self._running: dict[int, tuple[Task, Any]] = {}
        self._samples = self._done = self._forgotten = 0
        self.cut: int | None = None
        self._begun = time.monotonic()

    def outcomes(self) -> Iterator[Outcome]:
        """Yields what shards came to, those left out but told about aside.

        Raises:
            CalibrationError: A shard failed, and is not to be left out.
        """
        if self._progress is not None:
            self._progress(0, None)
        window = _AHEAD * self._cluster.slots
        for number in itertools.count():
            for task in itertools.islice(self._tasks, max(0, window - len(self._running))):
                task = replace(task, cut=self.cut)
                self._running[task.number] = task, self._submitted(task)
            if number not in self._running:
                return
            task, future = self._running[number]
            outcome = self._outcome(task, future) or self._alone(task)
            del self._running[number]
            self._tell(task, outcome)
            if outcome.failure is None:
                yield outcome

    def end(self) -> None:
        """Lets go of what is under way, and of what workers keep for this job."""
        self._running.clear()
        if self._client.status == "running":
            try:
                self._client.run(release, self._parcel.key, on_error="ignore")
            except Exception as error:  # workers keep little, and not for ever
                _log.debug("workers were not told that the job is done: %s", error)

    def _submitted(self, task: Task, there: Any = None) -> Any:
        there = there or self._there
        key = f"{there.key}-{task.number}-{self._forgotten}"
        return self._client.submit(sweep_shard, there, task, key=key, pure=False)

    def _again(self, task: Task) -> Any:
        """Sends a shard once more that the scheduler has forgotten, and the parcel if that is gone too.

        Raises:
            ClusterError: That happens again and again.
        """
        self._forgotten += 1
        if self._forgotten > _RESTARTS * (len(self._running) + 1):
            raise ClusterError(
                f"The Dask scheduler has forgotten what it was given, {self._forgotten} times.",
                where=task.name,
                fix="See who restarts the cluster or cancels its tasks, and repeat the call; nothing was written.",
            )
        _log.info("the scheduler has forgotten %s: it is sent once more", task.name)
        if self._there.status in _FORGOTTEN:
            self._there = self._sent(f"-again-{self._forgotten}")
        return self._submitted(task)

    def _sent(self, attempt: str) -> Any:
        """Returns the parcel as the result of a task, which is sent once a worker."""
        key = f"kenosis-{self._parcel.key}{attempt}"
        with warnings.catch_warnings():  # of a large one, which has to travel
            warnings.simplefilter("ignore", UserWarning)
            return self._client.submit(kept, self._parcel, key=key, pure=False)

    def _alone(self, task: Task) -> Outcome:
        """Runs a shard again when no other is under way, whose workers died; these may have died of another shard."""
        _log.info("the workers of %s died: it runs again, alone", task.name)
        for number, (other, future) in self._running.items():
            if number != task.number:
                self._outcome(other, future)
        found = self._outcome(task, self._submitted(task, self._sent(f"-{task.number}-alone")))
        return found or Outcome(
            failure=Failure(
                "Every worker that was given this shard died, also when it ran alone.",
                task.name,
                "Give workers more memory, or make the shards smaller.",
            )
        )

    def _outcome(self, task: Task, future: Any) -> Outcome | None:
        """Waits for a shard; None where its workers died, more often than Dask tries.

        Raises:
            ClusterError: The scheduler is gone, or no worker was there for long, or they fail for reasons of their own.
        """
        from distributed.scheduler import KilledWorker

        seen = time.monotonic()
        while True:
            try:
                found = self._result(task, future)
            except KilledWorker:
                return None
            except _ForgottenError:
                future = self._again(task)
                continue
            if found is not None:
                return found
            if self._client.status != "running":
                raise ClusterError(f"The Dask client is {self._client.status}.", fix="Repeat the call with a new one.")
            if self._cluster.workers():
                seen = time.monotonic()
            elif time.monotonic() - seen > _NO_WORKER_S:
                raise ClusterError(
                    f"No worker is left, for {_NO_WORKER_S:.0f} seconds.",
                    where="executor",
                    fix="Start workers again and repeat the call; nothing was written.",
                )

    def _result(self, task: Task, future: Any) -> Outcome | None:
        """Returns what a shard came to; None where that is not known within some seconds.

        Raises:
            KilledWorker: Its workers died, more often than Dask tries.
            _ForgottenError: The scheduler has restarted.
            ClusterError: It failed otherwise.
        """
        from distributed import TimeoutError as NotYet
        from distributed.scheduler import KilledWorker

        try:
            found = future.result(timeout=_POLL_S)
        except NotYet:
            return None
        except KilledWorker:
            raise
        except Exception as error:
            if self._client.status != "running":
                return None
            if future.status in _FORGOTTEN:
                raise _ForgottenError from error
            raise ClusterError(
                f"A worker failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                where=task.name,
                fix="See the worker's log; the data may be right.",
            ) from error
        assert isinstance(found, Outcome)
        return found

    def _tell(self, task: Task, outcome: Outcome) -> None:
        """Reports a shard.

        Raises:
            CalibrationError: It failed, and is not to be left out.
            ClusterError: Its worker is at fault.
        """
        failure = outcome.failure
        if failure is not None and failure.is_of_worker:
            raise ClusterError(failure.what, where=failure.where, fix=failure.fix)
        if failure is not None:
            error = CalibrationError(failure.what, where=failure.where or task.name, fix=failure.fix)
            if self._cluster.bad_shards == "stop":
                raise error
            warn_caller(f"{task.name} was left out: {error}")
        self._done += 1
        samples = 0 if outcome.table is None else outcome.table.samples
        self._samples += samples
        if self._progress is not None:
            self._progress(self._samples, None)
        each = (time.monotonic() - self._begun) / self._done
        left = None if self._total is None else each * (self._total - self._done)
        why = None if failure is None else failure.what
        told = ShardDone(task.name, outcome.worker, samples, outcome.seconds, self._done, self._total, left, why)
        _log.info("%s", told)
        if self._cluster.on_shard is not None:
            callers_own(self._cluster.on_shard)(told)
