"""Commands about machines and runtimes: targets, bench, sweep, doctor, profile, demo."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kenosis_ort.cli import data_flags, exits, flags
from kenosis_ort.cli.parser import Command
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import OutputError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kenosis_ort.bench.doctor import Examination, KernelSpeed
    from kenosis_ort.cli.fleet.job_runs import Row
    from kenosis_ort.targets import Target
    from kenosis_ort.targets.profile import HostProfile


# -- targets


def _targets_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("target", nargs="?", metavar="TARGET", help="show the table of this one")


def _targets(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.targets import TARGETS, get_target

    if arguments.target is None:
        screen.result(lambda: [summary(t) for t in TARGETS.values()], lambda: _list([*TARGETS.values()]))
    else:
        target = get_target(arguments.target)
        screen.result(lambda: {**summary(target), "rules": _rules(target)}, lambda: _table(target))
    return exits.SUCCESS


def summary(target: Target) -> dict[str, Any]:
    """Rules of a target as plain data in words."""
    types = target.data_types()
    return {
        "target": target.name,
        "activations": f"{_type(types.activation)}, zero point {'0' if types.symmetric else 'by the range'}",
        "weights": f"{_type(types.weight)}, a scale {'a channel' if types.per_channel else 'a tensor'}",
        "bias": target.bias,
        "taken_in": [*target.absorbs, *(f"x * {gate}(x)" for gate in target.gates)],
        "longest_epilogue": target.longest_epilogue,
        "residual": "Q on both inputs of an Add" if target.residual == "both" else "Q on the shortcut alone",
        "q_on_outputs": "wherever something reads integers" if target.float_output else "always",
        "formats": list(target.formats),
        "why": types.why,
        "proved": target.hooks.prove is not None,
        "timed": target.hooks.time is not None,
    }


def _type(element_type: int) -> str:
    from onnx import TensorProto

    return str(TensorProto.DataType.Name(element_type)).lower()


def _rules(target: Target) -> list[dict[str, Any]]:
    rules = [
        {"id": r.id, "operators": list(r.op_types), "role": r.role.value, "why": r.why, "source": r.source}
        for r in target.rules
    ]
    return [*rules, *({"id": i, "operators": [], "role": "fact", "why": why, "source": ""} for i, why in target.facts)]


def _list(targets: list[Target]) -> RenderableType:
    from kenosis_ort.report.sections import make_table

    table = make_table("target", "activations", "weights", "bias", "a kernel takes in", "residual", "here")
    for target in targets:
        s = summary(target)
        clamps = "where the range allows it: " if target.clamps else ""
        table.add_row(
            s["target"],
            s["activations"],
            s["weights"],
            s["bias"],
            clamps + (", ".join(s["taken_in"]) or "nothing"),
            s["residual"],
            ", ".join(word for word, can in (("proved", s["proved"]), ("timed", s["timed"])) if can) or "not run",
        )
    return table


def _table(target: Target) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from kenosis_ort.report.sections import make_table

    facts = Table.grid(padding=(0, 2))
    for name, entry in summary(target).items():
        text = ", ".join(map(str, entry)) if isinstance(entry, list) else str(entry)
        facts.add_row(Text(name.replace("_", " "), style="bold"), Text(text))
    table = make_table("rule", "operators", "what becomes of them", "rests on", title="Rules")
    for rule in _rules(target):
        rests = rule["source"] or f"test_rule_{rule['id'].replace('-', '_')}"
        table.add_row(rule["id"], ", ".join(rule["operators"]), f"{rule['role']}: {rule['why']}", rests)
    return Group(facts, table)


TARGETS: Final = Command(
    "list the runtimes that files can be made for, and the rules of one",
    "[TARGET] [options]",
    """Lists the targets: data types, where Q/DQ stands, and whether the runtime can
be asked and timed on this machine. With TARGET its whole table: each rule with
what it rests on.

  kenosis-ort targets
  kenosis-ort targets tensorrt
  kenosis-ort quantize model.onnx --data samples.npz --target tensorrt
