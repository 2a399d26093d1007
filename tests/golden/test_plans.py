"""The shared models' plans as they are known to be right, and what the runtime makes of them.

After a change of placement that is meant: ``python -m tests.golden.regenerate``, then read the diff.
"""

from __future__ import annotations

import difflib
from functools import cache

import pytest

from kenosis_ort.plan import Kind
from kenosis_ort.runtime.limits import at_hand
from kenosis_ort.targets.ort_cpu.rules import is_arm
from kenosis_ort.targets.proof import FusionReport, Status
from tests import models
from tests.golden.plan_text import FOLDER, plan_text, quantized

HEAVY = ("Conv", "Gemm", "MatMul")

report = cache(quantized)


@pytest.mark.parametrize("name", models.ALL)
def test_the_plan_is_the_golden_one(name: str) -> None:
    want = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    got = plan_text(report(name).plan).splitlines()
    diff = "\n".join(difflib.unified_diff(want, got, "golden", "now", lineterm=""))
    assert got == want, f"if this is meant, run python -m tests.golden.regenerate\n{diff}"


def test_every_golden_file_belongs_to_a_model() -> None:
    assert {p.stem for p in FOLDER.glob("*.txt")} == set(models.ALL)


def fusion(name: str) -> FusionReport:
    found = report(name).fusion
    assert found is not None
    return found


@pytest.mark.parametrize("name", models.ALL)
def test_no_heavy_node_that_is_planned_integer_runs_float(name: str) -> None:
    planned = [n.node for n in report(name).plan.nodes if n.kind is Kind.INTEGER and n.op_type in HEAVY]
    assert planned, "each of these models has something to gain"
    assert [n for n in planned if not fusion(name).by_node[n].integer] == []


@pytest.mark.parametrize("name", models.ALL)
def test_nothing_is_quantized_or_dequantized_behind_the_plans_back(name: str) -> None:
    assert [k.node for k in fusion(name).kernels if k.silently_quantized or k.weights_per_run] == []


@pytest.mark.parametrize("name", models.ALL)
def test_what_is_planned_to_vanish_vanishes(name: str) -> None:
    absorbed = [n.node for n in report(name).plan.nodes if n.kind is Kind.ABSORBED]
    standing = [n for n in absorbed if fusion(name).by_node[n].status not in (Status.ABSORBED, Status.REMOVED)]
    if not is_arm(at_hand().family):
        assert standing == []


@pytest.mark.parametrize("name", models.ALL)
def test_the_first_plan_stood(name: str) -> None:
    """The fusion proof found nothing to repair."""
    assert [n.node for n in report(name).plan.nodes if n.rule == "verified-float"] == []
    assert report(name).warnings == ()
