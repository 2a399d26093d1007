"""Commands that look at a model: verify, explain, inspect, compare, compare-targets.

What looks at one file does without calibration and passes, so those are imported where they are wanted.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

import kenosis_ort.verify as proofs
from kenosis_ort.cli.flags import in_shell_words
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.summary import ModelSummary, summarize
from kenosis_ort.plan import EdgeRole, Kind, PlacementPlan
from kenosis_ort.report import evidence
from kenosis_ort.report.text import Form, make_facts, render_fusion, render_layers, table
from kenosis_ort.storage.data import format_bytes, to_data
from kenosis_ort.targets import TARGETS, get_target

_OPERATORS = 12
_DIFFERENCES = 20


def _reader(arguments: argparse.Namespace, model: Path, *, required: bool = False) -> Any:
    """Reader of what ``--data`` and ``--synthetic`` name, None without."""
    if arguments.data is None and arguments.synthetic is None and not required:
        return None
    from kenosis_ort.cli.sources import make_reader

    return make_reader(arguments, model, required=required)


def verify(arguments: argparse.Namespace, screen: Screen) -> bool:
    """The command ``verify``."""
    if arguments.patterns is not None:
        report = proofs.verify_patterns(arguments.model, target=arguments.patterns)
        screen.result(report.to_dict, lambda: Text(str(report)))
        return bool(arguments.strict and not report.conforms)
    libraries = tuple(arguments.custom_op_libraries)
    fusion = proofs.verify_fusion(arguments.model, custom_op_libraries=libraries, target=arguments.target)
    feeds = _reader(arguments, arguments.model)
    losses = () if feeds is None else proofs.clipping_loss(arguments.model, feeds)
    facts = {"processors": to_data(fusion.processors), "losses": to_data(losses), **fusion.to_dict()}
    screen.result(
        lambda: {"verdict": evidence.fusion_verdict(fusion), **facts},
        lambda: render_fusion(fusion, losses=losses, full=arguments.full),
    )
    is_short = fusion.clipping() or not all(k.integer for k in fusion.heavy())
    return bool(arguments.strict and is_short)


# -- explain


def explain(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``explain``."""
    node, libraries = arguments.node, tuple(arguments.custom_op_libraries)
    wanted = {name: value for name in ("target", "host") if (value := getattr(arguments, name)) is not None}
    if arguments.times:
        from kenosis_ort import layer_times

        reader = _reader(arguments, arguments.model)
        layers = layer_times(
            arguments.model, reader, threads=arguments.threads, custom_op_libraries=libraries, **wanted
        )
        layers = tuple(layer for layer in layers if node in (None, layer.node))
        screen.result(lambda: to_data(layers), lambda: render_layers(layers))
        return
    if summarize(arguments.model).is_float:
        explained = _planned(arguments.model, libraries, arguments.target)
    else:
        fusion = proofs.verify_fusion(arguments.model, custom_op_libraries=libraries, target=arguments.target)
        explained = [evidence.explain_kernel(kernel) for kernel in fusion.kernels]
    if node is None:
        chosen = [e for e in explained if arguments.all or (e.is_heavy and e.kind == "float")]
    else:
        chosen = [e for e in explained if e.node == node]
        if not chosen:
            hint = did_you_mean(node, [e.node for e in explained])
            what = f"the model has no node '{node}'.{hint}"
            raise OptionError(what, where="NODE", fix="kenosis-ort explain MODEL --all")

    def render() -> Text:
        """One node in full, or several without their inputs, below a count."""
        if node is not None:
            return Text("\n".join(in_shell_words(str(e)) for e in chosen))
        heavy = [e for e in explained if e.is_heavy and e.kind != "prepared away"]
        floats = sum(e.kind == "float" for e in heavy)
        count = f"{floats or 'None'} of {len(heavy)} nodes that carry arithmetic (Conv, Gemm, MatMul) stay float."
        return Text("\n".join([count, *(in_shell_words(str(replace(e, inputs=()))) for e in chosen)]))

    screen.result(lambda: [e.to_dict() for e in chosen], render)


def _planned(model: Path, libraries: tuple[str, ...], target: str | None) -> list[evidence.Explanation]:
    """The nodes of the plan, and those of the file that it does not name, as preparation folded or rewrote them."""
    from kenosis_ort import preview

    plan = preview(model, custom_op_libraries=libraries, **({} if target is None else {"target": target}))
    if not plan:
        raise OptionError(
            "nothing in this model can run in integer, so there is no plan to explain",
            where=str(model),
            fix="kenosis-ort inspect shows its operators",
        )
    explained = evidence.explain_plan(plan)
    planned = {e.node for e in explained}
    reason = "folded into its neighbours or rewritten before quantization, or computes no float tensor"
    nodes = load_model(model, ask_runtime=False).proto.graph.node
    away = (node for node in nodes if node.name and node.name not in planned)
    return [*explained, *(evidence.Explanation(n.name, n.op_type, "prepared away", "", reason) for n in away)]


# -- inspect


