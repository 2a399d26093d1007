"""The shipped net and images are what they are said to be; what trained the net has true derivatives and learns."""

from importlib.resources import files
from types import ModuleType

import numpy as np
import onnx
import pytest

from kenosis_ort.demo import load_digits, model_path
from tests import models


@pytest.fixture(scope="module")
def script(load_example) -> ModuleType:
    return load_example("train_digits")


def away_from_kinks(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns distinct values at a distance from zero and from each other, so that a small step crosses no kink."""
    count = int(np.prod(shape))
    values = rng.permutation(count) - count // 2 + 0.5
    return (values * 4 / count).reshape(shape).astype(np.float32)


SIZES = {"Conv": (3, 5), "BatchNorm": (3,), "Relu": (), "MaxPool": (), "Linear": (3 * 4 * 4, 7)}


@pytest.mark.parametrize("kind", SIZES)
def test_gradients_are_derivatives(script: ModuleType, kind: str):
    rng = np.random.default_rng(3)
    layer = getattr(script, kind)(*SIZES[kind], *([rng] if kind in ("Conv", "Linear") else []))
    x = away_from_kinks(rng, (2, 4, 4, 3))
    weights = rng.normal(size=layer.forward(x, training=True).shape).astype(np.float32)

    def loss() -> float:
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


def test_export_computes_what_the_net_computes(script: ModuleType):
    rng = np.random.default_rng(1)
    net = script.build(rng)
    x = rng.random((16, 8, 8, 1), np.float32)
    for _ in range(3):
        script.run(net, x, training=True)  # moves the running statistics
    logits = models.session(script.export(net)).run(None, {"image": x.transpose(0, 3, 1, 2)})[0]
    np.testing.assert_allclose(logits, script.run(net, x), rtol=1e-3, atol=1e-3)


def test_training_learns_and_repeats_itself(script: ModuleType):
    digits = load_digits()
    images, labels = digits.images[:256].transpose(0, 2, 3, 1), digits.labels[:256]
    answers = []
    for _ in range(2):
        net = script.build(np.random.default_rng(0))
        script.train(net, images, labels, epochs=4, seed=0)
        answers.append(script.run(net, images))
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
