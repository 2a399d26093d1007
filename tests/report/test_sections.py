"""The parts that came later round-trip JSON, and reports from before them are still read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.report import (
    PassOutcome,
    QuantizationReport,
    ReportEvidence,
    SpeedCandidate,
    SpeedSummary,
    TrustSummary,
)
from kenosis_ort.report.text import render_report, to_text
from tests.report.samples import evidence, full_report, passes, report, speed, trust

numbers = st.none() | st.floats(allow_nan=False)


def through_json(raw: object) -> object:
    return json.loads(json.dumps(raw, allow_nan=False))


def test_every_section_round_trips_json():
    original = full_report()
    copy = QuantizationReport.from_json(original.to_json())
    for name in ("recipe", "passes", "speed", "trust", "evidence"):
        assert getattr(copy, name) == getattr(original, name), name
    assert copy.to_dict() == original.to_dict()


def test_a_report_without_the_sections_is_read():
    raw = report().to_dict()
    for key in ("recipe", "passes", "speed", "trust", "evidence"):
        del raw[key]
    copy = QuantizationReport.from_dict(raw)
    assert (copy.recipe, copy.passes, copy.speed, copy.trust, copy.evidence) == (None, (), None, None, None)


def test_evidence_can_be_left_out_of_the_json():
    assert full_report().to_dict(include_evidence=False)["evidence"] is None


@given(numbers, numbers, st.booleans())
def test_any_pass_survives_json(before: float | None, after: float | None, kept: bool):
    outcome = PassOutcome("p", kept, before, after)
    assert PassOutcome.from_dict(through_json(outcome.to_dict())) == outcome  # type: ignore[arg-type]


@given(numbers, numbers)
def test_any_rung_survives_json(ratio: float | None, low: float | None):
    summary = SpeedSummary((SpeedCandidate("a", ratio=ratio, low=low),), float_milliseconds=low)
    assert SpeedSummary.from_dict(through_json(summary.to_dict())) == summary  # type: ignore[arg-type]


def test_trust_and_evidence_survive_json():
    assert TrustSummary.from_dict(through_json(trust().to_dict())) == trust()  # type: ignore[arg-type]
    assert ReportEvidence.from_dict(through_json(evidence().to_dict())) == evidence()  # type: ignore[arg-type]
    assert not ReportEvidence()
    assert evidence()


@pytest.mark.parametrize(("before", "after", "change"), [(0.5, 0.25, -0.5), (None, 1.0, None), (0.0, 1.0, None)])
def test_change_of_a_pass(before: float | None, after: float | None, change: float | None):
    assert PassOutcome("p", True, before, after).change == change


def test_the_taken_form_is_found():
    taken = speed().taken
    assert taken is not None
    assert taken.name == "int8-first-float"
    assert speed().sentence() == "first node float: 1.50x"
    assert SpeedSummary().taken is None
    assert SpeedSummary().sentence() == ""


def test_text_tells_passes_forms_and_trust():
    text = to_text(render_report(full_report()))
    for expected in (
        "speed        1.50x (1.25 to 1.75) of the float model, faster",
        "trust        usable",
        "recipe       fast",
        "0.02 -> 0.015",
        "-25.0 %",
        "undone",
        "skipped",
        "only 0.80x",
        "and 1 form that did not have to be tried",
        "the pools were merged",
        "what would help: ten real samples",
        "a: unstable",
    ):
        assert expected in text, text
    assert len(passes()) == 3


def test_full_text_lists_every_form():
    assert "the float model" in to_text(render_report(full_report(), full=True))
