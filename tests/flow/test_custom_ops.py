"""Models with custom operators: the library is registered on request, and never unasked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from kenosis_ort import KenosisError, quantize_static, verify_fusion
from tests import models
from tests.flow.support import proof, session, sqnr_db
from tests.models import FeedReader, Net

extensions = pytest.importorskip("onnxruntime_extensions")


@pytest.fixture
def library() -> str:
    return str(extensions.get_library_path())


@pytest.fixture
def model() -> onnx.ModelProto:
    """A picture through Conv, the extensions' Inverse of a small matrix, and Conv again."""
    net = Net()
    x = net.op("Relu", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv0")], name="relu0")
    m = net.op("Reshape", [net.input("m", [4, 4]), net.const([4, 4])], name="same")
    m = net.op("Inverse", [m], name="inverse", domain="ai.onnx.contrib")
    m = net.op("Reshape", [m, net.const([1, 1, 4, 4])], name="as_map")
    m = net.op("Pad", [m, net.const([0, 0, 2, 2, 0, 0, 2, 2])], name="pad")
    y = net.op("Mul", [x, m], name="weighted")
    net.output(net.conv(y, 4, 4, name="conv1"), [1, 4, 8, 8])
    graph = onnx.helper.make_graph(net.nodes, "custom", net.inputs, net.outputs, net.initializers)
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.contrib", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


def feeds() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(0, 1, (1, 3, 8, 8)).astype(np.float32),
            "m": (np.eye(4) * 2 + rng.normal(0, 0.1, (4, 4))).astype(np.float32),
        }
        for _ in range(4)
    ]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The libraries that any session was given."""
    seen: list[str] = []
    original = ort.SessionOptions.register_custom_ops_library

    def register(self: ort.SessionOptions, path: str) -> None:
        seen.append(path)
        original(self, path)

    monkeypatch.setattr(ort.SessionOptions, "register_custom_ops_library", register)
    return seen


def test_registered_on_request(tmp_path: Path, model: onnx.ModelProto, library: str, registered: list[str]) -> None:
    out = tmp_path / "out.onnx"
    report = quantize_static(model, out, FeedReader(feeds()), custom_op_libraries=[library])
    assert set(registered) == {library}
    assert report.left_float() == ()
    kernels = {k.node: k for k in proof(report).kernels}
    assert kernels["conv0"].integer
    assert kernels["conv1"].integer
    assert not kernels["inverse"].integer
    want = [session(model, library).run(None, feed)[0] for feed in feeds()]
    got = [session(out, library).run(None, feed)[0] for feed in feeds()]
    assert sqnr_db(want, got) > 25
    assert verify_fusion(out, custom_op_libraries=[library]).by_node["conv1"].integer


def test_refused_without(tmp_path: Path, model: onnx.ModelProto, registered: list[str]) -> None:
    with pytest.raises(KenosisError) as caught:
        quantize_static(model, tmp_path / "out.onnx", FeedReader(feeds()))
    text = str(caught.value)
    assert "Inverse" in text
    assert "custom_op_libraries" in text
    assert caught.value.fix
    assert registered == []
    assert list(tmp_path.iterdir()) == []


def test_library_that_is_none(tmp_path: Path, model: onnx.ModelProto) -> None:
    bogus = tmp_path / "bogus.so"
    bogus.write_bytes(b"no library")
    with pytest.raises(KenosisError) as caught:
        quantize_static(model, tmp_path / "out.onnx", FeedReader(feeds()), custom_op_libraries=[str(bogus)])
    assert "bogus.so" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["bogus.so"]


def test_never_registered_unasked(tmp_path: Path, registered: list[str]) -> None:
    plain = models.residual_block()
    quantize_static(plain, tmp_path / "out.onnx", models.reader(plain))
    assert registered == []
