"""Quantizes every model of a file and writes one table of what came out, to the
screen and as sweep.json and sweep.html in the folder RESULTS (MODELS.sweep unless
it is named). A table [models.NAME] names the model and its data; what else it
holds are arguments of kenosis-ort quantize without their dashes, and [defaults]
holds those of all. Paths are relative to the file.

  [defaults]
  recipe = "accurate"

  [models.resnet]
  model = "resnet.onnx"
  data = "photos.npz"

A sweep that was ended goes on where it was: a model is left as it is where the
model, its data, its options, all versions and the output are those of the run
that made it.

  kenosis-ort sweep models.toml
  kenosis-ort sweep models.toml results/ --dask local:2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kenosis_ort.cli import exits
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import OutputError

if TYPE_CHECKING:
    from kenosis_ort.cli.fleet.job_runs import Row

HELP = "quantize many models"
USAGE = "MODELS.toml [RESULTS] [--dask ADDRESS] [options]"
ONE = "done, but not every model could be quantized"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("models", type=Path, metavar="MODELS.toml", help="the models and their options")
    parser.add_argument("results", type=Path, nargs="?", metavar="RESULTS", help="folder for outputs and the table")
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="run on the workers of the Dask scheduler at host:port that offer the resource timing=1; local:N starts N "
        "on this machine, each with processors of its own",
    )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    import json

    from kenosis_ort.cli.fleet import job_runs
    from kenosis_ort.cli.fleet.job_runs import RESOURCE, run_here, run_on
    from kenosis_ort.cli.fleet.jobs import read_jobs
    from kenosis_ort.storage.writing import absolute, write_text

    results = absolute(arguments.results or arguments.models.with_suffix(".sweep"))
    jobs = read_jobs(arguments.models, results)
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"The folder for results cannot be made: {error.strerror}.", where=str(results)) from error

    def report(row: Row) -> None:
        screen.tell("; ".join(part for part in job_runs.cells(row) if part))

    if arguments.dask is None:
        rows = run_here(jobs, report)
    else:
        from kenosis_ort.cluster import Cluster
        from kenosis_ort.cluster.client import connected

        with connected(arguments.dask, resources={RESOURCE: 1}) as client:
            rows = run_on(Cluster(client), jobs, report, local=arguments.dask.startswith("local"))
    data = job_runs.to_data(rows)
    write_text(results / "sweep.json", json.dumps(data, indent=1), "the table")
    write_text(results / "sweep.html", job_runs.to_html(rows), "the table")
    screen.result(lambda: data, lambda: job_runs.render(rows))
    screen.note(f"table: {results / 'sweep.html'}")
    return exits.LEFT_OUT if any(row.failed for row in rows) else exits.SUCCESS
