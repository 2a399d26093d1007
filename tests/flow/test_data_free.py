"""Quantization without the caller's data: the recipe, and the verdict on it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from kenosis_ort import CalibrationError, KenosisWarning, QuantizationReport, SyntheticReader, quantize_static
from tests import models
from tests.flow.support import quality


def test_the_recipe_needs_no_reader(tmp_path: Path) -> None:
    model = models.bn_net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KenosisWarning)
        report = quantize_static(model, tmp_path / "out.onnx", recipe="data-free", promise=False)
    assert report.calibration.samples == 64
    assert report.trust is not None
    assert report.trust.source == "synthetic"
    assert QuantizationReport.from_json(report.to_json()).trust == report.trust
    assert quality(model, tmp_path / "out.onnx", models.feeds(model, 8)) > 15


def test_other_recipes_ask_for_data(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="data-free"):
        quantize_static(models.bn_net(), tmp_path / "out.onnx")


def test_a_synthetic_reader_gets_a_verdict_too(tmp_path: Path) -> None:
    model = models.bn_net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KenosisWarning)
        report = quantize_static(model, tmp_path / "out.onnx", SyntheticReader(model, samples=16), promise=False)
    assert report.trust is not None
    assert report.trust.tensors
    ranges = next(p for p in report.passes if p.name == "ranges")
    assert not ranges.kept
    assert "made-up samples" in ranges.reason, "they do not show what clipping costs"


def test_real_data_need_none(tmp_path: Path) -> None:
    model = models.bn_net()
    report = quantize_static(model, tmp_path / "out.onnx", models.reader(model), promise=False)
    assert report.trust is None


def test_a_net_whose_statistics_the_samples_miss(tmp_path: Path) -> None:
    """The report says so, and what would help."""
    model = models.bn_net()
    for initializer in model.graph.initializer:
        if "var" in initializer.name or "mean" in initializer.name:
            values = 1e4 * (1 + onnx_array(initializer))
            initializer.CopyFrom(from_array(values, initializer.name))
    with pytest.warns(KenosisWarning, match="made-up calibration samples"):
        report = quantize_static(model, tmp_path / "out.onnx", recipe="data-free", promise=False)
    assert report.trust is not None
    assert report.trust.verdict == "do not ship"
    assert report.trust.advice


def onnx_array(initializer):  # type: ignore[no-untyped-def]
    from onnx import numpy_helper

    return numpy_helper.to_array(initializer)


def from_array(values, name):  # type: ignore[no-untyped-def]
    from onnx import numpy_helper

    return numpy_helper.from_array(values.astype("float32"), name)
