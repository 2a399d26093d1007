"""Trains CIFAR10Net and writes it as ONNX: ``python examples/cifar10_train.py [--cifar FOLDER] [--trainer torch]``.

The architecture is the running example of a walk-through of ONNX deployment: five 3x3 convolutions, three
BatchNormalizations, three pools, two linear layers with Dropout between, 667,000 numbers. Trained in plain numpy
(a few thousand images), or with PyTorch where it is installed (all 50,000: ``--trainer torch --epochs 40``). Both
yield the same names and the same ONNX file, as ``torch.onnx.export`` writes it: input ``image`` (N, 3, 32, 32), output
``logits`` (N, 10), opset 17, BatchNormalization unfolded, Dropout gone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import cifar10_data
import numpy as np
import onnx
import train_digits as nn
from cifar10_data import CLASSES, Images, as_input
from onnx import TensorProto, helper, numpy_helper

Array = nn.Array
BLOCKS: tuple[tuple[tuple[int, int], ...], ...] = (((3, 32), (32, 32)), ((32, 64), (64, 64)), ((64, 128),))
HIDDEN = 256


class Conv(nn.Conv):
    """3x3 convolution, padding 1, with bias."""

    def __init__(self, channels_in: int, channels_out: int, rng: np.random.Generator) -> None:
        super().__init__(channels_in, channels_out, rng)
        self.bias = nn.Parameter(np.zeros(channels_out))

    def forward(self, x: Array, *, training: bool) -> Array:
        return super().forward(x, training=training) + self.bias.value

    def backward(self, grad: Array) -> Array:
        self.bias.grad = grad.sum((0, 1, 2))
        return super().backward(grad)

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from super().parameters()
        yield self.bias


class Linear(nn.Linear):
    """Linear layer whose output keeps two spatial axes of size 1, so that another can follow."""

    def forward(self, x: Array, *, training: bool) -> Array:
        return super().forward(x, training=training)[:, None, None, :]

    def backward(self, grad: Array) -> Array:
        return super().backward(grad.reshape(len(grad), -1))


class Dropout:
    """Half of the values to zero in training, the others doubled."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def forward(self, x: Array, *, training: bool) -> Array:
        self.mask = 2 * (self.rng.random(x.shape) < 0.5).astype(np.float32) if training else np.ones_like(x)
        return x * self.mask

    def backward(self, grad: Array) -> Array:
        return grad * self.mask

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from ()


def train_numpy(images: Images, *, epochs: int, seed: int) -> dict[str, Array]:
    """Returns the trained weights by PyTorch's names."""
    rng = np.random.default_rng(seed)
    named: dict[str, nn.Layer] = {}
    for block, convs in enumerate(BLOCKS, 1):
        for i, (channels_in, channels_out) in enumerate(convs, 1):
            if i > 1:
                named[f"relu{block}"] = nn.Relu()
            named[f"conv{2 * block - 2 + i}"] = Conv(channels_in, channels_out, rng)
        named |= {f"bn{block}": nn.BatchNorm(channels_out), f"relu{block}b": nn.Relu(), f"pool{block}": nn.MaxPool()}
    named |= {"fc1": Linear(128 * 4 * 4, HIDDEN, rng), "relu_fc": nn.Relu(), "drop": Dropout(rng)}
    named["fc2"] = nn.Linear(HIDDEN, CLASSES, rng)
    pixels = as_input(images.train).transpose(0, 2, 3, 1)
    mirrored = np.concatenate([pixels, pixels[:, :, ::-1]])
    labels = np.concatenate([images.train_labels] * 2)
    nn.train(list(named.values()), mirrored, labels, epochs=epochs, seed=seed)
    return {f"{name}.{key}": value for name, layer in named.items() for key, value in _arrays(layer)}


