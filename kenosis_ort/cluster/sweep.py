"""The sweep on a cluster: shards as tasks, their tables merged in the order of the shards.

Merging is exact, so that the table is the one that a single process makes of the same samples. Each shard is merged
once, by its number: a task that runs twice, because its worker died or its result was lost, counts once.
"""

import importlib
import logging
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import onnx

from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.calibration.collector import Points, Progress
from kenosis_ort.calibration.feeds import Part, sample_feeds
from kenosis_ort.calibration.readers import Shards
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.cluster.client import Cluster, ShardDone
from kenosis_ort.cluster.executor import ClusterExecutor
from kenosis_ort.cluster.worker import Done, SweepJob, Task, chunked, swept
from kenosis_ort.errors import CalibrationError, ClusterError, OptionError, callers_own, warn_caller

_log = logging.getLogger(__name__)

_CHUNK_FEEDS: Final = 64


def collect_on(
    cluster: Cluster,
    proto: onnx.ModelProto,
    source: Any,
    points: Points,
    *,
    part: Part = MappingProxyType({}),
    progress: Progress | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> CalibrationTable:
    """Collects on the workers what `kenosis_ort.calibration.collect` collects here, to the bit.

    Args:
        cluster: Where to.
        proto: As for `collect`.
        source: `Shards`, which workers read; any other reader is read here, and its samples travel.
        points: As for `collect`, without a moving average, which depends on all samples before; libraries lie at the
            same paths on every worker.
        part: As for `collect`, not with `Shards`.
        progress: As for `collect`.
        defaults: Values of inputs that a feed may leave out and that are to be in every feed.

    Raises:
        CalibrationError: As `collect`; a shard is bad, and named.
        ClusterError: The cluster cannot do the work.
        OptionError: A shard cannot be sent.
    """
    cluster.check(points.custom_op_libraries)
    shards = source if isinstance(source, Shards) else None
    tasks = _chunks(source, part) if shards is None else _parts(shards)
    job = SweepJob(
        key=uuid.uuid4().hex,
        model=proto,
        fingerprint=model_fingerprint(proto),
        points=_pickled(replace(points, threads=0 if points.config.bit_exact else 1), "what calibration observes"),
        defaults=dict(defaults),
    )
    constants = {tensor.name for tensor in proto.graph.initializer}
    whole: CalibrationTable | None = None
    chosen: CalibrationTable | None = None

    def pieces() -> Iterator[tuple[SweepJob, Task]]:
        for task in tasks:
            yield job, replace(task, cut=None if whole is None or whole.cached is None else whole.cached.cut)

    with ClusterExecutor(cluster) as executor:
        tell = _Teller(cluster, None if shards is None else shards.count, progress)
        with closing(executor.outcomes(swept, pieces(), lambda piece: piece[1].name)) as outcomes:
            for (_, task), outcome in outcomes:
                table = tell(task, outcome or _deadly(task))
                if table is not None:
                    whole, chosen = _merged(whole, table, constants), _merged(chosen, table.part, constants)
    if whole is None:
        raise CalibrationError(
            "No data is collected: no shard yields a sample.", fix="Give at least one shard that can be read."
        )
    return replace(whole, part=chosen)


def _merged(
    so_far: CalibrationTable | None, more: CalibrationTable | None, constants: Collection[str]
) -> CalibrationTable | None:
    """Tables of two sets of samples as one; constants, which every shard sees whole, count once."""
    if so_far is None or more is None:
        return more if so_far is None else so_far
    merged = so_far.merge(more)
    once = {name: so_far.tensors[name] for name in merged.tensors if name in constants}
    return replace(merged, tensors={**merged.tensors, **once}) if once else merged


def _parts(shards: Shards) -> Iterator[Task]:
    """The shards as tasks, after all were found to be fit to be sent."""

    def task(number: int) -> Task:
        name = shards.name(number)
        return Task(name, _pickled(shards.part(number), name), shards.batch_size, inputs=shards.inputs)

    for number in range(shards.count):
        task(number)
    return map(task, range(shards.count))


def _chunks(reader: Any, part: Part) -> Iterator[Task]:
    """Yields the samples of a reader, some at a time, as tasks."""
    first = 0
    for feeds in chunked(map(dict, sample_feeds(reader)), _CHUNK_FEEDS):
        name = f"samples {first} to {first + len(feeds) - 1}"
        chosen = {n - first: part[n] for n in range(first, first + len(feeds)) if n in part}
        yield Task(name, _pickled(feeds, name), first=first, part=chosen)
        first += len(feeds)


def _pickled(content: Any, name: str) -> bytes:
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


class _Teller:
    """Reports shards.

    Args:
        cluster: Says what is to be done about a bad one.
        total: Number of shards, None where it is not known.
        progress: As for `collect`.
    """

    def __init__(self, cluster: Cluster, total: int | None, progress: Progress | None) -> None:
        self._cluster, self._total = cluster, total
        self._progress = progress or (lambda *_: None)
        self._samples = self._done = 0
        self._begun = time.monotonic()
        self._progress(0, None)

    def __call__(self, task: Task, outcome: Done) -> CalibrationTable | None:
        """Reports a shard; returns its table, None where it is left out.

        Raises:
            CalibrationError: It failed, and is not to be left out.
            ClusterError: Its worker is at fault.
        """
        table: CalibrationTable | None = outcome.value
        failure = outcome.error
        if failure is not None:
            if isinstance(failure, ClusterError) or self._cluster.bad_shards == "stop":
                raise failure
            warn_caller(f"{task.name} was left out: {failure}")
        self._done += 1
        samples = 0 if table is None else table.samples
        self._samples += samples
        self._progress(self._samples, None)
        each = (time.monotonic() - self._begun) / self._done
        left = None if self._total is None else each * (self._total - self._done)
        why = None if failure is None else failure.what
        finished = ShardDone(task.name, outcome.worker, samples, outcome.seconds, self._done, self._total, left, why)
        _log.info("%s", finished)
        if self._cluster.on_shard is not None:
            callers_own(self._cluster.on_shard)(finished)
        return table


def _deadly(task: Task) -> Done:
    what = "Every worker that was given this shard died, also when it ran alone."
    fix = "Give workers more memory, or make the shards smaller."
    return Done(error=CalibrationError(what, where=task.name, fix=fix))
