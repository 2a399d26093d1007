"""Trains CIFAR10Net and writes it as ONNX.

    python examples/cifar10_train.py                                               # numpy, on the images that are there
    python examples/cifar10_train.py --cifar FOLDER --trainer torch --epochs 40    # all 50,000, with PyTorch

Both trainers yield the same file, as ``torch.onnx.export`` would write it: input ``image`` (N, 3, 32, 32), output
``logits`` (N, 10), opset 17, BatchNormalization unfolded, Dropout gone. Numpy is fit for a few thousand images.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import cifar10_data
import cifar10_net
import numpy as np
import onnx
import train_digits as nn
from cifar10_data import CLASSES, Images, as_input
from cifar10_net import BLOCKS, HIDDEN, Array


def train_numpy(images: Images, *, epochs: int, seed: int) -> dict[str, Array]:
    """Returns the trained weights by PyTorch's names; images are mirrored and moved by a pixel."""
    layers = cifar10_net.build(np.random.default_rng(seed))
    pixels = as_input(images.train).transpose(0, 2, 3, 1)
    mirrored, labels = np.concatenate([pixels, pixels[:, :, ::-1]]), np.tile(images.train_labels, 2)
    nn.train(list(layers.values()), mirrored, labels, epochs=epochs, seed=seed)
    return cifar10_net.state(layers)


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
    onnx.save(cifar10_net.export(weights), arguments.out)
    print(f"wrote {arguments.out}: {sum(v.size for v in weights.values())} parameters")


if __name__ == "__main__":
    main()
