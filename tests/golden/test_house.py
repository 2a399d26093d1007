"""A part of what `benchmarks/house.py` freezes: plans and structures of files, on any processor."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LATER = {"transformer_block": "1.24", "decoder": "1.25"}  # runtimes from which on these nets get Attention, MatMulNBits
CASES = [
    ("conv_relu_chain", "ort-cpu", "none"), ("two_input_detector", "ort-cpu", "plain"),
    ("transformer_block", "ort-cpu", "plain"), ("external", "ort-cpu", "plain"),
    ("decoder", "ort-cpu", "weight-only-8"), ("mobile_block", "qnn", "plain"), ("net_with_if", "onednn", "plain"),
    ("silu_net", "tensorrt", "plain"),
]  # fmt: skip


@pytest.fixture(scope="module")
def house() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("house")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=pytest.mark.since(LATER.get(case[0], "1.23")), id=" ".join(case)) for case in CASES
])  # fmt: skip
def test_plans_and_structures_are_those_that_are_frozen(house: ModuleType, case: tuple[str, str, str]) -> None:
    frozen = json.loads(house.FROZEN.read_text(encoding="utf-8"))
    assert case in set(house.cases([], everything=False))
    found = dict([house.case(case)])
    assert house.compared(frozen, found, same_processor=False) == [], "if this is meant: benchmarks/house.py --write"


def test_a_case_that_differs_is_told(house: ModuleType) -> None:
    frozen = {"cases": {"a": {"plan": "1", "file": "2"}}}
    assert house.compared(frozen, {"a": {"plan": "1", "file": "3"}}, same_processor=True) == ["a: file"]
    assert house.compared(frozen, {"a": {"plan": "1", "file": "3"}}, same_processor=False) == []
    assert house.compared(frozen, {"b": {}}, same_processor=False) == ["b: not frozen"]