""",
    _targets_arguments,
    _targets,
)


# -- bench


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="the models; the first is the baseline")

    how = parser.add_argument_group("how to time")
    how.add_argument(
        "--threads", type=flags.threads, default=1, help="of a session; 0: as the runtime likes (default: 1)"
    )
    how.add_argument("--seconds", type=flags.seconds, default=20.0, help="for all of it (default: 20)")
    how.add_argument("--rounds", type=flags.positive, default=15, help="with fresh sessions, at most (default: 15)")
    flags.add_libraries(how)
    data_flags.add_arguments(parser, title="what the models are run with (default: --synthetic)")


def _bench(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.bench import bench
    from kenosis_ort.bench.bench_report import render_bench

    if arguments.data is None and arguments.synthetic is None and data_flags.given(arguments).keys() - {"seed"}:
        arguments.synthetic = data_flags.DEFAULT_SYNTHETIC  # an option about made-up samples was given
    feeds = data_flags.make_reader(arguments, arguments.models[0])
    with screen.progress("timing") as progress:
        report = bench(
            arguments.models,
            feeds,
            threads=arguments.threads,
            rounds=arguments.rounds,
            budget_s=arguments.seconds,
            custom_op_libraries=arguments.custom_op_libraries,
            seed=arguments.seed or 0,
            progress=progress,
        )
    screen.result(report.to_dict, lambda: render_bench(report))
    return exits.LEFT_OUT if report.left_out else exits.SUCCESS


BENCH: Final = Command(
    "time models against each other",
    "MODEL [MODEL ...] [options]",
    """Times models on the CPU, interleaved in random order with fresh sessions, and
says which are faster than the first one beyond the noise.

  kenosis-ort bench model.onnx model.int8.onnx --data samples.npz
  kenosis-ort bench model.onnx a.onnx b.onnx --threads 4 --seconds 60
""",
    _bench_arguments,
    _bench,
    one="done, but a model did not load or run and is left out",
)


# -- sweep


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("models", type=Path, metavar="MODELS.toml", help="the models and their options")
    parser.add_argument("results", type=Path, nargs="?", metavar="RESULTS", help="folder for outputs and the table")
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="run on the workers of the Dask scheduler at host:port that offer the resource timing=1; local:N starts N "
        "on this machine, each with processors of its own",
    )


def _sweep(arguments: argparse.Namespace, screen: Screen) -> int:
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


SWEEP: Final = Command(
    "quantize many models",
    "MODELS.toml [RESULTS] [--dask ADDRESS] [options]",
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
""",
    _sweep_arguments,
    _sweep,
    one="done, but not every model could be quantized",
)


# -- doctor


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--threads", type=flags.threads, default=1, help="of a session; 0: all (default: 1)")
    parser.add_argument("--seconds", type=flags.seconds, default=3.0, help="for the timing (default: 3)")
    parser.add_argument("--no-timing", action="store_true", help="do not time data types")


