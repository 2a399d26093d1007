"""The calibration cache: written once, used instead of data, refused where it does not belong."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat
from onnxruntime.quantization import quantize_static as stock_quantize_static

from kenosis_ort import CalibrationError, CalibrationTable, quantize_static
from tests import models
from tests.flow.support import quality, quantized
from tests.models import FeedReader


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "ranges.json"


def test_written_then_used_instead_of_data(tmp_path: Path, cache: Path) -> None:
    model = models.residual_block()
    first = quantized(model, tmp_path / "first.onnx", calibration_cache_path=cache)
    text = cache.read_text()
    second = quantize_static(
        model, tmp_path / "second.onnx", None, calibration_cache_path=str(cache), recipe="plain", promise=False
    )
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()
    assert (first.calibration.samples, second.calibration.samples) == (4, 0)
    assert second.outputs == first.outputs
    assert cache.read_text() == text
    assert CalibrationTable.load(cache).samples == 4


def test_a_reader_beside_a_cache_serves_the_passes_only(tmp_path: Path, cache: Path) -> None:
    """A second run with the same reader gives the same file as the first, without calibrating again."""
    model, options = models.residual_block(), {"recipe": "fast", "calibration_cache_path": cache}
    feeds = models.feeds(model, 8)
    quantized(model, tmp_path / "first.onnx", feeds, **options)
    report = quantized(model, tmp_path / "second.onnx", feeds, **options)
    assert report.calibration.samples == 0
    assert report.passes
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()


def test_renamed_file_and_new_metadata_are_the_same_model(tmp_path: Path, cache: Path) -> None:
    model = models.residual_block()
    quantized(model, tmp_path / "out.onnx", calibration_cache_path=cache)
    model.producer_name = "someone else"
    model.doc_string = "exported again"
    onnx.save(model, tmp_path / "again.onnx")
    quantize_static(tmp_path / "again.onnx", tmp_path / "out.onnx", None, calibration_cache_path=cache)


OTHERS: dict[str, tuple[onnx.ModelProto, dict[str, Any]]] = {
    "other weights": (models.residual_block(seed=1), {}),
    "other graph": (models.bn_net(), {}),
    "other method": (models.residual_block(), {"calibrate_method": CalibrationMethod.Entropy}),
    "other setting": (models.residual_block(), {"extra_options": {"CalibMovingAverage": True}}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_refused_for_another_model_or_setting(tmp_path: Path, cache: Path, other: str) -> None:
    out = tmp_path / "out.onnx"
    quantized(models.residual_block(), tmp_path / "first.onnx", calibration_cache_path=cache)
    text = cache.read_text()
    model, options = OTHERS[other]
    with pytest.raises(CalibrationError) as caught:
        quantized(model, out, calibration_cache_path=cache, **options)
    assert caught.value.fix
    assert not out.exists()
    assert cache.read_text() == text


def test_wider_placement_asks_for_what_is_missing(tmp_path: Path, cache: Path) -> None:
    """A cache made without the head lacks its tensors."""
    model = models.residual_block()
    names = [n.name for n in model.graph.node if n.name != "stem"]
    quantized(model, tmp_path / "few.onnx", calibration_cache_path=cache, nodes_to_exclude=names[3:])
    with pytest.raises(CalibrationError, match="lacks") as caught:
        quantized(model, tmp_path / "all.onnx", calibration_cache_path=cache)
    assert "ranges.json" in str(caught.value)
    assert caught.value.fix


def test_nothing_is_cached_when_calibration_fails(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(CalibrationError):
        quantize_static(models.residual_block(), tmp_path / "out.onnx", FeedReader([]), calibration_cache_path=cache)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_stocks_format_too(tmp_path: Path, cache: Path) -> None:
    """Stock reads the ranges back with its own loader."""
    calibrate = pytest.importorskip("onnxruntime.quantization.calibrate")
    if not hasattr(calibrate, "load_tensors_data"):
        pytest.skip("this runtime has no calibration cache")
    quantized(models.residual_block(), tmp_path / "out.onnx", calibration_cache_path=cache)
    raw = json.loads(cache.read_text())
    assert raw
    table, loaded = CalibrationTable.load(cache), calibrate.load_tensors_data(str(cache))
    for name in table.tensors:
        low, high = (float(np.asarray(v).reshape(-1)[0]) for v in loaded[name].range_value)
        assert (low, high) == pytest.approx(table.range_of(name))


def test_a_cache_that_stock_wrote(tmp_path: Path, cache: Path) -> None:
    if "calibration_cache_path" not in inspect.signature(stock_quantize_static).parameters:
        pytest.skip("this runtime has no calibration cache")
    model, out = models.conv_relu_chain(4), tmp_path / "out.onnx"
    stock_quantize_static(model, tmp_path / "stock.onnx", models.reader(model), calibration_cache_path=cache)
    quantize_static(model, out, None, calibration_cache_path=cache)
    assert quality(model, out, models.feeds(model)) > 25


def test_qoperator_uses_the_cache(tmp_path: Path, cache: Path) -> None:
    model = models.residual_block()
    options: dict[str, Any] = {"quant_format": QuantFormat.QOperator, "calibration_cache_path": cache}
    quantized(model, tmp_path / "first.onnx", **options)
    quantize_static(model, tmp_path / "second.onnx", None, recipe="plain", promise=False, **options)
    feeds = models.feeds(model)
    assert quality(model, tmp_path / "second.onnx", feeds) == quality(model, tmp_path / "first.onnx", feeds)
