"""``quantize --dry-run``: the plan by rule, and what stays float and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kenosis_ort.cli.flags import in_shell_words
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.report.explanation import Explanation, explain_plan
from kenosis_ort.report.sections import make_table

_NAMES = 3
_STYLES = {Kind.INTEGER: "green", Kind.FLOAT: "yellow"}


def to_data(plan: PlacementPlan, model: Path) -> dict[str, Any]:
    """The plan's summary as plain data."""
    return {
        "model": str(model),
        "target": plan.target,
        "placement": "planned" if plan else "as stock does",
        "nodes": {kind.value: sum(n.kind is kind for n in plan.nodes) for kind in Kind},
        "rules": [
            {"kind": kind.value, "rule": rule, "nodes": count, "operators": operators}
            for (kind, rule), (count, operators) in _by_rule(plan).items()
        ],
        "float_nodes": [e.to_dict() for e in explain_plan(plan) if e.kind == Kind.FLOAT.value],
    }


def render(plan: PlacementPlan, model: Path, *, full: bool = False) -> RenderableType:
    """The plan's summary for a rich console.

    Args:
        plan: The plan; empty where stock's placement is used.
        model: The model's file.
        full: Show every float node by itself, not only those that carry arithmetic.
    """
    if not plan:
        return Text(
            f"{model}: placed as stock does, node by node: the options dictate where Q/DQ goes, or nothing can run in "
            "integer. There is no plan to show."
        )
    integer = len(plan.integer_nodes())
    table = make_table("kind", "rule", ">nodes", "operators", title="What is planned")
    for (kind, rule), (count, operators) in _by_rule(plan).items():
        listed = ", ".join(f"{number} {name}" for name, number in operators.items())
        table.add_row(Text(kind.value, style=_STYLES.get(kind, "")), rule, str(count), Text(listed))
    floats = [e for e in explain_plan(plan) if e.kind == Kind.FLOAT.value]
    return Group(
        Text(
            f"{model}: {integer} of {len(plan.nodes)} nodes are planned as integer. Nothing is written.", style="bold"
        ),
        table,
        *([_floats(floats, full=full)] if floats else []),
    )


def _floats(floats: Sequence[Explanation], *, full: bool) -> Table:
    """The float nodes: those that carry arithmetic one a row, the others one row a reason."""
    table = make_table("nodes", "why", "what would change it", title="What stays float", expand=True)
    rows: dict[tuple[str, str, str], list[Explanation]] = {}
    for e in sorted(floats, key=lambda e: not e.is_heavy):
        own = e.node if full or e.is_heavy else ""
        rows.setdefault((own, e.reason, e.remedy), []).append(e)
    for (_, reason, remedy), nodes in rows.items():
        table.add_row(Text(_listed(nodes)), Text(reason), Text(in_shell_words(remedy)))
    return table


def _listed(nodes: Sequence[Explanation]) -> str:
    counts = Counter(e.op_type for e in nodes).most_common()
    names = ", ".join(e.node for e in nodes[:_NAMES]) + (", ..." if len(nodes) > _NAMES else "")
    return f"{', '.join(f'{count} {op}' for op, count in counts)}: {names}"


def _by_rule(plan: PlacementPlan) -> dict[tuple[Kind, str], tuple[int, dict[str, int]]]:
    """Number of nodes and operators by kind and rule, kinds in their order, most frequent rules first."""
    operators: dict[tuple[Kind, str], Counter[str]] = {}
    for node in plan.nodes:
        operators.setdefault((node.kind, node.rule), Counter())[node.op_type] += 1
    order = list(Kind)
    ranked = sorted(operators.items(), key=lambda item: (order.index(item[0][0]), -item[1].total(), item[0][1]))
    return {key: (counts.total(), dict(counts.most_common())) for key, counts in ranked}
