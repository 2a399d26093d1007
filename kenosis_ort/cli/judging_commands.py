"""Commands that judge a model: verify, explain, compare, compare-targets."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kenosis_ort.cli import data_flags, exits, flags
from kenosis_ort.cli.parser import Command
from kenosis_ort.cli.quantize_command import no_data
from kenosis_ort.cli.screen import Screen, check_model
from kenosis_ort.errors import KenosisWarning, OptionError, did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kenosis_ort.accuracy.compare import Comparison, TensorComparison
    from kenosis_ort.accuracy.outputs import OutputComparison
    from kenosis_ort.plan import PlacementPlan
    from kenosis_ort.report.explanation import Explanation


# -- verify


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="the quantized model")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 unless every Conv/Gemm/MatMul is integer, and the same on every processor",
    )
    flags.add_libraries(parser)
    parser.add_argument(
        "--patterns", metavar="TARGET", help="hold each Conv against this target's documented patterns, e.g. onednn"
    )
    parser.add_argument(
        "--target", metavar="TARGET", help="whose runtime to ask (default: what the file was made for, or ort-cpu)"
    )
    parser.add_argument("--full", action="store_true", help="show every float node")
    data_flags.add_arguments(parser, title="data, for what clipped products cost on processors without VNNI")


def _verify(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.cli.flags import in_shell_words
    from kenosis_ort.report.explanation import fusion_verdict, heavy_kernels
    from kenosis_ort.report.text import render_fusion
    from kenosis_ort.storage.data import to_data
    from kenosis_ort.verify import verify_fusion
    from kenosis_ort.verify.processors import clipping_loss

    check_model(arguments.model)
    if arguments.patterns is not None:
        return _patterns(arguments, screen)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KenosisWarning)
        libraries = tuple(arguments.custom_op_libraries)
        fusion = verify_fusion(arguments.model, custom_op_libraries=libraries, target=arguments.target)
    for warning in caught:
        screen.warn(in_shell_words(str(warning.message)))
    feeds = data_flags.make_reader(arguments, arguments.model)
    losses = () if feeds is None else clipping_loss(arguments.model, feeds)
    screen.result(
        lambda: {
            "verdict": fusion_verdict(fusion),
            "processors": to_data(fusion.processors),
            "losses": to_data(losses),
            **fusion.to_dict(),
        },
        lambda: render_fusion(fusion, losses=losses, full=arguments.full),
    )
    if arguments.strict and (fusion.clipping() or not all(k.integer for k in heavy_kernels(fusion))):
        return exits.NOT_INTEGER
    return exits.SUCCESS


def _patterns(arguments: argparse.Namespace, screen: Screen) -> int:
    from rich.text import Text

    from kenosis_ort.verify import verify_patterns

    report = verify_patterns(arguments.model, target=arguments.patterns)
    screen.result(report.to_dict, lambda: Text(str(report)))
    return exits.NOT_INTEGER if arguments.strict and not report.conforms else exits.SUCCESS


VERIFY: Final = Command(
    "show which kernel of the runtime executes each node of a model",
    "MODEL [options]",
    """Loads a quantized model of any origin in ONNX Runtime with all optimizations,
reads the optimized graph back and shows which nodes run on integer kernels,
which run in float, and why.

  kenosis-ort verify model.int8.onnx
  kenosis-ort verify model.int8.onnx --strict -q && echo all integer

Tells whether the file computes the same integers on every x86-64 processor:
without VNNI, kernels add two products of 8 bits in 16 and clip them. With data,
what that costs, simulated bit by bit on whichever processor this is.

  kenosis-ort verify model.int8.onnx --data samples.npz

With --patterns, holds each Conv against the quantized patterns of a document
instead, oneDNN's for one, and names the clause that it breaks; no runtime is
asked.

  kenosis-ort verify model.int8.onnx --patterns onednn
