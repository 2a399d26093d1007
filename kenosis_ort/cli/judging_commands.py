"""Commands that look at a model: verify, explain, inspect, compare, compare-targets.

What looks at one file does without calibration and passes, so those are imported where they are wanted.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

import kenosis_ort.verify as proofs
from kenosis_ort.cli.commands import WORST_LAYERS
from kenosis_ort.cli.flags import in_shell_words
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import KenosisWarning, OptionError, did_you_mean
from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.load import ModelSummary, load_model, summarize
from kenosis_ort.plan import EdgeRole, Kind, PlacementPlan
from kenosis_ort.report.evidence import Explanation, explain_kernel, explain_plan, fusion_verdict, heavy_kernels
from kenosis_ort.report.text import format_bytes, make_facts, make_table, render_fusion, render_layers
from kenosis_ort.storage.data import to_data
from kenosis_ort.targets import TARGETS, get_target
from kenosis_ort.targets.proof import ClippingLoss

if TYPE_CHECKING:
    from kenosis_ort.accuracy.compare import Comparison
    from kenosis_ort.accuracy.outputs import OutputComparison

_OPERATORS = 12
_DIFFERENCES = 20

# -- verify


def verify(arguments: argparse.Namespace, screen: Screen) -> bool:
    """The command ``verify``."""
    if arguments.patterns is not None:
        report = proofs.verify_patterns(arguments.model, target=arguments.patterns)
        screen.result(report.to_dict, lambda: Text(str(report)))
        return bool(arguments.strict and not report.conforms)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KenosisWarning)
        libraries = tuple(arguments.custom_op_libraries)
        fusion = proofs.verify_fusion(arguments.model, custom_op_libraries=libraries, target=arguments.target)
    for warning in caught:
        screen.warn(in_shell_words(str(warning.message)))
    feeds = _reader(arguments, arguments.model)
    losses: Sequence[ClippingLoss] = ()
    if feeds is not None:
        from kenosis_ort.verify.processors import clipping_loss

        losses = clipping_loss(arguments.model, feeds)
    screen.result(
        lambda: {
            "verdict": fusion_verdict(fusion),
            "processors": to_data(fusion.processors),
            "losses": to_data(losses),
            **fusion.to_dict(),
        },
        lambda: render_fusion(fusion, losses=losses, full=arguments.full),
    )
    is_short = fusion.clipping() or not all(k.integer for k in heavy_kernels(fusion))
    return bool(arguments.strict and is_short)


def _reader(arguments: argparse.Namespace, model: Path, *, required: bool = False) -> Any:
    """Reader of what ``--data`` and ``--synthetic`` name, None without."""
    if arguments.data is None and arguments.synthetic is None and not required:
        return None
    from kenosis_ort.cli.sources import make_reader

    return make_reader(arguments, model, required=required)


# -- explain


def explain(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``explain``."""
    if arguments.times:
        _times(arguments, screen)
        return
    libraries = tuple(arguments.custom_op_libraries)
    if summarize(arguments.model).is_float:
        explained = explain_plan(_plan(arguments.model, libraries, arguments.target))
        explained += _prepared_away(arguments.model, {e.node for e in explained})
    else:
        fusion = proofs.verify_fusion(arguments.model, custom_op_libraries=libraries, target=arguments.target)
        explained = [explain_kernel(kernel) for kernel in fusion.kernels]
    chosen = _chosen(explained, arguments.node, everything=arguments.all)

    def render() -> Text:
        """One node in full, or several without their inputs, below a count."""
        if arguments.node is not None:
            return Text("\n".join(in_shell_words(str(e)) for e in chosen))
        heavy = [e for e in explained if e.is_heavy and e.kind != "prepared away"]
        floats = sum(e.kind == "float" for e in heavy)
        count = f"{floats or 'None'} of {len(heavy)} nodes that carry arithmetic (Conv, Gemm, MatMul) stay float."
        return Text("\n".join([count, *(in_shell_words(str(replace(e, inputs=()))) for e in chosen)]))

    screen.result(lambda: [e.to_dict() for e in chosen], render)


def _times(arguments: argparse.Namespace, screen: Screen) -> None:
    from kenosis_ort.api import layer_times

    wanted = {"target": arguments.target, "host": arguments.for_host}
    layers = layer_times(
        arguments.model,
        _reader(arguments, arguments.model),
        threads=arguments.threads,
        custom_op_libraries=tuple(arguments.custom_op_libraries),
        **{name: value for name, value in wanted.items() if value is not None},
    )
    layers = tuple(layer for layer in layers if arguments.node in (None, layer.node))
    screen.result(lambda: [layer.to_dict() for layer in layers], lambda: render_layers(layers))


