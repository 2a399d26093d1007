"""The most likely mistakes, made on the command line: each is answered with its fix, and nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kenosis_ort.cli import exits
from kenosis_ort.cli.main import main
from kenosis_ort.demo import load_digits
from tests.cli.conftest import PLAIN


@pytest.fixture
def folder(tmp_path: Path, digits_model: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, data and what goes wrong with them; the current one."""
    images = load_digits().calibration[:4]
    np.savez(tmp_path / "samples.npz", image=images)
    np.savez(tmp_path / "wrong_name.npz", imagee=images)
    np.savez(tmp_path / "channels_last.npz", image=images.transpose(0, 2, 3, 1))
    np.savez(tmp_path / "no_batch.npz", image=images[:, 0])
    np.savez(tmp_path / "bytes.npz", image=(images * 255).astype(np.uint8))
    shutil.copy(digits_model, tmp_path / "digits.onnx")
    shutil.copy(quantized, tmp_path / "quantized.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


DATA = ("--data", "samples.npz")
MISTAKES = {
    "wrong input name": (["digits.onnx", "--data", "wrong_name.npz"], ["'imagee'", "Did you mean 'image'?"]),
    "wrong layout": (["digits.onnx", "--data", "channels_last.npz"], ["channels-last", "transpose(0, 3, 1, 2)"]),
    "no batch axis": (["digits.onnx", "--data", "no_batch.npz"], ["wrong shape", "array[None]"]),
    "uint8 for float": (["digits.onnx", "--data", "bytes.npz"], ["uint8", ".astype(numpy.float32)"]),
    "missing model": (["digit.onnx", *DATA], ["digit.onnx", "Did you mean 'digits.onnx'?"]),
    "missing data": (["digits.onnx", "--data", "sample.npz"], ["sample.npz", "Did you mean 'samples.npz'?"]),
    "no data": (["digits.onnx"], ["No calibration data", "--data SOURCE", "--synthetic"]),
    "no folder for the output": (["digits.onnx", "no/out.onnx", *DATA], ["no", "Create it first"]),
    "no folder for the report": (["digits.onnx", *DATA, "--report", "no/r.html"], ["Create it first"]),
    "quantized already": (["quantized.onnx", *DATA], ["already quantized", "original float model"]),
    "output is the input": (["digits.onnx", "digits.onnx", *DATA], ["float model itself", "name another file"]),
    "typo in a recipe": (["digits.onnx", *DATA, "--recipe", "acurate"], ["Did you mean 'accurate'?"]),
    "typo in an extra option": (
        ["digits.onnx", *DATA, "--option", "WeightSymetric=1"],
        ["Did you mean 'WeightSymmetric'?", "--option"],
    ),
    "arrays with an option of images": (
        ["digits.onnx", *DATA, "--mean", "0.5"],
        ["--mean goes with a folder of images"],
    ),
    "data with an option of made-up samples": (["digits.onnx", *DATA, "--seed", "1"], ["--seed goes with made-up"]),
    "unknown node": (["digits.onnx", *DATA, "--exclude", "layer0.con"], ["Did you mean 'layer0.conv'?"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_its_fix(mistake: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    arguments, expected = MISTAKES[mistake]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    plain = [] if "--recipe" in arguments else PLAIN
    assert main(["quantize", *arguments, *plain]) == exits.ERROR
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("kenosis-ort: error: ")
    assert "Fix: " in printed.err
    for text in expected:
        assert text in printed.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_with_json_the_error_is_an_object_too(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["quantize", "digits.onnx", "--json"]) == exits.ERROR
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "CalibrationError"
    assert error["what"] == "No calibration data was given."
    assert "--synthetic" in error["fix"]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["quantize", "m.onnx", "--recpe", "fast"], "--recipe"),
        (["quantize", "m.onnx", "--no-promis"], "--no-promise"),
        (["quantize", "m.onnx", "--dat=x.npz"], "--data"),
        (["quantize", "m.onnx", "--tune", "modell"], "model"),
        (["quantise", "m.onnx"], "quantize"),
        (["--jsn", "inspect", "m.onnx"], "--json"),
    ],
)
def test_a_typo_on_the_command_line_is_answered_with_what_was_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == exits.ERROR
    assert f"Did you mean '{meant}'?" in capsys.readouterr().err


def test_abbreviations_are_not_taken(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["quantize", "m.onnx", "--synth"])
    assert "Did you mean '--synthetic'?" in capsys.readouterr().err


@pytest.mark.x86_only
@pytest.mark.parametrize("output", [[], ["-q"]])
def test_int8_activations_on_x86_are_done(output: list[str], folder: Path, capsys: pytest.CaptureFixture[str]):
    types = ["--activation-type", "int8", "--weight-type", "int8"]
    assert main(["quantize", "digits.onnx", *DATA, *PLAIN, *types, *output]) == exits.SUCCESS
    printed = capsys.readouterr()
    assert "warning" not in printed.err + printed.out
