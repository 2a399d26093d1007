"""Explanations: every remedy belongs to a rule, reason or cause that exists, and says what would change a node."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import kenosis_ort
from kenosis_ort import preview
from kenosis_ort.report import evidence
from kenosis_ort.report.evidence import explain_kernel, explain_plan
from kenosis_ort.targets.proof import Cause, KernelReport, Status
from tests import models

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
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("Conv", ["c", "fed"], ["y"], "dynamic"),
    ]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 3, 1, 1], [0.5] * 12)
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, [1, 3, 8, 8]), value("fed", TensorProto.FLOAT, [4, 4, 1, 1])],
        [value("y", TensorProto.FLOAT, [1, 4, 8, 8])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    explained = {e.node: e for e in explain_plan(preview(model, primary_inputs=["x", "fed"]))}
    assert explained["dynamic"].kind == "float"
    assert "not a constant" in explained["dynamic"].reason
    assert "initializer" in explained["dynamic"].remedy


@pytest.mark.parametrize(
    ("kernel", "reason", "remedy"),
    [
        (
            KernelReport("c", "Conv", "QLinearConv", True, ("r",), None, "", Status.INTEGER),
            "runs as QLinearConv with r",
            "",
        ),
        (
            KernelReport("c", "Conv", "Conv", False, (), None, "16 bit", Status.FLOAT, Cause.SIXTEEN_BIT),
            "16 bit",
            "8-bit",
        ),
        (
            KernelReport("c", "Conv", "", False, (), None, "computed at load", Status.REMOVED),
            "computed at load",
            "",
        ),
    ],
)
def test_a_kernel_is_explained(kernel: KernelReport, reason: str, remedy: str):
    explained = explain_kernel(kernel)
    assert explained.reason == reason
    assert remedy in explained.remedy
    assert bool(explained.remedy) is bool(remedy)
    assert explained.kind == kernel.status.value
