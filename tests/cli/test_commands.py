"""What each command says, and what holds for all: help with an example, JSON alone on stdout, quiet, colours."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from rich.console import Console

from kenosis_ort import CalibrationTable, demo
from kenosis_ort.cli import screen, sweep_command
from kenosis_ort.cli.main import COMMANDS
from kenosis_ort.report.text import to_text
from kenosis_ort.targets import TARGETS
from tests import models
from tests.cli.conftest import BATCH, PLAIN, ROUNDS, Printed


def test_a_float_and_a_quantized_model_are_inspected(shell):
    shown = ("quantization float", "3,186", "image float [batch, 1, 8, 8]", "4 Conv", "ai.onnx")
    assert not shell("inspect float.onnx").lacks(*shown)
    found = shell("inspect int8.onnx --json").data
    assert (found["quantization"], found["file_bytes"]) == ("QDQ", len(shell.files()["int8.onnx"]))
    assert found["weight_types"]["int8"] > 3_000


# -- explain


def test_the_plan_of_a_float_model_is_explained(shell):
    assert "None of 5 nodes that carry arithmetic" in shell("explain float.onnx").line
    assert not shell("explain float.onnx layer5.conv").lacks("Conv 'layer5.conv': integer, by conv-integer", "input 1")
    gone = [e for e in shell("explain float.onnx --all --json").data if e["kind"] == "prepared away"]
    assert {e["op_type"] for e in gone} == {"BatchNormalization"}
    assert "folded into its neighbours" in shell("explain float.onnx", gone[0]["node"]).line


def test_a_quantized_model_is_asked_of_the_runtime(shell):
    assert "runs as com.microsoft.QLinearConv" in shell("explain int8.onnx layer5.conv").line
    shell.quantize("-q --exclude layer5.conv")
    assert not shell("explain out.onnx").lacks("1 of 5 nodes", "Conv 'layer5.conv': float, by")


# -- verify


def test_the_proof_and_what_strict_makes_of_it(shell):
    printed = shell("verify int8.onnx --strict")
    assert not printed.lacks("5 of 5 Conv/Gemm/MatMul run on integer kernels", "com.microsoft.QGemm")
    raw = shell("verify int8.onnx --json").data
    assert raw["verdict"].startswith("5 of 5")
    assert {k["op_type"] for k in raw["kernels"]} >= {"Conv", "Gemm", "Relu"}
    assert "0 of 5" in shell("verify float.onnx").out
    shell("verify float.onnx --strict", code=1)


def test_patterns_name_the_broken_clause(shell):
    printed = shell("verify int8.onnx --patterns onednn --strict", code=1)
    broken = "breaks bias-conversion: the bias is s32 behind a DequantizeLinear"
    assert not printed.lacks("Convs match 'oneDNN, Quantized Convolution Fusion Patterns'", broken)
    shell("verify int8.onnx --patterns onednn")


# -- compare

COMPARE = "compare float.onnx int8.onnx --data samples.npz"


def test_outputs_layers_and_a_next_step(shell):
    printed = shell(f"{COMPARE} --full")
    shown = ("logits 100.0 %", "Layers, most lost first", "Weights, worst first", " samples; ", "next: ")
    assert printed.lacks(*shown, "made-up") == ["made-up"]
    itself = shell("compare float.onnx float.onnx --synthetic 2 --min-sqnr 100")
    assert not itself.lacks("inf dB", "made-up data")


@pytest.mark.parametrize(("demand", "code"), [
    ("--min-agreement 99% --min-sqnr 10", 0), ("--min-sqnr 90", 1), ("--min-agreement 50% --min-sqnr 90", 1),
])  # fmt: skip
def test_demands_show_in_the_exit_code(demand, code, shell):
    found = shell(f"{COMPARE} {demand} --json", code=code).data
    assert (found["below"], found["made_up_data"]) == ([] if code == 0 else ["logits"], False)


# -- calibrate and merge


def test_tables_are_written_merged_and_used(shell):
    calibrate = "calibrate float.onnx"
    assert "from 12 samples; it holds 12 of them" in shell(f"{calibrate} day.json --data samples.npz").line
    shell(f"{calibrate} night.json --synthetic 3")
    assert shell("merge both.json day.json night.json --json").data["samples"] == 15
    assert CalibrationTable.load(Path("both.json")).samples == 15
    shell("quantize float.onnx o.onnx --table both.json --no-promise -q")
    assert shell(f"{calibrate} bare.json --data samples.npz --no-samples --json").data["kept_samples"] == 0
    assert CalibrationTable.load(Path("bare.json")).cached is None


# -- bench

QUICK = "--seconds 0.3 --rounds 2"


def test_models_are_timed_side_by_side_and_what_cannot_run_is_left_out(shell):
    printed = shell(f"bench float.onnx int8.onnx {QUICK}")
    assert not printed.lacks("float.onnx", "int8.onnx", "baseline", "p95", "made-up data")
    raw = shell(f"bench float.onnx int8.onnx --data samples.npz --threads 2 --json {QUICK}").data
    assert ([m["name"] for m in raw["models"]], raw["threads"]) == (["float.onnx", "int8.onnx"], 2)
    assert not any("made-up" in note for note in raw["notes"])
    Path("broken.onnx").write_bytes(b"no model")
    printed = shell(f"bench float.onnx broken.onnx --input-range image=0,1 {QUICK}", code=1)
    assert "left out: broken.onnx" in printed.out


# -- targets and compare-targets


def test_all_targets_are_listed_with_what_they_want(shell):
    listed = {row["target"]: row for row in shell("targets --json").data}
    assert (list(listed), listed["ort-cpu"]["proved"]) == (list(TARGETS), True)
    assert listed["tensorrt"].items() >= {"activations": "int8, zero point 0", "proved": False}.items()
    assert "x * Sigmoid(x)" in listed["tensorrt"]["taken_in"]


@pytest.mark.parametrize("name", TARGETS)
def test_the_table_of_a_target_holds_every_rule_and_fact(name, shell):
    target = TARGETS[name]
    rows = shell(f"targets {name} --json").data["rules"]
    assert [row["id"] for row in rows] == [*(r.id for r in target.rules), *(i for i, _ in target.facts)]
    if name == "tensorrt":
        assert all(row["source"].startswith("[") for row in rows if row["role"] != "fact"), "it was not run"
    assert shell(f"targets {name}").out


def test_targets_are_compared_on_a_net(shell):
    found = shell("compare-targets float.onnx --target ort-cpu --target tensorrt --json").data
    rows = [(row["target"], row["integer_heavy"], row["heavy"]) for row in found["targets"]]
    assert rows == [("ort-cpu", 5, 5), ("tensorrt", 5, 5)]
    assert found["targets"][1]["grids"] == ["int8 symmetric"]
    differ = {entry["what"]: (entry["ort-cpu"], entry["tensorrt"]) for entry in found["differ"]}
    assert differ["node 'layer3.add'"] == ("integer", "absorbed")
    assert "They do the same" in shell("compare-targets float.onnx --target arm --target arm").out


# -- doctor


def test_the_doctor_tells_facts_and_types(shell):
    shown = ("processor", "onnxruntime", "CPUExecutionProvider", "operator sets up to", "uint8 x int8")
    assert not shell("doctor --seconds 0.1").lacks(*shown)
    assert shell("doctor --no-timing").lacks("note: ", "uint8 x int8") == ["uint8 x int8"]


# -- demo


def test_the_demonstration(demonstration, kept_models):
    """It prints and tells accuracy, speed and proof, and keeps the models."""
    shown = ("float32", "stock, default", "stock, best", "kenosis-ort", "accuracy", "speed")
    printed = Printed(to_text(demo.render(demonstration)), "")
    assert not printed.lacks(*shown, "7 of 7 Conv/Gemm/MatMul run on integer kernels")
    assert (kept_models / "digits_kenosis.onnx").is_file()
    found = demonstration.to_dict()
    assert list(found["models"]) == [demo.FLOAT, demo.STOCK_DEFAULT, demo.STOCK_BEST, demo.OURS]
    assert found["models"][demo.FLOAT]["proof"] is None
    ours = found["models"][demo.OURS]
    assert ours["accuracy"] > 0.97
    assert (ours["proof"][:6], found["batch"], found["rounds"]) == ("7 of 7", BATCH, ROUNDS)


# ---- what holds for all commands ------------------------------------------------------------------------------------


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])(?:;\d+)*m")
CALLS = {
    "quantize": f"float.onnx --data samples.npz {PLAIN}", "verify": "int8.onnx", "explain": "float.onnx --all",
    "compare": "float.onnx int8.onnx --data samples.npz --samples 2",
    "compare-targets": "float.onnx --target ort-cpu --target tensorrt", "targets": "tensorrt", "sweep": "models.toml",
    "bench": "float.onnx int8.onnx --seconds 0.2 --rounds 2", "inspect": "float.onnx",
    "convert": "int8.onnx made.onnx --to float", "calibrate": "float.onnx table.json --data samples.npz",
    "fuse": "float.onnx fused.onnx", "weights": "linear.onnx weights.onnx", "merge": "all.json first.json",
    "doctor": "--seconds 0.1", "profile": "--seconds 0.1", "demo": "--rounds 1",
}  # fmt: skip


@pytest.fixture
def folder(shell, demonstration, monkeypatch):
    """What the calls need; the demonstration and the model of the sweep are not made again."""
    monkeypatch.setattr("kenosis_ort.tuning.measure.measure_profile", lambda target, **_: target.profiles[0])
    monkeypatch.setattr("kenosis_ort.cli.machine_commands.demonstrate", lambda *_, **__: demonstration)
    onnx.save(models.mlp(n_in=48, hidden=64, n_out=32), "linear.onnx")
    Path("models.toml").write_text("[models.digits]\nmodel = 'float.onnx'\ndata = 'samples.npz'\n")
    row = sweep_command.Row("digits", "20 of 20", False, "out.onnx", 1.0, 30.0, 2.0, 100, 30)
    monkeypatch.setattr("kenosis_ort.cli.sweep_command.perform", lambda _: row)  # see test_script
    return shell


def call(shell, command, more=""):
    for made in ("table.json", "all.json", "first.json"):
        (shell.folder / made).unlink(missing_ok=True)
    if command == "merge":
        shell("calibrate float.onnx first.json --synthetic 1 -q")
    return shell(f"{command} {CALLS[command]} {more}")


def test_every_command_is_tried_here():
    assert CALLS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_all_that_is_on_stdout(command, folder):
    printed = call(folder, command, "--json")
    assert printed.data
    assert (printed.lacks("NaN", "Infinity"), printed.err) == (["NaN", "Infinity"], "")


@pytest.mark.parametrize("command", COMMANDS)
def test_quiet_prints_nothing_and_text_has_no_escapes_in_a_pipe(command, folder):
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
def test_help_has_an_example_and_the_exit_codes(command, shell):
    printed = shell(f"{command} --help")
    assert f"\n  kenosis-ort {command}" in printed.out
    assert not printed.lacks("exit codes:", "--json", "--quiet", "--verbose")
    if command:
        assert ("\n  1 " in printed.out) is bool(COMMANDS[command].one)
        assert COMMANDS[command].summary[0].islower()


def test_the_common_options_go_before_and_after_the_command(shell):
    for line in ("--json inspect float.onnx", "inspect float.onnx --json"):
        assert shell(line).data["quantization"] == "float"


def test_verbose_logs_to_stderr(shell):
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


def test_parsing_imports_nothing_slow():
    code = PARSE_ONLY.format(path=str(Path(sys.modules["kenosis_ort"].__file__ or "").parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("command", [name for name, each in COMMANDS.items() if each.needs_data])
def test_where_data_are_needed_their_lack_is_told(command, shell):
    words = CALLS[command].partition(" --data")[0]
    assert "--synthetic" in shell(f"{command} {words}", code=2).err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_model_is_named_with_the_closest_one(command, shell):
    """Whatever takes a model; bench leaves models out, and is asked of a single one elsewhere."""
    if any(one.dest in ("model", "float_model") for one in COMMANDS[command].arguments):
        line = CALLS[command].replace("float.onnx", "flaot.onnx").replace("int8.onnx", "int4.onnx")
        assert re.search("Did you mean.* Fix: ", shell.complaint(f"{command} {line.replace('linear', 'flaot')}"))


def test_a_screen_without_colours_or_a_terminal_shows_no_bar(capsys):
    with screen.Screen().progress("counting") as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")


def test_what_json_cannot_say_is_null(capsys):
    screen.Screen(as_json=True).result(lambda: {"a": [float("inf"), float("nan"), 1.0]}, lambda: "")
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.0]}


def test_a_terminal_gets_a_bar_that_clears_itself():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, force_interactive=True, width=80, legacy_windows=False)
    with screen.Screen().progress("calibrating", console) as progress:
        progress(1, None)
        progress(3, 4)
    assert re.search(r"(?s)calibrating.*3/4.*\x1b\[2K$", stream.getvalue())
