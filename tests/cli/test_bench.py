"""``kenosis-ort bench``: arguments, output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kenosis_ort.cli import exits
from kenosis_ort.cli.main import main

QUICK = ["--seconds", "0.3", "--rounds", "2"]


def test_prints_a_row_per_model(digits_model: Path, quantized: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert main(["bench", str(digits_model), str(quantized), *QUICK]) == exits.SUCCESS
    printed = capsys.readouterr()
    assert printed.err == ""
    for expected in (digits_model.name, quantized.name, "baseline", "p95", "made-up data"):
        assert expected in printed.out


def test_json_with_data_of_ones_own(
    digits_model: Path, quantized: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    arguments = ["bench", str(digits_model), str(quantized), "--data", str(digits_data), "--threads", "2", "--json"]
    assert main([*arguments, *QUICK]) == exits.SUCCESS
    raw = json.loads(capsys.readouterr().out)
    assert [m["name"] for m in raw["models"]] == [digits_model.name, quantized.name]
    assert raw["threads"] == 2
    assert not any("made-up" in note for note in raw["notes"])


def test_hints_about_made_up_data_are_taken(digits_model: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", str(digits_model), "--input-range", "imag=0,1", *QUICK]) == exits.ERROR
    assert "Did you mean 'image'?" in capsys.readouterr().err
    assert main(["bench", str(digits_model), "--input-range", "image=0,1", *QUICK]) == exits.SUCCESS


def test_a_model_left_out_shows_in_the_exit_code(
    tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]
):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    assert main(["bench", str(digits_model), str(broken), "--synthetic", "2", *QUICK]) == exits.LEFT_OUT
    assert "left out: broken.onnx" in capsys.readouterr().out


def test_nothing_to_time_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["bench", str(tmp_path / "none.onnx"), *QUICK]) == exits.ERROR
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "none.onnx" in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["m.onnx", "--seconds", "0"],
        ["m.onnx", "--seconds", "soon"],
        ["m.onnx", "--threads", "-1"],
        ["m.onnx", "--rounds", "0"],
        ["m.onnx", "--batch-size", "0"],
    ],
)
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == exits.ERROR
    assert "usage:" in capsys.readouterr().err
