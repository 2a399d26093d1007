"""The plan and the calibration table without a model written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kenosis_ort import CalibrationTable, OptionError, OutputError, calibrate, preview, quantize_static
from tests import models


def test_the_plan_without_data_is_the_one_that_is_performed(tmp_path: Path) -> None:
    model = models.residual_block()
    seen = preview(model)
    report = quantize_static(model, tmp_path / "out.onnx", models.reader(model), promise=False)
    assert [(n.node, n.kind) for n in seen.nodes] == [(n.node, n.kind) for n in report.plan.nodes]
    assert list(tmp_path.iterdir()) == [tmp_path / "out.onnx"]


def test_the_plan_follows_the_options() -> None:
    model = models.residual_block()
    heavy = next(n.node for n in preview(model).nodes if n.op_type == "Conv")
    assert heavy in preview(model).integer_nodes()
    assert heavy not in preview(model, nodes_to_exclude=[heavy]).integer_nodes()
    with pytest.raises(TypeError):
        preview(model, nodes_to_exlude=[heavy])
    with pytest.raises(OptionError):
        preview(model, recipe="quick")


def test_a_calibration_table_is_what_quantization_reads(tmp_path: Path) -> None:
    model, path = models.residual_block(), tmp_path / "table.json"
    table = calibrate(model, path, models.reader(model))
    assert CalibrationTable.load(path).tensors.keys() == table.tensors.keys()
    report = quantize_static(model, tmp_path / "out.onnx", calibration_cache_path=path, promise=False)
    assert report.calibration.samples == 0
    with pytest.raises(OutputError, match="exists already"):
        calibrate(model, path, models.reader(model))
    with pytest.raises(OutputError):
        calibrate(model, tmp_path / "no" / "table.json", models.reader(model))
