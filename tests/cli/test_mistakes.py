"""Whatever goes wrong: one line with the fix, exit code 2, nothing written, nothing left behind, nothing on stdout."""

import logging
import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from kenosis_ort.demo import load_digits
from tests.cli.conftest import PLAIN

LOADER = """import os, numpy
def samples():
    data = dict(numpy.load('samples.npz'))
    os.chdir('sub')
    return data
"""


@pytest.fixture
def bad(shell):
    """Data that do not fit beside what does, and other names of files."""
    images = load_digits().calibration[:4]
    np.savez("wrong_name.npz", imagee=images)
    np.savez("channels_last.npz", image=images.transpose(0, 2, 3, 1))
    np.savez("no_batch.npz", image=images[:, 0])
    np.savez("bytes.npz", image=(images * 255).astype(np.uint8))
    (shell.folder / "text.onnx").write_text("not a model\nat all\n")
    (shell.folder / "loader.py").write_text(LOADER)
    onnx.save(onnx.load("float.onnx"), "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    (shell.folder / "soft.html").symlink_to("float.onnx")
    (shell.folder / "soft.toml").symlink_to("samples.npz")
    (shell.folder / "sub").mkdir()
    return shell


MISTAKES = """
quantize float.onnx --data wrong_name.npz => 'imagee' | Did you mean 'image'?
quantize float.onnx --data channels_last.npz => channels-last | transpose(0, 3, 1, 2)
quantize float.onnx --data no_batch.npz => wrong shape | array[None]
quantize float.onnx --data bytes.npz => uint8 | .astype(numpy.float32)
quantize text.onnx soft.html DATA => text.onnx
quantize float.onnx --data sample.npz => sample.npz | Did you mean 'samples.npz'?
quantize float.onnx => No calibration data | --data SOURCE | --synthetic
quantize float.onnx DATA --report no/r.html => Create it first
quantize int8.onnx DATA => already quantized | original float model
quantize float.onnx float.onnx DATA => float model itself | name another file
quantize float.onnx DATA --recipe acurate => Did you mean 'accurate'?
quantize float.onnx DATA --option WeightSymetric=1 => Did you mean 'WeightSymmetric'? | --option
quantize float.onnx DATA --mean 0.5 => --mean goes with a folder of images
quantize float.onnx DATA --exclude layer0.con => Did you mean 'layer0.conv'?
quantize float.onnx DATA --report soft.html => the report is the float model itself
quantize float.onnx DATA --report float.int8.onnx => the report is the output itself
quantize float.onnx DATA --report no.onnx => the report would take the place of a file of another kind | name another
quantize float.onnx DATA --save-recipe no_batch.npz => the recipe to save would take the place of a file of another kind
quantize float.onnx DATA --save-recipe soft.toml => the recipe to save is the calibration data itself
quantize float.onnx DATA --save-recipe r.html --report r.html => the report is the recipe to save itself
quantize float.onnx DATA --cache samples.npz => The calibration cache cannot be read
quantize float.onnx --data loader.py:samples --report loader.py => the report is the calibration data itself
quantize float.onnx bytes.npz DATA --eval-data bytes.npz => the output is the evaluation data itself
quantize m.onnx m.bin DATA => the output is the float model's external data itself
fuse float.onnx float.onnx => the output is the float model itself
weights float.onnx soft.html => the output is the float model itself
explain float.onnx layer5.cnv => Did you mean 'layer5.conv'?
verify int8.onnx --patterns tpu => tpu
targets tensrrt => Did you mean 'tensorrt'?
bench float.onnx --input-range imag=0,1 --seconds 0.3 => Did you mean 'image'?
bench none.onnx --seconds 0.3 => none.onnx
merge samples.npz day.json => exists already
merge new.json none.json => none.json
"""
"""Command lines, each with what its complaint holds beside the fix."""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines(), ids=lambda line: line.partition(" =>")[0])
def test_a_mistake_is_answered_with_what_where_and_fix(mistake, bad):
    line, expected = mistake.replace("DATA", "--data samples.npz").split(" => ")
    line += f" {PLAIN}" if line.startswith("quantize") and "--recipe" not in line else ""
    told = bad.complaint(line)
    error = bad(f"{line} --json", code=2).data["error"]
    assert [text for text in expected.split(" | ") if text not in told] == []
    assert error["kind"].endswith("Error")
    assert all(" ".join(error[part].split()) in told for part in ("what", "where", "fix") if error[part])
    assert all(error[part] for part in ("what", "fix"))


