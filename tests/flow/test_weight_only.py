"""Recipes that quantize weights alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort import KenosisWarning, NothingToQuantizeError, OptionError, preview, quantize_static
from tests import models
from tests.models import FeedReader
from tests.weights.test_quantize import decoder, feeds


@pytest.mark.parametrize("bits", [4, 8])
def test_the_report_tells_what_the_file_holds(tmp_path: Path, bits: int):
    model, out = decoder(), tmp_path / "out.onnx"
    report = quantize_static(model, out, FeedReader(feeds(16)), recipe=f"weight-only-{bits}")
    written = [node.op_type for node in onnx.load(out).graph.node]
    assert (written.count("MatMulNBits"), written.count("GatherBlockQuantized")) == (4, 1)
    assert report.size_after == out.stat().st_size
    assert report.outputs[0].sqnr_db > (12 if bits == 4 else 30)
    assert report.fusion is not None
    assert report.fusion.integer_share() == 1.0
    assert any(note.startswith("Weights alone") and f"{bits} bits" in note for note in report.notes)
    assert report.measure is not None
    assert report.measure.samples == 8
    assert report.recipe is not None
    assert report.recipe.weight_only == bits
    report.save_recipe(tmp_path / "kept.toml")
    quantize_static(model, tmp_path / "again.onnx", FeedReader(feeds(16)), recipe=tmp_path / "kept.toml")
    assert (tmp_path / "again.onnx").read_bytes() == out.read_bytes()


def test_a_budget_that_four_bits_do_not_keep_means_eight(tmp_path: Path):
    def closeness(outputs, reference):
        (name,) = reference[0]
        off = np.mean([((a[name] - b[name]) ** 2).mean() for a, b in zip(outputs, reference, strict=True)])
        return 1.0 - float(np.sqrt(off / np.mean([(b[name] ** 2).mean() for b in reference])))

    options = {"recipe": "weight-only-4", "metric": closeness, "accuracy_budget": 0.03}
    report = quantize_static(decoder(), tmp_path / "out.onnx", FeedReader(feeds(16)), **options)
    bits = [a.i for n in onnx.load(tmp_path / "out.onnx").graph.node for a in n.attribute if a.name == "bits"]
    assert set(bits) == {8}
    assert report.measure is not None
    assert report.measure.kept is True
    assert any("do not keep the budget" in note for note in report.notes)


def test_no_samples_round_to_nearest(tmp_path: Path):
    report = quantize_static(decoder(), tmp_path / "out.onnx", None, recipe="weight-only-4")
    assert report.calibration.samples == 0
    assert not report.is_float


def test_a_model_without_such_layers_is_delivered_as_it_came(tmp_path: Path):
    with pytest.warns(KenosisWarning, match="as it came"):
        report = quantize_static(models.conv_relu_chain(2), tmp_path / "out.onnx", None, recipe="weight-only-4")
    assert report.is_float


def test_a_form_that_others_do_not_read_is_refused(tmp_path: Path):
    with pytest.raises(OptionError, match="weights alone"):
        quantize_static(decoder(), tmp_path / "out.onnx", FeedReader(feeds(4)), recipe="weight-only-4", format="qop")
    assert not list(tmp_path.iterdir())


def test_a_preview_names_the_nodes_whose_weights_are_quantized(tmp_path: Path):
    model, out = decoder(), tmp_path / "out.onnx"
    plan = preview(model, recipe="weight-only-4")
    quantize_static(model, out, None, recipe="weight-only-4")
    made = {n.name for n in onnx.load(out).graph.node if n.op_type in ("MatMulNBits", "GatherBlockQuantized")}
    assert set(plan.integer_nodes()) == made
    assert "4 bits in blocks" in plan.explain(min(made))
    assert "or 8" in plan.explain(min(made))
    left = preview(model, recipe="weight-only-8", nodes_to_exclude=[min(made)])
    assert set(left.integer_nodes()) == made - {min(made)}
    assert "8 bits in blocks" in left.explain(max(made))
    with pytest.raises(OptionError, match="no form of weights alone"):
        preview(model, recipe="weight-only-4", target="onednn")
    with pytest.raises(NothingToQuantizeError):
        preview(models.conv_relu_chain(2), recipe="weight-only-4")
