"""A folder with nets of digits and data, and the command run in it."""

import json
import shlex
import shutil
from typing import NamedTuple

import numpy as np
import onnx
import pytest

from kenosis_ort.cli.main import main
from kenosis_ort.demo import demonstrate, load_digits, model_path
from tests import models

ROUNDS, BATCH = 1, 2  # of the demonstration
PLAIN = "--recipe plain --no-promise"  # the fastest way to a quantized model


class Printed(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def line(self):
        """The output without line breaks."""
        return " ".join(self.out.split())

    @property
    def data(self):
        """The output read as JSON."""
        return json.loads(self.out)

    def lacks(self, *expected):
        """Which of these the output does not hold, line breaks aside."""
        return [text for text in expected if text not in self.line]


class Shell:
    """Runs commands in the current folder, which holds ``float.onnx``, ``int8.onnx`` and ``samples.npz``."""

    def __init__(self, folder, capsys):
        self.folder = folder
        self._capsys = capsys

    def __call__(self, line, *words, code=0):
        self._capsys.readouterr()
        try:
            found = main([*shlex.split(line), *map(str, words)])
        except SystemExit as stopped:
            found = int(str(stopped.code))
        printed = Printed(*self._capsys.readouterr())
        assert found == code, printed
        return printed

    def quantize(self, line="", *words, model="float.onnx", code=0):
        """Quantizes to ``out.onnx`` without passes."""
        return self(f"quantize {model} out.onnx --data samples.npz {PLAIN} {line}", *words, code=code)

    def complaint(self, line, *words, code=2):
        """The one line on stderr of a command that fails; no file is made or changed."""
        before = self.files()
        printed = self(line, *words, code=code)
        assert printed.out == ""
        assert printed.err.startswith("kenosis-ort: error: ")
        assert printed.err.count("\n") == 1
        assert self.files() == before
        return printed.err

    def files(self):
        """Content of the folder's files by name."""
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}


@pytest.fixture(scope="session")
def trained_model():
    with model_path() as path:
        yield path


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The files of `shell`, made once."""
    folder = tmp_path_factory.mktemp("made")
    onnx.save(models.narrow_digits(), folder / "float.onnx")
    np.savez(folder / "samples.npz", image=load_digits().calibration[:12])
    line = f"quantize {folder}/float.onnx {folder}/int8.onnx --data {folder}/samples.npz -q --no-save-recipe {PLAIN}"
    assert main(shlex.split(line)) == 0
    return folder


@pytest.fixture
def shell(made, tmp_path, monkeypatch, capsys):
    for path in made.iterdir():
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


@pytest.fixture(scope="session")
def kept_models(tmp_path_factory):
    """The folder in which the demonstration keeps its models."""
    return tmp_path_factory.mktemp("demo") / "kept"


@pytest.fixture(scope="session")
def demonstration(kept_models):
    return demonstrate(kept_models, batch=BATCH, rounds=ROUNDS)
