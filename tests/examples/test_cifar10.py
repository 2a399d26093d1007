"""The CIFAR10Net walk-through: its data, its net, its trainers and its table."""

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest

from tests import models


@pytest.fixture(scope="module")
def walkthrough(load_example) -> ModuleType:
    return load_example("cifar10_walkthrough")


@pytest.fixture(scope="module")
def data(walkthrough: ModuleType) -> ModuleType:
    return walkthrough.cifar10_data


def test_binary_version_is_read(data: ModuleType, tmp_path: Path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (6, 32, 32, 3), np.uint8), rng.integers(0, 10, 6)
    planes = images.transpose(0, 3, 1, 2).reshape(6, -1)
    records = np.concatenate([labels[:, None].astype(np.uint8), planes], 1)
    for name, pair in zip(("data_batch_1", "data_batch_2", "test_batch"), np.split(records, 3), strict=True):
        pair.tofile(tmp_path / f"{name}.bin")
    read = data.read_binary(tmp_path)
    np.testing.assert_array_equal(np.concatenate([read.train, read.test]), images)
    np.testing.assert_array_equal(np.concatenate([read.train_labels, read.test_labels]), labels)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x0b" * 3073])
def test_what_is_not_the_binary_version_is_refused(data: ModuleType, tmp_path: Path, content: bytes):
    with pytest.raises(SystemExit, match="data_batch"):
        data.read_binary(tmp_path)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match="data_batch_1"):
        data.read_binary(tmp_path)


def test_archives_are_split(data: ModuleType, tmp_path: Path):
    for name, count in (("calib", 30), ("test", 1020)):
        images = np.full((count, 32, 32, 3), count % 256, np.uint8)
        np.savez(tmp_path / f"cifar10_{name}.npz", images=images, labels=np.zeros(count, np.int64))
    read = data.read_archives(tmp_path)
    assert (len(read.train), len(read.test)) == (50, 1000)


def test_export_is_the_architecture_and_computes_what_the_net_computes(walkthrough: ModuleType, data: ModuleType):
    import train_digits as nn

    net = walkthrough.cifar10_net
    layers = net.build(np.random.default_rng(0))
    pixels = data.as_input(data.generate(8).train).transpose(0, 2, 3, 1)
    for _ in range(2):
        nn.run(list(layers.values()), pixels, training=True)  # moves the running statistics
    model = net.export(net.state(layers))
    ops = [node.op_type for node in model.graph.node]
    block = ["Conv", "Relu", "Conv", "BatchNormalization", "Relu", "MaxPool"]
    assert ops == [*block, *block, *block[2:], "Flatten", "Gemm", "Relu", "Gemm"]
    shapes = {i.name: tuple(i.dims) for i in model.graph.initializer}
    assert (shapes["conv5.weight"], shapes["fc1.weight"]) == ((128, 64, 3, 3), (256, 2048))
    logits = models.session(model).run(None, {"image": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))})[0]
    np.testing.assert_allclose(logits, nn.run(list(layers.values()), pixels), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_torch_trains_the_same_net(walkthrough: ModuleType, data: ModuleType):
    weights = walkthrough.cifar10_train.train_torch(data.generate(80), epochs=1, seed=0)
    net = walkthrough.cifar10_net
    expected = net.state(net.build(np.random.default_rng(0)))
    assert {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in expected.items()}
    onnx.checker.check_model(net.export(weights), full_check=True)


def test_missing_torch_is_said(walkthrough: ModuleType, data: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="pip install torch"):
        walkthrough.cifar10_train.train_torch(data.generate(8), epochs=1, seed=0)


def test_a_changed_file_is_not_loaded(walkthrough: ModuleType, data: ModuleType, tmp_path: Path):
    net = walkthrough.cifar10_net
    path = tmp_path / "net.onnx"
    onnx.save(net.export(net.state(net.build(np.random.default_rng(0)))), path)
    approved = walkthrough.sha256(path)
    assert approved == hashlib.sha256(path.read_bytes()).hexdigest()
    assert walkthrough.load_verified(path, approved).get_inputs()[0].name == "image"
    path.write_bytes(path.read_bytes() + b"\x00")
    with pytest.raises(SystemExit, match="not loaded"):
        walkthrough.load_verified(path, approved)


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")  # hardly trained; int8 need not pay everywhere
def test_from_training_to_the_table(load_example, walkthrough, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    narrow = [[tuple(max(c // 4, 3) for c in conv) for conv in block] for block in walkthrough.cifar10_net.BLOCKS]
    monkeypatch.setattr(walkthrough.cifar10_net, "BLOCKS", narrow)
    monkeypatch.setattr(walkthrough.cifar10_net, "HIDDEN", 32)
    model = tmp_path / "cifar10.onnx"
    chosen = ["--generated", "160"]
    load_example("cifar10_train").main([*chosen, "--epochs", "1", "--out", str(model)])
    walkthrough.main([*chosen, "--model", str(model), "--samples", "16", "--rounds", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    timed = ("float32", "dynamic", "static, as in the text", "static, stock's best", "kenosis-ort")
    for name in (*timed, "QOperator, 8 bits", "QCDQ, 4 bits"):
        assert re.search(rf"^{name} +[0-9.]+ MB( +[0-9.]+){{3}} ", printed, re.MULTILINE), name
    for name in ("QONNX, 8 bits", "QONNX, 4 bits"):
        assert re.search(rf"^{name} +[0-9.]+ MB( +-){{4}} +[0-9.]+ ", printed, re.MULTILINE), name
    deployed = re.search(r"deploy: sha256 ([0-9a-f]{64})", printed)[1]
    sums = dict(line.split()[::-1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert deployed in sums.values()
    assert all(walkthrough.sha256(tmp_path / name) == value for name, value in sums.items())
