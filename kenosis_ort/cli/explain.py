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
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kenosis_ort.cli import data, exits, options, values
from kenosis_ort.cli.screen import Screen, check_model
from kenosis_ort.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kenosis_ort.plan import PlacementPlan
    from kenosis_ort.report.explanation import Explanation

HELP = "say why nodes are integer or float, and what would change it"
USAGE = "MODEL [NODE] [options]"
ONE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a float or a quantized model")
    parser.add_argument("node", nargs="?", metavar="NODE", help="name of a node (default: all that stay float)")
    parser.add_argument("--all", action="store_true", help="without NODE: the integer nodes too")
    parser.add_argument("--target", metavar="TARGET", help="the runtime in question (see: kenosis-ort targets)")
    parser.add_argument("--times", action="store_true", help="kernel, path and time of each layer")
    parser.add_argument(
        "--for-host", metavar="HOST", help="with --times, of a float model: as laid out for this machine"
    )
    parser.add_argument("--threads", type=values.threads, default=1, help="with --times: of a session (default: 1)")
    options.add_libraries(parser)
    data.add_arguments(parser, title="what a quantized model is run on for --times (default: made up)")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    from kenosis_ort.graph.summary import summarize
    from kenosis_ort.report.explanation import explain_kernel, explain_plan
    from kenosis_ort.verify import verify_fusion

    check_model(arguments.model)
    if arguments.times:
        return _times(arguments, screen)
    libraries = tuple(arguments.custom_op_library)
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
    screen.result(lambda: [e.to_dict() for e in chosen], lambda: _render(chosen, heavy, whole=whole))
    return exits.SUCCESS


def _times(arguments: argparse.Namespace, screen: Screen) -> int:
    from kenosis_ort.api import layer_times
    from kenosis_ort.report.evidence import render_layers

    wanted = {"target": arguments.target, "host": arguments.for_host}
    given = {name: value for name, value in wanted.items() if value is not None}
    layers = layer_times(
        arguments.model,
        data.make_reader(arguments, arguments.model),
        threads=arguments.threads,
        custom_op_libraries=tuple(arguments.custom_op_library),
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


def _render(chosen: Sequence[Explanation], heavy: Sequence[Explanation], *, whole: bool) -> RenderableType:
    """One node in full, or several without their inputs, below a count."""
    from rich.text import Text

    from kenosis_ort.cli.screen import in_shell_words

    if whole:
        return Text("\n".join(in_shell_words(str(e)) for e in chosen))
    floats = sum(e.kind == "float" for e in heavy)
    count = f"{floats or 'None'} of {len(heavy)} nodes that carry arithmetic (Conv, Gemm, MatMul) stay float."
    return Text("\n".join([count, *(in_shell_words(str(replace(e, inputs=()))) for e in chosen)]))
