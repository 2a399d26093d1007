"""Whatever goes wrong: one line on stderr with the fix, exit code 2, nothing written, nothing on stdout."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kenosis_ort.cli.main import build_parser
from kenosis_ort.demo import load_digits
from tests.cli.conftest import PLAIN, Shell


@pytest.fixture
def bad(shell: Shell) -> Shell:
    """Data that do not fit beside what does, and other names of files."""
    images = load_digits().calibration[:4]
    np.savez("wrong_name.npz", imagee=images)
    np.savez("channels_last.npz", image=images.transpose(0, 2, 3, 1))
    np.savez("no_batch.npz", image=images[:, 0])
    np.savez("bytes.npz", image=(images * 255).astype(np.uint8))
    (shell.folder / "text.onnx").write_text("not a model\nat all\n")
    (shell.folder / "loader.py").write_text(
        "import numpy\ndef samples():\n    return dict(numpy.load('samples.npz'))\n"
    )
    (shell.folder / "soft.html").symlink_to("float.onnx")
    os.link("samples.npz", "hard.toml")
    (shell.folder / "sub").mkdir()
    return shell


DATA = "--data samples.npz"
MISTAKES = {
    "wrong input name": ("float.onnx --data wrong_name.npz", ["'imagee'", "Did you mean 'image'?"]),
    "wrong layout": ("float.onnx --data channels_last.npz", ["channels-last", "transpose(0, 3, 1, 2)"]),
    "no batch axis": ("float.onnx --data no_batch.npz", ["wrong shape", "array[None]"]),
    "uint8 for float": ("float.onnx --data bytes.npz", ["uint8", ".astype(numpy.float32)"]),
    "missing model": (f"flaot.onnx {DATA}", ["flaot.onnx", "Did you mean 'float.onnx'?"]),
    "no model": (f"text.onnx soft.html {DATA}", ["text.onnx"]),
    "missing data": ("float.onnx --data sample.npz", ["sample.npz", "Did you mean 'samples.npz'?"]),
    "no data": ("float.onnx", ["No calibration data", "--data SOURCE", "--synthetic"]),
    "no folder for the output": (f"float.onnx no/such/out.onnx {DATA}", ["no/such", "Create it first"]),
    "no folder for the report": (f"float.onnx {DATA} --report no/r.html", ["Create it first"]),
    "quantized already": (f"int8.onnx {DATA}", ["already quantized", "original float model"]),
    "output is the input": (f"float.onnx float.onnx {DATA}", ["float model itself", "name another file"]),
    "typo in a recipe": (f"float.onnx {DATA} --recipe acurate", ["Did you mean 'accurate'?"]),
    "typo in an extra option": (
        f"float.onnx {DATA} --option WeightSymetric=1",
        ["Did you mean 'WeightSymmetric'?", "--option"],
    ),
    "option of images": (f"float.onnx {DATA} --mean 0.5", ["--mean goes with a folder of images"]),
    "option of made-up samples": (f"float.onnx {DATA} --seed 1", ["--seed goes with made-up"]),
    "unknown node": (f"float.onnx {DATA} --exclude layer0.con", ["Did you mean 'layer0.conv'?"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_its_fix(mistake: str, bad: Shell) -> None:
    line, expected = MISTAKES[mistake]
    told = bad.complaint(f"quantize {line} {'' if '--recipe' in line else PLAIN}")
    assert [text for text in ("Fix: ", *expected) if text not in told] == []


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("./float.onnx", "the output is the float model itself"),
        ("--report float.onnx", "the report is the float model itself"),
        ("--report soft.html", "the report is the float model itself"),
        ("--report float.int8.onnx", "the report is the output itself"),
        ("--save-recipe sub/../samples.npz", "the recipe to save is the calibration data itself"),
        ("--save-recipe hard.toml", "the recipe to save is the calibration data itself"),
        ("--save-recipe r.html --report r.html", "the report is the recipe to save itself"),
        ("--cache c.json --report c.json", "the calibration cache is the report itself"),
        ("--cache samples.npz", "The calibration cache cannot be read"),
        ("--data loader.py:samples --report loader.py", "the report is the calibration data itself"),
    ],
)
def test_no_output_is_an_input_or_another_output(line: str, text: str, bad: Shell) -> None:
    assert text in bad.complaint(f"quantize float.onnx --data samples.npz {PLAIN} {line}")


def test_with_json_the_error_is_an_object_too(shell: Shell) -> None:
    error = shell("quantize float.onnx --json", code=2).data["error"]
    assert (error["kind"], error["what"]) == ("CalibrationError", "No calibration data was given.")
    assert "--synthetic" in error["fix"]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("quantize m.onnx --recpe fast", "--recipe"),
        ("quantize m.onnx --no-promis", "--no-promise"),
        ("quantize m.onnx --dat=x.npz", "--data"),
        ("quantize m.onnx --synth", "--synthetic"),
        ("quantize m.onnx --tune modell", "model"),
        ("quantise m.onnx", "quantize"),
        ("--jsn inspect m.onnx", "--json"),
    ],
)
def test_a_typo_is_answered_with_what_was_meant_and_abbreviations_are_not_taken(
    line: str, meant: str, shell: Shell
) -> None:
    assert f"Did you mean '{meant}'?" in shell(line, code=2).err


@pytest.mark.parametrize(
    "line",
    [
        *("", "nonsense", "quantize", "compare a.onnx", "verify", "bench", "demo --rounds 0", "demo --batch -1"),
        *(f"quantize a.onnx b.onnx {rest}" for rest in ("--data d --size 224", "--data d --mean a,b")),
        *(f"bench m.onnx {rest}" for rest in ("--seconds 0", "--seconds soon", "--rounds 0", "--batch-size 0")),
        *(f"{command} --threads 99999999999" for command in ("bench m.onnx", "compare m.onnx m.onnx", "doctor")),
    ],
)
def test_bad_usage_shows_the_usage(line: str, shell: Shell) -> None:
    assert "usage:" in shell(line, code=2).err


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--threads", ("99999999999", "-1", "1.5", "x", "", "9" * 5000)),
        ("--accuracy-budget", ("nan", "inf", "-1", "2", "x", "150%")),
        ("--synthetic", ("0", "-1", "1.5", "x")),
        ("--batch-size", ("0", "-1", "x")),
        ("--option", ("WeightSymmetric=no", "CalibPercentile=x", "BlockSize=1.5", "=1", "x")),
        ("--seed", ("-1", "x")),
        *((option, ("x",)) for option in ("--preset", "--tune", "--method", "--format", "--weight-type", "--target")),
        *((option, ("",)) for option in ("--recipe", "--cache")),
        ("--protect-outputs", ("x",)),
    ],
)
def test_a_wrong_value_on_the_command_line(option: str, values: tuple[str, ...], shell: Shell) -> None:
    before = shell.files()
    for value in values:
        printed = shell("quantize float.onnx out.onnx --synthetic 1", option, value, code=2)
        assert printed.out == ""
        assert "Traceback" not in printed.err
    assert shell.files() == before


@pytest.mark.parametrize(
    "text",
    [
        *("options = 3", "data = []", "made = 'x'", "schema = 9", "schema = 'x'", "recipe = 5", "= ="),
        *("[options]\nthreads = 99999999999", "[options]\nthreads = -1", "[options]\nthreads = true"),
        *("[options]\ntune_budget_s = nan", "[options]\nper_channel = 'x'", "[options]\nnodes_to_exclude = [1]"),
        *("[options]\nverify = 'no'", "[options]\nextra_options = { WeightSymmetric = 'no' }", "[options]\ntarget = 5"),
        *("[options]\nrewrites = [1]", "[options]\npromise = 2024-01-01", "[options]\nactivation_type = 'int7'"),
        *("[data]\nbatch_size = 'x'", "[data]\nseed = -1", "[data]\nsynthetic = 0", "[data]\nnothing = 1"),
        *("[recipe]\nsamples = 'x'", "[recipe]\nequalize = 'no'", "[recipe]\nsmooth = nan", "[recipe]\nname = 3"),
    ],
    ids=lambda text: text.replace("\n", " "),
)
def test_a_wrong_value_in_a_recipe_file(text: str, shell: Shell) -> None:
    (shell.folder / "r.toml").write_text(f"{text}\n" if "recipe" in text else f"{text}\n[recipe]\nname = 'mine'\n")
    before = shell.files()
    printed = shell("quantize float.onnx out.onnx --synthetic 1 --recipe r.toml", code=2)
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert shell.files() == before


@pytest.mark.parametrize(
    ("raised", "code", "expected"),
    [
        (KeyboardInterrupt, 130, ["interrupted"]),
        (ZeroDivisionError, 2, ["ZeroDivisionError", "report this as a bug"]),
    ],
)
def test_interruption_and_a_defect_of_ours_are_told_as_such(
    raised: type[BaseException], code: int, expected: list[str], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("kenosis_ort.verify.verify_fusion", fail)
    told = shell.complaint("verify float.onnx", code=code)
    assert [text for text in expected if text not in told] == []


def test_logging_is_left_as_it_was(shell: Shell) -> None:
    logger = logging.getLogger("kenosis_ort")
    before = (logger.level, logger.propagate, list(logger.handlers))
    assert "none.onnx" in shell("-v verify none.onnx", code=2).err
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "kenosis_ort", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.startswith("kenosis-ort ")
    assert build_parser().prog == "kenosis-ort"
