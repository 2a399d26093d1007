"""The command quantize, its dry run, and the ``.recipe.toml`` that it saves beside an output.

The library reads ``[recipe]`` and ``[options]`` of it (`kenosis_ort.option_types`). The command's own are ``[data]``,
how samples were read or made up, in the words of its options.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kenosis_ort import preview, quantize_static
from kenosis_ort.cli import flags
from kenosis_ort.cli.flags import in_shell_words
from kenosis_ort.cli.parser import Parser
from kenosis_ort.cli.screen import Screen
from kenosis_ort.cli.sources import executor, files_named, make_eval_reader, make_reader, named_metric, no_data
from kenosis_ort.errors import KenosisWarning, OptionError, did_you_mean, strict_names
from kenosis_ort.flow.file_checks import check_files
from kenosis_ort.graph.files import check_destination
from kenosis_ort.option_types import RecipeFile, resolve
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.report.evidence import Explanation, explain_plan
from kenosis_ort.report.quantization_report import QuantizationReport
from kenosis_ort.report.text import Form, listed, make_table, render_report, table
from kenosis_ort.storage.writing import absolute, check_kind


def saved_data(file: RecipeFile, where: str) -> dict[str, Any]:
    """The ``[data]`` of a recipe file, as the command's own parser reads it.

    Raises:
        OptionError: It holds something unknown or of another kind.
    """
    parser = Parser(prog="kenosis-ort quantize", where=where)
    flags.add_arguments(parser, flags.data_arguments())
    tokens = []
    for name, words in file.data.items():
        if name not in flags.DATA_NAMES:
            what = f"unknown setting '{name}' in [data].{did_you_mean(name, flags.DATA_NAMES)}"
            raise OptionError(what, where=where, fix=f"one of {[*flags.DATA_NAMES]}")
        tokens += [f"--{name.replace('_', '-')}={text}" for text in (words if isinstance(words, list) else [words])]
    return flags.given_data(parser.parse_args(tokens))


def recall(arguments: argparse.Namespace, data: Mapping[str, Any]) -> None:
    """Sets the arguments about data that were not given; the source itself only where it was made up."""
    given = arguments.data is not None or arguments.synthetic is not None
    unsaid = {name for name in data if getattr(arguments, name) in (None, [])}
    arguments.recalled = unsaid - {"data", *(["synthetic"] if given else [])}
    for name in arguments.recalled:
        setattr(arguments, name, data[name])


def spelled(value: Any) -> Any:
    """An argument about data as it is written on the command line; whole numbers as they are."""
    if isinstance(value, list):
        return [(f"{name}=" if name is not None else "") + spelled(entry) for name, entry in value]
    if isinstance(value, tuple) and all(isinstance(size, int) for size in value):
        return "x".join(map(str, value))
    if isinstance(value, tuple):
        return ",".join(f"{number:.17g}" if float(f"{number:g}") != number else f"{number:g}" for number in value)
    return value


# -- quantize


def quantize(arguments: argparse.Namespace, screen: Screen) -> bool:
    """The command ``quantize``."""
    saved = RecipeFile.load(arguments.recipe) if str(arguments.recipe).endswith(".toml") else None
    if saved is not None:
        recall(arguments, saved_data(saved, arguments.recipe))
    words = flags.given(arguments)
    if arguments.dry_run:
        _dry_run(arguments, words, screen)
        return False
    names = {"recipe": _recipe_path(arguments), "report": arguments.report}
    paths = {name: None if path is None else absolute(path) for name, path in names.items()}
    model, output = absolute(arguments.model), absolute(output_path(arguments))
    called = flags.to_api(words)
    _check_files(arguments, output, paths)
    synthetic = resolve(words.get("recipe", "fast")).recipe.synthetic
    cache = arguments.calibration_cache_path
    if synthetic and arguments.data is None and arguments.synthetic is None and cache is None:
        arguments.synthetic = synthetic
    data = flags.given_data(arguments)
    reader = make_reader(arguments, arguments.model)
    _check_files(arguments, output, paths, reader)
    if reader is None and not (cache is not None and Path(cache).is_file()):
        raise no_data()
    called["eval_reader"] = make_eval_reader(arguments, arguments.model)
    if arguments.metric is not None:
        called["metric"] = named_metric(arguments.metric)
    with (
        executor(arguments, screen) as cluster,
        screen.progress("calibrating") as progress,
        warnings.catch_warnings(),
        strict_names(),
    ):
        warnings.simplefilter("ignore", KenosisWarning)  # the report holds them
        evidence: Literal["full", "none"] = "none" if paths["report"] is None else "full"  # only the page shows it
        made = quantize_static(model, output, reader, progress=progress, evidence=evidence, executor=cluster, **called)
    report = replace(made, model_input=str(arguments.model), model_output=str(output_path(arguments)))
    if (path := paths["recipe"]) is not None:
        head = f"Makes {output.name} again: kenosis-ort quantize {model.name} --recipe {path.name}, with the same data."
        kept = {name: spelled(value) for name, value in data.items()}
        replace(report.recipe_file(), data=kept).save(path, head=head)
    if paths["report"] is not None:
        report.save_html(paths["report"])
    _show(report, screen, full=arguments.full, files=names)
    return bool(report.left_float() or (arguments.strict and report.is_float))


def output_path(arguments: argparse.Namespace) -> Path:
    """The file to write: ``model.int8.onnx`` beside ``model.onnx`` where none is named."""
    model: Path = arguments.model
    out: Path = arguments.out or model.with_name(f"{model.name.removesuffix('.onnx')}.int8.onnx")
    return out


def _recipe_path(arguments: argparse.Namespace) -> Path | None:
    """Path of the saved recipe: ``model.int8.recipe.toml`` beside the output; None where that is the one used."""
    if arguments.no_save_recipe:
        return None
    path: Path = arguments.save_recipe or output_path(arguments).with_suffix(".recipe.toml")
    used = arguments.recipe is not None and path.exists() and Path(arguments.recipe).exists()
    return None if used and path.samefile(arguments.recipe) else path


def _check_files(
    arguments: argparse.Namespace, output: Path, paths: Mapping[str, Path | None], reader: Any = None
) -> None:
    roles = {"recipe": "the recipe to save", "report": "the report"}
    written = [(roles[name], path) for name, path in paths.items() if path is not None]
    check_files(
        arguments.model,
        output,
        cache=arguments.calibration_cache_path,
        written=written,
        read=files_named(arguments),
        reader=reader,
        in_place=False,
    )
    for path in (output, *(path for _, path in written)):
        check_destination(path)
    for role, path in written:
        check_kind(path, "<" if role == roles["report"] else "[", role)


def _show(report: QuantizationReport, screen: Screen, *, full: bool, files: Mapping[str, Path | None]) -> None:
    written = {name: str(path) for name, path in files.items() if path is not None}
    warned = tuple(map(in_shell_words, report.warnings))
    trust = None if report.trust is None else replace(report.trust, advice=in_shell_words(report.trust.advice))
    screen.result(
        lambda: {**report.to_dict(), "files": written},
        lambda: render_report(replace(report, warnings=warned, trust=trust), full=full),
    )
    if screen.quiet and not screen.as_json:
        for text in warned:
            screen.warn(text)
    for name, path in written.items():
        screen.note(f"{name}: {path}")


# -- dry run

_STYLES = {Kind.INTEGER.value: "green", Kind.FLOAT.value: "yellow"}
_RULES: dict[str, Form] = {
    "kind": lambda row: Text(row["kind"], style=_STYLES.get(row["kind"], "")),
    "rule": "{0[rule]}",
    ">nodes": "{0[nodes]}",
    "operators": lambda row: ", ".join(f"{count} {name}" for name, count in row["operators"].items()),
}


def _dry_run(arguments: argparse.Namespace, words: Mapping[str, Any], screen: Screen) -> None:
    """The command ``quantize --dry-run``: the plan by rule, and what stays float and why."""
    with strict_names():
        plan = preview(arguments.model, **flags.to_api(words))
    floats = [e for e in explain_plan(plan) if e.kind == Kind.FLOAT.value]
    rules = _by_rule(plan)
    screen.result(
        lambda: {
            "model": str(arguments.model),
            "target": plan.target,
            "placement": "planned" if plan else "as stock does",
            "nodes": {kind.value: sum(n.kind is kind for n in plan.nodes) for kind in Kind},
            "rules": rules,
            "float_nodes": [e.to_dict() for e in floats],
        },
        lambda: _render_plan(plan, arguments.model, rules, floats, full=arguments.full),
    )


def _by_rule(plan: PlacementPlan) -> list[dict[str, Any]]:
    """Number of nodes and operators by kind and rule, kinds in their order, most frequent rules first."""
    operators: dict[tuple[Kind, str], Counter[str]] = {}
    for node in plan.nodes:
        operators.setdefault((node.kind, node.rule), Counter())[node.op_type] += 1
    order = list(Kind)
    ranked = sorted(operators.items(), key=lambda item: (order.index(item[0][0]), -item[1].total(), item[0][1]))
    return [
        {"kind": kind.value, "rule": rule, "nodes": counts.total(), "operators": dict(counts.most_common())}
        for (kind, rule), counts in ranked
    ]


def _render_plan(
    plan: PlacementPlan, model: Path, rules: list[dict[str, Any]], floats: Sequence[Explanation], *, full: bool
) -> RenderableType:
    if not plan:
        return Text(
            f"{model}: placed as stock does, node by node: the options dictate where Q/DQ goes, or nothing can run in "
            "integer. There is no plan to show."
        )
    count = f"{len(plan.integer_nodes())} of {len(plan.nodes)} nodes are planned as integer"
    blocks: list[RenderableType] = [Text(f"{model}: {count}. Nothing is written.", style="bold")]
    blocks += [table(rules, _RULES, title="What is planned"), *([_floats(floats, full=full)] if floats else [])]
    return Group(*blocks)


def _floats(floats: Sequence[Explanation], *, full: bool) -> Table:
    """The float nodes: those that carry arithmetic one a row, the others one row a reason."""
    rows: dict[tuple[str, str, str], list[Explanation]] = {}
    for e in sorted(floats, key=lambda e: not e.is_heavy):
        own = e.node if full or e.is_heavy else ""
        rows.setdefault((own, e.reason, e.remedy), []).append(e)
    cells = ((listed(nodes), reason, in_shell_words(remedy)) for (_, reason, remedy), nodes in rows.items())
    headings = ("nodes", "why", "what would change it")
    return make_table(*headings, rows=cells, title="What stays float", expand=True)