""",
    _verify_arguments,
    _verify,
    one="with --strict: a layer runs in float or clips on some processors, or with --patterns a Conv does not match",
)


# -- explain


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a float or a quantized model")
    parser.add_argument("node", nargs="?", metavar="NODE", help="name of a node (default: all that stay float)")
    parser.add_argument("--all", action="store_true", help="without NODE: the integer nodes too")
    parser.add_argument("--target", metavar="TARGET", help="the runtime in question (see: kenosis-ort targets)")
    parser.add_argument("--times", action="store_true", help="kernel, path and time of each layer")
    parser.add_argument(
        "--for-host", metavar="HOST", help="with --times, of a float model: as laid out for this machine"
    )
    parser.add_argument("--threads", type=flags.threads, default=1, help="with --times: of a session (default: 1)")
    flags.add_libraries(parser)
    data_flags.add_arguments(parser, title="what a quantized model is run on for --times (default: made up)")


def _explain(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.graph.load import summarize
    from kenosis_ort.report.explanation import explain_kernel, explain_plan
    from kenosis_ort.verify import verify_fusion

    check_model(arguments.model)
    if arguments.times:
        return _times(arguments, screen)
    libraries = tuple(arguments.custom_op_libraries)
    if summarize(arguments.model).is_float:
        explained = explain_plan(_plan(arguments.model, libraries, arguments.target))
        explained += _prepared_away(arguments.model, {e.node for e in explained})
    else:
        explained = [
            explain_kernel(k)
            for k in verify_fusion(arguments.model, custom_op_libraries=libraries, target=arguments.target).kernels
        ]
    chosen = _chosen(explained, arguments.node, everything=arguments.all)
    whole = arguments.node is not None
    heavy = [e for e in explained if e.is_heavy and e.kind != "prepared away"]
    screen.result(lambda: [e.to_dict() for e in chosen], lambda: _render_of_explain(chosen, heavy, whole=whole))
    return exits.SUCCESS


def _times(arguments: argparse.Namespace, screen: Screen) -> int:
    from kenosis_ort.api import layer_times
    from kenosis_ort.report.evidence import render_layers

    wanted = {"target": arguments.target, "host": arguments.for_host}
    given = {name: value for name, value in wanted.items() if value is not None}
    layers = layer_times(
        arguments.model,
        data_flags.make_reader(arguments, arguments.model),
        threads=arguments.threads,
        custom_op_libraries=tuple(arguments.custom_op_libraries),
        **given,
    )
    if arguments.node is not None:
        layers = tuple(layer for layer in layers if layer.node == arguments.node)
    screen.result(lambda: [layer.to_dict() for layer in layers], lambda: render_layers(layers))
    return exits.SUCCESS


def _plan(model: Path, libraries: tuple[str, ...], target: str | None) -> PlacementPlan:
    from kenosis_ort.api import preview

    wanted = {} if target is None else {"target": target}
    plan = preview(model, custom_op_libraries=libraries, **wanted)
    if not plan:
        raise OptionError(
            "nothing in this model can run in integer, so there is no plan to explain",
            where=str(model),
            fix="kenosis-ort inspect shows its operators",
        )
    return plan


def _prepared_away(model: Path, planned: set[str]) -> Iterator[Explanation]:
    """Yields the nodes of the file that the plan does not name: preparation folded, merged or rewrote them."""
    from kenosis_ort.graph.load import load_model
    from kenosis_ort.report.explanation import Explanation

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


def _render_of_explain(chosen: Sequence[Explanation], heavy: Sequence[Explanation], *, whole: bool) -> RenderableType:
    """One node in full, or several without their inputs, below a count."""
    from rich.text import Text

    from kenosis_ort.cli.flags import in_shell_words

    if whole:
        return Text("\n".join(in_shell_words(str(e)) for e in chosen))
    floats = sum(e.kind == "float" for e in heavy)
    count = f"{floats or 'None'} of {len(heavy)} nodes that carry arithmetic (Conv, Gemm, MatMul) stay float."
    return Text("\n".join([count, *(in_shell_words(str(replace(e, inputs=()))) for e in chosen)]))


EXPLAIN: Final = Command(
    "say why nodes are integer or float, and what would change it",
    "MODEL [NODE] [options]",
    """For a float model: what quantize would do with each node, and by which rule.
For a quantized model: what the installed runtime makes of each node, read off
its optimized graph. Without NODE all float nodes that carry arithmetic.

  kenosis-ort explain model.onnx
  kenosis-ort explain model.onnx /layer1/conv/Conv
  kenosis-ort explain model.int8.onnx --json

With --times the kernel and the time of each layer: of a float model as quantize
would lay it out, by estimate; of a quantized one as the runtime runs it here, by
its profiler in fresh sessions.

  kenosis-ort explain model.onnx --times --for-host amx
  kenosis-ort explain model.int8.onnx --times --data samples.npz
