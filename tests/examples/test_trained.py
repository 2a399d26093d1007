"""Nets that examples train: true derivatives, exports that compute what the net computes, measures that are right."""

import hashlib
import importlib.util
import re
import sys
from importlib.resources import files

import numpy as np
import onnx
import pytest

from kenosis_ort.demo import load_digits, model_path
from tests import models


def example(name):
    """A fixture of this script."""
    return pytest.fixture(scope="module")(lambda load_example: load_example(name))


trainer, detector, walkthrough = map(example, ("train_digits", "detector", "cifar10_walkthrough"))


def away_from_kinks(rng, shape):
    """Returns distinct values at a distance from zero and from each other, so that a small step crosses no kink."""
    count = int(np.prod(shape))
    values = rng.permutation(count) - count // 2 + 0.5
    return (values * 4 / count).reshape(shape).astype(np.float32)


SIZES = {"Conv": (3, 5), "BatchNorm": (3,), "Relu": (), "MaxPool": (), "Linear": (3 * 4 * 4, 7)}


@pytest.mark.parametrize("kind", SIZES)
def test_gradients_are_derivatives(trainer, kind):
    rng = np.random.default_rng(3)
    layer = getattr(trainer, kind)(*SIZES[kind], *([rng] if kind in ("Conv", "Linear") else []))
    x = away_from_kinks(rng, (2, 4, 4, 3))
    weights = rng.normal(size=layer.forward(x, training=True).shape).astype(np.float32)

    def loss():
        return float((layer.forward(x, training=True).astype(np.float64) * weights).sum())

    step = np.float32(1e-2)
    loss()
    inputs = layer.backward(weights)
    gradients = [(x, inputs), *((parameter.value, parameter.grad.copy()) for parameter in layer.parameters())]
    for value, gradient in gradients:
        direction = rng.choice([-1, 1], value.shape).astype(np.float32)
        value += step * direction
        high = loss()
        value -= 2 * step * direction
        low = loss()
        value += step * direction
        assert (high - low) / (2 * step) == pytest.approx(float((gradient * direction).sum()), rel=5e-3, abs=5e-3)


def test_the_exported_digits_compute_what_the_net_computes(trainer):
    rng = np.random.default_rng(1)
    net = trainer.build(rng)
    x = rng.random((16, 8, 8, 1), np.float32)
    for _ in range(3):
        trainer.run(net, x, training=True)  # moves the running statistics
    logits = models.session(trainer.export(net)).run(None, {"image": x.transpose(0, 3, 1, 2)})[0]
    np.testing.assert_allclose(logits, trainer.run(net, x), rtol=1e-3, atol=1e-3)


def test_training_learns_and_repeats_itself(trainer):
    digits = load_digits()
    images, labels = digits.images[:256].transpose(0, 2, 3, 1), digits.labels[:256]
    answers = []
    for _ in range(2):
        net = trainer.build(np.random.default_rng(0))
        trainer.train(net, images, labels, epochs=4, seed=0)
        answers.append(trainer.run(net, images))
    np.testing.assert_array_equal(answers[0], answers[1])
    assert (answers[0].argmax(1) == labels).mean() > 0.8


def test_what_is_shipped_is_small_and_as_described_and_the_net_is_trained():
    sizes = [files("kenosis_ort.demo").joinpath(name) for name in ("digits_cnn.onnx", "digits.npz")]
    assert sum(len(path.read_bytes()) for path in sizes) < 600_000
    digits = load_digits()
    assert (digits.calibration.shape, digits.images.shape) == ((100, 1, 8, 8), (600, 1, 8, 8))
    assert digits.calibration.dtype == digits.images.dtype == np.float32
    assert (digits.images.min(), digits.images.max()) == (0, 1)
    assert set(digits.labels) == set(range(10))
    held_out = {image.tobytes() for image in digits.images}
    assert not any(image.tobytes() in held_out for image in digits.calibration)
    with model_path() as path:
        model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    expected = {"Conv", "BatchNormalization", "Relu", "MaxPool", "Add", "Flatten", "Gemm"}
    assert {node.op_type for node in model.graph.node} == expected
    answers = models.session(model).run(None, {"image": digits.images})[0].argmax(1)
    assert (answers == digits.labels).mean() >= 0.97


# ---- the detector ----------------------------------------------------------------------------------------------------


def rows(*values):
    return np.array(values, np.float32)


TRUTH = rows((0, 0, 0, 10, 10), (1, 20, 20, 30, 30))


