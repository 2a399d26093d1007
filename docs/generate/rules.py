"""The measured rules of the target, from its file."""

from __future__ import annotations

import re
from typing import Final

from kenosis_ort.targets.ort_cpu import ORT_CPU
from kenosis_ort.targets.vocabulary import FusionRule, Requirement, Role

from .markdown import code, table

ROLES: Final = {
    Role.ANCHOR: "integer",
    Role.BINARY: "integer",
    Role.UNARY: "integer",
    Role.CONCAT: "integer",
    Role.PASS_THROUGH: "bytes",
    Role.ACTIVATION: "absorbed",
    Role.ISLAND: "float",
    Role.FLOAT: "float",
}
REQUIREMENTS: Final = {
    Requirement.CONSTANT_WEIGHT: "constant weights",
    Requirement.CONSTANT_OR_NO_BIAS: "constant bias or none",
    Requirement.UNIT_ALPHA: "alpha is 1",
    Requirement.NO_TRANS_A: "transA is 0",
    Requirement.WEIGHT_RANK_2: "weights of rank 2",
    Requirement.RESIZE_NEAREST: "nearest mode",
    Requirement.ONE_OUTPUT: "only the first output is used",
    Requirement.WHOLE_POOL: "the pool covers the whole picture",
    Requirement.SCALAR_CONSTANT: "a constant operand holds one value",
    Requirement.EXACT_CONSTANT: "a constant operand is exact in 8 bits",
    Requirement.NO_CONSTANT: "no operand is constant",
}

_FIGURE = re.compile(r"\s*\(([^()]*\d(?:\.\d+)?x[^()]*)\)$")


def rule_table() -> str:
    """Returns rule, operators, what the runtime does and the measured figure."""
    return table(
        ["Rule", "Operators", "Kind", "What the runtime does", "Measured"],
        [_row(rule) for rule in ORT_CPU.rules],
    )


def fact_table() -> str:
    """Returns the facts that are not about one operator."""
    return table(["Fact", "What was measured"], [[code(name), text] for name, text in ORT_CPU.facts])


def _row(rule: FusionRule) -> list[str]:
    figure = _FIGURE.search(rule.why)
    conditions = [REQUIREMENTS[r] for r in rule.requires]
    if rule.min_opset > 1:
        conditions.append(f"opset {rule.min_opset} and later")
    does = _FIGURE.sub("", rule.why)
    if conditions:
        does += f". *Condition: {', '.join(conditions)}*"
    return [code(rule.id), ", ".join(rule.op_types), ROLES[rule.role], does, figure[1] if figure else ""]
