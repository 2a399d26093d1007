"""Files on the command line: no output is an input, and however the command ends nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx
import pytest

from kenosis_ort.cli.main import main
from tests.cli.conftest import PLAIN, Shell


@pytest.fixture
def folder(shell: Shell) -> Path:
    onnx.save(onnx.load("float.onnx"), "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    (shell.folder / "loader.py").write_text(
        "import os, numpy\ndef samples():\n    data = dict(numpy.load('samples.npz'))\n    os.chdir('sub')\n"
        "    return data\n"
    )
    (shell.folder / "waiter.py").write_text(
        "import numpy, time\ndef samples():\n    data = numpy.load('samples.npz')['image']\n"
        "    yield {'image': data[:1]}\n"
        # Not one long sleep: a signal that comes just before it is looked at only when it is over.
        "    print('waiting', flush=True)\n    for _ in range(600):\n        time.sleep(0.1)\n"
    )
    (shell.folder / "sub").mkdir()
    return shell.folder


def test_external_data_is_not_written_over(folder: Path, shell: Shell) -> None:
    told = shell.complaint(f"quantize m.onnx m.bin --data samples.npz {PLAIN}")
    assert "the output is the float model's external data itself" in told


def test_a_function_that_changes_the_working_directory_moves_nothing(folder: Path, shell: Shell) -> None:
    shell(f"quantize m.onnx --data loader.py:samples --report r.html --cache c.json {PLAIN}")
    assert {"m.int8.onnx", "m.int8.recipe.toml", "r.html", "c.json"} <= shell.files().keys()
    assert list((folder / "sub").iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_terminated_it_cleans_up_and_killed_the_next_run_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    before = sorted(folder.iterdir())

    def left() -> list[Path]:
        return [path for path in (folder / "tmp").iterdir() if "kenosis" in path.name]  # the runtime leaves a file too

    def stopped_by(number: int) -> tuple[int, str]:
        command = [
            sys.executable,
            "-m",
            "kenosis_ort",
            "quantize",
            "m.onnx",
            "--data",
            "waiter.py:samples",
            *PLAIN.split(),
        ]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "waiting\n"
            assert left()
            child.send_signal(number)
            return child.wait(), child.communicate()[1]

    assert stopped_by(signal.SIGTERM) == (143, "kenosis-ort: error: terminated\n")
    assert sorted(folder.iterdir()) == before
    assert left() == []
    assert stopped_by(signal.SIGKILL)[0] == -signal.SIGKILL
    assert left()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    assert main(["quantize", "m.onnx", "--data", "samples.npz", *PLAIN.split()]) == 0
    assert left() == []