def _doctor(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.bench.doctor import examine
    from kenosis_ort.targets.profile import processor

    (cpu, flags), cores = processor(), os.cpu_count() or 1
    with screen.progress("timing") as progress:
        found = examine(
            flags=flags,
            threads=arguments.threads,
            budget_s=0.0 if arguments.no_timing else arguments.seconds,
            progress=progress,
        )
    screen.result(
        lambda: {"cpu": cpu, "cores": cores, **found.to_dict()},
        lambda: _render_of_doctor(cpu, cores, found),
    )
    return exits.PROBLEM if found.problems else exits.SUCCESS


def _render_of_doctor(cpu: str, cores: int, found: Examination) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for label, text in (
        ("processor", f"{cpu}, {cores} cores, {found.architecture}"),
        ("instructions", ", ".join(found.flags) or "not known on this system"),
        ("int8 products", found.host),
        ("runtime", f"onnxruntime {found.versions['onnxruntime']}: {', '.join(found.providers)}"),
        ("build", found.build),
        ("reads", f"IR version up to {found.max_ir}, operator sets up to {found.max_opset}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in found.versions.items())),
    ):
        facts.add_row(Text(label, style="dim"), Text(text))
    blocks: list[RenderableType] = [facts]
    if found.speeds:
        blocks.append(_speeds(found.speeds, found.threads))
    blocks += [Text.assemble(("problem: ", "bold red"), str(p)) for p in found.problems]
    blocks += [Text.assemble(("note: ", "cyan"), str(n)) for n in found.notes]
    if not found.problems:
        blocks.append(Text("Nothing to fix.", style="bold green"))
    return Group(*blocks)


def _speeds(speeds: tuple[KernelSpeed, ...], threads: int) -> Table:
    from rich.text import Text

    from kenosis_ort.report.sections import make_table

    on = {0: "all threads", 1: "one thread"}.get(threads, f"{threads} threads")
    title = f"Data types, {on}: speed beside float32, measured"
    table = make_table("operator", "activations x weights", "kernel", ">us", ">speed", "verdict", title=title)
    for s in speeds:
        style = {"fast": "green", "slow": "red", "refused": "dim"}.get(s.verdict, "")
        time = "" if s.microseconds is None else f"{s.microseconds:.0f}"
        ratio = "" if s.ratio is None else f"{s.ratio:.2f}x"
        table.add_row(s.operator, s.types, s.kernel, time, ratio, Text(s.verdict, style=style))
    return table


DOCTOR: Final = Command(
    "show what this machine's runtime can do, and what is fast on it",
    "[options]",
    """Shows the processor, the runtime and the formats it reads, times small
convolutions and matrix products in each data type (some 3 seconds), and says
what to fix.

  kenosis-ort doctor
  kenosis-ort doctor --threads 4 --json
""",
    _doctor_arguments,
    _doctor,
    one="done, but there is a problem that has a fix",
)


# -- profile


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--target", help="the runtime that is measured (default: ort-cpu)")
    parser.add_argument("--threads", type=flags.threads, default=1, help="of a session; 0: all (default: 1)")
    parser.add_argument("--seconds", type=flags.seconds, default=30.0, help="for all of it (default: 30)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the profile to this file too")
    parser.add_argument("--name", default="", help="what reports call it (default: the processor's name)")


def _profile(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.api import measure_host
    from kenosis_ort.graph.save import check_destination
    from kenosis_ort.targets import DEFAULT_TARGET

    if arguments.out is not None:
        check_destination(arguments.out)
    with screen.progress("timing") as progress:
        profile = measure_host(
            target=arguments.target or DEFAULT_TARGET,
            threads=arguments.threads,
            budget_s=arguments.seconds,
            name=arguments.name,
            progress=progress,
        )
    if arguments.out is not None:
        profile.save(arguments.out)
        screen.note(f"profile: {arguments.out}")
    screen.result(profile.to_dict, lambda: _render_of_profile(profile))
    return exits.SUCCESS


def _render_of_profile(profile: HostProfile) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from kenosis_ort.report.sections import make_table

    table = make_table("kernel", ">float", ">integer", ">second kernel")
    for name, (in_float, in_integer) in profile.kernels.items():
        second = profile.shifted.get(name)
        if in_float.product or in_float.element:
            cells = ["" if cost is None else f"{cost.product:g} / {cost.element:g}" for cost in (in_integer, second)]
            table.add_row(name, f"{in_float.product:g} / {in_float.element:g}", *cells)
    head = Text(f"'{profile.name}': {profile.machine}; picoseconds a product / an element written")
    return Group(head, table)


PROFILE: Final = Command(
    "measure what kernels cost on this machine, so that files are laid out for it",
    "[options]",
    """Times the runtime's kernels in float and in integer by their shapes, in some 30
seconds, and keeps the result for this processor, runtime and number of threads:
later calls of quantize lay files out for it. With --out it goes to a file as
well, with which files are laid out for this machine elsewhere.

  kenosis-ort profile
  kenosis-ort profile --threads 4 --out server.json
  kenosis-ort quantize model.onnx --data samples.npz --for-host server.json
""",
    _profile_arguments,
    _profile,
)


# -- demo


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the models there (default: thrown away)")
    parser.add_argument("--batch", type=flags.positive, default=32, help="images per timed run (default: 32)")
    parser.add_argument("--rounds", type=flags.positive, default=15, help="timing rounds (default: 15)")


def _demo(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.demo.__main__ import demonstrate, render

    with screen.progress("timing") as progress:
        found = demonstrate(arguments.out, batch=arguments.batch, rounds=arguments.rounds, progress=progress)
    screen.result(found.to_dict, lambda: render(found))
    return exits.NOT_INTEGER if found.report.left_float() else exits.SUCCESS


DEMO: Final = Command(
    "quantize the shipped digits net; print accuracy, speed and the fusion proof",
    "[options]",
    """Quantizes a trained CNN for handwritten digits with stock ONNX Runtime and
with kenosis-ort, and prints accuracy on held-out images, speed and the
fusion proof.

  kenosis-ort demo
  kenosis-ort demo --out models/
""",
    _demo_arguments,
    _demo,
    one="done, but a node that was planned as integer runs in float",
)
