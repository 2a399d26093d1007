"""Paths, bytes, external data, custom operators, models that the runtime refuses; and whose runtime is asked."""

import dataclasses
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort import FusionReport, KenosisWarning, OptionError, quantize_static, verify_fusion
from kenosis_ort.cli.main import main
from kenosis_ort.errors import ModelLoadError, VerificationError
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.save import made_for, mark
from kenosis_ort.targets import Hooks, Target, get_target
from kenosis_ort.verify import check_bias_alignment
from tests import models
from tests.targets.qdq import QdqGraph
from tests.verify.expect import one


@pytest.fixture
def model() -> onnx.ModelProto:
    g = QdqGraph()
    return g.model(g.relu_q(g.op("Relu", g.conv(g.act_input()))))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files and as working folder."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(folder)
    return folder


def split(model: onnx.ModelProto, path: Path) -> Path:
    """Saves a model with its data beside it."""
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    return path


def test_all_forms_of_a_model_give_the_same_report_and_leave_nothing(model, tmp_path, scratch, monkeypatch):
    expected, content, path = verify_fusion(model), model.SerializeToString(), tmp_path / "model.onnx"
    onnx.save(model, path)
    assert [verify_fusion(form) for form in (path, str(path), content)] == [expected] * 3
    assert verify_fusion(split(onnx.load(path), tmp_path / "split.onnx")) == expected
    monkeypatch.setattr("kenosis_ort.graph.load.MAPPED_FROM", 0)  # a large one goes through a file
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((64, 1024), np.float32), "unused"))
    assert verify_fusion(model) == expected
    assert list(scratch.iterdir()) == []
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "split.onnx", "model.data", "scratch"}


def test_float_node_with_external_scales(tmp_path: Path) -> None:
    g = QdqGraph()
    path = split(g.model(g.q(g.op("Relu", g.conv(g.act_input())))), tmp_path / "model.onnx")
    assert "zero point of its Q is 128" in one(verify_fusion(path), "Conv").reason
    assert check_bias_alignment(onnx.load(path, load_external_data=False), base=tmp_path) == []


def test_missing_files(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = split(copy_model(model), tmp_path / "model.onnx")
    (tmp_path / "model.data").unlink()
    with pytest.raises(VerificationError):
        verify_fusion(path)
    with pytest.raises(ModelLoadError, match="does not exist"):
        verify_fusion(tmp_path / "none.onnx")
    with pytest.raises(VerificationError):
        verify_fusion(model, custom_op_libraries=[str(tmp_path / "none.so")])


def test_refusal_names_the_node_by_its_own_name(model: onnx.ModelProto, scratch: Path) -> None:
    node = next(n for n in model.graph.node if n.op_type == "Relu")
    node.op_type, node.name = "NoSuchOperator", "my_node"
    with pytest.raises(VerificationError, match="my_node") as caught:
        verify_fusion(model)
    assert "kv#" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert list(scratch.iterdir()) == []


# ---- a file says for which target it was made; the proof asks its runtime, and says so where it cannot ---------------


def made(out: Path, target: str | Target = "ort-cpu", **options: Any) -> Path:
    model = models.conv_relu_chain(2)
    quantize_static(model, out, models.reader(model, 4), target=target, recipe="plain", promise=False, **options)
    return out


def test_a_file_says_for_which_target_it_was_made_but_not_one_for_other_tools(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    assert made_for(onnx.load(made(out))) == made_for(onnx.load(made(out, format="qop"))) == "ort-cpu"
    assert made_for(onnx.load(made(out, "tensorrt"))) == "tensorrt"
    assert made_for(onnx.load(made(out, format="qonnx"))) is made_for(models.conv_relu_chain(2)) is None


def test_marking_replaces_the_mark_and_nothing_else() -> None:
    model = models.conv_relu_chain(2)
    onnx.helper.set_model_props(model, {"author": "somebody"})
    mark(model, "first")
    mark(model, "second")
    assert {e.key: e.value for e in model.metadata_props} == {"author": "somebody", "kenosis_ort.target": "second"}


def test_the_runtime_of_the_files_own_target_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def prove(model: Any, **_: Any) -> FusionReport:
        asked.append("elsewhere")
        return FusionReport((), "1", runtime="another")

    elsewhere = dataclasses.replace(get_target("ort-cpu"), name="elsewhere", hooks=Hooks(prove=prove))
    monkeypatch.setattr("kenosis_ort.verify.TARGETS", {"elsewhere": elsewhere, "ort-cpu": get_target("ort-cpu")})
    path = made(tmp_path / "out.onnx", elsewhere)
    asked.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify_fusion(path).runtime == "another"
    assert asked == ["elsewhere"]
    with pytest.warns(KenosisWarning, match="was made for target 'elsewhere'.*Fix: target='elsewhere'"):
        assert verify_fusion(path, target="ort-cpu").runtime == "onnxruntime"


def test_a_file_for_a_runtime_that_is_not_here_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path / "out.onnx", "tensorrt")
    with pytest.warns(KenosisWarning, match="made for target 'tensorrt', and the runtime of 'ort-cpu' is asked"):
        verify_fusion(path)
    with pytest.raises(OptionError, match="'tensorrt' has no runtime here"):
        verify_fusion(path, target="tensorrt")
    for command, shown in (("verify", "asked: onnxruntime"), ("explain", "nodes that carry arithmetic")):
        assert main([command, str(path)]) == 0
        printed = capsys.readouterr()
        assert re.fullmatch("kenosis-ort: warning: .*made for target 'tensorrt'.*\n", printed.err), command
        assert shown in printed.out
