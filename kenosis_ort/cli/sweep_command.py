"""The command sweep: a call of ``kenosis-ort quantize`` for each model of a TOML file, and one table of what came out.

Each job runs in a process of its own, here one after the other or on a Dask cluster; what is done stays done. A job
that is killed leaves nothing, since outputs appear whole or not at all, and runs again the next time. On a cluster a
job needs a worker that offers the resource ``timing``: one at a time there, on processors that no other job uses.
"""

import argparse
import contextlib
import glob
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from kenosis_ort import __version__
from kenosis_ort.cli import flags
from kenosis_ort.cli.commands import Quantize
from kenosis_ort.cli.parser import Parser
from kenosis_ort.cli.screen import Screen
from kenosis_ort.cli.sources import files_named
from kenosis_ort.cluster import Cluster
from kenosis_ort.cluster.client import answering, connected, versions
from kenosis_ort.errors import ClusterError, ModelLoadError, OptionError, OutputError, did_you_mean
from kenosis_ort.graph.files import external_files
from kenosis_ort.passes.recipe import read_text, read_toml
from kenosis_ort.report.text import make_table
from kenosis_ort.storage.data import format_bytes, to_data
from kenosis_ort.storage.writing import absolute, check_apart, sha256_of, write_text

_log = logging.getLogger(__name__)

RESOURCE: Final = "timing"
"""What a worker offers that runs one job at a time on processors of its own."""
_SEE: Final = "see kenosis-ort sweep --help"
_TABLES: Final = ("models", "defaults")
_NAME: Final = re.compile(r"[\w.-]+")
_NOT_A_MODELS: Final = frozenset({"json", "quiet", "verbose", "help", "help-all", "dask", "skip-bad-shards", "dry-run"})


@dataclass(frozen=True)
class Job:
    """One model to quantize.

    Attributes:
        name: Of its table in the file.
        arguments: Of ``kenosis-ort``.
        folder: The folder that they are relative to.
        model: The float model.
        output: The file to write.
        record: Where what came out is kept.
        reads: Files that the result depends on.
    """

    name: str
    arguments: tuple[str, ...]
    folder: Path
    model: Path
    output: Path
    record: Path
    reads: tuple[Path, ...]

    def fingerprint(self) -> str:
        """A SHA-256 over model, options, data and versions.

        Raises:
            OSError: A file cannot be read.
        """
        digest = hashlib.sha256(json.dumps([self.arguments, str(self.output), versions()], sort_keys=True).encode())
        for file in self.reads:
            digest.update(f"\0{file}\0".encode())
            digest.update(sha256_of(file).encode())
        return digest.hexdigest()


def read_jobs(file: Path, results: Path) -> list[Job]:
    """The jobs of a file.

    Args:
        file: TOML: a table ``[models.NAME]`` for each model, with ``model`` and any argument of ``kenosis-ort
            quantize`` by its name without dashes, and ``[defaults]`` for all of them. Paths are relative to the file.
        results: The folder for outputs that the file does not name, and for records.

    Raises:
        OptionError: The file cannot be read, or something in it is unknown; the message names where.
        ModelLoadError: A model does not exist.
        OutputError: Two models would be written to one file.
    """
    raw = read_toml(read_text(file), str(file), fix=_SEE)
    for key in raw:
        if key not in _TABLES:
            raise OptionError(
                f"unknown table [{key}].{did_you_mean(key, _TABLES)}", where=str(file), fix="[models.NAME]"
            )
    models, defaults = raw.get("models", {}), raw.get("defaults", {})
    if not isinstance(models, Mapping) or not models or not isinstance(defaults, Mapping):
        raise OptionError("the file names no model", where=str(file), fix="[models.NAME] with model = 'net.onnx'")
    folder = absolute(file).parent
    jobs = [
        _job(name, words, defaults, folder, results, f"[models.{name}] of {file}") for name, words in models.items()
    ]
    check_apart(
        [(f"the output of '{job.name}'", job.output) for job in jobs],
        [(f"the float model of '{job.name}'", job.model) for job in jobs],
    )
    return jobs


def _job(name: str, settings: Any, defaults: Mapping[str, Any], folder: Path, results: Path, where: str) -> Job:
    if _NAME.fullmatch(name) is None:
        raise OptionError(f"'{name}' is no name for a model", where=where, fix="use letters, digits, '.', '_' and '-'")
    if not isinstance(settings, Mapping) or not isinstance(settings.get("model"), str):
        raise OptionError("it names no model", where=where, fix="model = 'net.onnx'")
    words = {**defaults, **settings}
    model = folder / str(words.pop("model"))
    output = folder / str(words.pop("out", results / f"{name}.int8.onnx"))
    if not model.is_file():
        raise ModelLoadError("The model file does not exist.", where=f"{model}, {where}", fix="Check the path.")
    arguments = (str(model), str(output), *_arguments(words, where))
    parser = Parser(prog="kenosis-ort quantize", where=where)
    flags.add_arguments(parser, Quantize.arguments)
    parsed = parser.parse_args(arguments)
    if parsed.data is None and parsed.synthetic is None and parsed.calibration_cache_path is None:
        raise OptionError("it names no data", where=where, fix="data = 'samples.npz', or synthetic = 32")
    reads = dict.fromkeys(_files(parsed, model, folder))
    return Job(name, ("quantize", *arguments), folder, model, absolute(output), results / f"{name}.json", tuple(reads))


