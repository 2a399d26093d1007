"""The files that the pages speak about."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from kenosis_ort.demo import load_digits
from tests import models

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(7)


def _weights(name: str, *shape: int) -> onnx.TensorProto:
    fan_in = int(np.prod(shape[1:])) or 1
    return numpy_helper.from_array((RNG.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32), name)


def _value(name: str, *shape: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def _model(nodes: list[onnx.NodeProto], inputs: list, outputs: list, weights: list) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "docs", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _classifier() -> onnx.ModelProto:
    """A small net over colour pictures."""
    nodes = [
        helper.make_node("Conv", ["image", "w0"], ["c0"], name="stem", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c0"], ["r0"], name="relu0"),
        helper.make_node("Conv", ["r0", "w1"], ["c1"], name="body", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("GlobalAveragePool", ["r1"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w2"], ["logits"], name="head", transB=1),
    ]
    weights = [_weights("w0", 16, 3, 3, 3), _weights("w1", 16, 16, 3, 3), _weights("w2", 10, 16)]
    return _model(nodes, [_value("image", 1, 3, 16, 16)], [_value("logits", 1, 10)], weights)


def _recurrent() -> onnx.ModelProto:
    """One step of a net whose state is an input and an output."""
    nodes = [
        helper.make_node("Gemm", ["x", "wx"], ["a"], name="inputs", transB=1),
        helper.make_node("Gemm", ["state", "wh"], ["b"], name="states", transB=1),
        helper.make_node("Add", ["a", "b"], ["s"], name="sum"),
        helper.make_node("Tanh", ["s"], ["stateN"], name="tanh"),
        helper.make_node("Gemm", ["stateN", "wo"], ["y"], name="head", transB=1),
    ]
    inputs, outputs = [_value("x", 1, 16), _value("state", 1, 32)], [_value("y", 1, 4), _value("stateN", 1, 32)]
    return _model(nodes, inputs, outputs, [_weights("wx", 32, 16), _weights("wh", 32, 32), _weights("wo", 4, 32)])


def _write_pipeline(folder: Path) -> None:
    """Writes an encoder and its decoders, of one layer each, and a folder of sentences."""
    spec = importlib.util.spec_from_file_location("docs_bart_net", ROOT / "examples" / "bart_net.py")
    assert spec is not None
    assert spec.loader is not None
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    net.LAYERS, net._FITTED_ON = 1, 16
    net.write(folder)
    (folder / "sentences").mkdir()
    for number, sentence in enumerate(net.sentences(3, seed=1)):
        np.savez(folder / "sentences" / f"{number}.npz", **sentence)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and samples that the pages name."""
    folder = tmp_path_factory.mktemp("docs")
    digits = load_digits()
    onnx.save(models.narrow_digits(), folder / "model.onnx")
    np.savez(folder / "samples.npz", image=digits.calibration[:8])
    np.savez(folder / "test.npz", image=digits.images[:32])
    np.save(folder / "labels.npy", digits.labels[:32])
    np.savez(folder / "recording.npz", x=RNG.normal(size=(40, 1, 16)).astype(np.float32)[:, 0])
    onnx.save(_classifier(), folder / "classifier.onnx")
    onnx.save(_recurrent(), folder / "recurrent.onnx")
    _write_pipeline(folder)
    (folder / "photos").mkdir()
    for number in range(8):
        pixels = RNG.integers(0, 255, size=(40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")
    return folder


@pytest.fixture
def workplace(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these files, which is the current folder, and a bench that runs a model for no longer than it must."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    harness = importlib.import_module("kenosis_ort.bench.harness")
    monkeypatch.setattr(harness, "Schedule", partial(harness.Schedule, block_s=0.005))
    return tmp_path
