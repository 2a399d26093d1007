"""The sweep on a cluster: shards as tasks, their tables merged in the order of the shards.

Merging is exact, so that the table is the one that a single process makes of the same samples. Each shard is merged
once, by its number: a task that runs twice, because its worker died or its result was lost, counts once.
"""

import importlib
import logging
import pickle
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, cast

import onnx

from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.calibration.collector import Points, Progress, Sweep
from kenosis_ort.calibration.feeds import Part, sample_feeds
from kenosis_ort.calibration.readers import Shards, opened
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.cluster.client import Cluster, ShardDone, lock
from kenosis_ort.cluster.executor import MOST_KEPT, ClusterExecutor, Done, chunked, idle
from kenosis_ort.errors import CalibrationError, ClusterError, KenosisError, OptionError, callers_own, warn_caller

_log = logging.getLogger(__name__)

_CHUNK_FEEDS: Final = 64


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

    total = None if shards is None else shards.count
    samples, begun, tell = 0, time.monotonic(), progress or (lambda *_: None)
    tell(0, None)
    with (
        ClusterExecutor(cluster) as executor,
        closing(executor.outcomes(swept, pieces(), lambda piece: piece[1].name)) as outcomes,
    ):
        for done, ((_, task), outcome) in enumerate(outcomes, 1):
            found = outcome or _deadly(task)
            table, failure = found.value, found.error
            if failure is not None:
                if isinstance(failure, ClusterError) or cluster.bad_shards == "stop":
                    raise failure
                warn_caller(f"{task.name} was left out: {failure}")
            count = 0 if table is None else table.samples
            samples += count
            tell(samples, None)
            left_s = None if total is None else (time.monotonic() - begun) / done * (total - done)
            why = None if failure is None else failure.what
            finished = ShardDone(task.name, found.worker, count, found.seconds, done, total, left_s, why)
            _log.info("%s", finished)
            if cluster.on_shard is not None:
                callers_own(cluster.on_shard)(finished)
            if count and table is not None:
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


def _deadly(task: Task) -> Done:
    what = "Every worker that was given this shard died, also when it ran alone."
    fix = "Give workers more memory, or make the shards smaller."
    return Done(error=CalibrationError(what, where=task.name, fix=fix))


# ---- on the workers -------------------------------------------------------------------------------------------------


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
            sweep.read(({**job.defaults, **feed} for feed in feeds), first=task.first, least=0)
            return sweep.table(job.fingerprint)
    except KenosisError as error:
        where = error.where or task.name
        where = where if where.startswith(task.name) else f"{task.name}, {where}"
        raise CalibrationError(error.what, where=where, fix=error.fix) from error


@contextmanager
def _sweep_of(job: SweepJob) -> Iterator[Sweep]:
    """Lends sessions of the model, those of an earlier shard where they are free."""
    with lock:
        known = idle.get(job.key)
        sweep = cast(Sweep, known.pop()) if known else None
    if sweep is None:
        sweep = Sweep(job.model, pickle.loads(job.points))
    try:
        yield sweep
    finally:
        sweep.start_again()  # holds no statistics while it is idle
        with lock:
            idle.setdefault(job.key, []).append(sweep)
            old = [each for key in list(idle)[:-MOST_KEPT] for each in idle.pop(key)]
        for each in old:
            each.close()