""",
    _explain_arguments,
    _explain,
)


# -- compare

_LAYERS = 8


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("float_model", type=Path, metavar="FLOAT", help="the float model")
    parser.add_argument("quantized_model", type=Path, metavar="QUANTIZED", help="what was made of it")
    parser.add_argument("--samples", type=flags.positive, help="samples to compare on (default: all that are given)")
    parser.add_argument("--full", action="store_true", help=f"show every layer, not the {_LAYERS} that lose most")
    parser.add_argument(
        "--min-agreement", type=flags.share, metavar="SHARE", help="least share of equal argmax, e.g. 99%%"
    )
    parser.add_argument("--min-sqnr", type=flags.number, metavar="DB", help="least signal to noise ratio, dB")
    parser.add_argument("--threads", type=flags.threads, default=1, help="of a session; 0: all (default: 1)")
    flags.add_libraries(parser)
    data_flags.add_arguments(parser)


def _compare(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.accuracy.compare import compare

    check_model(arguments.float_model)
    check_model(arguments.quantized_model)
    feeds = data_flags.make_reader(arguments, arguments.float_model)
    if feeds is None:
        raise no_data()
    found = compare(
        arguments.float_model,
        arguments.quantized_model,
        feeds,
        samples=arguments.samples,
        custom_op_libraries=tuple(arguments.custom_op_libraries),
        threads=arguments.threads,
    )
    short = [o.name for o in found.outputs if _falls_short(o, arguments.min_agreement, arguments.min_sqnr)]
    made_up = arguments.synthetic is not None and arguments.data is None
    screen.result(
        lambda: _to_data(found, short, made_up=made_up),
        lambda: _render_of_compare(found, short, full=arguments.full, made_up=made_up),
    )
    return exits.BELOW if short else exits.SUCCESS


def _falls_short(output: OutputComparison, agreement: float | None, sqnr_db: float | None) -> bool:
    disagrees = agreement is not None and output.agreement is not None and output.agreement < agreement
    return disagrees or (sqnr_db is not None and not (output.is_compared and output.sqnr_db >= sqnr_db))


def _to_data(found: Comparison, short: list[str], *, made_up: bool) -> dict[str, Any]:
    return {**found.to_dict(), "below": short, "made_up_data": made_up}


def _render_of_compare(found: Comparison, short: list[str], *, full: bool, made_up: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from kenosis_ort.cli.flags import in_shell_words

    shown = found.worst(len(found.tensors) if full else _LAYERS)
    compared = (
        f"{found.samples} samples; {len(found.tensors)} quantized activations have a counterpart in the float model, "
        f"{found.unmatched} do not"
    )
    blocks: list[RenderableType] = [_outputs(found, short)]
    if shown:
        blocks.append(_layers(shown, found.jump, full=full))
    if found.weights and full:
        blocks.append(_weights(found))
    blocks.append(Text(compared, style="dim"))
    if made_up:
        blocks.append(Text("note: on made-up data; agreement on real data may differ", style="yellow"))
    return Group(*blocks, Text(f"next: {in_shell_words(found.advice)}", style="bold"))


def _outputs(found: Comparison, short: list[str]) -> Table:
    from rich.text import Text

    from kenosis_ort.report.sections import make_table

    table = make_table("output", ">agreement", ">SQNR", ">cosine", ">largest difference", title="Outputs")
    for o in found.outputs:
        agreement = "-" if o.agreement is None else f"{100 * o.agreement:.1f} %"
        style = "red" if o.name in short else "" if o.is_fine else "yellow"
        cells = (
            (agreement, f"{o.sqnr_db:.1f} dB", f"{o.cosine:.5f}", f"{o.max_abs:.3g}") if o.is_compared else ("-",) * 4
        )
        table.add_row(Text(o.name), *cells, style=style)
    return table


def _layers(shown: tuple[TensorComparison, ...], jump: str | None, *, full: bool) -> Table:
    from rich.text import Text

    from kenosis_ort.report.sections import make_table

    title = "Layers, most lost first" if full else f"The {len(shown)} layers that lose most"
    table = make_table("tensor", ">SQNR", ">lost here", ">cosine", ">clipped", ">float range", title=title)
    for t in shown:
        name = Text(t.name) if t.name != jump else Text.assemble(t.name, (" first jump", "bold red"))
        span, clipped = f"{t.low:.3g} .. {t.high:.3g}", f"{100 * t.clipping:.2f} %"
        table.add_row(name, f"{t.sqnr_db:.1f} dB", f"{t.drop_db:.1f} dB", f"{t.cosine:.5f}", clipped, span)
    return table


def _weights(found: Comparison) -> Table:
    from rich.text import Text

    from kenosis_ort.report.sections import make_table

    table = make_table("weight", ">SQNR", ">cosine", ">scales", ">float range", title="Weights, worst first")
    for w in sorted(found.weights, key=lambda w: w.sqnr_db):
        scales = "by channel" if w.per_channel else "one"
        table.add_row(Text(w.name), f"{w.sqnr_db:.1f} dB", f"{w.cosine:.5f}", scales, f"{w.low:.3g} .. {w.high:.3g}")
    return table


COMPARE: Final = Command(
    "show where a quantized model departs from the float one",
    "FLOAT QUANTIZED (--data SOURCE | --synthetic [N]) [options]",
    r"""Runs a float and a quantized model on the same samples and shows how far each
