"""Golden plans of the shared nets, what the runtime makes of them, and a part of what `benchmarks/house.py` freezes.

After a change of placement that is meant: ``python -m tests.golden.regenerate``, then read the diff.
"""

import difflib
import json
from functools import cache

import pytest

from benchmarks import house
from kenosis_ort import preview
from kenosis_ort.plan import Kind
from kenosis_ort.runtime.machine import at_hand
from kenosis_ort.targets import DEFAULT_TARGET, TARGETS
from kenosis_ort.targets.ort_cpu.rules import is_arm
from kenosis_ort.targets.proof import Status
from tests import models
from tests.golden.regenerate import FOLDER, plan_text, quantized

report = cache(quantized)


ATTENTION = pytest.param("transformer_block", marks=pytest.mark.since("1.24"))  # before, it has no operator of its own


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [ATTENTION if name == "transformer_block" else name for name in models.ALL])
def test_the_plan_is_the_golden_one(name, target):
    """Of the default target as calibrated, of others before."""
    is_default = target == DEFAULT_TARGET
    plan = report(name).plan if is_default else preview(models.ALL[name](), target=target)
    folder, got = FOLDER if is_default else FOLDER / target, plan_text(plan).splitlines()
    want = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    diff = "\n".join(difflib.unified_diff(want, got, "golden", "now", lineterm=""))
    assert got == want, f"if this is meant, run python -m tests.golden.regenerate\n{diff}"


def test_every_golden_file_belongs_to_a_model():
    assert {p.stem for p in FOLDER.glob("*.txt")} == set(models.ALL)


@pytest.mark.parametrize("name", models.ALL)
def test_the_runtime_does_what_is_planned_and_nothing_else(name):
    """No heavy node planned integer runs float, what is planned to vanish vanishes, nothing is repaired or clips."""
    plan, fusion = report(name).plan, report(name).fusion
    planned = [n.node for n in plan.nodes if n.kind is Kind.INTEGER and n.op_type in ("Conv", "Gemm", "MatMul")]
    assert planned, "each of these models has something to gain"
    assert [n for n in planned if not fusion.by_node[n].integer] == []
    assert [k.node for k in fusion.kernels if k.silently_quantized or k.weights_per_run] == []
    absorbed = [n.node for n in plan.nodes if n.kind is Kind.ABSORBED and not is_arm(at_hand().family)]
    assert [n for n in absorbed if fusion.by_node[n].status not in (Status.ABSORBED, Status.REMOVED)] == []
    assert [n.node for n in plan.nodes if n.rule == "verified-float"] == []
    assert (report(name).warnings, fusion.clipping()) == ((), ())
    assert {processor.exact for processor in report(name).processors} == {True}


# ---- plans and structures of files that are frozen, on any processor -------------------------------------------------


LATER = {"transformer_block": "1.24", "decoder": "1.25"}  # runtimes from which on these nets get Attention, MatMulNBits
CASES = [
    ("conv_relu_chain", "ort-cpu", "none"), ("two_input_detector", "ort-cpu", "plain"),
    ("transformer_block", "ort-cpu", "plain"), ("external", "ort-cpu", "plain"),
    ("decoder", "ort-cpu", "weight-only-8"), ("mobile_block", "qnn", "plain"), ("net_with_if", "onednn", "plain"),
    ("silu_net", "tensorrt", "plain"),
]  # fmt: skip


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=pytest.mark.since(LATER.get(case[0], "1.23")), id=" ".join(case)) for case in CASES
])  # fmt: skip
def test_plans_and_structures_are_those_that_are_frozen(case):
    frozen = json.loads(house.FROZEN.read_text(encoding="utf-8"))
    assert case in set(house.cases([], everything=False))
    found = dict([house.case(case)])
    assert house.compared(frozen, found, same_processor=False) == [], "if this is meant: benchmarks/house.py --write"


def test_a_case_that_differs_is_told():
    frozen, other = {"cases": {"a": {"plan": "1", "file": "2"}}}, {"a": {"plan": "1", "file": "3"}}
    for found, same, told in ((other, True, ["a: file"]), (other, False, []), ({"b": {}}, False, ["b: not frozen"])):
        assert house.compared(frozen, found, same_processor=same) == told