def _plan(model: Path, libraries: tuple[str, ...], target: str | None) -> PlacementPlan:
    from kenosis_ort.api import preview

    plan = preview(model, custom_op_libraries=libraries, **({} if target is None else {"target": target}))
    if not plan:
        raise OptionError(
            "nothing in this model can run in integer, so there is no plan to explain",
            where=str(model),
            fix="kenosis-ort inspect shows its operators",
        )
    return plan


def _prepared_away(model: Path, planned: set[str]) -> Iterator[Explanation]:
    """Yields the nodes of the file that the plan does not name: preparation folded, merged or rewrote them."""
    for node in load_model(model, ask_runtime=False).proto.graph.node:
        if node.name and node.name not in planned:
            reason = "folded into its neighbours or rewritten before quantization, or computes no float tensor"
            yield Explanation(node.name, node.op_type, "prepared away", "", reason)


def _chosen(explained: Sequence[Explanation], node: str | None, *, everything: bool) -> list[Explanation]:
    if node is None:
        return [e for e in explained if everything or (e.is_heavy and e.kind == "float")]
    named = [e for e in explained if e.node == node]
    if not named:
        hint = did_you_mean(node, [e.node for e in explained])
        raise OptionError(f"the model has no node '{node}'.{hint}", where="NODE", fix="kenosis-ort explain MODEL --all")
    return named


# -- inspect


