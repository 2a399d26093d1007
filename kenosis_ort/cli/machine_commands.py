"""Commands about machines and runtimes: targets, bench, doctor, profile, demo."""

import argparse
import os
from collections.abc import Iterable
from typing import Any

from onnx import TensorProto
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kenosis_ort.api import measure_host
from kenosis_ort.bench import bench
from kenosis_ort.bench.benchmark import render_bench
from kenosis_ort.bench.doctor import Examination, KernelSpeed, examine
from kenosis_ort.cli import flags
from kenosis_ort.cli.screen import Screen
from kenosis_ort.cli.sources import make_reader
from kenosis_ort.demo import measurements
from kenosis_ort.graph.save import check_destination
from kenosis_ort.report.text import make_facts, make_table
from kenosis_ort.runtime.limits import machine
from kenosis_ort.targets import DEFAULT_TARGET, TARGETS, Target, get_target
from kenosis_ort.targets.profile import HostProfile

_VERDICT_STYLES = {"fast": "green", "slow": "red", "refused": "dim"}

# -- targets


def targets(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``targets``."""
    if arguments.target is None:
        screen.result(lambda: [summary(t) for t in TARGETS.values()], lambda: _list(TARGETS.values()))
    else:
        target = get_target(arguments.target)
        screen.result(lambda: {**summary(target), "rules": _rules(target)}, lambda: _details(target))


def summary(target: Target) -> dict[str, Any]:
    """Rules of a target as plain data in words."""
    types = target.data_types()
    activation, weight = (str(TensorProto.DataType.Name(kind)).lower() for kind in (types.activation, types.weight))
    return {
        "target": target.name,
        "activations": f"{activation}, zero point {'0' if types.symmetric else 'by the range'}",
        "weights": f"{weight}, a scale {'a channel' if types.per_channel else 'a tensor'}",
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


def _rules(target: Target) -> list[dict[str, Any]]:
    rules = [
        {"id": r.id, "operators": list(r.op_types), "role": r.role.value, "why": r.why, "source": r.source}
        for r in target.rules
    ]
    return [*rules, *({"id": i, "operators": [], "role": "fact", "why": why, "source": ""} for i, why in target.facts)]


def _list(targets: Iterable[Target]) -> RenderableType:
    rows = []
    for target in targets:
        s = summary(target)
        clamps = "where the range allows it: " if target.clamps else ""
        taken_in = clamps + (", ".join(s["taken_in"]) or "nothing")
        here = ", ".join(word for word in ("proved", "timed") if s[word]) or "not run"
        rows.append((s["target"], s["activations"], s["weights"], s["bias"], taken_in, s["residual"], here))
    headings = ("target", "activations", "weights", "bias", "a kernel takes in", "residual", "here")
    return make_table(*headings, rows=rows)


def _details(target: Target) -> RenderableType:
    facts = (
        (name.replace("_", " "), ", ".join(map(str, entry)) if isinstance(entry, list) else str(entry))
        for name, entry in summary(target).items()
    )
    rules = (
        (
            rule["id"],
            ", ".join(rule["operators"]),
            f"{rule['role']}: {rule['why']}",
            rule["source"] or f"test_rule_{rule['id'].replace('-', '_')}",
        )
        for rule in _rules(target)
    )
    headings = ("rule", "operators", "what becomes of them", "rests on")
    return Group(make_facts(facts, style="bold"), make_table(*headings, rows=rules, title="Rules"))


# -- bench


def time_models(arguments: argparse.Namespace, screen: Screen) -> bool:
    """The command ``bench``."""
    if arguments.data is None and arguments.synthetic is None and flags.given_data(arguments).keys() - {"seed"}:
        arguments.synthetic = flags.DEFAULT_SYNTHETIC  # an option about made-up samples was given
    feeds = make_reader(arguments, arguments.models[0])
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
    return bool(report.left_out)


# -- doctor


def doctor(arguments: argparse.Namespace, screen: Screen) -> bool:
    """The command ``doctor``."""
    here, cores = machine(), os.cpu_count() or 1
    with screen.progress("timing") as progress:
        found = examine(
            flags=here.features,
            threads=arguments.threads,
            budget_s=0.0 if arguments.no_timing else arguments.seconds,
            progress=progress,
        )
    screen.result(
        lambda: {"cpu": here.cpu, "cores": cores, **found.to_dict()},
        lambda: _render_examination(here.cpu, cores, found),
    )
    return bool(found.problems)


def _render_examination(cpu: str, cores: int, found: Examination) -> RenderableType:
    facts = {
        "processor": f"{cpu}, {cores} cores, {found.architecture}",
        "instructions": ", ".join(found.flags) or "not known on this system",
        "int8 products": found.host,
        "runtime": f"onnxruntime {found.versions['onnxruntime']}: {', '.join(found.providers)}",
        "build": found.build,
        "reads": f"IR version up to {found.max_ir}, operator sets up to {found.max_opset}",
        "packages": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    }
    blocks: list[RenderableType] = [make_facts(facts.items())]
    if found.speeds:
        blocks.append(_speeds(found.speeds, found.threads))
    blocks += [Text.assemble(("problem: ", "bold red"), str(p)) for p in found.problems]
    blocks += [Text.assemble(("note: ", "cyan"), str(n)) for n in found.notes]
    if not found.problems:
        blocks.append(Text("Nothing to fix.", style="bold green"))
    return Group(*blocks)


def _speeds(speeds: Iterable[KernelSpeed], threads: int) -> Table:
    on = {0: "all threads", 1: "one thread"}.get(threads, f"{threads} threads")
    rows = (
        (
            s.operator,
            s.types,
            s.kernel,
            "" if s.microseconds is None else f"{s.microseconds:.0f}",
            "" if s.ratio is None else f"{s.ratio:.2f}x",
            Text(s.verdict, style=_VERDICT_STYLES.get(s.verdict, "")),
        )
        for s in speeds
    )
    headings = ("operator", "activations x weights", "kernel", ">us", ">speed", "verdict")
    return make_table(*headings, rows=rows, title=f"Data types, {on}: speed beside float32, measured")


# -- profile


def profile(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``profile``."""
    if arguments.out is not None:
        check_destination(arguments.out)
    with screen.progress("timing") as progress:
        measured = measure_host(
            target=arguments.target or DEFAULT_TARGET,
            threads=arguments.threads,
            budget_s=arguments.seconds,
            name=arguments.name,
            progress=progress,
        )
    if arguments.out is not None:
        measured.save(arguments.out)
        screen.note(f"profile: {arguments.out}")
    screen.result(measured.to_dict, lambda: _render_profile(measured))


def _render_profile(measured: HostProfile) -> RenderableType:
    rows = []
    for name, (in_float, in_integer) in measured.kernels.items():
        if in_float.product or in_float.element:
            costs = (in_float, in_integer, measured.shifted.get(name))
            rows.append((name, *("" if cost is None else f"{cost.product:g} / {cost.element:g}" for cost in costs)))
    head = Text(f"'{measured.name}': {measured.machine}; picoseconds a product / an element written")
    return Group(head, make_table("kernel", ">float", ">integer", ">second kernel", rows=rows))


# -- demo


def demo(arguments: argparse.Namespace, screen: Screen) -> bool:
    """The command ``demo``."""
    with screen.progress("timing") as progress:
        found = measurements.demonstrate(
            arguments.out, batch=arguments.batch, rounds=arguments.rounds, progress=progress
        )
    screen.result(found.to_dict, lambda: measurements.render(found))
    return bool(found.report.left_float())
