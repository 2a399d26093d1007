"""The report is pure data: it round-trips JSON and tells the outcome in one honest sentence."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.report import OptionChoice, OutputQuality, QuantizationReport
from tests.report.samples import fusion, kernel, plan, report


class Shade(Enum):
    DARK = 3


def test_json_round_trip_keeps_everything():
    original = report()
    copy = QuantizationReport.from_json(original.to_json())
    assert copy.to_dict() == original.to_dict()
    assert copy.plan == original.plan
    assert copy.calibration == original.calibration
    assert copy.outputs == original.outputs
    assert copy.verdict() == original.verdict()
    assert copy.fusion == original.fusion
    assert copy.left_float() == original.left_float() != ()


def test_round_trip_without_a_proof_and_without_the_plan():
    original = report(fusion=None)
    raw = original.to_dict(include_plan=False)
    assert raw["plan"] is None
    copy = QuantizationReport.from_dict(raw)
    assert copy.fusion is None
    assert not copy.plan.decisions
    assert copy.plan.target == original.target


@given(st.floats(allow_nan=False))
def test_any_signal_to_noise_ratio_survives_json(db: float):
    original = report(outputs=(OutputQuality("logits", db),))
    assert QuantizationReport.from_json(original.to_json()).outputs[0].sqnr_db == db


def test_json_is_strict_json():
    text = report(outputs=(OutputQuality("same", float("inf")), OutputQuality("broken", float("nan")))).to_json()
    assert "Infinity" not in text
    assert "NaN" not in text
    assert [o["sqnr_db"] for o in json.loads(text)["outputs"]] == ["inf", "nan"]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Shade.DARK, "DARK"),
        (Path("a/b"), "a/b"),
        ({"k": (1, Shade.DARK)}, {"k": [1, "DARK"]}),
        ({Shade.DARK: {2, 1}}, {"DARK": [1, 2]}),
        (float("inf"), "inf"),
        (None, None),
        (True, True),
        (len, "builtin_function_or_method"),
    ],
)
def test_option_values_become_plain_data(value: object, plain: object):
    raw = report(options={"option": OptionChoice(value, "caller")}).to_dict()
    assert raw["options"] == {"option": {"value": plain, "source": "caller"}}


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": 99}', '"schema"'])
def test_foreign_json_is_refused(text: str):
    with pytest.raises(ValueError, match=r"report"):
        QuantizationReport.from_json(text)


def test_verdict_counts_only_what_the_runtime_still_computes():
    proof = fusion(kernel("a"), kernel("b"), kernel("folded", status="removed", integer=False))
    assert report(fusion=proof).verdict() == "2 of 2 Conv/Gemm/MatMul run on integer kernels."


def test_verdict_tells_a_broken_plan_from_a_float_one():
    head = kernel("head", integer=False, status="float", reason="protected")
    assert "1 planned as integer run in float" in report(fusion=fusion(kernel("a"), head)).verdict()
    as_planned = report(fusion=fusion(kernel("a"), head), plan=plan("a"))
    assert as_planned.verdict().endswith("the others stay float as planned.")
    assert as_planned.left_float() == ()


def test_absorbed_into_a_float_kernel_counts_as_left_float():
    lost = kernel("a", integer=False, status="absorbed")
    assert report(fusion=fusion(lost), plan=plan("a")).left_float() == (lost,)


def test_a_model_without_heavy_nodes_has_a_verdict():
    assert "no Conv, Gemm or MatMul" in report(fusion=fusion(kernel("x", op_type="Add"))).verdict()


def test_repr_is_one_short_line_and_ratios_are_safe():
    text = repr(report())
    assert text.startswith("<QuantizationReport 'out.onnx'")
    assert "\n" not in text
    assert report(size_after=0).size_ratio == 0
    assert report(size_before=100, size_after=25).size_ratio == 4
    assert report(seconds={"a": 1.0, "b": 0.5}).total_seconds == 1.5


def test_report_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        report().target = "other"
