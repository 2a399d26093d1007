"""Runs jobs, each in a process of its own, here one after the other or on a Dask cluster; what is done stays done.

A job that is killed leaves nothing, since outputs appear whole or not at all, and runs again the next time. On a
cluster a job needs a worker that offers the resource ``timing``: one at a time there, on processors that no other job
uses.

The table of a sweep: for people, as JSON, and as one HTML page that fetches nothing.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2
from markupsafe import Markup

from kenosis_ort import __version__
from kenosis_ort.cli.fleet.jobs import Job
from kenosis_ort.cluster import Cluster
from kenosis_ort.cluster.client import answering
from kenosis_ort.errors import ClusterError, OutputError, printable
from kenosis_ort.report.text import format_bytes
from kenosis_ort.storage.data import to_data as plain_data
from kenosis_ort.storage.writing import sha256_of, write_text

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS: Final = ("model", "dB", "speed", "size", "seconds", "verdict")
_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>Sweep</title>
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid rgba(128, 128, 128, 0.4); padding: 6px 10px; text-align: left; vertical-align: top }
td.n, th.n { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap }
tr.failed td { color: #b3261e }
@media (prefers-color-scheme: dark) { tr.failed td { color: #f2b8b5 } }
</style>
</head>
<body>
<h1>{{ rows|length }} models</h1>
<p>{{ summary }}</p>
<table>
<thead><tr>
{% for name in columns %}<th{{ number if loop.index0 in numbers }} scope="col">{{ name }}</th>{% endfor %}

</tr></thead>
<tbody>
{% for cells, failed in rows %}
<tr{{ ' class="failed"'|safe if failed }}>
{% for cell in cells %}<td{{ number if loop.index0 in numbers }}>{{ cell }}</td>{% endfor %}

</tr>
{% endfor %}
</tbody>
</table>
<p>kenosis-ort {{ version }}</p>
</body>
</html>
"""


def to_data(rows: Sequence[Row]) -> dict[str, Any]:
    """The table as plain data for JSON."""
    models = plain_data(list(rows))
    return {"schema": 1, "version": __version__, "failed": sum(row.failed for row in rows), "models": models}


def summary(rows: Sequence[Row]) -> str:
    """The outcome in one sentence."""
    failed, earlier = sum(row.failed for row in rows), sum(row.earlier for row in rows)
    parts = [f"{len(rows) - failed} of {len(rows)} models quantized"]
    parts += [f"{earlier} of them by an earlier run"] if earlier else []
    parts += [f"{failed} failed"] if failed else []
    return ", ".join(parts) + "."


def cells(row: Row) -> tuple[str, ...]:
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


def render(rows: Sequence[Row]) -> Table:
    """The table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=summary(rows), title_justify="left", box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("model", "verdict") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in cells(row)), style="red" if row.failed else None)
    return table


def to_html(rows: Sequence[Row]) -> str:
    """The table as a page; all names are escaped."""
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    shown = [([printable(cell) for cell in cells(row)], row.failed) for row in rows]
    return template.render(
        rows=shown,
        summary=summary(rows),
        columns=_COLUMNS,
        version=__version__,
        number=Markup(' class="n"'),
        numbers=(1, 2, 3, 4),
    )


_log = logging.getLogger(__name__)

RESOURCE: Final = "timing"
"""What a worker offers that runs one job at a time on processors of its own."""


@dataclass(frozen=True)
class Row:
    """Result of one job.

    Attributes:
        name: The model.
        verdict: One sentence; of a failed job what went wrong.
        failed: There is no output.
        sqnr_db: Of the output that lost most, on calibration samples; None where it was not measured.
        speed: Times the float model's; None where nothing was timed.
        size_before: Bytes of the float model.
        size_after: Bytes of the output.
        seconds: That the job took.
        output: The file.
        fingerprint: Of all that the result depends on.
        output_digest: SHA-256 of the output.
        earlier: It was done by an earlier run.
    """

    name: str
    verdict: str
    failed: bool
    sqnr_db: float | None
    speed: float | None
    size_before: int
    size_after: int
    seconds: float
    output: str
    fingerprint: str
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
    source = str(Path(__file__).resolve().parents[3])
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
    if "verdict" not in printed or not job.output.is_file():
        what = _reason(printed, done.returncode, done.stderr)
        row = Row(job.name, what, True, None, None, 0, 0, seconds, str(job.output), fingerprint)
    else:
        taken = [c for c in (printed.get("speed") or {}).get("candidates", []) if c["status"] == "taken"]
        ratios = [float(c["ratio"]) for c in taken if c["ratio"] is not None]
        losses = [float(output["sqnr_db"]) for output in printed["outputs"]]
        row = Row(
            name=job.name,
            verdict=str(printed["verdict"]),
            failed=False,
            sqnr_db=min(losses) if losses else None,
            speed=ratios[0] if ratios else None,
            size_before=int(printed["size_before"]),
            size_after=int(printed["size_after"]),
            seconds=seconds,
            output=str(job.output),
            fingerprint=fingerprint,
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


def run_here(jobs: Sequence[Job], report: Callable[[Row], None]) -> list[Row]:
    """Runs jobs one after the other."""
    rows = []
    for job in jobs:
        rows.append(done_before(job) or perform(job))
        report(rows[-1])
    return rows


def run_on(cluster: Cluster, jobs: Sequence[Job], report: Callable[[Row], None], *, local: bool) -> list[Row]:
    """Runs jobs on a cluster whose workers see the same files; the rows come in the order of the jobs.

    Args:
        cluster: The cluster.
        jobs: The jobs.
        report: Called with each row when it is there.
        local: The workers share this machine: each gets processors of its own.

    Raises:
        ClusterError: The cluster cannot do the work, or went away; what is done is recorded.
    """
    found = {job.name: row for job in jobs if (row := done_before(job)) is not None}
    for row in found.values():
        report(row)
    left = [job for job in jobs if job.name not in found]
    if left:
        cluster.check()
        _check_workers(cluster, left)
        with answering(cluster.client):
            for row in _performed(cluster, left, local=local):
                found[row.name] = row
                report(row)
    return [found[job.name] for job in jobs]


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


def _performed(cluster: Cluster, jobs: Sequence[Job], *, local: bool) -> Iterator[Row]:
    from distributed import as_completed

    client = cluster.client
    workers = len(cluster.workers()) if local else 0
    futures = {client.submit(perform_on_worker, job, workers, pure=False, resources={RESOURCE: 1}): job for job in jobs}
    for future in as_completed(futures, loop=client.loop):
        error = future.exception()
        if error is None:
            yield future.result()
            continue
        if client.status != "running" or isinstance(error, OutputError):
            raise error
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"  # its workers died, for one
        yield Row(futures[future].name, what, True, None, None, 0, 0, 0.0, str(futures[future].output), "")


def perform_on_worker(job: Job, sharing: int) -> Row:
    """Runs a job on a worker.

    Args:
        job: The job.
        sharing: Workers that share this machine, numbered by name; 0 where this is the only one.
    """
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
