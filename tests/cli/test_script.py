"""Scripts of the caller's with ours in stock's place, and sweeps over models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime.quantization as stock
import pytest

from kenosis_ort import KenosisError, __main__, verify_fusion
from kenosis_ort.cli import main, sweep_command, sweep_command as sweeping
from kenosis_ort.report.text import to_text
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


def script(folder, text):
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
    assert __main__.run_script([*(["-m", "script"] if module else [path]), "--flag", "a b"]) == 0
    assert capsys.readouterr().out == "__main__ ['--flag', 'a b'] found\n"
    assert (sys.argv, list(sys.path), stock.quantize_static, stock.quantize) == before
    sys.modules.pop("beside", None)


def test_exit_codes_and_errors_are_the_scripts_own(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.run_script([script(tmp_path, "import sys; sys.exit(7)")])
    assert stopped.value.code == 7
    with pytest.raises(ZeroDivisionError):
        __main__.run_script([script(tmp_path, "1 / 0")])
    assert "nothing of kenosis-ort was called" in capsys.readouterr().err
    text = "from onnxruntime.quantization import quantize_static as q\nq('none.onnx', 'out.onnx', None)"
    assert __main__.run_script([script(tmp_path, text)]) == 2
    said = capsys.readouterr().err
    assert "kenosis-ort: error: " in said
    assert "raised by quantize_static 1 time" in said
    assert "nothing of kenosis-ort was called" not in said
    assert __main__.run_script([str(tmp_path / "scirpt.py")]) == 2
    assert "Did you mean 'script.py'?" in capsys.readouterr().err


def test_a_script_is_told_from_a_command():
    lines = ("a.py", "-m x", "-m", "quantize m.onnx", "")
    assert [__main__.is_script(line.split()) for line in lines] == [True, True, False, False, False]


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
    assert __main__.run_script([script(tmp_path, CLIENT), str(tmp_path / "m.onnx"), str(tmp_path / "q.onnx")]) == 0
    told = capsys.readouterr().err
    assert "kenosis-ort: QDQQuantizer: onnxruntime" in told
    assert told.splitlines()[-1] == "kenosis-ort: called create_calibrator 1 time, QDQQuantizer 1 time"
    assert verify_fusion(tmp_path / "q.onnx").integer_share() == 1.0


# ---- sweeps: one call a model, the table, and nothing done twice ----------------------------------------------------


NET = "[models.a]\nmodel = 'net.onnx'\ndata = 'data.npz'"
PLAIN = "recipe = 'plain'\nno_promise = true\n"
ONE = f"{NET}\n{PLAIN}"


@pytest.fixture
def folder(tmp_path):
    onnx.save(models.conv_relu_chain(2), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=models.normal((4, 4, 8, 8)))
    return tmp_path


def write(folder, text):
    file = folder / "models.toml"
    file.write_text(text)
    return file


def test_models_are_quantized_once_and_the_table_says_what_failed(folder, monkeypatch, capsys):
    models = "[models.good]\nmodel = 'net.onnx'\n[models.bad]\nmodel = 'net.onnx'\nexclude = ['no such node']\n"
    file = write(folder, f"[defaults]\ndata = 'data.npz'\n{PLAIN}{models}")
    assert main.main(["sweep", str(file), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    results = folder / "models.sweep"
    assert data == json.loads((results / "sweep.json").read_text())
    good, bad = data["models"]
    output = str(results / "good.int8.onnx")
    assert good.items() >= {"name": "good", "failed": False, "earlier": False, "output": output}.items()
    assert min(good["sqnr_db"], good["size_after"]) > 10
    assert (bad["failed"], "no such node" in bad["verdict"]) == (True, True)

    done = []

    def performed(job, *_):
        done.append(job.name)
        return sweep_command.Row(job.name, "done", False, str(job.output))

    monkeypatch.setattr(sweeping, "perform", performed)

    def repeated():
        done.clear()
        main.main(["sweep", str(file), "-q"])
        return list(done)

    assert repeated() == ["bad"], "what failed is tried again, what is done is left"
    (results / "good.int8.onnx").write_bytes(b"edited")
    assert repeated() == ["good", "bad"], "another output than the recorded one"


def test_whatever_a_model_depends_on_makes_it_again(folder, monkeypatch):
    def job(text=ONE):
        return sweep_command.read_jobs(write(folder, text), folder)[0]

    row = sweep_command.perform(job())
    assert not row.failed, row.verdict
    assert sweep_command.done_before(job()) is not None
    assert sweep_command.done_before(job(ONE.replace("no_promise = true", "threads = 1"))) is None, "other options"
    with monkeypatch.context() as patched:
        patched.setattr("kenosis_ort.cli.sweep_command.versions", lambda: {"onnxruntime": "0"})
        assert sweep_command.done_before(job()) is None, "other versions"
    for name in ("net.onnx", "data.npz"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b"\0")
        assert sweep_command.done_before(job()) is None, f"another {name}"
        (folder / name).write_bytes(content)
    job().record.write_text("{}")
    assert sweep_command.done_before(job()) is None, "a record that is none"


def test_a_process_that_dies_fails_its_model_alone(folder, monkeypatch):
    job = sweep_command.read_jobs(write(folder, ONE), folder)[0]
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    row = sweep_command.perform(job)
    assert (row.failed, "killed by signal 9" in row.verdict, sweep_command.done_before(job)) == (True, True, None)


@pytest.mark.parametrize(("text", "what"), [
    ("[models.a", "not valid TOML"), ("", "names no model"), ("models = 3", "names no model"),
    ("[modles.a]\nmodel = 'net.onnx'", r"unknown table \[modles\]. Did you mean 'models'"),
    ("[models.a]\ndata = 'data.npz'", "it names no model"),
    ("[models.a]\nmodel = 'no.onnx'\ndata = 'data.npz'", "model file does not exist"),
    ("[models.a]\nmodel = 'net.onnx'", "names no data"), (f"{NET}\nrecpie = 'x'", "unknown argument '--recpie"),
    (f"{NET}\njson = true", "no setting of one model"),
    (f'{NET}\ncache = "a\\u0000b"', "'--cache' is given a null character"), (f"{NET}\nthreads = 'x'", "threads"),
    (f"{NET}\nset = {{a = 1}}", "no string, number"),
    ("[models.'../a']\nmodel = 'net.onnx'\ndata = 'data.npz'", "no name for a model"),
    ("[models.a]\nmodel = 'net.onnx'\nout = 'net.onnx'\ndata = 'data.npz'", "is the float model of 'a'"),
    (f"[defaults]\nout = 'o'\n{NET}\n{NET.replace('models.a', 'models.b')}", "output of 'b' is the output of 'a'"),
])  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_done(folder, text, what):
    with pytest.raises(KenosisError, match=what):
        sweep_command.read_jobs(write(folder, text), folder / "results")
    assert not (folder / "results").exists()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system gives processors to none")
def test_no_processor_is_two_workers():
    everything = os.sched_getaffinity(0)
    shares = [sweep_command.share_of(number, len(everything)) for number in range(len(everything))]
    assert sorted(processor for share in shares for processor in share) == sorted(everything)


def test_names_cannot_do_anything_on_a_terminal():
    row = sweep_command.Row("[red]<script>", "</td>\x1b[2J", False, "o", sqnr_db=float("inf"))
    text = to_text(sweep_command.render([row]))
    assert ("[red]<script>" in text, "\x1b" in text) == (True, False)