def test_measures_of_perfect_duplicate_missing_and_wrong_detections(detector):
    found = rows((0, 0, 0, 10, 5, 0.9), (1, 0, 0, 10, 10, 0.8))
    np.testing.assert_allclose(detector.overlap(found, TRUTH), [[0.5, 0], [0, 0]])  # of equal class only
    perfect = np.column_stack([TRUTH, [0.9, 0.8]]).astype(np.float32)
    assert detector.mean_average_precision([perfect], [TRUTH]) == pytest.approx(2 / 3)  # the third class is not there
    assert detector.f1([perfect], [TRUTH]) == 1
    doubled = np.concatenate([perfect, perfect[:1]])
    assert detector.hits(doubled, TRUTH).tolist() == [True, True, False]
    assert detector.f1([doubled], [TRUTH]) == pytest.approx(4 / 5)
    assert detector.f1([perfect[:0]], [TRUTH]) == 0
    assert detector.hits(perfect, TRUTH[:0]).tolist() == [False, False]
    wrong_first = rows((0, 20, 20, 30, 30, 0.9), (0, 0, 0, 10, 10, 0.5))
    assert detector.mean_average_precision([wrong_first], [TRUTH[:1]]) == pytest.approx(0.5 / 3)


def test_targets_decode_to_the_shapes(load_example, detector):
    """What the net is trained to say, said through the exported arithmetic, is the truth."""
    import detector_net as net

    images, truths = net.draw(8, seed=3)
    wanted, held = net.targets(truths)
    assert images.shape == (8, 1, 32, 32)
    for grid, cells, truth in zip(wanted, held, truths, strict=True):
        at = np.argwhere(cells)[:, ::-1]
        values = grid[cells > 0]
        centre = (at + values[:, 3:5]) * net.STRIDE
        half = np.exp(values[:, 5:]) * net.UNIT / 2
        boxes = np.concatenate([centre - half, centre + half], 1)
        expected = truth[np.lexsort(((truth[:, 1] + truth[:, 3]) // 8, (truth[:, 2] + truth[:, 4]) // 8))]
        np.testing.assert_allclose(boxes, expected[:, 1:], atol=1e-3)


def test_the_exported_detector_computes_what_the_net_computes(detector):
    import detector_net as net
    import train_digits as nn

    layers = net.build(np.random.default_rng(0))
    images, _ = net.draw(4, seed=0)
    for _ in range(3):
        nn.run(layers, images.transpose(0, 2, 3, 1), training=True)  # moves the running statistics
    said = nn.run(layers, images.transpose(0, 2, 3, 1)).reshape(4, -1, 7)
    scale = np.array([[0.5, 0.25]] * 4, np.float32)
    scores, boxes = models.session(net.export(layers)).run(None, {"image": images, "scale_factor": scale})
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-said[..., :3])).transpose(0, 2, 1), atol=1e-4)
    grid = np.stack(np.meshgrid(np.arange(8), np.arange(8)), 2).reshape(-1, 2)
    centre, half = (grid + said[..., 3:5]) * net.STRIDE, np.exp(said[..., 5:]) * net.UNIT / 2
    expected = np.concatenate([centre - half, centre + half], 2) / [0.25, 0.5, 0.25, 0.5]
    np.testing.assert_allclose(boxes, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")  # hardly trained, it is far from its best
def test_the_detector_runs(detector, capsys):
    detector.main(["--images", "256", "--epochs", "3", "--test", "60"])
    printed = capsys.readouterr().out
    assert re.search(r"kenosis-ort +mAP [0-9.]+ +F1 [0-9.]+ +F1 against float ([0-9.]+)", printed)
    assert "Gather 'scale_xyxy': float by protected-input" in printed


# ---- the CIFAR10Net walk-through: its data, its net, its trainers and its table --------------------------------------


@pytest.fixture(scope="module")
def data(walkthrough):
    return walkthrough.cifar10_data


def test_binary_version_is_read(data, tmp_path):
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
def test_what_is_not_the_binary_version_is_refused(data, tmp_path, content):
    with pytest.raises(SystemExit, match="data_batch"):
        data.read_binary(tmp_path)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match="data_batch_1"):
        data.read_binary(tmp_path)


def test_archives_are_split(data, tmp_path):
    for name, count in (("calib", 30), ("test", 1020)):
        images = np.full((count, 32, 32, 3), count % 256, np.uint8)
        np.savez(tmp_path / f"cifar10_{name}.npz", images=images, labels=np.zeros(count, np.int64))
    read = data.read_archives(tmp_path)
    assert (len(read.train), len(read.test)) == (50, 1000)


def test_the_exported_cifar10_is_the_architecture_and_computes_the_same(walkthrough, data):
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
def test_torch_trains_the_same_net(walkthrough, data):
    weights = walkthrough.cifar10_train.train_torch(data.generate(80), epochs=1, seed=0)
    net = walkthrough.cifar10_net
    expected = net.state(net.build(np.random.default_rng(0)))
    assert {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in expected.items()}
    onnx.checker.check_model(net.export(weights), full_check=True)


def test_missing_torch_is_said(walkthrough, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="pip install torch"):
        walkthrough.cifar10_train.train_torch(data.generate(8), epochs=1, seed=0)


def test_a_changed_file_is_not_loaded(walkthrough, data, tmp_path):
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
def test_from_training_to_the_table(load_example, walkthrough, tmp_path, capsys, monkeypatch):
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
