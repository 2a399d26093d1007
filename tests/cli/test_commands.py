"""inspect, explain, verify, compare, calibrate and merge, bench, targets, doctor: what each says."""

from pathlib import Path

import pytest

from kenosis_ort import CalibrationTable
from kenosis_ort.demo import measurements as measured
from kenosis_ort.report.text import to_text
from kenosis_ort.targets import TARGETS
from tests.cli.conftest import BATCH, ROUNDS, Printed, Shell


def test_a_float_and_a_quantized_model_are_inspected(shell: Shell) -> None:
    shown = ("quantization float", "3,186", "image float [batch, 1, 8, 8]", "4 Conv", "ai.onnx")
    assert not shell("inspect float.onnx").lacks(*shown)
    found = shell("inspect int8.onnx --json").data
    assert (found["quantization"], found["file_bytes"]) == ("QDQ", len(shell.files()["int8.onnx"]))
    assert found["weight_types"]["int8"] > 3_000


# -- explain


def test_the_plan_of_a_float_model_is_explained(shell: Shell) -> None:
    assert "None of 5 nodes that carry arithmetic" in shell("explain float.onnx").line
    shown = ("Conv 'layer5.conv': integer, by conv-integer", "input 1")
    assert not shell("explain float.onnx layer5.conv").lacks(*shown)
    gone = [e for e in shell("explain float.onnx --all --json").data if e["kind"] == "prepared away"]
    assert {e["op_type"] for e in gone} == {"BatchNormalization"}
    assert "folded into its neighbours" in shell("explain float.onnx", gone[0]["node"]).line


def test_a_quantized_model_is_asked_of_the_runtime(shell: Shell) -> None:
    assert "runs as com.microsoft.QLinearConv" in shell("explain int8.onnx layer5.conv").line
    shell.quantize("-q --exclude layer5.conv")
    assert not shell("explain out.onnx").lacks("1 of 5 nodes", "Conv 'layer5.conv': float, by")


# -- verify


def test_the_proof_and_what_strict_makes_of_it(shell: Shell) -> None:
    printed = shell("verify int8.onnx --strict")
    assert not printed.lacks("5 of 5 Conv/Gemm/MatMul run on integer kernels", "com.microsoft.QGemm")
    raw = shell("verify int8.onnx --json").data
    assert raw["verdict"].startswith("5 of 5")
    assert {k["op_type"] for k in raw["kernels"]} >= {"Conv", "Gemm", "Relu"}
    assert "0 of 5" in shell("verify float.onnx").out
    shell("verify float.onnx --strict", code=1)


def test_patterns_name_the_broken_clause(shell: Shell) -> None:
    printed = shell("verify int8.onnx --patterns onednn --strict", code=1)
    broken = "breaks bias-conversion: the bias is s32 behind a DequantizeLinear"
    assert not printed.lacks("Convs match 'oneDNN, Quantized Convolution Fusion Patterns'", broken)
    shell("verify int8.onnx --patterns onednn")


# -- compare

COMPARE = "compare float.onnx int8.onnx --data samples.npz"


def test_outputs_layers_and_a_next_step(shell: Shell) -> None:
    printed = shell(f"{COMPARE} --full")
    shown = ("logits 100.0 %", "Layers, most lost first", "Weights, worst first", " samples; ", "next: ")
    assert printed.lacks(*shown, "made-up") == ["made-up"]
    itself = shell("compare float.onnx float.onnx --synthetic 2 --min-sqnr 100")
    assert not itself.lacks("inf dB", "made-up data")


@pytest.mark.parametrize(
    ("demand", "code"),
    [("--min-agreement 99% --min-sqnr 10", 0), ("--min-sqnr 90", 1), ("--min-agreement 50% --min-sqnr 90", 1)],
)
def test_demands_show_in_the_exit_code(demand: str, code: int, shell: Shell) -> None:
    found = shell(f"{COMPARE} {demand} --json", code=code).data
    assert (found["below"], found["made_up_data"]) == ([] if code == 0 else ["logits"], False)


