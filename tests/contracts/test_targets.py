"""What every target has to hold, whatever its rules say."""

import importlib
import json
import pkgutil
import re
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

import tests.targets
from kenosis_ort import InternalError, KenosisWarning, errors, preview, quantize_static
from kenosis_ort.graph.view import GraphView
from kenosis_ort.placement import constraints, eligibility, planner
from kenosis_ort.plan import EdgeRole, How, PlacementOptions, PlacementPlan
from kenosis_ort.targets import TARGETS
from kenosis_ort.targets.vocabulary import Role as TargetRole
from tests import models, planning
from tests.processor import ARM, NO_VNNI, VNNI

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
each_rule = pytest.mark.parametrize(("target", "rule"), [
    pytest.param(target, rule, id=f"{target.name}-{rule.id}") for target in TARGETS.values() for rule in target.rules
])  # fmt: skip
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@pytest.fixture(scope="module")
def proofs():
    """Names of all tests of the rule proofs."""
    found = set()
    for name in (m.name for m in pkgutil.iter_modules(tests.targets.__path__) if m.name.startswith("test_")):
        module = vars(importlib.import_module(f"tests.targets.{name}"))
        found |= {*module, *(f"test_rule_{rule.replace('-', '_')}" for rule in module.get("EXAMPLES", ()))}
    return {name for name in found if name.startswith("test_")}


def plan_for(target, name, **options):
    return planner.Planner(GraphView(planning.prepared(models.ALL[name]())), target, PlacementOptions(**options)).plan()


# ---- the table ----------------------------------------------------------------------------------------------------


@each_target
def test_every_rule_and_every_fact_names_a_test_that_exists(target, proofs):
    named = [*(rule.id for rule in target.rules), *(identifier for identifier, _ in target.facts)]
    assert {f"test_rule_{name.replace('-', '_')}" for name in named} - proofs == set()


@each_target
def test_rules_and_facts_have_names_of_their_own_and_reasons_and_are_found_by_operators(target):
    identifiers = [r.id for r in target.rules] + [i for i, _ in target.facts]
    assert len(identifiers) == len(set(identifiers))
    assert [i for i in identifiers if not _ID.fullmatch(i)] == []
    assert all(r.why and r.op_types for r in target.rules)
    assert all(sentence for _, sentence in target.facts)
    for op_type in {o for r in target.rules for o in r.op_types}:
        rules = target.rules_of(op_type)
        assert all(rule.requires for rule in rules[:-1])  # else those behind it never count
        assert list(rules) == [rule for rule in target.rules if op_type in rule.op_types]
        assert target.rule(op_type) is rules[0]
    assert target.rule("NoSuchOperator") is None


@each_target
def test_what_the_table_lists_beside_its_rules_has_rules(target):
    roles = {o: r.role for r in reversed(target.rules) for o in r.op_types}  # the first rule of an operator
    assert {roles.get(o) for o in target.clamps} <= {TargetRole.ACTIVATION}
    assert set(target.clamps) <= set(target.absorbs)
    assert TargetRole.ANCHOR not in {roles.get(o) for o in target.absorbs}
    assert {roles.get(o) for o in target.float_output} <= {TargetRole.ANCHOR}


