"""The target tables against their proofs: no rule without a test of its name, no operator with a wrong role."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import tests.targets
from kenosis_ort.targets.model import Target
from kenosis_ort.targets.ort_cpu import ORT_CPU

TARGETS = [ORT_CPU]


def _proofs() -> set[str]:
    names: set[str] = set()
    for module in pkgutil.iter_modules(tests.targets.__path__):
        if module.name.startswith("test_"):
            names |= set(vars(importlib.import_module(f"tests.targets.{module.name}")))
    return names


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_rule_has_its_proof(target: Target) -> None:
    facts = {f"test_rule_{fact.replace('-', '_')}" for fact, _ in target.facts}
    wanted = {rule.evidence for rule in target.rules} | facts
    assert sorted(wanted - _proofs()) == []


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_one_rule_an_operator(target: Target) -> None:
    """An operator stands in one rule only, and an identifier is used once."""
    operators = [o for rule in target.rules for o in rule.op_types]
    identifiers = [rule.id for rule in target.rules] + [fact for fact, _ in target.facts]
    assert len(operators) == len(set(operators))
    assert len(identifiers) == len(set(identifiers))
