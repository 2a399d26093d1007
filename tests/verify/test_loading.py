"""Paths, bytes, external data, custom operators, and models that the runtime refuses."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort.errors import ModelLoadError, VerificationError
from kenosis_ort.verify import check_bias_alignment, verify_fusion
from tests.targets.qdq import QdqGraph
from tests.verify.expect import one


@pytest.fixture
def model() -> onnx.ModelProto:
    g = QdqGraph()
    return g.model(g.relu_q(g.op("Relu", g.conv(g.q(g.input((1, 16, 12, 12)))))))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files and as working folder."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(folder)
    return folder


def test_path_bytes_and_proto_give_the_same_report(model: onnx.ModelProto, tmp_path: Path, scratch: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    expected = verify_fusion(model)
    assert verify_fusion(path) == expected
    assert verify_fusion(str(path)) == expected
    assert verify_fusion(model.SerializeToString()) == expected
    assert list(scratch.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "scratch"]


def test_external_data(model: onnx.ModelProto, tmp_path: Path, scratch: Path) -> None:
    expected = verify_fusion(model)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    assert verify_fusion(path) == expected
    assert list(scratch.iterdir()) == []


def test_float_node_with_external_scales(tmp_path: Path) -> None:
    g = QdqGraph()
    model = g.model(g.q(g.op("Relu", g.conv(g.q(g.input((1, 16, 12, 12)))))))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    assert "zero point of its Q is 128" in one(verify_fusion(path), "Conv").reason
    assert check_bias_alignment(onnx.load(path, load_external_data=False), base=tmp_path) == []


def test_missing_files(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    (tmp_path / "model.data").unlink()
    with pytest.raises(VerificationError):
        verify_fusion(path)
    with pytest.raises(ModelLoadError, match="does not exist"):
        verify_fusion(tmp_path / "none.onnx")
    with pytest.raises(VerificationError):
        verify_fusion(model, custom_op_libraries=[str(tmp_path / "none.so")])


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"\x08\x0a"])
def test_not_a_model(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError):
        verify_fusion(path)
    with pytest.raises(ModelLoadError):
        verify_fusion(content)


def test_refusal_names_the_node_by_its_own_name(model: onnx.ModelProto, scratch: Path) -> None:
    node = next(n for n in model.graph.node if n.op_type == "Relu")
    node.op_type, node.name = "NoSuchOperator", "my_node"
    with pytest.raises(VerificationError, match="my_node") as caught:
        verify_fusion(model)
    assert "kv#" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert list(scratch.iterdir()) == []


def test_custom_operator_library() -> None:
    extensions = pytest.importorskip("onnxruntime_extensions")
    g = QdqGraph()
    x = g.q(g.gemm(g.q(g.input((4, 32)))))
    y = g.op("Inverse", g.op("MatMul", g.op("Transpose", x, perm=[1, 0]), x), domain="ai.onnx.contrib")
    model = g.model(y)
    model.opset_import.add(domain="ai.onnx.contrib", version=1)
    with pytest.raises(VerificationError, match="custom_op_libraries"):
        verify_fusion(model)
    found = verify_fusion(model, custom_op_libraries=[extensions.get_library_path()])
    assert one(found, "ai.onnx.contrib.Inverse").kernel == "ai.onnx.contrib.Inverse"
    assert one(found, "Gemm").integer


def test_large_model_goes_through_a_file(
    model: onnx.ModelProto, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = verify_fusion(model)
    monkeypatch.setattr("kenosis_ort.graph.load.MAPPED_FROM", 0)
    model.graph.initializer.add().CopyFrom(onnx.numpy_helper.from_array(np.zeros((64, 1024), np.float32), "unused"))
    assert verify_fusion(model) == expected
    assert list(scratch.iterdir()) == []
