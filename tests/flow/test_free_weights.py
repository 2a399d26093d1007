"""Weights whose pairs may clip: for a machine that the caller names, and where held-out samples gain by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from kenosis_ort.passes.evaluator import Score
from tests import models
from tests.flow.support import quantized
from tests.processor import NO_VNNI, VNNI, Pretend
from tests.quantizer.test_exact_products import clipping_layers

WITH_DATA: dict[str, Any] = {"recipe": "fast", "tune": "off"}


def made(tmp_path: Path, **options: Any) -> tuple[onnx.ModelProto, str]:
    model = models.residual_block()
    report = quantized(model, tmp_path / "out.onnx", models.feeds(model, 16), **WITH_DATA, **options)
    return onnx.load(tmp_path / "out.onnx"), " ".join(report.notes)


def processors(model: onnx.ModelProto) -> str | None:
    return next((e.value for e in model.metadata_props if e.key == "kenosis_ort.processors"), None)


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Score, "beats", lambda *_: True)


@pytest.mark.usefixtures("gains")
@pytest.mark.parametrize("host", ["vnni", "amx"])
def test_they_are_taken_and_told_where_they_gain(tmp_path: Path, pretend: Pretend, host: str) -> None:
    pretend(VNNI)
    model, notes = made(tmp_path, host=host)
    assert clipping_layers(model)
    assert processors(model) == "with VNNI"
    assert f"for processors with VNNI, as '{host}'" in notes


@pytest.mark.usefixtures("gains")
def test_not_without_the_callers_word(tmp_path: Path, pretend: Pretend) -> None:
    pretend(VNNI)
    model, _ = made(tmp_path)
    assert clipping_layers(model) == []
    assert processors(model) is None


@pytest.mark.usefixtures("gains")
def test_not_where_the_gain_cannot_be_measured(tmp_path: Path, pretend: Pretend) -> None:
    pretend(NO_VNNI)
    model, notes = made(tmp_path, host="vnni")
    assert clipping_layers(model) == []
    assert "cannot be measured" in notes


def test_not_where_they_are_no_better(tmp_path: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(VNNI)
    monkeypatch.setattr(Score, "beats", lambda *_: False)
    model, _ = made(tmp_path, host="vnni")
    assert clipping_layers(model) == []
