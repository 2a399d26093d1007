"""Whatever goes wrong: one clear line on stderr, exit code 2, nothing written, nothing on stdout."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kenosis_ort.cli import exits
from kenosis_ort.cli import main as main_module
from kenosis_ort.cli.main import main


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kenosis-ort: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_missing_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.onnx"
    assert main(["quantize", str(tmp_path / "none.onnx"), str(out), "--synthetic"]) == exits.ERROR
    assert "none.onnx" in complaint(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_model_leaves_an_existing_output_alone(
    tmp_path: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    model, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    model.write_text("not a model\nat all\n")
    out.write_bytes(b"precious")
    assert main(["quantize", str(model), str(out), "--data", str(digits_data)]) == exits.ERROR
    assert "model.onnx" in complaint(capsys)
    assert out.read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "out.onnx"]


def test_wrong_input_name_in_the_data(tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]):
    data, out = tmp_path / "data.npz", tmp_path / "out.onnx"
    np.savez(data, imagee=np.zeros((2, 1, 8, 8), np.float32))
    assert main(["quantize", str(digits_model), str(out), "--data", str(data)]) == exits.ERROR
    assert "image" in complaint(capsys)
    assert not out.exists()


def test_unknown_option_suggests_the_closest(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["quantize", str(digits_model), str(tmp_path / "o.onnx"), "--data", str(digits_data)]
    assert main([*arguments, "--option", "WeightSymetric=1"]) == exits.ERROR
    assert "Did you mean 'WeightSymmetric'?" in complaint(capsys)


def test_missing_output_folder(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "no" / "such" / "out.onnx"
    assert main(["quantize", str(digits_model), str(out), "--data", str(digits_data)]) == exits.ERROR
    assert str(out.parent) in complaint(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["quantize"],
        ["compare", "a.onnx"],
        ["quantize", "a.onnx", "b.onnx", "--synthetic", "0"],
        ["quantize", "a.onnx", "b.onnx", "--data", "d", "--size", "224"],
        ["quantize", "a.onnx", "b.onnx", "--data", "d", "--mean", "a,b"],
        ["quantize", "a.onnx", "b.onnx", "--synthetic", "--option", "novalue"],
        ["verify"],
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == exits.ERROR
    assert "usage:" in capsys.readouterr().err


def test_interruption_is_reported_as_such(
    digits_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kenosis_ort.verify.verify_fusion", interrupt)
    assert main(["verify", str(digits_model)]) == exits.INTERRUPTED
    assert "interrupted" in complaint(capsys)


def test_a_defect_of_ours_is_told_as_one(
    digits_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kenosis_ort.verify.verify_fusion", fail)
    assert main(["verify", str(digits_model)]) == exits.ERROR
    told = capsys.readouterr().err
    assert "ZeroDivisionError" in told
    assert "report this as a bug" in told


def test_logging_is_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    logger = logging.getLogger("kenosis_ort")
    before = (logger.level, logger.propagate, list(logger.handlers))
    main(["-v", "verify", str(tmp_path / "none.onnx")])
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    assert "error" in capsys.readouterr().err


def test_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]):
    for arguments in (["--help"], ["quantize", "--help"], ["verify", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
        assert "exit codes:" in capsys.readouterr().out


def test_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "kenosis_ort", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("kenosis-ort ")
    assert main_module.build_parser().prog == "kenosis-ort"
