"""Files on the command line: no output is an input, and however the command ends nothing of it is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx
import pytest

from kenosis_ort.cli import exits
from kenosis_ort.cli.main import main
from tests.cli.conftest import PLAIN


@pytest.fixture
def folder(tmp_path: Path, digits_model: Path, digits_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    proto = onnx.load(digits_model)
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    shutil.copy(digits_data, tmp_path / "d.npz")
    (tmp_path / "soft.html").symlink_to("m.onnx")
    os.link(tmp_path / "d.npz", tmp_path / "hard.toml")
    (tmp_path / "loader.py").write_text(
        "import os, numpy\ndef samples():\n    data = dict(numpy.load('d.npz'))\n    os.chdir('sub')\n    return data\n"
    )
    (tmp_path / "waiter.py").write_text(
        "import numpy, time\ndef samples():\n    data = numpy.load('d.npz')['image']\n    yield {'image': data[:1]}\n"
        # Not one long sleep: a signal that comes just before it is looked at only when it is over.
        "    print('waiting', flush=True)\n    for _ in range(600):\n        time.sleep(0.1)\n"
    )
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["m.onnx", "./m.onnx"], "the output is the float model itself"),
        (["m.onnx", "m.bin"], "the output is the float model's external data itself"),
        (["m.onnx", "--report", "m.onnx"], "the report is the float model itself"),
        (["m.onnx", "--report", "soft.html"], "the report is the float model itself"),
        (["m.onnx", "--report", "m.int8.onnx"], "the report is the output itself"),
        (["m.onnx", "--save-recipe", "sub/../d.npz"], "the recipe to save is the calibration data itself"),
        (["m.onnx", "--save-recipe", "hard.toml"], "the recipe to save is the calibration data itself"),
        (["m.onnx", "--save-recipe", "r.html", "--report", "r.html"], "the report is the recipe to save itself"),
        (["m.onnx", "--cache", "c.json", "--report", "c.json"], "the calibration cache is the report itself"),
        (["m.onnx", "--cache", "d.npz"], "The calibration cache cannot be read"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_no_output_is_an_input_or_another_output(
    arguments: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert main(["quantize", *arguments, "--data", "d.npz", *PLAIN]) == exits.ERROR
    assert text in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_the_file_of_a_function_is_data_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "m.onnx", "--data", "loader.py:samples", "--report", "loader.py"]) == exits.ERROR
    assert "the report is the calibration data itself" in capsys.readouterr().err


def test_a_function_that_changes_the_working_directory_moves_nothing(folder: Path) -> None:
    arguments = ["quantize", "m.onnx", "--data", "loader.py:samples", "--report", "r.html", "--cache", "c.json", *PLAIN]
    assert main(arguments) == exits.SUCCESS
    assert {"m.int8.onnx", "m.int8.recipe.toml", "r.html", "c.json"} <= {path.name for path in folder.iterdir()}
    assert list((folder / "sub").iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_terminated_it_cleans_up_and_killed_the_next_run_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    before = sorted(folder.iterdir())

    def left() -> list[Path]:
        return [path for path in (folder / "tmp").iterdir() if "kenosis" in path.name]  # the runtime leaves a file too

    def stopped_by(number: int) -> tuple[int, str]:
        command = [sys.executable, "-m", "kenosis_ort", "quantize", "m.onnx", "--data", "waiter.py:samples", *PLAIN]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "waiting\n"
            assert left()
            child.send_signal(number)
            return child.wait(), child.communicate()[1]

    assert stopped_by(signal.SIGTERM) == (exits.TERMINATED, "kenosis-ort: error: terminated\n")
    assert sorted(folder.iterdir()) == before
    assert left() == []
    assert stopped_by(signal.SIGKILL)[0] == -signal.SIGKILL
    assert left()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    assert main(["quantize", "m.onnx", "--data", "d.npz", *PLAIN]) == exits.SUCCESS
    assert left() == []