def _arrays(layer: nn.Layer) -> Iterator[tuple[str, Array]]:
    if isinstance(layer, nn.Conv):
        fan_in, channels_out = layer.weight.value.shape
        yield "weight", layer.weight.value.reshape(3, 3, fan_in // 9, channels_out).transpose(3, 2, 0, 1)
        yield "bias", layer.bias.value
    elif isinstance(layer, nn.Linear):
        yield "weight", layer.weight.value.T
        yield "bias", layer.bias.value
    elif isinstance(layer, nn.BatchNorm):
        yield from (("weight", layer.gain.value), ("bias", layer.shift.value))
        yield from (("running_mean", layer.mean), ("running_var", layer.variance))


def train_torch(images: Images, *, epochs: int, seed: int) -> dict[str, Array]:
    """Returns the trained weights by PyTorch's names; on a GPU where there is one."""
    try:
        import torch
    except ImportError as error:
        raise SystemExit("--trainer torch needs PyTorch (pip install torch); --trainer numpy needs nothing") from error
    from torch.nn import functional

    class CIFAR10Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for block, convs in enumerate(BLOCKS, 1):
                for i, (channels_in, channels_out) in enumerate(convs, 1):
                    setattr(self, f"conv{2 * block - 2 + i}", torch.nn.Conv2d(channels_in, channels_out, 3, padding=1))
                setattr(self, f"bn{block}", torch.nn.BatchNorm2d(channels_out))
            self.fc1, self.fc2 = torch.nn.Linear(128 * 4 * 4, HIDDEN), torch.nn.Linear(HIDDEN, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            f, pool = functional.relu, functional.max_pool2d
            x = pool(f(self.bn1(self.conv2(f(self.conv1(x))))), 2)
            x = pool(f(self.bn2(self.conv4(f(self.conv3(x))))), 2)
            x = pool(f(self.bn3(self.conv5(x))), 2).flatten(1)
            return self.fc2(functional.dropout(f(self.fc1(x)), 0.5, self.training))

    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net, batch = CIFAR10Net().to(device), 128
    inputs = torch.from_numpy(as_input(images.train)).to(device)
    labels = torch.from_numpy(images.train_labels).to(device)
    steps = epochs * -(-len(inputs) // batch)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs), device=device).split(batch):
            x = functional.pad(inputs[chosen], (4,) * 4)
            i, j = torch.randint(0, 9, (2,)).tolist()
            x = x[:, :, i : i + 32, j : j + 32]
            x = torch.where(torch.rand(len(x), 1, 1, 1, device=device) < 0.5, x, x.flip(3))
            optimizer.zero_grad()
            functional.cross_entropy(net(x), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    return {key: value.cpu().numpy() for key, value in net.state_dict().items() if "tracked" not in key}


def export(weights: Mapping[str, Array]) -> onnx.ModelProto:
    """Returns CIFAR10Net with these weights as ONNX."""
    nodes: list[onnx.NodeProto] = []
    value = "image"

    def emit(op: str, name: str, keys: str = "", **attributes: object) -> None:
        nonlocal value
        inputs = [value, *(f"{name}.{key}" for key in keys.split())]
        value = "logits" if name == "fc2" else f"/{name}/{op}_out"
        nodes.append(helper.make_node(op, inputs, [value], f"/{name}/{op}", **attributes))

    for block, convs in enumerate(BLOCKS, 1):
        for i in range(1, len(convs) + 1):
            if i > 1:
                emit("Relu", f"relu{block}")
            emit("Conv", f"conv{2 * block - 2 + i}", "weight bias", kernel_shape=[3, 3], pads=[1] * 4)
        emit("BatchNormalization", f"bn{block}", "weight bias running_mean running_var", epsilon=1e-5)
        emit("Relu", f"relu{block}b")
        emit("MaxPool", f"pool{block}", kernel_shape=[2, 2], strides=[2, 2])
    emit("Flatten", "flatten", axis=1)
    emit("Gemm", "fc1", "weight bias", transB=1)
    emit("Relu", "relu_fc")
    emit("Gemm", "fc2", "weight bias", transB=1)
    initializers = [numpy_helper.from_array(np.ascontiguousarray(v, np.float32), k) for k, v in weights.items()]
    graph = helper.make_graph(
        nodes,
        "CIFAR10Net",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="cifar10_train")
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model


TRAINERS = {"numpy": train_numpy, "torch": train_torch}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and writes ``cifar10.onnx``."""
    parser = argparse.ArgumentParser(description="Train CIFAR10Net and write it as ONNX.")
    cifar10_data.add_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("examples/out/cifar10.onnx"))
    parser.add_argument("--trainer", choices=TRAINERS, default="numpy")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    images = cifar10_data.load(arguments)
    print(f"{images.source}; training with {arguments.trainer} for {arguments.epochs} epochs")
    weights = TRAINERS[arguments.trainer](images, epochs=arguments.epochs, seed=arguments.seed)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(export(weights), arguments.out)
    print(f"wrote {arguments.out}: {sum(v.size for v in weights.values())} parameters")


if __name__ == "__main__":
    main()
