"""Explanations: every remedy belongs to a rule, reason or cause that exists, and says what would change a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kenosis_ort
from kenosis_ort import preview
from kenosis_ort.report import evidence
from kenosis_ort.report.evidence import explain_kernel, explain_plan
from kenosis_ort.targets.proof import Cause, KernelReport, Status
from tests import models, planning

PACKAGE = Path(kenosis_ort.__file__ or "").parent
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("placement", "targets", "flow")
    for path in (PACKAGE / folder).rglob("*.py")
)


@pytest.mark.parametrize("rule", evidence._BY_RULE)
def test_every_rule_with_a_remedy_exists(rule: str):
    assert f'"{rule}"' in SOURCES


@pytest.mark.parametrize("words", evidence._BY_REASON)
def test_every_reason_with_a_remedy_exists(words: str):
    assert words in SOURCES


def test_causes_of_the_runtime_have_remedies_but_for_those_without_any():
    hopeless = {Cause.NONE, Cause.PROTECTED, Cause.UNSUPPORTED_OP, Cause.UNSUPPORTED_ATTRIBUTE, Cause.UNKNOWN}
    assert set(evidence._BY_CAUSE) == {cause.value for cause in set(Cause) - hopeless}


def test_a_plan_is_explained_node_by_node():
    model = models.residual_block()
    heavy = next(e.node for e in explain_plan(preview(model)) if e.op_type == "Conv")
    kept = {e.node: e for e in explain_plan(preview(model, nodes_to_exclude=[heavy]))}[heavy]
    assert kept.kind == "float"
    assert kept.rule == "caller-excluded"
    assert "nodes_to_exclude" in kept.remedy
    assert kept.is_heavy
    integer = {e.node: e for e in explain_plan(preview(model))}[heavy]
    assert integer.remedy == ""
    assert any(line.startswith("input 1") for line in integer.inputs)
    assert str(integer).startswith(f"Conv '{heavy}': integer, by conv-integer\n  ")
    assert integer.to_dict()["inputs"] == integer.inputs


def test_a_node_that_misses_a_requirement_is_told_what_it_misses():
    model = planning.parse("""(float[1,3,8,8] x, float[4,4,1,1] fed) => (y) <float[4,3,1,1] w> {
        [conv] c = Conv (x, w) [dynamic] y = Conv (c, fed) }""")
    explained = {e.node: e for e in explain_plan(preview(model, primary_inputs=["x", "fed"]))}
    assert explained["dynamic"].kind == "float"
    assert "not a constant" in explained["dynamic"].reason
    assert "initializer" in explained["dynamic"].remedy


@pytest.mark.parametrize(
    ("kernel", "status", "reason", "remedy"),
    [
        (("QLinearConv", True, ("r",), None, ""), Status.INTEGER, "runs as QLinearConv with r", ""),
        (("Conv", False, (), None, "16 bit"), Status.FLOAT, "16 bit", "8-bit"),
        (("", False, (), None, "computed at load"), Status.REMOVED, "computed at load", ""),
    ],
)
def test_a_kernel_is_explained(kernel: tuple[Any, ...], status: Status, reason: str, remedy: str):
    cause = Cause.SIXTEEN_BIT if status is Status.FLOAT else Cause.NONE
    explained = explain_kernel(KernelReport("c", "Conv", *kernel, status, cause))
    assert (explained.reason, explained.kind) == (reason, status.value)
    assert bool(explained.remedy) is bool(remedy)
    assert remedy in explained.remedy