def test_a_function_that_changes_the_working_directory_moves_nothing(bad):
    printed = bad(f"quantize m.onnx --data loader.py:samples --report r.html --cache c.json {PLAIN}")
    assert "report: r.html" in printed.out
    assert {"m.int8.onnx", "m.int8.recipe.toml", "r.html", "c.json"} <= bad.files().keys()
    assert list((bad.folder / "sub").iterdir()) == []


USAGE = """
quantize m.onnx --recpe fast => Did you mean '--recipe'?
quantize m.onnx --dat=x.npz => Did you mean '--data'?
quantize m.onnx --tune modell => Did you mean 'model'?
quantise m.onnx => Did you mean 'quantize'?
--jsn inspect m.onnx => Did you mean '--json'?
 => required
nonsense => invalid choice
compare a.onnx => required
bench => required
"""
"""Typos are answered with what was meant; abbreviations are not taken."""


@pytest.mark.parametrize("mistake", USAGE[1:].splitlines(), ids=lambda line: line.partition(" =>")[0])
def test_bad_usage_shows_the_usage_and_what_is_wrong(mistake, shell):
    line, expected = mistake.split(" => ")
    printed = shell(line, code=2)
    assert printed.out == ""
    assert [text for text in ("usage:", expected, "Fix: see kenosis-ort") if text not in printed.err] == []


WRONG = "options = 3, data = [], recipe = 5, = =, [data] batch_size = 'x', [data] seed = -1, [data] nothing = 1"
WRONG += ", [machine] threads = 1, [machine] host = 3"


@pytest.mark.parametrize("text", WRONG.split(", "))
def test_a_wrong_value_in_a_recipe_file_is_told_with_the_file(text, shell):
    """What is no value of an option: see `tests.cli.test_options`."""
    written = f"{text}\n".replace("] ", "]\n")
    (shell.folder / "r.toml").write_text(written if "recipe" in text else f"{written}[recipe]\nname = 'mine'\n")
    told = shell.complaint("quantize float.onnx out.onnx --synthetic 1 --recipe r.toml")
    assert told.index("[at: r.toml") < told.index("Fix: ")


def test_interruption_and_a_defect_of_ours_are_told(shell, monkeypatch):
    for raised, code, expected in (
        (KeyboardInterrupt, 130, "interrupted"),
        (ZeroDivisionError("!"), 2, "ZeroDivisionError: !"),
        (ZeroDivisionError, 2, "report this as a bug"),
    ):
        monkeypatch.setattr("kenosis_ort.verify.verify_fusion", Mock(side_effect=raised))
        assert expected in shell.complaint("verify float.onnx", code=code)


def test_logging_is_left_as_it_was(shell):
    logger = logging.getLogger("kenosis_ort")
    before = (logger.level, logger.propagate, list(logger.handlers))
    assert "none.onnx" in shell("-v verify none.onnx", code=2).err
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_the_version_is_told(shell):
    """That the module runs as a command: see below."""
    assert shell("--version").out.startswith("kenosis-ort ")


WAITER = """
import numpy, time
def samples():
    yield {"image": numpy.load("samples.npz")["image"][:1]}
    print("waiting", flush=True)
    for _ in range(600):  # not one long sleep: a signal that comes just before it is looked at only when it is over
        time.sleep(0.1)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_terminated_it_cleans_up(bad):
    folder = bad.folder
    (folder / "waiter.py").write_text(WAITER)
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    before = sorted(folder.iterdir())
    line = f"quantize m.onnx --data waiter.py:samples {PLAIN}".split()

    def left():
        return [path for path in (folder / "tmp").iterdir() if "kenosis" in path.name]  # the runtime leaves a file too

    command, pipe = [sys.executable, "-m", "kenosis_ort", *line], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout.readline() == "waiting\n"
        assert left()
        child.send_signal(signal.SIGTERM)
        assert (child.wait(), child.communicate()[1]) == (143, "kenosis-ort: error: terminated\n")
    assert sorted(folder.iterdir()) == before
    assert left() == []
