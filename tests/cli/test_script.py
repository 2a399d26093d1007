"""``python -m kenosis_ort SCRIPT ARGS``: an existing script, unchanged, with ours in stock's place."""

import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime.quantization as stock
import pytest

from kenosis_ort.__main__ import is_script, run_script
from kenosis_ort.verify import verify_fusion
from tests import models

SCRIPT = Path(__file__).parents[2] / "examples" / "drop_in_before.py"


def test_the_script_of_the_examples_runs_unchanged_with_ours_in_stocks_place():
    command = [sys.executable, "-m", "kenosis_ort", SCRIPT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    accuracy, verdict = done.stdout.splitlines()
    assert float(accuracy.rpartition(" ")[2]) >= 0.97
    assert verdict != "no report"
    told = done.stderr.splitlines()
    assert told[-2].endswith(f"digits.int8.onnx: {verdict}")
    assert told[-1] == "kenosis-ort: called quantize_static 1 time"


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("module", [False, True])
def test_a_script_or_module_sees_its_own_arguments_and_folder(tmp_path, monkeypatch, capsys, module):
    (tmp_path / "beside.py").write_text("NAME = 'found'")
    if module:
        monkeypatch.chdir(tmp_path)
    path = script(tmp_path, "import sys, beside\nprint(__name__, sys.argv[1:], beside.NAME)")
    before = (sys.argv, list(sys.path), stock.quantize_static, stock.quantize)
    assert run_script([*(["-m", "script"] if module else [path]), "--flag", "a b"]) == 0
    assert capsys.readouterr().out == "__main__ ['--flag', 'a b'] found\n"
    assert (sys.argv, list(sys.path), stock.quantize_static, stock.quantize) == before
    sys.modules.pop("beside", None)


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
    assert run_script([str(tmp_path / "scirpt.py")]) == 2
    assert "Did you mean 'script.py'?" in capsys.readouterr().err


def test_a_script_is_told_from_a_command():
    lines = ("a.py", "-m x", "-m", "quantize m.onnx", "")
    assert [is_script(line.split()) for line in lines] == [True, True, False, False, False]


CLIENT = """
import sys
from onnxruntime.quantization import QDQQuantizer, QuantType
from onnxruntime.quantization.calibrate import create_calibrator
import onnx
from tests import models

path, out = sys.argv[1:]
calibrator = create_calibrator(path, None, out + ".augmented")
calibrator.collect_data(models.reader(onnx.load(path), 2))
quantizer = QDQQuantizer(onnx.load(path), True, False, QuantType.QInt8, QuantType.QUInt8, calibrator.compute_data(),
                         [], [], ["Conv", "Relu", "Add", "Gemm", "GlobalAveragePool", "Flatten"], {})
quantizer.quantize_model()
quantizer.model.save_model_to_file(out)
"""


def test_a_client_that_builds_the_quantizer_itself_is_told_what_came_of_it(tmp_path, capsys):
    onnx.save(models.residual_block(), tmp_path / "m.onnx")
    assert run_script([script(tmp_path, CLIENT), str(tmp_path / "m.onnx"), str(tmp_path / "q.onnx")]) == 0
    told = capsys.readouterr().err
    assert "kenosis-ort: QDQQuantizer: onnxruntime" in told
    assert told.splitlines()[-1] == "kenosis-ort: called create_calibrator 1 time, QDQQuantizer 1 time"
    assert verify_fusion(tmp_path / "q.onnx").integer_share() == 1.0