POOL = "kernel_shape = [2,2]"
STATEMENTS = {
    "Conv": "Conv (x, w)", "ConvTranspose": "ConvTranspose (x, w)", "Gemm": "Gemm (m, v)", "MatMul": "MatMul (m, v)",
    **{op: f"{op} (x, z)" for op in ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Mean", "PRelu")},
    "Einsum": 'Einsum <equation = "ij,kj->ik"> (m, m)', "Where": "Where (b, x, z)",
    "Concat": "Concat <axis = 1> (x, z)",
    "MaxPool": f"MaxPool <{POOL}> (x)", "AveragePool": "AveragePool <kernel_shape = [8,8]> (x)",
    "Split": "Split <axis = 1> (x, s)", "Gather": "Gather (x, i)", "Resize": 'Resize <mode = "nearest"> (x, , f)',
    "Clip": "Clip (x, lo, hi)", "Reshape": "Reshape (x, r)", "Pad": "Pad (x, p)",
    "LRN": "LRN <size = 3> (x)", "LayerNormalization": "LayerNormalization (x, g)",
}  # fmt: skip
"""A node of each operator whose form is not ``Operator (x)``; what its rule asks for is there."""
CONSTANTS = {
    "r": [1, 256], "p": [0] * 8, "i": [0, 1], "s": [2, 2], "f": np.float32([1, 1, 2, 2]),
    "lo": np.float32(0), "hi": np.float32(6),
}  # fmt: skip
FORMS = {"qnn-matmul-activations": "MatMul (m, n)", "qnn-resample": 'Resize <mode = "linear"> (x, , f)'}
"""Of rules about a further form of an operator."""


@each_rule
def test_a_rule_decides_about_its_operator(target, rule):
    """One node of its first operator, of the form that it asks for, is classed by it; a float form of such never is."""
    statement = FORMS.get(rule.id) or STATEMENTS.get(rule.op_types[0], f"{rule.op_types[0]} (x)")
    inputs = "float[1,4,8,8] x, float[1,4,8,8] z, float[2,8] m, float[8,2] n, bool[1,4,8,8] b"
    text = f"net ({inputs}) => (y) <float[4,4,1,1] w, float[8,8] v, float[8] g> {{ y = {statement} }}"
    constants = {name: value for name, value in CONSTANTS.items() if re.search(rf"\b{name}\b", statement)}
    view = GraphView(planning.parse(text, constants, checked=False))
    (found,) = eligibility.classify(constraints.constrain(view, target, PlacementOptions()), {}).values()
    assert (found.role, found.rule, found.reason) == (rule.role, rule.id, rule.why)


# ---- what planning makes of it --------------------------------------------------------------------------------------


OWN_WORDS = {
    "integer-domain", "not-quantized", "float-producer", "output-protection", "protected-input", "unsupported-op",
    "not-float32", "constant-operand", "float-prefix", "integer-producer",
}  # fmt: skip
"""Rules that no table lists."""


@each_target
@pytest.mark.parametrize("name", models.ALL)
def test_plans_are_consistent_and_explain_every_node(target, name):
    """What a reader of a plan may rely on, whoever made it; planning changes neither the model nor the view."""
    proto, view = planning.prepared(models.ALL[name]()), GraphView(planning.prepared(models.ALL[name]()))
    nodes = [*map(str, view.nodes)]
    plan, again = (planner.Planner(view, target, PlacementOptions()).plan() for _ in range(2))
    assert (plan, view.proto, [*map(str, view.nodes)]) == (again, proto, nodes)
    raw = json.loads(plan.to_json())
    assert [(n["node"], n["rule"]) for n in raw["nodes"]] == [(n.node, n.rule) for n in plan.nodes]
    told = [(d["edge"]["value"], d["how"]) for d in raw["decisions"]]
    assert told == [(d.edge.value, d.how.value) for d in plan.decisions]
    for n in plan.nodes:
        text = plan.explain(n.node)
        assert text.startswith(f"{n.op_type} '{n.node}': {n.kind.value} by {n.rule}: ")
        assert n.reason in text
        assert len(text.splitlines()) == 1 + sum(d.edge.consumer == n.node for d in plan.decisions)
    with pytest.raises(errors.OptionError):
        plan.explain("no such node")
    nodes, quantized = {n.name: n for n in proto.graph.node}, dict(plan.quantized_values())
    assert set(plan.by_node) == set(nodes)
    edges = {decision.edge for decision in plan.decisions}
    assert (len(edges), len(plan.by_node)) == (len(plan.decisions), len(plan.nodes)), "each is decided once"
    assert all(each.reason and each.rule for each in (*plan.decisions, *plan.nodes))
    known = {r.id for r in target.rules} | {i for i, _ in target.facts} | OWN_WORDS
    assert {each.rule for each in (*plan.nodes, *plan.decisions)} <= known
    for d in plan.decisions:
        if d.edge.consumer and d.edge.index >= 0:
            assert nodes[d.edge.consumer].input[d.edge.index] == d.edge.value
        assert (d.how is How.DERIVED) == (d.scale_from is not None)
        assert (d.how is How.DERIVED) <= (d.role is EdgeRole.BIAS)
        assert (d.how is How.SHARED) <= (d.provider is not None)
        assert d.provider is None or d.provider in quantized
        assert d.scale_from is None or d.scale_from[0] in quantized
    assert {*plan.barriers, *(r.value for r in (*plan.limits, *plan.saturations))} <= set(quantized)


def test_an_empty_plan_is_false():
    assert not PlacementPlan("ort-cpu")
    assert plan_for(TARGETS["ort-cpu"], "mlp")


# ---- the runtime and the machine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [VNNI, NO_VNNI, ARM], ids=["vnni", "no vnni", "arm"])
@each_target
def test_on_another_processor_plans_are_of_types_that_kernels_take(target, machine, pretend):
    pretend(machine)
    assert target.data_types().activation in target.types.activations
    assert preview(models.ALL["residual_block"](), target=target).integer_nodes()


@pytest.mark.parametrize("told", [True, False])
@each_target
def test_a_runtime_that_ends_is_told_and_a_proof_that_breaks_is_a_defect(target, told, tmp_path):
    prove = Mock(side_effect=errors.RuntimeEndedError("it fell over") if told else RuntimeError("it fell over"))
    broken = replace(target, hooks=replace(target.hooks, prove=prove, time=None))
    model, out = models.conv_relu_chain(2), tmp_path / "out.onnx"
    settled = {"target": broken, "recipe": "plain", "promise": False}
    with pytest.warns(KenosisWarning, match="fell over") if told else pytest.raises(InternalError, match="fell over"):
        report = quantize_static(model, out, models.reader(model, 2), **settled)
        assert report.fusion is None
        assert "without a fusion proof" in report.verdict()
    assert out.exists() is told
