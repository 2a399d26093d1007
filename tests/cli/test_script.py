"""``python -m kenosis_ort SCRIPT ARGS``: an existing script, unchanged, with ours in stock's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime.quantization as stock
import pytest

from kenosis_ort.cli.main import is_script, run_script
from kenosis_ort.verify import verify_fusion
from tests import models

SCRIPT = Path(__file__).with_name("scripts") / "run.py"


def test_a_script_in_the_style_of_the_runtimes_examples_runs_unchanged(tmp_path: Path, made: Path):
    out = tmp_path / "out.onnx"
    model, data = made / "float.onnx", made / "samples.npz"
    arguments = ["--input_model", model, "--output_model", out, "--calibrate_dataset", data]
    done = subprocess.run(
        [sys.executable, "-m", "kenosis_ort", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Avg: ") == 2
    assert f"kenosis-ort: {out}: " in done.stderr
    assert verify_fusion(out).kernels


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_the_script_sees_its_own_arguments_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "beside.py").write_text("NAME = 'found'")
    before = (sys.argv, list(sys.path), stock.quantize_static, stock.quantize)
    text = "import sys, beside\nprint(__name__, sys.argv[1:], beside.NAME)"
    assert run_script([script(tmp_path, text), "--flag", "a b"]) == 0
    assert capsys.readouterr().out == "__main__ ['--flag', 'a b'] found\n"
    assert (sys.argv, list(sys.path), stock.quantize_static, stock.quantize) == before
    sys.modules.pop("beside", None)


IMPORTS = """
from onnxruntime.quantization import quantize_static, quantize, quantize_dynamic
from onnxruntime.quantization.quantize import quantize_static as direct
import kenosis_ort
assert quantize_static.__wrapped__ is kenosis_ort.quantize_static
assert direct is quantize_static
assert quantize_dynamic.__module__.startswith("onnxruntime.")
"""


def test_both_ways_to_import_lead_to_ours_and_dynamic_stays_stocks(tmp_path: Path):
    assert run_script([script(tmp_path, IMPORTS)]) == 0
    assert not hasattr(stock.quantize_static, "__wrapped__"), "outside, stock is stock"


def test_exit_codes_and_errors_are_the_scripts_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        run_script([script(tmp_path, "import sys; sys.exit(7)")])
    assert stopped.value.code == 7
    with pytest.raises(ZeroDivisionError):
        run_script([script(tmp_path, "1 / 0")])
    assert "nothing of kenosis-ort was called" in capsys.readouterr().err
    text = "from onnxruntime.quantization import quantize_static as q\nq('none.onnx', 'out.onnx', None)"
    assert run_script([script(tmp_path, text)]) == 2
    said = capsys.readouterr().err
    assert "kenosis-ort: error: " in said
    assert "raised by quantize_static 1 time" in said
    assert "nothing of kenosis-ort was called" not in said


def test_a_missing_script_is_named_with_the_closest_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script(tmp_path, "")
    assert run_script([str(tmp_path / "scirpt.py")]) == 2
    assert "Did you mean 'script.py'?" in capsys.readouterr().err


def test_a_module_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a_module_of_mine.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert run_script(["-m", "a_module_of_mine", "x"]) == 0
    assert capsys.readouterr().out == "__main__ ['x']\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["a.py"], True), (["-m", "x"], True), (["-m"], False), (["quantize", "m.onnx"], False), ([], False)],
)
def test_a_script_is_told_from_a_command(arguments: list[str], expected: bool):
    assert is_script(arguments) is expected


CLIENT = """
import sys
from onnxruntime.quantization import QDQQuantizer, QuantType
from onnxruntime.quantization.calibrate import create_calibrator
import numpy as np
import onnx

class Reader:
    def __init__(self, n): self.left = n
    def get_next(self):
        self.left -= 1
        if self.left >= 0:
            return {"x": np.random.default_rng(self.left).normal(size=(1, 3, 8, 8))}

path, out = sys.argv[1:]
calibrator = create_calibrator(path, None, out + ".augmented")
calibrator.collect_data(Reader(2))
quantizer = QDQQuantizer(onnx.load(path), True, False, QuantType.QInt8, QuantType.QUInt8, calibrator.compute_data(),
                         [], [], ["Conv", "Relu", "Add", "Gemm", "GlobalAveragePool", "Flatten"], {})
quantizer.quantize_model()
quantizer.model.save_model_to_file(out)
"""


def test_a_client_that_builds_the_quantizer_itself_is_told_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    onnx.save(models.residual_block(), tmp_path / "m.onnx")
    assert run_script([script(tmp_path, CLIENT), str(tmp_path / "m.onnx"), str(tmp_path / "q.onnx")]) == 0
    told = capsys.readouterr().err
    assert "kenosis-ort: QDQQuantizer: onnxruntime" in told
    assert told.splitlines()[-1] == "kenosis-ort: called create_calibrator 1 time, QDQQuantizer 1 time"
    assert verify_fusion(tmp_path / "q.onnx").integer_share() == 1.0


def test_a_script_that_never_meets_ours_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run_script([script(tmp_path, "raise SystemExit(3)")])
    assert "nothing of kenosis-ort was called" in capsys.readouterr().err
