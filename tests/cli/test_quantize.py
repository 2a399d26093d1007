"""``kenosis-ort quantize``: what it writes, prints and returns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from kenosis_ort.cli import exits
from kenosis_ort.cli.main import main
from kenosis_ort.cli.quantize_command import default_output
from kenosis_ort.demo import load_digits
from kenosis_ort.report import QuantizationReport
from tests import models
from tests.cli.conftest import PLAIN


def accuracy(model: Path) -> float:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    digits = load_digits()
    return float((session.run(None, {"image": digits.images})[0].argmax(1) == digits.labels).mean())


def test_writes_an_accurate_model_and_prints_the_proof(
    tmp_path: Path, trained_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.onnx"
    assert main(["quantize", str(trained_model), str(out), "--data", str(digits_data)]) == 0
    printed = capsys.readouterr()
    assert "7 of 7 Conv/Gemm/MatMul run on integer kernels" in printed.out
    assert "QLinearConv" in printed.out
    assert printed.err == ""
    assert accuracy(out) >= 0.97
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.onnx", "out.recipe.toml"]


@pytest.mark.parametrize(
    ("model", "expected"), [("m.onnx", "m.int8.onnx"), ("m", "m.int8.onnx"), ("a.b", "a.b.int8.onnx")]
)
def test_the_output_is_named_after_the_model(tmp_path: Path, model: str, expected: str):
    assert default_output(tmp_path / model) == tmp_path / expected


def test_without_a_name_the_output_goes_beside_the_model(tmp_path: Path, digits_model: Path, digits_data: Path):
    model = shutil.copy(digits_model, tmp_path / "net.onnx")
    assert main(["quantize", str(model), "--data", str(digits_data), "--no-save-recipe", "-q", *PLAIN]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.int8.onnx", "net.onnx"]


def test_json_is_the_whole_report(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.onnx"
    assert main(["quantize", str(digits_model), str(out), "--data", str(digits_data), "--json", *PLAIN]) == 0
    printed = capsys.readouterr().out
    report = QuantizationReport.from_json(printed)
    assert report.model_output == str(out)
    assert report.calibration.samples == 12
    assert report.plan.integer_nodes()
    assert report.size_after == out.stat().st_size
    assert json.loads(printed)["files"] == {"recipe": str(tmp_path / "out.recipe.toml")}


def test_synthetic_data_needs_no_files(tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.onnx"
    assert main(["quantize", str(digits_model), str(out), "--synthetic", "8", "--json", *PLAIN]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["samples"] == 8
    assert out.is_file()


def test_a_few_real_samples_beside_the_made_up_ones(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["quantize", str(digits_model), str(tmp_path / "out.onnx"), "--data", str(digits_data), *PLAIN]
    assert main([*arguments, "--synthetic", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["samples"] == 16


def test_a_recipe_without_data_makes_samples_up(tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]):
    recipe = tmp_path / "r.toml"
    recipe.write_text('[recipe]\nranges = "minmax"\nequalize = false\nbias_correction = false\nsynthetic = 3\n')
    out = tmp_path / "out.onnx"
    assert main(["quantize", str(digits_model), str(out), "--recipe", str(recipe), "--no-promise", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["samples"] == 3


def test_what_made_up_data_lack_is_said_in_the_commands_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tmp_path / "m.onnx"
    onnx.save(models.conv_relu_chain(2, channels=3, size=16), model)
    assert main(["quantize", str(model), "--synthetic", "4", "--no-save-recipe", *PLAIN]) == exits.SUCCESS
    printed = " ".join(capsys.readouterr().out.split())
    assert "what would help: --input-range x=LOW,HIGH, or --mean and --std" in printed


def test_what_is_said_is_done_and_recorded_as_the_callers(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["quantize", str(digits_model), str(tmp_path / "out.onnx"), "--data", str(digits_data), *PLAIN]
    how = ["--no-per-channel", "--method", "percentile", "--option", "CalibPercentile=99.9"]
    code = main([*arguments, *how, "--exclude", "layer0.conv", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["options"]["per_channel"] == {"value": False, "source": "caller"}
    assert report["options"]["activation_type"]["source"] == "host default"
    assert report["calibration"]["method"] == "percentile"
    kernels = {k["node"]: k["integer"] for k in report["fusion"]["kernels"]}
    assert kernels["layer0.conv"] is False
    assert kernels["layer5.conv"] is True


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]
):
    model = shutil.copy(digits_model, tmp_path / "net.onnx")
    assert main(["quantize", str(model), "--dry-run", "--exclude", "layer5.conv"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for expected in (
        "conv-integer",
        "3 Conv",
        "caller-excluded",
        "1 Conv: layer5.conv",
        "--exclude",
        "Nothing is written",
    ):
        assert expected in printed
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


def test_a_dry_run_as_json(digits_model: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["quantize", str(digits_model), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["placement"] == "planned"
    assert {"kind": "integer", "rule": "gemm-integer", "nodes": 1, "operators": {"Gemm": 1}} in found["rules"]
    assert sum(rule["nodes"] for rule in found["rules"]) == sum(found["nodes"].values())
    assert len(found["float_nodes"]) == found["nodes"]["float"]
    assert main(["quantize", str(digits_model), "--dry-run", "--json", "--format", "qoperator"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_the_html_report_is_saved(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "report.html"
    arguments = ["quantize", str(digits_model), str(tmp_path / "out.onnx"), "--data", str(digits_data), *PLAIN]
    assert main([*arguments, "--report", str(page)]) == 0
    assert "5 of 5 Conv/Gemm/MatMul" in page.read_text(encoding="utf-8")
    assert f"report: {page}" in capsys.readouterr().out


def test_quiet_prints_nothing(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["-q", "quantize", str(digits_model), str(tmp_path / "out.onnx"), "--data", str(digits_data), *PLAIN]
    assert main(arguments) == 0
    assert capsys.readouterr() == ("", "")
