"""A file says for which target it was made; the proof asks that one's runtime, and says so where it cannot."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest

from kenosis_ort import FusionReport, KenosisWarning, OptionError, quantize_static, verify_fusion
from kenosis_ort.cli.main import main
from kenosis_ort.graph.save import made_for, mark
from kenosis_ort.targets import Hooks, Target, get_target
from tests import models


def made(out: Path, target: str | Target) -> Path:
    model = models.conv_relu_chain(2)
    quantize_static(model, out, models.reader(model, 4), target=target, recipe="plain", promise=False)
    return out


def test_a_file_says_for_which_target_it_was_made(tmp_path: Path) -> None:
    for target in ("ort-cpu", "tensorrt"):
        path = made(tmp_path / f"{target}.onnx", target)
        assert made_for(onnx.load(path)) == target
    assert made_for(models.conv_relu_chain(2)) is None


@pytest.mark.parametrize(("said", "target"), [("qop", "ort-cpu"), ("qonnx", None)])
def test_other_formats_say_so_too_but_not_those_for_other_tools(tmp_path: Path, said: Any, target: str | None) -> None:
    model, out = models.conv_relu_chain(2), tmp_path / "out.onnx"
    quantize_static(model, out, models.reader(model, 4), format=said, recipe="plain", promise=False)
    assert made_for(onnx.load(out)) == target


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
        assert printed.err.startswith("kenosis-ort: warning: "), command
        assert "made for target 'tensorrt'" in printed.err
        assert printed.err.count("\n") == 1
        assert shown in printed.out
