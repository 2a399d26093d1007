"""``kenosis-ort quantize``: what it writes, prints and returns."""

from __future__ import annotations

import argparse
import json
import shlex
from enum import Enum
from pathlib import Path

import onnxruntime as ort
import pytest

from kenosis_ort.cli.main import build_parser, main
from kenosis_ort.cli.quantize import _keywords, _option
from kenosis_ort.demo import load_digits
from kenosis_ort.report import QuantizationReport


def accuracy(model: Path) -> float:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    digits = load_digits()
    return float((session.run(None, {"image": digits.images})[0].argmax(1) == digits.labels).mean())


def test_writes_an_accurate_model_and_prints_the_proof(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.onnx"
    assert main(["quantize", str(digits_model), str(out), "--data", str(digits_data)]) == 0
    printed = capsys.readouterr()
    assert "7 of 7 Conv/Gemm/MatMul run on integer kernels" in printed.out
    assert "QLinearConv" in printed.out
    assert printed.err == ""
    assert accuracy(out) >= 0.97
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]


def test_json_is_the_whole_report(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.onnx"
    assert main(["quantize", str(digits_model), str(out), "--data", str(digits_data), "--json"]) == 0
    report = QuantizationReport.from_json(capsys.readouterr().out)
    assert report.model_output == str(out)
    assert report.calibration.samples == 12
    assert report.plan.integer_nodes()
    assert report.size_after == out.stat().st_size


def test_synthetic_data_needs_no_files(tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.onnx"
    assert main(["quantize", str(digits_model), str(out), "--synthetic", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["samples"] == 8
    assert out.is_file()


def test_what_is_said_is_done_and_recorded_as_the_callers(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.onnx"
    arguments = ["--no-per-channel", "--method", "percentile", "--option", "CalibPercentile=99.9", "--exclude"]
    code = main(
        ["quantize", str(digits_model), str(out), "--data", str(digits_data), *arguments, "layer0.conv", "--json"]
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["options"]["per_channel"] == {"value": False, "source": "caller"}
    assert report["options"]["activation_type"]["source"] == "host default"
    assert report["calibration"]["method"] == "percentile"
    kernels = {k["node"]: k["integer"] for k in report["fusion"]["kernels"]}
    assert kernels["layer0.conv"] is False
    assert kernels["layer5.conv"] is True


def test_nothing_said_means_nothing_passed_on():
    arguments = build_parser().parse_args(["quantize", "a.onnx", "b.onnx", "--synthetic"])
    assert _keywords(arguments) == {}
    assert arguments.synthetic == 32


def test_every_option_reaches_the_api():
    line = """quantize a.onnx b.onnx --synthetic 1 --per-channel --no-reduce-range --activation-type int8
        --weight-type uint8 --exclude n1 --exclude n2 --only n3 --op-type Conv --primary-input image --external-data
        --cache c.json --custom-op-library lib.so --no-verify --protect-outputs float --target ort-cpu --format qdq
        --method entropy --option WeightSymmetric=False"""
    arguments = build_parser().parse_args(shlex.split(line))
    said = {key: value.name if isinstance(value, Enum) else value for key, value in _keywords(arguments).items()}
    assert said == {
        "quant_format": "QDQ",
        "op_types_to_quantize": ["Conv"],
        "per_channel": True,
        "reduce_range": False,
        "activation_type": "QInt8",
        "weight_type": "QUInt8",
        "nodes_to_quantize": ["n3"],
        "nodes_to_exclude": ["n1", "n2"],
        "use_external_data_format": True,
        "calibrate_method": "Entropy",
        "extra_options": {"WeightSymmetric": False},
        "calibration_cache_path": Path("c.json"),
        "target": "ort-cpu",
        "protect_outputs": "float",
        "primary_inputs": ["image"],
        "custom_op_libraries": ["lib.so"],
        "verify": False,
    }


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("A=1", ("A", 1)),
        ("A=0.5", ("A", 0.5)),
        ("A=True", ("A", True)),
        ("A=false", ("A", False)),
        ("A=text", ("A", "text")),
        ("A=b=c", ("A", "b=c")),
        ('A={"x": [1]}', ("A", {"x": [1]})),
        ("A=", ("A", "")),
    ],
)
def test_extra_options_are_read_as_json_or_text(text: str, pair: tuple[str, object]):
    assert _option(text) == pair


@pytest.mark.parametrize("text", ["A", "=1", ""])
def test_extra_options_without_a_key_or_a_value_are_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError):
        _option(text)
