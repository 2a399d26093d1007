"""targets and compare-targets: the tables, and what each target would do to a net."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kenosis_ort.cli import exits
from kenosis_ort.cli.main import main
from kenosis_ort.targets import TARGETS


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == exits.SUCCESS
    return json.loads(capsys.readouterr().out)


def test_all_targets_are_listed_with_what_they_want(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {row["target"]: row for row in told(capsys, "targets")}
    assert list(listed) == list(TARGETS)
    assert listed["tensorrt"]["activations"] == "int8, zero point 0"
    assert (listed["tensorrt"]["proved"], listed["ort-cpu"]["proved"]) == (False, True)
    assert "x * Sigmoid(x)" in listed["tensorrt"]["taken_in"]


@pytest.mark.parametrize("name", TARGETS)
def test_the_table_of_a_target_holds_every_rule_and_fact(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = TARGETS[name]
    rows = {row["id"]: row for row in told(capsys, "targets", name)["rules"]}
    assert list(rows) == [*(r.id for r in target.rules), *(i for i, _ in target.facts)]
    assert main(["targets", name]) == exits.SUCCESS
    assert capsys.readouterr().out


def test_a_rule_that_was_not_run_names_its_clause(capsys: pytest.CaptureFixture[str]) -> None:
    rules = [r for r in told(capsys, "targets", "tensorrt")["rules"] if r["role"] != "fact"]
    assert all(rule["source"].startswith("[") for rule in rules)


def test_targets_are_compared_on_a_net(digits_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "compare-targets", str(digits_model), "--target", "ort-cpu", "--target", "tensorrt")
    assert [(row["target"], row["integer_heavy"], row["heavy"]) for row in found["targets"]] == [
        ("ort-cpu", 5, 5),
        ("tensorrt", 5, 5),
    ]
    grids = {row["target"]: row["grids"] for row in found["targets"]}
    assert grids["tensorrt"] == ["int8 symmetric"]
    differ = {entry["what"]: (entry["ort-cpu"], entry["tensorrt"]) for entry in found["differ"]}
    assert differ["node 'layer3.add'"] == ("integer", "absorbed")


def test_the_same_target_twice_differs_nowhere(digits_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare-targets", str(digits_model), "--target", "arm", "--target", "arm"]) == exits.SUCCESS
    assert "They do the same" in capsys.readouterr().out


def test_an_unknown_target_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "tensrrt"]) == exits.ERROR
    assert "Did you mean 'tensorrt'?" in capsys.readouterr().err
