"""Sessions of models in memory: large weights are mapped from a file that does not stay behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.external_data import uses_external_data, write_external_data
from kenosis_ort.graph.outside import weight_bytes
from kenosis_ort.runtime import session


@pytest.fixture
def model() -> onnx.ModelProto:
    weight = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    listed = helper.make_tensor("bias", TensorProto.FLOAT, [32], np.arange(32, dtype=np.float32).tolist())
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], name="gemm")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 32])],
        [numpy_helper.from_array(weight, "weight"), listed],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def outputs(model: onnx.ModelProto) -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    return np.asarray(session.open_session(model).run(None, {"x": x})[0])


def test_mapped_weights_compute_the_same_and_leave_nothing(
    model: onnx.ModelProto, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, before = outputs(model), model.SerializeToString()
    monkeypatch.setattr(session, "MAPPED_FROM", 1)
    assert np.array_equal(outputs(model), expected)
    assert model.SerializeToString() == before
    assert list(scratch.iterdir()) == []


def test_a_full_disk_does_not_matter_where_bytes_do(
    model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> onnx.ModelProto:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session, "MAPPED_FROM", 1)
    monkeypatch.setattr(session, "write_external_data", full)
    assert session.openable(model, tmp_path) == model.SerializeToString()
    monkeypatch.setattr(session, "_BYTES_LIMIT", 1)
    with pytest.raises(OSError, match="No space"):
        session.openable(model, tmp_path)


def test_a_refused_model_leaves_nothing(model: onnx.ModelProto, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAPPED_FROM", 1)
    model.graph.node[0].op_type = "Nonsense"
    with pytest.raises(VerificationError, match="Nonsense"):
        session.open_session(model)
    assert list(scratch.iterdir()) == []


def test_weight_bytes_are_those_in_memory(model: onnx.ModelProto, tmp_path: Path) -> None:
    assert weight_bytes(model) == 4 * (64 * 32 + 32)
    shell = write_external_data(model, tmp_path / "weights.bin")
    assert uses_external_data(shell)
    assert weight_bytes(shell) == 4 * 32  # the bias is too small to be moved


def test_what_a_session_returns_as_one_array() -> None:
    pair = [np.float32([[1, 2]]), np.float32([3])]
    np.testing.assert_array_equal(session.as_array(pair), [1, 2, 3])
    np.testing.assert_array_equal(
        session.as_array([{"b": 0.75, "a": 0.25}, {"a": 1.0, "b": 0.0}]), [[0.25, 0.75], [1, 0]]
    )
    np.testing.assert_array_equal(session.as_array({2: 5.0, 1: 4.0}), [4, 5])
    assert not session.as_array([]).size
    assert not session.as_array(None).size
    assert session.as_array([np.array(["a", "b"], object), np.array(["c"], object)]).tolist() == ["a", "b", "c"]
    assert session.as_array(onnxruntime.OrtValue.ortvalue_from_numpy(pair[0])).shape == (1, 2)
    assert session.as_array(pair[0]) is pair[0]
