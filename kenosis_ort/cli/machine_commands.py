"""Commands about machines and runtimes: targets, bench, doctor, profile, demo."""

import argparse
import os
from typing import Any

from onnx import TensorProto
from rich.console import Group, RenderableType
from rich.text import Text

from kenosis_ort import measure_host
from kenosis_ort.bench.benchmark import bench, render_bench
from kenosis_ort.bench.doctor import Examination, examine
from kenosis_ort.cli import flags
from kenosis_ort.cli.screen import Screen
from kenosis_ort.cli.sources import make_reader
from kenosis_ort.demo import demonstrate, render
from kenosis_ort.graph.files import check_destination
from kenosis_ort.report.text import Form, make_facts, table
from kenosis_ort.runtime.machine import machine
from kenosis_ort.targets import DEFAULT_TARGET, TARGETS, Target, get_target
from kenosis_ort.targets.profile import HostProfile, KernelCost

# -- targets

_TARGETS: dict[str, Form] = {
    **{name: f"{{0[{name}]}}" for name in ("target", "activations", "weights", "bias")},
    "a kernel takes in": lambda s: (
        ("where the range allows it: " if TARGETS[s["target"]].clamps else "") + (", ".join(s["taken_in"]) or "nothing")
    ),
    "residual": "{0[residual]}",
    "here": lambda s: ", ".join(word for word in ("proved", "timed") if s[word]) or "not run",
}
_RULES: dict[str, Form] = {
    "rule": "{0[id]}",
    "operators": lambda rule: ", ".join(rule["operators"]),
    "what becomes of them": "{0[role]}: {0[why]}",
    "rests on": lambda rule: rule["source"] or f"test_rule_{rule['id'].replace('-', '_')}",
}


def targets(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``targets``."""
    if arguments.target is None:
        found = [summary(target) for target in TARGETS.values()]
        screen.result(lambda: found, lambda: table(found, _TARGETS))
        return
    target = get_target(arguments.target)
    facts = summary(target)
    rules = [
        {"id": r.id, "operators": list(r.op_types), "role": r.role.value, "why": r.why, "source": r.source}
        for r in target.rules
    ]
    rules += [{"id": i, "operators": [], "role": "fact", "why": why, "source": ""} for i, why in target.facts]
    words = {
        name.replace("_", " "): ", ".join(map(str, entry)) if isinstance(entry, list) else str(entry)
        for name, entry in facts.items()
    }
    screen.result(
        lambda: {**facts, "rules": rules},
        lambda: Group(make_facts(words.items(), style="bold"), table(rules, _RULES, title="Rules")),
    )


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

_STYLES = {"fast": "green", "slow": "red", "refused": "dim"}
_SPEEDS: dict[str, Form] = {
    "operator": "{0.operator}",
    "activations x weights": "{0.types}",
    "kernel": "{0.kernel}",
    ">us": lambda speed: "" if speed.microseconds is None else f"{speed.microseconds:.0f}",
    ">speed": lambda speed: "" if speed.ratio is None else f"{speed.ratio:.2f}x",
    "verdict": lambda speed: Text(speed.verdict, style=_STYLES.get(speed.verdict, "")),
}


def doctor(arguments: argparse.Namespace, screen: Screen) -> None:
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
        on = {0: "all threads", 1: "one thread"}.get(found.threads, f"{found.threads} threads")
        title = f"Data types, {on}: speed beside float32, measured"
        blocks.append(table(found.speeds, _SPEEDS, title=title))
    return Group(*blocks, *(Text.assemble(("note: ", "cyan"), note) for note in found.notes))


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
    def cost(found: KernelCost | None) -> str:
        return "" if found is None else f"{found.product:g} / {found.element:g}"

    columns: dict[str, Form] = {
        "kernel": lambda row: row[0],
        ">float": lambda row: cost(row[1][0]),
        ">integer": lambda row: cost(row[1][1]),
        ">second kernel": lambda row: cost(measured.shifted.get(row[0])),
    }
    rows = [row for row in measured.kernels.items() if row[1][0].product or row[1][0].element]
    head = Text(f"'{measured.name}': {measured.machine}; picoseconds a product / an element written")
    return Group(head, table(rows, columns))


# -- demo


def demo(arguments: argparse.Namespace, screen: Screen) -> bool:
    """The command ``demo``."""
    with screen.progress("timing") as progress:
        found = demonstrate(arguments.out, batch=arguments.batch, rounds=arguments.rounds, progress=progress)
    screen.result(found.to_dict, lambda: render(found))
    return bool(found.report.left_float())
