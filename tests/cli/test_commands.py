"""inspect, explain, compare, calibrate and merge, doctor, completion: what each says."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from kenosis_ort import CalibrationTable
from kenosis_ort.bench import doctor
from kenosis_ort.cli import exits
from kenosis_ort.cli.commands import COMMANDS
from kenosis_ort.cli.main import main
from tests.cli.conftest import PLAIN


def lines(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


class TestInspect:
    def test_a_float_and_a_quantized_model(
        self, digits_model: Path, quantized: Path, capsys: pytest.CaptureFixture[str]
    ):
        assert main(["inspect", str(digits_model)]) == exits.SUCCESS
        printed = lines(capsys)
        for expected in ("quantization float", "3,186", "image float [batch, 1, 8, 8]", "4 Conv", "ai.onnx"):
            assert expected in printed
        assert main(["inspect", str(quantized), "--json"]) == exits.SUCCESS
        found = json.loads(capsys.readouterr().out)
        assert found["quantization"] == "QDQ"
        assert found["file_bytes"] == quantized.stat().st_size
        assert found["weight_types"]["int8"] > 3_000


class TestExplain:
    def test_nothing_heavy_is_float(self, digits_model: Path, capsys: pytest.CaptureFixture[str]):
        assert main(["explain", str(digits_model)]) == exits.SUCCESS
        assert "None of 5 nodes that carry arithmetic" in lines(capsys)

    def test_a_node_of_a_float_model_with_its_inputs(self, digits_model: Path, capsys: pytest.CaptureFixture[str]):
        assert main(["explain", str(digits_model), "layer5.conv"]) == exits.SUCCESS
        printed = lines(capsys)
        assert "Conv 'layer5.conv': integer, by conv-integer" in printed
        assert "input 1" in printed

    def test_a_node_that_is_folded_says_so(self, digits_model: Path, capsys: pytest.CaptureFixture[str]):
        assert main(["explain", str(digits_model), "--all", "--json"]) == exits.SUCCESS
        gone = [e for e in json.loads(capsys.readouterr().out) if e["kind"] == "prepared away"]
        assert {e["op_type"] for e in gone} == {"BatchNormalization"}
        assert main(["explain", str(digits_model), gone[0]["node"]]) == exits.SUCCESS
        assert "folded into its neighbours" in lines(capsys)

    def test_a_quantized_model_is_asked_of_the_runtime(self, quantized: Path, capsys: pytest.CaptureFixture[str]):
        assert main(["explain", str(quantized), "layer5.conv"]) == exits.SUCCESS
        assert "runs as com.microsoft.QLinearConv" in lines(capsys)

    def test_the_float_nodes_of_a_quantized_model(
        self, digits_model: Path, digits_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        out = tmp_path / "o.onnx"
        arguments = ["quantize", str(digits_model), str(out), "--data", str(digits_data), "-q", *PLAIN]
        assert main([*arguments, "--exclude", "layer5.conv"]) == exits.SUCCESS
        assert main(["explain", str(out)]) == exits.SUCCESS
        printed = lines(capsys)
        assert "1 of 5 nodes" in printed
        assert "Conv 'layer5.conv': float, by" in printed

    def test_an_unknown_node_suggests_the_closest(self, digits_model: Path, capsys: pytest.CaptureFixture[str]):
        assert main(["explain", str(digits_model), "layer5.cnv"]) == exits.ERROR
        assert "Did you mean 'layer5.conv'?" in capsys.readouterr().err


class TestCompare:
    def arguments(self, digits_model: Path, quantized: Path, digits_data: Path) -> list[str]:
        return ["compare", str(digits_model), str(quantized), "--data", str(digits_data)]

    def test_outputs_layers_and_a_next_step(
        self, digits_model: Path, quantized: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
    ):
        assert main([*self.arguments(digits_model, quantized, digits_data), "--full"]) == exits.SUCCESS
        printed = lines(capsys)
        for expected in ("logits 100.0 %", "Layers, most lost first", "Weights, worst first", " samples; ", "next: "):
            assert expected in printed
        assert "made-up" not in printed

    @pytest.mark.parametrize(
        ("demand", "code"),
        [
            (["--min-agreement", "99%"], exits.SUCCESS),
            (["--min-sqnr", "10"], exits.SUCCESS),
            (["--min-sqnr", "90"], exits.BELOW),
            (["--min-agreement", "50%", "--min-sqnr", "90"], exits.BELOW),
        ],
    )
    def test_demands_show_in_the_exit_code(
        self, demand: list[str], code: int, digits_model: Path, quantized: Path, digits_data: Path,
        capsys: pytest.CaptureFixture[str],
    ):  # fmt: skip
        assert main([*self.arguments(digits_model, quantized, digits_data), *demand, "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        assert found["below"] == ([] if code == exits.SUCCESS else ["logits"])
        assert found["made_up_data"] is False

    def test_a_model_against_itself_on_made_up_data(self, digits_model: Path, capsys: pytest.CaptureFixture[str]):
        arguments = ["compare", str(digits_model), str(digits_model), "--synthetic", "2", "--min-sqnr", "100"]
        assert main(arguments) == exits.SUCCESS
        printed = lines(capsys)
        assert "inf dB" in printed
        assert "made-up data" in printed


def test_tables_are_written_merged_and_used(
    tmp_path: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
):
    day, night, both = (str(tmp_path / f"{name}.json") for name in ("day", "night", "both"))
    model = str(digits_model)
    assert main(["calibrate", model, day, "--data", str(digits_data)]) == exits.SUCCESS
    assert "from 12 samples; it holds 12 of them" in lines(capsys)
    assert main(["calibrate", model, night, "--synthetic", "3"]) == exits.SUCCESS
    assert main(["merge", both, day, night, "--json"]) == exits.SUCCESS
    assert '"samples": 15' in capsys.readouterr().out
    assert CalibrationTable.load(Path(both)).samples == 15
    out = str(tmp_path / "o.onnx")
    assert main(["quantize", model, out, "--table", both, "--no-promise", "-q"]) == exits.SUCCESS
    bare = str(tmp_path / "bare.json")
    assert main(["calibrate", model, bare, "--data", str(digits_data), "--no-samples", "--json"]) == exits.SUCCESS
    assert '"kept_samples": 0' in capsys.readouterr().out
    assert CalibrationTable.load(Path(bare)).cached is None
    assert main(["merge", both, day]) == exits.ERROR
    assert main(["merge", str(tmp_path / "no" / "b.json"), day]) == exits.ERROR
    assert main(["merge", str(tmp_path / "new.json"), str(tmp_path / "none.json")]) == exits.ERROR
    assert not (tmp_path / "new.json").exists()


class TestDoctor:
    def test_facts_and_the_table_of_types(self, capsys: pytest.CaptureFixture[str]):
        assert main(["doctor", "--seconds", "0.1"]) == exits.SUCCESS
        printed = lines(capsys)
        for expected in ("processor", "onnxruntime", "CPUExecutionProvider", "operator sets up to", "uint8 x int8"):
            assert expected in printed

    def test_without_timing_and_with_a_problem(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(doctor, "_has_quantizer", lambda: False)
        assert main(["doctor", "--no-timing"]) == exits.PROBLEM
        printed = lines(capsys)
        assert "problem: onnxruntime.quantization is missing. Fix: pip install" in printed
        assert "uint8 x int8" not in printed


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_the_commands_and_parses(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == exits.SUCCESS
    script = capsys.readouterr().out
    for expected in (*COMMANDS, "--accuracy-budget"):
        assert expected in script
    assert "compgen_files" in script or "_files" in script, "paths are completed"
    if shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(script)
        subprocess.run([shell, "-n", str(path)], check=True)
