"""What holds for all commands: help with an example, JSON alone on stdout, quiet, colours where they are wanted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from kenosis_ort.cli import exits
from kenosis_ort.cli.commands import COMMANDS
from kenosis_ort.cli.main import main
from kenosis_ort.cli.sweep import Row
from kenosis_ort.demo.__main__ import Demonstration
from tests import models
from tests.cli.conftest import PLAIN

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])(?:;\d+)*m")


@pytest.fixture
def folder(
    tmp_path: Path,
    digits_model: Path,
    digits_data: Path,
    quantized: Path,
    demonstration: Demonstration,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The files of the calls, in the current folder; the demonstration is not made again."""
    monkeypatch.setattr("kenosis_ort.demo.__main__.demonstrate", lambda *_, **__: demonstration)
    for source, name in ((digits_model, "float.onnx"), (digits_data, "samples.npz"), (quantized, "int8.onnx")):
        shutil.copy(source, tmp_path / name)
    onnx.save(models.mlp(n_in=48, hidden=64, n_out=32), tmp_path / "linear.onnx")
    (tmp_path / "models.toml").write_text("[models.digits]\nmodel = 'float.onnx'\ndata = 'samples.npz'\n")
    row = Row("digits", "20 of 20", False, 30.0, 2.0, 100, 30, 1.0, "out.onnx", "0")
    monkeypatch.setattr("kenosis_ort.cli.sweep.perform", lambda _: row)  # see test_sweep
    monkeypatch.chdir(tmp_path)
    return tmp_path


CALLS = {
    "quantize": ["float.onnx", "--data", "samples.npz", *PLAIN],
    "verify": ["int8.onnx"],
    "explain": ["float.onnx", "--all"],
    "compare": ["float.onnx", "int8.onnx", "--data", "samples.npz", "--samples", "2"],
    "compare-targets": ["float.onnx", "--target", "ort-cpu", "--target", "tensorrt"],
    "targets": ["tensorrt"],
    "sweep": ["models.toml"],
    "bench": ["float.onnx", "int8.onnx", "--seconds", "0.2", "--rounds", "2"],
    "inspect": ["float.onnx"],
    "convert": ["int8.onnx", "made.onnx", "--to", "float"],
    "calibrate": ["float.onnx", "table.json", "--data", "samples.npz"],
    "fuse": ["float.onnx", "fused.onnx"],
    "weights": ["linear.onnx", "weights.onnx"],
    "merge": ["all.json", "first.json"],
    "doctor": ["--seconds", "0.1"],
    "profile": ["--seconds", "0.1"],
    "demo": ["--rounds", "1"],
    "completion": ["bash"],
}


def call(command: str, *more: str) -> int:
    if command == "merge":
        assert main(["calibrate", "float.onnx", "first.json", "--synthetic", "1", "-q"]) == exits.SUCCESS
    return main([command, *CALLS[command], *more])


def test_every_command_is_tried_here():
    assert CALLS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_all_that_is_on_stdout(command: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert call(command, "--json") == exits.SUCCESS
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    assert "NaN" not in printed.out
    assert "Infinity" not in printed.out
    assert printed.err == ""


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "completion"])
def test_quiet_prints_nothing_and_text_has_no_escapes_in_a_pipe(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert call(command, "--quiet") == exits.SUCCESS
    assert capsys.readouterr() == ("", "")
    for made in ("table.json", "all.json", "first.json"):
        (folder / made).unlink(missing_ok=True)
    assert call(command) == exits.SUCCESS
    printed = capsys.readouterr()
    assert printed.out
    assert "\x1b" not in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(("name", "coloured"), [("NO_COLOR", False), ("UNRELATED", True)])
def test_no_color_is_honoured_on_a_terminal(
    name: str, coloured: bool, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(name, "1")
    assert call("verify") == exits.SUCCESS
    assert bool(COLOUR.search(capsys.readouterr().out)) is coloured


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_the_exit_codes(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert f"\n  kenosis-ort {command}" in printed
    assert "exit codes:" in printed
    assert ("\n  1 " in printed) is bool(COMMANDS[command].one)
    assert COMMANDS[command].summary[0].islower()
    for option in ("--json", "--quiet", "--verbose"):
        assert option in printed


def test_the_common_options_go_before_and_after_the_command(folder: Path, capsys: pytest.CaptureFixture[str]):
    for arguments in (["--json", "inspect", "float.onnx"], ["inspect", "float.onnx", "--json"]):
        assert main(arguments) == exits.SUCCESS
        assert json.loads(capsys.readouterr().out)["quantization"] == "float"


def test_verbose_logs_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["quantize", "float.onnx", "-vv", "--json", "--synthetic", "1", *PLAIN]) == exits.SUCCESS
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    assert printed.err


PARSE_ONLY = """
import sys, types
package = types.ModuleType("kenosis_ort")
package.__path__, package.__version__ = [{path!r}], "0"
sys.modules["kenosis_ort"] = package
from kenosis_ort.cli.main import build_parser
build_parser()
print(*sorted({{"numpy", "onnx", "onnxruntime", "rich", "shtab", "onnx_ir"}} & sys.modules.keys()))
"""


def test_parsing_imports_nothing_slow():
    path = str(Path(sys.modules["kenosis_ort"].__file__ or "").parent)
    done = subprocess.run(
        [sys.executable, "-c", PARSE_ONLY.format(path=path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("missing", ["verify", "explain", "inspect", "compare", "calibrate", "quantize"])
def test_a_missing_model_is_named_with_the_closest_one(missing: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [text.replace("float.onnx", "flaot.onnx").replace("int8.onnx", "int4.onnx") for text in CALLS[missing]]
    assert main([missing, *arguments]) == exits.ERROR
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Did you mean" in printed.err
    assert "Fix: " in printed.err


@pytest.mark.parametrize("command", ["compare", "calibrate"])
def test_where_data_are_needed_their_lack_is_said(command: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    arguments = {"compare": ["float.onnx", "int8.onnx"], "calibrate": ["float.onnx", "t.json"]}[command]
    assert main([command, *arguments]) == exits.ERROR
    assert "--synthetic" in capsys.readouterr().err


def test_a_screen_without_colours_or_a_terminal_shows_no_bar(capsys: pytest.CaptureFixture[str]):
    from kenosis_ort.cli.screen import Screen

    opened: Callable[..., object] = Screen().progress
    with opened("counting") as progress:  # type: ignore[attr-defined]
        assert progress is None
    assert capsys.readouterr() == ("", "")
