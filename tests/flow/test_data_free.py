"""Quantization without the caller's data, and of weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort import KenosisWarning, QuantizationReport, SyntheticReader, errors, preview, quantize_static
from tests import models
from tests.flow.support import changed, make, quality
from tests.models import FeedReader
from tests.weights.test_quantize import decoder, feeds

MODEL = models.bn_net()
quiet = pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")


@quiet
def test_the_recipe_needs_no_reader_and_others_ask_for_data(tmp_path: Path) -> None:
    report = quantize_static(MODEL, tmp_path / "out.onnx", recipe="data-free", promise=False)
    assert report.calibration.samples == 64
    assert report.trust.source == "synthetic"
    assert QuantizationReport.from_json(report.to_json()).trust == report.trust
    assert quality(MODEL, tmp_path / "out.onnx", models.feeds(MODEL, 8)) > 15
    with pytest.raises(errors.CalibrationError, match="data-free"):
        quantize_static(MODEL, tmp_path / "out.onnx")


@quiet
def test_made_up_samples_get_a_verdict_and_real_ones_need_none(tmp_path: Path) -> None:
    report = quantize_static(MODEL, tmp_path / "out.onnx", SyntheticReader(MODEL, samples=16), promise=False)
    assert report.trust.tensors
    ranges = next(p for p in report.passes if p.name == "ranges")
    assert not ranges.kept
    assert "made-up samples" in ranges.reason, "they do not show what clipping costs"
    assert quantize_static(MODEL, tmp_path / "out.onnx", models.reader(MODEL), promise=False).trust is None


def test_a_net_whose_statistics_the_samples_miss(tmp_path: Path) -> None:
    """The report says so, and what would help."""
    off = {f"bn{i}_{kind}": lambda values: 1e4 * (1 + values) for i in range(2) for kind in ("mean", "var")}
    with pytest.warns(KenosisWarning, match="made-up calibration samples"):
        report = quantize_static(changed(MODEL, **off), tmp_path / "out.onnx", recipe="data-free", promise=False)
    assert report.trust.verdict == "do not ship"
    assert report.trust.advice


# ---- weights alone --------------------------------------------------------------------------------------------


def weights_alone(out: Path, samples: Any = 16, **options: Any) -> QuantizationReport:
    data = FeedReader(feeds(samples)) if samples else None
    return quantize_static(decoder(), out, data, **{"recipe": "weight-only-4", **options})


@pytest.mark.parametrize("bits", [4, 8])
def test_the_report_tells_what_the_file_holds(tmp_path: Path, bits: int) -> None:
    out = tmp_path / "out.onnx"
    report = weights_alone(out, recipe=f"weight-only-{bits}")
    written = [node.op_type for node in onnx.load(out).graph.node]
    assert (written.count("MatMulNBits"), written.count("GatherBlockQuantized")) == (4, 1)
    assert report.size_after == out.stat().st_size
    assert report.outputs[0].sqnr_db > (12 if bits == 4 else 30)
    assert report.fusion.integer_share() == 1.0
    assert any(note.startswith("Weights alone") and f"{bits} bits" in note for note in report.notes)
    assert report.measure.samples == 8
    assert report.recipe.weight_only == bits
    report.save_recipe(tmp_path / "kept.toml")
    weights_alone(tmp_path / "again.onnx", recipe=tmp_path / "kept.toml")
    assert (tmp_path / "again.onnx").read_bytes() == out.read_bytes()


def test_a_budget_that_four_bits_do_not_keep_means_eight(tmp_path: Path) -> None:
    def closeness(outputs: Any, reference: Any) -> float:
        (name,) = reference[0]
        off = np.mean([((a[name] - b[name]) ** 2).mean() for a, b in zip(outputs, reference, strict=True)])
        return 1.0 - float(np.sqrt(off / np.mean([(b[name] ** 2).mean() for b in reference])))

    report = weights_alone(tmp_path / "out.onnx", metric=closeness, accuracy_budget=0.03)
    bits = [a.i for n in onnx.load(tmp_path / "out.onnx").graph.node for a in n.attribute if a.name == "bits"]
    assert set(bits) == {8}
    assert report.measure.kept is True
    assert any("do not keep the budget" in note for note in report.notes)


def test_no_samples_no_such_layers_and_no_such_form(tmp_path: Path) -> None:
    report = weights_alone(tmp_path / "out.onnx", 0)
    assert (report.calibration.samples, report.is_float) == (0, False)
    with pytest.warns(KenosisWarning, match="as it came"):
        assert make(models.conv_relu_chain(2), tmp_path, recipe="weight-only-4").report.is_float
    with pytest.raises(errors.OptionError, match="weights alone"):
        weights_alone(tmp_path / "other.onnx", format="qop")
    assert not (tmp_path / "other.onnx").exists()


def test_a_preview_names_the_nodes_whose_weights_are_quantized(tmp_path: Path) -> None:
    model = decoder()
    plan = preview(model, recipe="weight-only-4")
    weights_alone(tmp_path / "out.onnx", 0)
    nodes = onnx.load(tmp_path / "out.onnx").graph.node
    made = {n.name for n in nodes if n.op_type in ("MatMulNBits", "GatherBlockQuantized")}
    assert set(plan.integer_nodes()) == made
    assert "4 bits in blocks" in plan.explain(min(made))
    assert "or 8" in plan.explain(min(made))
    left = preview(model, recipe="weight-only-8", nodes_to_exclude=[min(made)])
    assert set(left.integer_nodes()) == made - {min(made)}
    assert "8 bits in blocks" in left.explain(max(made))
    with pytest.raises(errors.OptionError, match="no form of weights alone"):
        preview(model, recipe="weight-only-4", target="onednn")
    with pytest.raises(errors.NothingToQuantizeError):
        preview(models.conv_relu_chain(2), recipe="weight-only-4")