output agrees, which layers lose most, where the error jumps first, and what to
do next.

  kenosis-ort compare model.onnx model.int8.onnx --data test.npz
  kenosis-ort compare model.onnx model.int8.onnx --data test.npz --samples 32 \
                      --min-agreement 99%
""",
    _compare_arguments,
    _compare,
    one="done, but an output agrees less than --min-agreement or --min-sqnr demands",
)


# -- compare-targets

_SHOWN = 20


def _compare_targets_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a float model")
    parser.add_argument("--target", action="append", metavar="TARGET", help="this one (may be repeated; default: all)")
    parser.add_argument("--full", action="store_true", help="show every node on which the targets differ")


def _compare_targets(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.api import preview
    from kenosis_ort.targets import TARGETS, get_target

    check_model(arguments.model)
    names = [get_target(name).name for name in arguments.target or TARGETS]
    plans = {name: preview(arguments.model, target=name) for name in dict.fromkeys(names)}
    screen.result(
        lambda: {
            "model": str(arguments.model),
            "targets": [_row(plan) for plan in plans.values()],
            "differ": _differ(plans),
        },
        lambda: _render_of_compare_targets(plans, full=arguments.full),
    )
    return exits.SUCCESS


def _row(plan: PlacementPlan) -> dict[str, Any]:
    from kenosis_ort.graph.constants import LAYERS
    from kenosis_ort.plan import EdgeRole, Kind

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
    found = []
    nodes = {name: {n.node: n.kind.value for n in plan.nodes} for name, plan in plans.items()}
    values = {name: {value for value, _ in plan.quantized_values()} for name, plan in plans.items()}
    for node in dict.fromkeys(name for kinds in nodes.values() for name in kinds):
        kinds = {target: by_node.get(node, "rewritten") for target, by_node in nodes.items()}
        if len(set(kinds.values())) > 1:
            found.append({"what": f"node '{node}'", **kinds})
    for value in dict.fromkeys(v for quantized in values.values() for v in sorted(quantized)):
        carries = {target: "Q/DQ" if value in quantized else "float" for target, quantized in values.items()}
        if len(set(carries.values())) > 1:
            found.append({"what": f"value '{value}'", **carries})
    return found


def _render_of_compare_targets(plans: Mapping[str, PlacementPlan], *, full: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from kenosis_ort.report.sections import make_table

    table = make_table("target", "layers in integer", "taken in", "float nodes", "values with Q/DQ", "types")
    for row in map(_row, plans.values()):
        table.add_row(
            row["target"],
            f"{row['integer_heavy']} of {row['heavy']}",
            *(str(row[name]) for name in ("taken_in", "float", "quantized_values")),
            ", ".join(row["grids"]),
        )
    differ = _differ(plans)
    if not differ:
        return Group(table, Text("They do the same, but for data types."))
    shown = make_table("", *plans, title="Where they differ")
    for entry in differ if full else differ[:_SHOWN]:
        shown.add_row(*(str(entry[name]) for name in ("what", *plans)))
    more = len(differ) - _SHOWN
    rest = [Text(f"and {more} more; --full shows them")] if more > 0 and not full else []
    return Group(table, shown, *rest)


COMPARE_TARGETS: Final = Command(
    "show what each target would do to a float model",
    "MODEL [options]",
    """Plans a float model for every target, without data and without writing, and
shows side by side how many layers run in integer, what their kernels take in
and how many values carry Q/DQ; then where the plans differ.

  kenosis-ort compare-targets model.onnx
  kenosis-ort compare-targets model.onnx --target ort-cpu --target tensorrt
""",
    _compare_targets_arguments,
    _compare_targets,
)
