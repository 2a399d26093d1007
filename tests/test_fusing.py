"""`fuse`: attention as one operator in a float model."""

import json
from pathlib import Path

import onnx
import pytest

import kenosis_ort
from kenosis_ort.cli.main import main
from tests import models
from tests.contracts import rules
from tests.graph.build import assert_same, ops


@pytest.fixture
def layer():
    """An attention in parts."""
    return rules.net(rules.EXAMPLES["fuse_attention"][1])


@pytest.mark.since("1.24")  # before, the runtime quantizes no operator set that has Attention
def test_the_file_holds_the_layer_and_computes_the_same_and_what_is_in_memory_stays(
    layer, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    before = layer.SerializeToString(deterministic=True)
    assert len(kenosis_ort.fuse(layer).attentions) == 1
    assert layer.SerializeToString(deterministic=True) == before
    assert not list(tmp_path.iterdir())
    source, out = Path("float.onnx"), Path("fused.onnx")
    source.write_bytes(before)
    assert main(["fuse", str(source), str(out), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["attentions"]) == 1
    assert source.read_bytes() == before
    assert_same(layer, onnx.load(out), models.feeds(layer, 1)[0])
    assert len(kenosis_ort.fuse(source, source).attentions) == 1  # in place
    assert ops(onnx.load(source)) == ops(onnx.load(out)) == ["Attention"]


def test_half_precision_stays_what_it_is_and_is_told(layer):
    for value in (*layer.graph.input, *layer.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    found = kenosis_ort.fuse(layer)
    assert not found.attentions
    assert any("float32" in note for note in found.notes)
    assert found.model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16


@pytest.mark.parametrize("wrong", [3, None, b"model"])
def test_what_is_no_model_is_told(wrong):
    with pytest.raises(kenosis_ort.ArgumentTypeError, match="model"):
        kenosis_ort.fuse(wrong)