def inspect(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``inspect``."""
    summary = summarize(arguments.model)
    screen.result(summary.to_dict, lambda: _render_summary(summary, full=arguments.full))


def _render_summary(summary: ModelSummary, *, full: bool) -> RenderableType:
    total = sum(summary.weight_types.values()) or 1
    shares = ", ".join(f"{100 * size / total:.0f} % {name}" for name, size in summary.weight_types.items()) or "none"
    facts = {
        "model": summary.path,
        "size": format_bytes(summary.file_bytes),
        "quantization": summary.quantization,
        "parameters": f"{summary.parameters:,} in {format_bytes(summary.weight_bytes)} ({shares})",
        "operator sets": ", ".join(f"{domain} {version}" for domain, version in summary.opsets.items()),
        "file format": f"IR version {summary.ir_version}, written by {summary.producer or 'nobody named'}",
    }
    columns: dict[str, Form] = {
        "": "{0[0]}",
        "name": "{0[1].name}",
        "type": "{0[1].dtype}",
        "shape": lambda end: "any" if end[1].shape is None else f"[{', '.join(map(str, end[1].shape))}]",
    }
    shown = list(summary.operators.items())[: None if full else _OPERATORS]
    rest = len(summary.operators) - len(shown)
    listed = ", ".join(f"{count} {name}" for name, count in shown)
    listed += f", and {rest} other operators (--full)" if rest else ""
    ends = [*(("input", t) for t in summary.inputs), *(("output", t) for t in summary.outputs)]
    return Group(make_facts(facts.items()), table(ends, columns), Text(f"{summary.nodes} nodes: {listed}"))


# -- compare


def compare(arguments: argparse.Namespace, screen: Screen) -> bool:
    """The command ``compare``."""
    from kenosis_ort.report import comparison

    found = comparison.compare(
        arguments.float_model,
        arguments.quantized_model,
        _reader(arguments, arguments.float_model, required=True),
        samples=arguments.samples,
        custom_op_libraries=tuple(arguments.custom_op_libraries),
        threads=arguments.threads,
    )
    agreement, sqnr_db = arguments.min_agreement, arguments.min_sqnr
    short = [
        o.name
        for o in found.outputs
        if (agreement is not None and o.agreement is not None and o.agreement < agreement)
        or (sqnr_db is not None and not (o.is_compared and o.sqnr_db >= sqnr_db))
    ]
    made_up = arguments.synthetic is not None and arguments.data is None
    screen.result(
        lambda: {**found.to_dict(), "below": short, "made_up_data": made_up},
        lambda: comparison.render_comparison(
            replace(found, advice=in_shell_words(found.advice)), short, full=arguments.full, made_up=made_up
        ),
    )
    return bool(short)


# -- compare-targets


def compare_targets(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``compare-targets``."""
    from kenosis_ort import preview

    names = [get_target(name).name for name in arguments.target or TARGETS]
    plans = {name: preview(arguments.model, target=name) for name in dict.fromkeys(names)}
    rows, differ = [_counted(plan) for plan in plans.values()], _differ(plans)
    screen.result(
        lambda: {"model": str(arguments.model), "targets": rows, "differ": differ},
        lambda: _render_targets(rows, differ, [*plans], full=arguments.full),
    )


def _counted(plan: PlacementPlan) -> dict[str, Any]:
    heavy, role = [n for n in plan.nodes if n.op_type in LAYERS], EdgeRole.ACTIVATION
    return {
        "target": plan.target,
        "heavy": len(heavy),
        "integer_heavy": sum(n.kind is Kind.INTEGER for n in heavy),
        "taken_in": sum(n.kind is Kind.ABSORBED for n in plan.nodes),
        "float": sum(n.kind is Kind.FLOAT for n in plan.nodes),
        "quantized_values": sum(1 for _ in plan.quantized_values()),
        "grids": sorted({d.grid for d in plan.decisions if d.role is role and d.dtype and d.axis is None}),
    }


def _differ(plans: Mapping[str, PlacementPlan]) -> list[dict[str, Any]]:
    """The nodes of which two targets make different things, and the values that carry Q/DQ on some only."""
    kinds = {target: {n.node: n.kind.value for n in plan.nodes} for target, plan in plans.items()}
    quantized = {target: sorted({value for value, _ in plan.quantized_values()}) for target, plan in plans.items()}
    values = {target: dict.fromkeys(names, "Q/DQ") for target, names in quantized.items()}
    found = []
    for what, by_target, otherwise in (("node", kinds, "rewritten"), ("value", values, "float")):
        for name in dict.fromkeys(name for named in by_target.values() for name in named):
            entry = {target: named.get(name, otherwise) for target, named in by_target.items()}
            if len({*entry.values()}) > 1:
                found.append({"what": f"{what} '{name}'", **entry})
    return found


def _render_targets(
    rows: Sequence[Mapping[str, Any]], differ: list[dict[str, Any]], names: Sequence[str], *, full: bool
) -> RenderableType:
    columns: dict[str, Form] = {
        "target": "{0[target]}",
        "layers in integer": "{0[integer_heavy]} of {0[heavy]}",
        "taken in": "{0[taken_in]}",
        "float nodes": "{0[float]}",
        "values with Q/DQ": "{0[quantized_values]}",
        "types": lambda row: ", ".join(row["grids"]),
    }
    if not differ:
        return Group(table(rows, columns), Text("They do the same, but for data types."))
    shown = differ if full else differ[:_DIFFERENCES]
    differences = table(shown, {"": "{0[what]}", **{n: f"{{0[{n}]}}" for n in names}}, title="Where they differ")
    rest = [Text(f"and {len(differ) - len(shown)} more; --full shows them")] if len(shown) < len(differ) else []
    return Group(table(rows, columns), differences, *rest)
