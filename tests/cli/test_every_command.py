"""What holds for all commands: help with an example, JSON alone on stdout, quiet, colours where they are wanted."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from rich.console import Console

from kenosis_ort.cli.commands import COMMANDS
from kenosis_ort.cli.screen import Screen
from kenosis_ort.cli.sweep_command import Row
from kenosis_ort.demo.measurements import Demonstration
from tests import models
from tests.cli.conftest import PLAIN, Printed, Shell

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])(?:;\d+)*m")
CALLS = {
    "quantize": f"float.onnx --data samples.npz {PLAIN}",
    "verify": "int8.onnx",
    "explain": "float.onnx --all",
    "compare": "float.onnx int8.onnx --data samples.npz --samples 2",
    "compare-targets": "float.onnx --target ort-cpu --target tensorrt",
    "targets": "tensorrt",
    "sweep": "models.toml",
    "bench": "float.onnx int8.onnx --seconds 0.2 --rounds 2",
    "inspect": "float.onnx",
    "convert": "int8.onnx made.onnx --to float",
    "calibrate": "float.onnx table.json --data samples.npz",
    "fuse": "float.onnx fused.onnx",
    "weights": "linear.onnx weights.onnx",
    "merge": "all.json first.json",
    "doctor": "--seconds 0.1",
    "profile": "--seconds 0.1",
    "demo": "--rounds 1",
}


@pytest.fixture
def folder(shell: Shell, demonstration: Demonstration, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """What the calls need; the demonstration and the model of the sweep are not made again."""
    monkeypatch.setattr("kenosis_ort.tuning.measure.measure_profile", lambda target, **_: target.profiles[0])
    monkeypatch.setattr("kenosis_ort.demo.measurements.demonstrate", lambda *_, **__: demonstration)
    onnx.save(models.mlp(n_in=48, hidden=64, n_out=32), "linear.onnx")
    Path("models.toml").write_text("[models.digits]\nmodel = 'float.onnx'\ndata = 'samples.npz'\n")
    row = Row("digits", "20 of 20", False, "out.onnx", 1.0, 30.0, 2.0, 100, 30)
    monkeypatch.setattr("kenosis_ort.cli.sweep_command.perform", lambda _: row)  # see test_script
    return shell


def call(shell: Shell, command: str, more: str = "") -> Printed:
    for made in ("table.json", "all.json", "first.json"):
        (shell.folder / made).unlink(missing_ok=True)
    if command == "merge":
        shell("calibrate float.onnx first.json --synthetic 1 -q")
    return shell(f"{command} {CALLS[command]} {more}")


def test_every_command_is_tried_here() -> None:
    assert CALLS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_all_that_is_on_stdout(command: str, folder: Shell) -> None:
    printed = call(folder, command, "--json")
    assert printed.data
    assert (printed.lacks("NaN", "Infinity"), printed.err) == (["NaN", "Infinity"], "")


@pytest.mark.parametrize("command", COMMANDS)
def test_quiet_prints_nothing_and_text_has_no_escapes_in_a_pipe(command: str, folder: Shell) -> None:
    assert call(folder, command, "--quiet") == ("", "")
    printed = call(folder, command)
    assert (bool(printed.out), "\x1b" in printed.out, printed.err) == (True, False, "")


@pytest.mark.parametrize(("name", "coloured"), [("NO_COLOR", False), ("UNRELATED", True)])
def test_no_color_is_honoured_on_a_terminal(name, coloured, shell, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for variable, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), (name, "1")):
        monkeypatch.setenv(variable, value)
    assert bool(COLOUR.search(call(shell, "verify").out)) is coloured


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_an_example_and_the_exit_codes(command: str, shell: Shell) -> None:
    printed = shell(f"{command} --help")
    assert f"\n  kenosis-ort {command}" in printed.out
    assert not printed.lacks("exit codes:", "--json", "--quiet", "--verbose")
    if command:
        assert ("\n  1 " in printed.out) is bool(COMMANDS[command].one)
        assert COMMANDS[command].summary[0].islower()


def test_the_common_options_go_before_and_after_the_command(shell: Shell) -> None:
    for line in ("--json inspect float.onnx", "inspect float.onnx --json"):
        assert shell(line).data["quantization"] == "float"


def test_verbose_logs_to_stderr(shell: Shell) -> None:
    printed = shell(f"quantize float.onnx -vv --json --synthetic 1 {PLAIN}")
    assert printed.data
    assert printed.err


PARSE_ONLY = """
import sys, types
package = types.ModuleType("kenosis_ort")
package.__path__, package.__version__ = [{path!r}], "0"
sys.modules["kenosis_ort"] = package
from kenosis_ort.cli.main import build_parser
build_parser()
print(*sorted({{"numpy", "onnx", "onnxruntime", "rich", "onnx_ir"}} & sys.modules.keys()))
"""


def test_parsing_imports_nothing_slow() -> None:
    code = PARSE_ONLY.format(path=str(Path(sys.modules["kenosis_ort"].__file__ or "").parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("command", [name for name, each in COMMANDS.items() if each.needs_data])
def test_where_data_are_needed_their_lack_is_told(command: str, shell: Shell) -> None:
    words = CALLS[command].partition(" --data")[0]
    assert "--synthetic" in shell(f"{command} {words}", code=2).err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_model_is_named_with_the_closest_one(command: str, shell: Shell) -> None:
    """Whatever takes a model; bench leaves models out, and is asked of a single one elsewhere."""
    if any(one.dest in ("model", "float_model") for one in COMMANDS[command].arguments):
        line = CALLS[command].replace("float.onnx", "flaot.onnx").replace("int8.onnx", "int4.onnx")
        assert re.search("Did you mean.* Fix: ", shell.complaint(f"{command} {line.replace('linear', 'flaot')}"))


def test_a_screen_without_colours_or_a_terminal_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen().progress("counting") as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")


def test_what_json_cannot_say_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(as_json=True).result(lambda: {"a": [float("inf"), float("nan"), 1.0]}, lambda: "")
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.0]}


def test_a_terminal_gets_a_bar_that_clears_itself():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, force_interactive=True, width=80, legacy_windows=False)
    with Screen().progress("calibrating", console) as progress:
        assert progress is not None
        progress(1, None)
        progress(3, 4)
    assert re.search(r"(?s)calibrating.*3/4.*\x1b\[2K$", stream.getvalue())
