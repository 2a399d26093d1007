"""`fuse`: attention as one operator in a float model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import kenosis_ort
from kenosis_ort.cli import exits
from kenosis_ort.cli.main import main
from tests.graph.build import run
from tests.rewrite.test_fuse_attention import Heads


def attention() -> onnx.ModelProto:
    """A model of one attention of two heads over projections of ``x`` [2, 4, 5]."""
    g = Heads([2, 4, 5])
    q, k, v = (g.turned(g.project("x", 5, 2, 4, 2, 4), 0, 2, 1, 3) for _ in range(3))
    return g.model(g.attend(g.scores(q, k), v))


def test_the_file_holds_the_layer_and_computes_the_same(tmp_path: Path):
    x = np.random.default_rng(0).normal(size=(2, 4, 5)).astype(np.float32)
    source, out = tmp_path / "float.onnx", tmp_path / "fused.onnx"
    onnx.save(attention(), source)
    before = source.read_bytes()
    found = kenosis_ort.fuse(source, out)
    assert source.read_bytes() == before
    assert len(found.attentions) == 1
    session = ort.InferenceSession(out, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], run(attention(), {"x": x})[0], rtol=1e-4, atol=1e-5)


def test_a_model_in_memory_is_not_changed_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    proto = attention()
    before = proto.SerializeToString(deterministic=True)
    assert len(kenosis_ort.fuse(proto).attentions) == 1
    assert proto.SerializeToString(deterministic=True) == before
    assert not list(tmp_path.iterdir())


def test_half_precision_stays_what_it_is_and_is_told():
    proto = attention()
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    found = kenosis_ort.fuse(proto)
    assert not found.attentions
    assert any("float32" in note for note in found.notes)
    assert all(t.data_type != onnx.TensorProto.FLOAT for t in found.model.graph.initializer)


def test_an_output_over_the_model_it_reads_is_in_place(tmp_path: Path):
    path = tmp_path / "m.onnx"
    onnx.save(attention(), path)
    kenosis_ort.fuse(path, path)
    assert [n.op_type for n in onnx.load(path).graph.node].count("Attention") == 1


@pytest.mark.parametrize("wrong", [3, None, b"model"])
def test_what_is_no_model_is_told(wrong: object):
    with pytest.raises(kenosis_ort.ArgumentTypeError, match="model"):
        kenosis_ort.fuse(wrong)


def test_the_command_names_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, out = tmp_path / "float.onnx", tmp_path / "fused.onnx"
    onnx.save(attention(), source)
    assert main(["fuse", str(source), str(out), "--json"]) == exits.SUCCESS
    assert len(json.loads(capsys.readouterr().out)["attentions"]) == 1
    assert main(["fuse", str(tmp_path / "none.onnx"), str(out)]) == exits.ERROR
