"""Trains the small CNN that ships with kenosis-ort, on scikit-learn's handwritten digits, in plain numpy.

The net is a miniature of what image classifiers are made of: Conv + BatchNormalization + Relu, two residual
blocks, MaxPool, Flatten and Gemm, 111,000 weights, 8x8 grey images with pixels from 0 to 1. It is written
out as exported ONNX with the batch normalization still unfolded, beside an archive of images: 100 from the
training split for calibration and 600 held-out ones, which training never sees, for the accuracy.

Run ``python examples/train_digits.py`` (needs scikit-learn; under a minute on one core). The same numpy on
the same machine gives the same net. The shipped files are made by::

    python examples/train_digits.py --out kenosis_ort/demo
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[np.float32]

CLASSES = 10
HELD_OUT = 600
CALIBRATION = 100
PIXEL_MAX = 16  # scikit-learn stores the digits as counts from 0 to 16


class Layer(Protocol):
    """A differentiable function of an NHWC batch. ``backward`` needs the ``forward`` before it."""

    def forward(self, x: Array, *, training: bool) -> Array: ...

    def backward(self, grad: Array) -> Array: ...

    def parameters(self) -> Iterator[Parameter]: ...


class Parameter:
    """A trainable array with its gradient and Adam's two moments."""

    def __init__(self, value: npt.ArrayLike) -> None:
        self.value = np.asarray(value, np.float32)
        self.grad = np.zeros_like(self.value)
        self.moments = np.zeros((2, *self.value.shape), np.float32)

    def adam(self, step: int, rate: float, decay: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        """One step of Adam with decoupled weight decay (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""
        for moment, beta, sample in zip(self.moments, betas, (self.grad, self.grad**2), strict=True):
            moment += (1 - beta) * (sample - moment)
        mean, square = (m / (1 - b**step) for m, b in zip(self.moments, betas, strict=True))
        self.value -= rate * (mean / (np.sqrt(square) + 1e-8) + decay * self.value)


class Conv:
    """3x3 convolution, stride 1, padding 1, no bias: one matrix product over the nine shifted images."""

    def __init__(self, channels_in: int, channels_out: int, rng: np.random.Generator) -> None:
        fan_in = 9 * channels_in
        self.weight = Parameter(rng.normal(0, np.sqrt(2 / fan_in), (fan_in, channels_out)))

    def forward(self, x: Array, *, training: bool) -> Array:  # noqa: ARG002
        self.shape = x.shape
        _, height, width, _ = x.shape
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifted = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        self.columns = np.concatenate(shifted, axis=3)
        return self.columns @ self.weight.value

    def backward(self, grad: Array) -> Array:
        batch, height, width, channels = self.shape
        fan_in = self.columns.shape[-1]
        self.weight.grad = self.columns.reshape(-1, fan_in).T @ grad.reshape(-1, grad.shape[-1])
        columns = (grad @ self.weight.value.T).reshape(batch, height, width, 9, channels)
        padded = np.zeros((batch, height + 2, width + 2, channels), np.float32)
        for k in range(9):
            i, j = divmod(k, 3)
            padded[:, i : i + height, j : j + width] += columns[:, :, :, k]
        return padded[:, 1:-1, 1:-1]

    def parameters(self) -> Iterator[Parameter]:
        yield self.weight


class BatchNorm:
    """Batch normalization over all but the channel axis (Ioffe & Szegedy 2015)."""

    epsilon, momentum = 1e-5, 0.1

    def __init__(self, channels: int) -> None:
        self.gain, self.shift = Parameter(np.ones(channels)), Parameter(np.zeros(channels))
        self.mean, self.variance = np.zeros(channels, np.float32), np.ones(channels, np.float32)

    def forward(self, x: Array, *, training: bool) -> Array:
        if training:
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            self.mean += self.momentum * (mean - self.mean)
            self.variance += self.momentum * (variance - self.variance)
        else:
            mean, variance = self.mean, self.variance
        self.scale = 1 / np.sqrt(variance + np.float32(self.epsilon))
        self.normal = (x - mean) * self.scale
        out: Array = self.normal * self.gain.value + self.shift.value
        return out

    def backward(self, grad: Array) -> Array:
        self.gain.grad, self.shift.grad = (grad * self.normal).sum((0, 1, 2)), grad.sum((0, 1, 2))
        count = np.float32(grad.size // grad.shape[-1])
        centred = grad - self.shift.grad / count - self.normal * (self.gain.grad / count)
        return centred * self.scale * self.gain.value

    def parameters(self) -> Iterator[Parameter]:
        yield self.gain
        yield self.shift


class Relu:
    """``max(x, 0)``."""

    def forward(self, x: Array, *, training: bool) -> Array:  # noqa: ARG002
        self.positive = x > 0
        return x * self.positive

    def backward(self, grad: Array) -> Array:
        return grad * self.positive

    def parameters(self) -> Iterator[Parameter]:
        yield from ()


class MaxPool:
    """2x2 maximum, stride 2; the gradient goes to every position that holds the maximum."""

    def forward(self, x: Array, *, training: bool) -> Array:  # noqa: ARG002
        batch, height, width, channels = x.shape
        tiles = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
        out: Array = tiles.max((2, 4))
        self.winner = tiles == out[:, :, None, :, None]
        return out

    def backward(self, grad: Array) -> Array:
        tiles = grad[:, :, None, :, None] * self.winner
        batch, rows, _, columns, _, channels = tiles.shape
        return tiles.reshape(batch, rows * 2, columns * 2, channels)

    def parameters(self) -> Iterator[Parameter]:
        yield from ()


class Residual:
    """``Relu(x + BatchNorm(Conv(Relu(BatchNorm(Conv(x))))))``."""

    def __init__(self, channels: int, rng: np.random.Generator) -> None:
        self.body: list[Layer] = [
            Conv(channels, channels, rng),
            BatchNorm(channels),
            Relu(),
            Conv(channels, channels, rng),
            BatchNorm(channels),
        ]
        self.relu = Relu()

    def forward(self, x: Array, *, training: bool) -> Array:
        return self.relu.forward(x + run(self.body, x, training=training), training=training)

    def backward(self, grad: Array) -> Array:
        grad = self.relu.backward(grad)
        return grad + run_back(self.body, grad)

    def parameters(self) -> Iterator[Parameter]:
        for layer in self.body:
            yield from layer.parameters()


class Linear:
    """Flattens in channel-first order, as ONNX does, and multiplies."""

    def __init__(self, size_in: int, size_out: int, rng: np.random.Generator) -> None:
        self.weight = Parameter(rng.normal(0, np.sqrt(1 / size_in), (size_in, size_out)))
        self.bias = Parameter(np.zeros(size_out))

    def forward(self, x: Array, *, training: bool) -> Array:  # noqa: ARG002
        self.shape = x.shape
        self.flat = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
        return self.flat @ self.weight.value + self.bias.value

    def backward(self, grad: Array) -> Array:
        self.weight.grad, self.bias.grad = self.flat.T @ grad, grad.sum(0)
        batch, height, width, channels = self.shape
        return (grad @ self.weight.value.T).reshape(batch, channels, height, width).transpose(0, 2, 3, 1)

    def parameters(self) -> Iterator[Parameter]:
        yield self.weight
        yield self.bias


def run(layers: Sequence[Layer], x: Array, *, training: bool = False) -> Array:
    """Returns the output of the last layer."""
    for layer in layers:
        x = layer.forward(x, training=training)
    return x


def run_back(layers: Sequence[Layer], grad: Array) -> Array:
    """Returns the gradient by the first layer's input; leaves the parameters' gradients in the parameters."""
    for layer in reversed(layers):
        grad = layer.backward(grad)
    return grad


def build(rng: np.random.Generator) -> list[Layer]:
    """Returns the untrained net: input (N, 8, 8, 1), output (N, 10) logits."""
    return [
        Conv(1, 32, rng),
        BatchNorm(32),
        Relu(),
        Residual(32, rng),
        MaxPool(),
        Conv(32, 64, rng),
        BatchNorm(64),
        Relu(),
        Residual(64, rng),
        MaxPool(),
        Linear(4 * 64, CLASSES, rng),
    ]


def cross_entropy_gradient(logits: Array, labels: npt.NDArray[np.int64]) -> Array:
    """Returns the gradient of the mean softmax cross-entropy by the logits."""
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    probabilities: Array = shifted / shifted.sum(1, keepdims=True)
    probabilities[np.arange(len(labels)), labels] -= 1
    return probabilities / np.float32(len(labels))


def jitter(images: Array, rng: np.random.Generator) -> Array:
    """Returns the images, each moved by -1, 0 or 1 pixel along both axes."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    moves = rng.integers(0, 3, (len(images), 2))
    height, width = images.shape[1:3]
    return np.stack([p[i : i + height, j : j + width] for p, (i, j) in zip(padded, moves, strict=True)])


def train(net: Sequence[Layer], images: Array, labels: npt.NDArray[np.int64], *, epochs: int, seed: int) -> None:
    """Trains in place: Adam, batches of 64, cosine decay of the learning rate, jittered images."""
    rng = np.random.default_rng(seed)
    batch, peak = 64, 3e-3
    steps = epochs * (len(images) // batch)
    step = 0
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - batch + 1, batch):
            chosen = order[start : start + batch]
            logits = run(net, jitter(images[chosen], rng), training=True)
            run_back(net, cross_entropy_gradient(logits, labels[chosen]))
            rate = peak * (1 + np.cos(np.pi * step / steps)) / 2
            step += 1
            for layer in net:
                for parameter in layer.parameters():
                    parameter.adam(step, rate, decay=1e-2)


def export(net: Sequence[Layer]) -> onnx.ModelProto:
    """Returns the net as ONNX: input ``image`` (N, 1, 8, 8), output ``logits`` (N, 10), BatchNormalization unfolded."""
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []

    def emit(op_type: str, name: str, inputs: list[str], arrays: dict[str, Array], **attributes: object) -> str:
        for key, array in arrays.items():
            weights.append(numpy_helper.from_array(np.ascontiguousarray(array), f"{name}.{key}"))
        tensors = inputs + [f"{name}.{key}" for key in arrays]
        nodes.append(helper.make_node(op_type, tensors, [f"{name}.out"], name, **attributes))
        return f"{name}.out"

    def walk(layers: Sequence[Layer], value: str, prefix: str) -> str:
        for index, layer in enumerate(layers):
            name = f"{prefix}{index}"
            if isinstance(layer, Conv):
                fan_in, channels_out = layer.weight.value.shape
                weight = layer.weight.value.reshape(3, 3, fan_in // 9, channels_out).transpose(3, 2, 0, 1)
                value = emit("Conv", f"{name}.conv", [value], {"weight": weight}, kernel_shape=[3, 3], pads=[1] * 4)
            elif isinstance(layer, BatchNorm):
                statistics = {
                    "gain": layer.gain.value,
                    "shift": layer.shift.value,
                    "mean": layer.mean,
                    "variance": layer.variance,
                }
                value = emit("BatchNormalization", f"{name}.norm", [value], statistics, epsilon=layer.epsilon)
            elif isinstance(layer, Relu):
                value = emit("Relu", f"{name}.relu", [value], {})
            elif isinstance(layer, MaxPool):
                value = emit("MaxPool", f"{name}.pool", [value], {}, kernel_shape=[2, 2], strides=[2, 2])
            elif isinstance(layer, Residual):
                total = emit("Add", f"{name}.add", [value, walk(layer.body, value, f"{name}.body")], {})
                value = emit("Relu", f"{name}.relu", [total], {})
            elif isinstance(layer, Linear):
                value = emit("Flatten", f"{name}.flatten", [value], {})
                parameters = {"weight": layer.weight.value, "bias": layer.bias.value}
                value = emit("Gemm", f"{name}.gemm", [value], parameters)
            else:
                raise TypeError(f"no export for {type(layer).__name__}")
        return value

    walk(net, "image", "layer")
    nodes[-1].output[0] = "logits"
    graph = helper.make_graph(
        nodes,
        "digits_cnn",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="train_digits")
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model


def split(seed: int) -> dict[str, npt.NDArray[np.uint8]]:
    """Returns scikit-learn's digits as uint8 images (N, 8, 8) and labels, split into training and held-out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, labels = digits.images[order].astype(np.uint8), digits.target[order].astype(np.uint8)
    return {
        "train_images": images[HELD_OUT:],
        "train_labels": labels[HELD_OUT:],
        "test_images": images[:HELD_OUT],
        "test_labels": labels[:HELD_OUT],
    }


def as_input(images: npt.NDArray[np.uint8]) -> Array:
    """Returns uint8 images (N, 8, 8) as the net's NHWC input from 0 to 1."""
    return images[..., None].astype(np.float32) / np.float32(PIXEL_MAX)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, measures on the held-out images, writes ``digits_cnn.onnx`` and ``digits.npz``."""
    parser = argparse.ArgumentParser(description="Train the shipped digits CNN; write digits_cnn.onnx and digits.npz.")
    parser.add_argument("--out", type=Path, default=Path("examples/out"), help="folder to write to")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)

    data = split(arguments.seed)
    net = build(np.random.default_rng(arguments.seed))
    labels = data["train_labels"].astype(np.int64)
    train(net, as_input(data["train_images"]), labels, epochs=arguments.epochs, seed=arguments.seed)
    predicted = run(net, as_input(data["test_images"])).argmax(1)
    accuracy = float((predicted == data["test_labels"]).mean())
    print(f"accuracy on {HELD_OUT} held-out images: {accuracy:.4f}")

    arguments.out.mkdir(parents=True, exist_ok=True)
    onnx.save(export(net), arguments.out / "digits_cnn.onnx")
    np.savez_compressed(
        arguments.out / "digits.npz",
        calibration_images=data["train_images"][:CALIBRATION],
        test_images=data["test_images"],
        test_labels=data["test_labels"],
    )
    print(f"wrote digits_cnn.onnx and digits.npz to {arguments.out}")


if __name__ == "__main__":
    main()