def _arguments(words: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields words of a file as arguments."""
    for key, value in words.items():
        option = str(key).replace("_", "-")
        if option in _NOT_A_MODELS:
            raise OptionError(f"'{key}' is no setting of one model", where=where, fix="give it to kenosis-ort sweep")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool):
                yield from [f"--{option}"] if each else []
            elif isinstance(each, (str, int, float)):
                yield f"--{option}={each}"
            else:
                raise OptionError(f"'{key}' is no string, number, truth value or list of those", where=where, fix=_SEE)


def _files(parsed: argparse.Namespace, model: Path, folder: Path) -> Iterator[Path]:
    """Yields the files that a call reads, as far as its arguments tell."""
    yield model
    yield from external_files(model)
    for _, source in files_named(parsed, folder):
        within = source.rglob("*") if source.is_dir() else map(Path, glob.glob(str(source)))
        yield from sorted(path for path in (*within, source) if path.is_file())


# -- how jobs run


@dataclass(frozen=True)
class Row:
    """Result of one job.

    Attributes:
        name: The model.
        verdict: One sentence; of a failed job what went wrong.
        failed: There is no output.
        output: The file.
        seconds: That the job took.
        sqnr_db: Of the output that lost most; None where it was not measured.
        speed: Times the float model's; None where nothing was timed.
        size_before: Bytes of the float model.
        size_after: Bytes of the output.
        fingerprint: Of all that the result depends on.
        output_digest: SHA-256 of the output.
        earlier: It was done by an earlier run.
    """

    name: str
    verdict: str
    failed: bool
    output: str
    seconds: float = 0.0
    sqnr_db: float | None = None
    speed: float | None = None
    size_before: int = 0
    size_after: int = 0
    fingerprint: str = ""
    output_digest: str = ""
    earlier: bool = False


def done_before(job: Job) -> Row | None:
    """Record of an earlier run; None where something differs, or the output is not what it wrote."""
    try:
        row = Row(**{**json.loads(job.record.read_text(encoding="utf-8")), "earlier": True})
        same = not row.failed and row.fingerprint == job.fingerprint()
        return row if same and sha256_of(job.output) == row.output_digest else None
    except (OSError, ValueError, TypeError) as error:  # no record, or not one of ours
        _log.debug("'%s' is to be done: %s", job.name, error)
        return None


def perform(job: Job, processors: Collection[int] = ()) -> Row:
    """Runs a job in a process of its own and records what came out.

    Args:
        job: The job.
        processors: Those that it may use; empty for all.
    """
    start = time.perf_counter()
    fingerprint = job.fingerprint()
    source = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "kenosis_ort.cli.main", *job.arguments, "--json"],
        cwd=job.folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=(lambda: os.sched_setaffinity(0, processors)) if processors else None,
    )
    seconds = time.perf_counter() - start
    try:
        printed = json.loads(done.stdout)
    except ValueError:
        printed = {}
    row = Row(job.name, "", True, str(job.output), seconds, fingerprint=fingerprint)
    if "verdict" not in printed or not job.output.is_file():
        row = replace(row, verdict=_reason(printed, done.returncode, done.stderr))
    else:
        taken = [c for c in (printed.get("speed") or {}).get("candidates", []) if c["status"] == "taken"]
        row = replace(
            row,
            verdict=str(printed["verdict"]),
            failed=False,
            sqnr_db=min((float(output["sqnr_db"]) for output in printed["outputs"]), default=None),
            speed=next((float(c["ratio"]) for c in taken if c["ratio"] is not None), None),
            size_before=int(printed["size_before"]),
            size_after=int(printed["size_after"]),
            output_digest=sha256_of(job.output),
        )
    write_text(job.record, json.dumps(asdict(row), indent=1), f"the record of '{job.name}'")
    return row


def _reason(printed: Any, code: int, stderr: str) -> str:
    error = printed.get("error") if isinstance(printed, dict) else None
    if error:
        parts = (error.get("what"), f"[at: {error['where']}]" if error.get("where") else "")
        return " ".join(part for part in parts if part)
    if code < 0:
        return f"killed by signal {-code}" + (": memory may have run out" if code == -9 else "")
    return " ".join(stderr.split())[-300:] or f"ended with {code} and said nothing"


def _check_workers(cluster: Cluster, jobs: Sequence[Job]) -> None:
    offering = [w for w in cluster.workers().values() if w.get("resources", {}).get(RESOURCE, 0) >= 1]
    if not offering:
        raise ClusterError(
            "No worker offers processors to time a model on.",
            where="--dask",
            fix=f"dask worker ADDRESS --nthreads 1 --resources {RESOURCE}=1, one on each machine.",
        )
    needed = [str(path) for job in jobs for path in job.reads] + [str(job.output.parent) for job in jobs]
    found = cluster.client.run(_missing, sorted(set(needed)))
    lacking = {worker: paths for worker, paths in found.items() if paths}
    if lacking:
        listed = "; ".join(f"{worker}: {', '.join(paths[:3])}" for worker, paths in sorted(lacking.items()))
        raise ClusterError(
            f"{len(lacking)} workers do not see files of the sweep: {listed}.",
            where="--dask",
            fix="Put models, data and results on a file system that all machines share, under the same paths.",
        )


def _missing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]


def perform_on(cluster: Cluster, jobs: Sequence[Job], *, local: bool) -> Iterator[Row]:
    """Yields the rows of jobs that a cluster runs whose workers see the same files, each as soon as it is there.

    Args:
        cluster: The cluster.
        jobs: The jobs.
        local: The workers share this machine: each gets processors of its own.

    Raises:
        ClusterError: The cluster cannot do the work, or went away; what is done is recorded.
    """
    from distributed import as_completed

    earlier = {job.name: row for job in jobs if (row := done_before(job)) is not None}
    yield from earlier.values()
    left = [job for job in jobs if job.name not in earlier]
    if not left:
        return
    cluster.check()
    _check_workers(cluster, left)
    client, workers = cluster.client, len(cluster.workers()) if local else 0
    with answering(client):
        futures = {client.submit(_on_worker, job, workers, pure=False, resources={RESOURCE: 1}): job for job in left}
        for future in as_completed(futures, loop=client.loop):
            error = future.exception()
            if error is None:
                yield future.result()
                continue
            if client.status != "running" or isinstance(error, OutputError):
                raise error
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"  # its workers died, for one
            yield Row(futures[future].name, what, True, str(futures[future].output))


def _on_worker(job: Job, sharing: int) -> Row:
    """Runs a job on a worker, one of several that share a machine and are numbered by name, or 0 for the only one."""
    if not sharing:
        return perform(job)
    from distributed import get_worker

    return perform(job, share_of(int(get_worker().name), sharing))


def share_of(number: int, sharing: int) -> frozenset[int]:
    """The processors of one of several workers on a machine; no processor is two workers'."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    mine = sorted(os.sched_getaffinity(0))
    return frozenset(mine[number % sharing :: sharing])


# -- the command


def sweep(arguments: argparse.Namespace, screen: Screen) -> bool:
    """The command ``sweep``."""
    results = absolute(arguments.results or arguments.models.with_suffix(".sweep"))
    jobs = read_jobs(arguments.models, results)
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"The folder for results cannot be made: {error.strerror}."
        raise OutputError(what, where=str(results), fix="Name another folder.") from error

    found = {}
    with contextlib.ExitStack() as stack:
        if arguments.dask is None:
            done: Iterator[Row] = (done_before(job) or perform(job) for job in jobs)
        else:
            client = stack.enter_context(connected(arguments.dask, resources={RESOURCE: 1}))
            done = perform_on(Cluster(client), jobs, local=arguments.dask.startswith("local"))
        for row in done:
            found[row.name] = row
            screen.tell("; ".join(part for part in _cells(row) if part))
    rows = [found[job.name] for job in jobs]
    failed = sum(row.failed for row in rows)
    data = {"schema": 1, "version": __version__, "failed": failed, "models": to_data(rows)}
    write_text(results / "sweep.json", json.dumps(data, indent=1), "the table")
    screen.result(lambda: data, lambda: render(rows))
    screen.note(f"table: {results / 'sweep.json'}")
    return bool(failed)


def render(rows: Sequence[Row]) -> Table:
    """The table for a terminal, with the outcome above it."""
    failed, earlier = sum(row.failed for row in rows), sum(row.earlier for row in rows)
    parts = [f"{len(rows) - failed} of {len(rows)} models quantized"]
    parts += [f"{earlier} of them by an earlier run"] if earlier else []
    parts += [f"{failed} failed"] if failed else []
    headings = ("model", ">dB", ">speed", ">size", ">seconds", "verdict")
    return make_table(*headings, rows=map(_cells, rows), title=f"{', '.join(parts)}.")


def _cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    if row.failed:
        return (row.name, "", "", "", f"{row.seconds:.1f}", f"failed: {row.verdict}")
    return (
        row.name,
        "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
        "" if row.speed is None else f"{row.speed:.2f}x",
        f"{format_bytes(row.size_before)} to {format_bytes(row.size_after)}",
        f"{row.seconds:.1f}" + (" before" if row.earlier else ""),
        row.verdict,
    )
