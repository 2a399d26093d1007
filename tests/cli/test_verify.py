"""``kenosis-ort verify``: the proof of any model, and what --strict makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kenosis_ort.cli import exits
from kenosis_ort.cli.main import main


def test_prints_the_proof_of_a_quantized_model(quantized: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert main(["verify", str(quantized), "--strict"]) == exits.SUCCESS
    printed = capsys.readouterr()
    assert "5 of 5 Conv/Gemm/MatMul run on integer kernels" in printed.out
    assert "com.microsoft.QGemm" in printed.out
    assert printed.err == ""


def test_strict_tells_float_from_integer_by_exit_code(digits_model: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", str(digits_model)]) == exits.SUCCESS
    assert main(["verify", str(digits_model), "--strict"]) == exits.NOT_INTEGER
    assert "0 of 5" in capsys.readouterr().out


def test_json_is_the_proof_with_its_verdict(quantized: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert main(["verify", str(quantized), "--json"]) == exits.SUCCESS
    raw = json.loads(capsys.readouterr().out)
    assert raw["verdict"].startswith("5 of 5")
    assert {k["op_type"] for k in raw["kernels"]} >= {"Conv", "Gemm", "Relu"}


def test_a_missing_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", str(tmp_path / "none.onnx")]) == exits.ERROR
    assert "none.onnx" in capsys.readouterr().err


def test_patterns_name_the_broken_clause(quantized: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert main(["verify", str(quantized), "--patterns", "onednn"]) == exits.SUCCESS
    printed = capsys.readouterr()
    assert "Convs match 'oneDNN, Quantized Convolution Fusion Patterns'" in printed.out
    assert "breaks bias-conversion: the bias is s32 behind a DequantizeLinear" in printed.out
    assert main(["verify", str(quantized), "--patterns", "onednn", "--strict"]) == exits.NOT_INTEGER
    assert main(["verify", str(quantized), "--patterns", "tpu"]) == exits.ERROR