# -- calibrate and merge


def test_tables_are_written_merged_and_used(shell: Shell) -> None:
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


def test_models_are_timed_side_by_side_and_what_cannot_run_is_left_out(shell: Shell) -> None:
    printed = shell(f"bench float.onnx int8.onnx {QUICK}")
    assert not printed.lacks("float.onnx", "int8.onnx", "baseline", "p95", "made-up data")
    raw = shell(f"bench float.onnx int8.onnx --data samples.npz --threads 2 --json {QUICK}").data
    assert ([m["name"] for m in raw["models"]], raw["threads"]) == (["float.onnx", "int8.onnx"], 2)
    assert not any("made-up" in note for note in raw["notes"])
    Path("broken.onnx").write_bytes(b"no model")
    printed = shell(f"bench float.onnx broken.onnx --input-range image=0,1 {QUICK}", code=1)
    assert "left out: broken.onnx" in printed.out


# -- targets and compare-targets


def test_all_targets_are_listed_with_what_they_want(shell: Shell) -> None:
    listed = {row["target"]: row for row in shell("targets --json").data}
    assert (list(listed), listed["ort-cpu"]["proved"]) == (list(TARGETS), True)
    assert listed["tensorrt"].items() >= {"activations": "int8, zero point 0", "proved": False}.items()
    assert "x * Sigmoid(x)" in listed["tensorrt"]["taken_in"]


@pytest.mark.parametrize("name", TARGETS)
def test_the_table_of_a_target_holds_every_rule_and_fact(name: str, shell: Shell) -> None:
    target = TARGETS[name]
    rows = shell(f"targets {name} --json").data["rules"]
    assert [row["id"] for row in rows] == [*(r.id for r in target.rules), *(i for i, _ in target.facts)]
    if name == "tensorrt":
        assert all(row["source"].startswith("[") for row in rows if row["role"] != "fact"), "it was not run"
    assert shell(f"targets {name}").out


def test_targets_are_compared_on_a_net(shell: Shell) -> None:
    found = shell("compare-targets float.onnx --target ort-cpu --target tensorrt --json").data
    rows = [(row["target"], row["integer_heavy"], row["heavy"]) for row in found["targets"]]
    assert rows == [("ort-cpu", 5, 5), ("tensorrt", 5, 5)]
    assert found["targets"][1]["grids"] == ["int8 symmetric"]
    differ = {entry["what"]: (entry["ort-cpu"], entry["tensorrt"]) for entry in found["differ"]}
    assert differ["node 'layer3.add'"] == ("integer", "absorbed")
    assert "They do the same" in shell("compare-targets float.onnx --target arm --target arm").out


# -- doctor


def test_the_doctor_tells_facts_and_types(shell: Shell) -> None:
    shown = ("processor", "onnxruntime", "CPUExecutionProvider", "operator sets up to", "uint8 x int8")
    assert not shell("doctor --seconds 0.1").lacks(*shown)
    assert shell("doctor --no-timing").lacks("note: ", "uint8 x int8") == ["uint8 x int8"]


# -- demo


def test_the_demonstration(demonstration: measured.Demonstration, kept_models: Path) -> None:
    """It prints and tells accuracy, speed and proof, and keeps the models."""
    shown = ("float32", "stock, default", "stock, best", "kenosis-ort", "accuracy", "speed")
    printed = Printed(to_text(measured.render(demonstration)), "")
    assert not printed.lacks(*shown, "7 of 7 Conv/Gemm/MatMul run on integer kernels")
    assert (kept_models / "digits_kenosis.onnx").is_file()
    found = demonstration.to_dict()
    assert list(found["models"]) == [measured.FLOAT, measured.STOCK_DEFAULT, measured.STOCK_BEST, measured.OURS]
    assert found["models"][measured.FLOAT]["proof"] is None
    ours = found["models"][measured.OURS]
    assert ours["accuracy"] > 0.97
    assert (ours["proof"][:6], found["batch"], found["rounds"]) == ("7 of 7", BATCH, ROUNDS)