def inspect(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``inspect``."""
    summary = summarize(arguments.model)
    screen.result(summary.to_dict, lambda: _render_summary(summary, full=arguments.full))


def _render_summary(summary: ModelSummary, *, full: bool) -> RenderableType:
    total = sum(summary.weight_types.values()) or 1
    shares = ", ".join(f"{100 * size / total:.0f} % {name}" for name, size in summary.weight_types.items()) or "none"
    facts = make_facts(
        {
            "model": summary.path,
            "size": format_bytes(summary.file_bytes),
            "quantization": summary.quantization,
            "parameters": f"{summary.parameters:,} in {format_bytes(summary.weight_bytes)} ({shares})",
            "operator sets": ", ".join(f"{domain} {version}" for domain, version in summary.opsets.items()),
            "file format": f"IR version {summary.ir_version}, written by {summary.producer or 'nobody named'}",
        }.items()
    )
    rows = (
        (kind, tensor.name, tensor.dtype, "any" if tensor.shape is None else f"[{', '.join(map(str, tensor.shape))}]")
        for kind, tensors in (("input", summary.inputs), ("output", summary.outputs))
        for tensor in tensors
    )
    shown = list(summary.operators.items())[: None if full else _OPERATORS]
    rest = len(summary.operators) - len(shown)
    listed = ", ".join(f"{count} {name}" for name, count in shown)
    listed += f", and {rest} other operators (--full)" if rest else ""
    table = make_table("", "name", "type", "shape", rows=rows)
    return Group(facts, table, Text(f"{summary.nodes} nodes: {listed}"))


# -- compare


def compare(arguments: argparse.Namespace, screen: Screen) -> bool:
    """The command ``compare``."""
    from kenosis_ort.accuracy.compare import compare as compare_models

    found = compare_models(
        arguments.float_model,
        arguments.quantized_model,
        _reader(arguments, arguments.float_model, required=True),
        samples=arguments.samples,
        custom_op_libraries=tuple(arguments.custom_op_libraries),
        threads=arguments.threads,
    )
    short = [o.name for o in found.outputs if _falls_short(o, arguments.min_agreement, arguments.min_sqnr)]
    made_up = arguments.synthetic is not None and arguments.data is None
    screen.result(
        lambda: {**found.to_dict(), "below": short, "made_up_data": made_up},
        lambda: _render_comparison(found, short, full=arguments.full, made_up=made_up),
    )
    return bool(short)


def _falls_short(output: OutputComparison, agreement: float | None, sqnr_db: float | None) -> bool:
    disagrees = agreement is not None and output.agreement is not None and output.agreement < agreement
    return disagrees or (sqnr_db is not None and not (output.is_compared and output.sqnr_db >= sqnr_db))


def _render_comparison(found: Comparison, short: list[str], *, full: bool, made_up: bool) -> RenderableType:
    rows = []
    for o in found.outputs:
        agreement = "-" if o.agreement is None else f"{100 * o.agreement:.1f} %"
        cells = agreement, f"{o.sqnr_db:.1f} dB", f"{o.cosine:.5f}", f"{o.max_abs:.3g}"
        rows.append((o.name, *(cells if o.is_compared else ("-",) * 4)))
    styles = ["red" if o.name in short else "" if o.is_fine else "yellow" for o in found.outputs]
    headings = ("output", ">agreement", ">SQNR", ">cosine", ">largest difference")
    blocks: list[RenderableType] = [make_table(*headings, rows=rows, styles=styles, title="Outputs")]
    shown = found.worst(len(found.tensors) if full else WORST_LAYERS)
    if shown:
        layers = (
            (
                Text.assemble(t.name, (" first jump", "bold red")) if t.name == found.jump else t.name,
                f"{t.sqnr_db:.1f} dB",
                f"{t.drop_db:.1f} dB",
                f"{t.cosine:.5f}",
                f"{100 * t.clipping:.2f} %",
                f"{t.low:.3g} .. {t.high:.3g}",
            )
            for t in shown
        )
        title = "Layers, most lost first" if full else f"The {len(shown)} layers that lose most"
        columns = ("tensor", ">SQNR", ">lost here", ">cosine", ">clipped", ">float range")
        blocks.append(make_table(*columns, rows=layers, title=title))
    if found.weights and full:
        weights = (
            (
                w.name,
                f"{w.sqnr_db:.1f} dB",
                f"{w.cosine:.5f}",
                "by channel" if w.per_channel else "one",
                f"{w.low:.3g} .. {w.high:.3g}",
            )
            for w in sorted(found.weights, key=lambda w: w.sqnr_db)
        )
        of_weights = ("weight", ">SQNR", ">cosine", ">scales", ">float range")
        blocks.append(make_table(*of_weights, rows=weights, title="Weights, worst first"))
    compared = (
        f"{found.samples} samples; {len(found.tensors)} quantized activations have a counterpart in the float model, "
        f"{found.unmatched} do not"
    )
    blocks.append(Text(compared, style="dim"))
    if made_up:
        blocks.append(Text("note: on made-up data; agreement on real data may differ", style="yellow"))
    return Group(*blocks, Text(f"next: {in_shell_words(found.advice)}", style="bold"))


# -- compare-targets


def compare_targets(arguments: argparse.Namespace, screen: Screen) -> None:
    """The command ``compare-targets``."""
    from kenosis_ort.api import preview

    names = [get_target(name).name for name in arguments.target or TARGETS]
    plans = {name: preview(arguments.model, target=name) for name in dict.fromkeys(names)}
    rows, differ = [_counted(plan) for plan in plans.values()], _differ(plans)
    screen.result(
        lambda: {"model": str(arguments.model), "targets": rows, "differ": differ},
        lambda: _render_targets(rows, differ, full=arguments.full),
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
    value_kinds = {
        target: dict.fromkeys(sorted({value for value, _ in plan.quantized_values()}), "Q/DQ")
        for target, plan in plans.items()
    }
    found = []
    for what, by_target, otherwise in (("node", kinds, "rewritten"), ("value", value_kinds, "float")):
        for name in dict.fromkeys(name for named in by_target.values() for name in named):
            entry = {target: named.get(name, otherwise) for target, named in by_target.items()}
            if len({*entry.values()}) > 1:
                found.append({"what": f"{what} '{name}'", **entry})
    return found


def _render_targets(rows: Sequence[Mapping[str, Any]], differ: list[dict[str, Any]], *, full: bool) -> RenderableType:
    counts = (
        (
            row["target"],
            f"{row['integer_heavy']} of {row['heavy']}",
            *(str(row[name]) for name in ("taken_in", "float", "quantized_values")),
            ", ".join(row["grids"]),
        )
        for row in rows
    )
    headings = ("target", "layers in integer", "taken in", "float nodes", "values with Q/DQ", "types")
    table = make_table(*headings, rows=counts)
    if not differ:
        return Group(table, Text("They do the same, but for data types."))
    shown = differ if full else differ[:_DIFFERENCES]
    names = [row["target"] for row in rows]
    cells = ((str(entry[name]) for name in ("what", *names)) for entry in shown)
    rest = [Text(f"and {len(differ) - len(shown)} more; --full shows them")] if len(shown) < len(differ) else []
    return Group(table, make_table("", *names, rows=cells, title="Where they differ"), *rest)
