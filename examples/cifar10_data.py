"""CIFAR-10 for the walk-through: the real data set, the images of a folder of archives, or generated ones.

The data set is read from its binary version (https://www.cs.toronto.edu/~kriz/cifar.html, "binary version", records of
one label byte and 3072 pixel bytes). The Python version is not read: it is pickled, and loading a pickle runs code.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

SIZE = 32
CLASSES = 10
RECORD = 1 + 3 * SIZE * SIZE
HELD_OUT = 1000
DEFAULT_ARCHIVES = Path(__file__).resolve().parents[2] / "shared" / "zoo"


@dataclass(frozen=True)
class Images:
    """Images and labels, split.

    Attributes:
        train: uint8 (N, 32, 32, 3).
        train_labels: int64 (N,), 0 to 9.
        test: uint8 (M, 32, 32, 3), never seen in training or calibration.
        test_labels: int64 (M,).
        source: Where they come from, for the printed result.
    """

    train: Pixels
    train_labels: Labels
    test: Pixels
    test_labels: Labels
    source: str


def read_binary(folder: Path) -> Images:
    """Reads ``data_batch_*.bin`` and ``test_batch.bin``."""
    batches = sorted(folder.glob("data_batch_*.bin"))
    if not batches or not (folder / "test_batch.bin").is_file():
        raise SystemExit(f"{folder}: no data_batch_*.bin and test_batch.bin; unpack CIFAR-10's binary version there")
    parts = [_records(path) for path in batches]
    test, test_labels = _records(folder / "test_batch.bin")
    train, labels = (np.concatenate([part[i] for part in parts]) for i in range(2))
    return Images(train, labels, test, test_labels, f"CIFAR-10, {len(train)} training images")


def _records(path: Path) -> tuple[Pixels, Labels]:
    raw = np.fromfile(path, np.uint8)
    if raw.size == 0 or raw.size % RECORD:
        raise SystemExit(f"{path}: {raw.size} bytes are not whole records of {RECORD}")
    records = raw.reshape(-1, RECORD)
    if records[:, 0].max() >= CLASSES:
        raise SystemExit(f"{path}: a label above {CLASSES - 1}; this is not CIFAR-10's binary version")
    pixels = records[:, 1:].reshape(-1, 3, SIZE, SIZE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), records[:, 0].astype(np.int64)


def read_archives(folder: Path) -> Images:
    """Reads ``cifar10_calib.npz`` and ``cifar10_test.npz``; the last 1,000 images are held out."""
    with (
        np.load(folder / "cifar10_calib.npz", allow_pickle=False) as calib,
        np.load(folder / "cifar10_test.npz", allow_pickle=False) as test,
    ):
        images, labels = (np.concatenate([calib[k], test[k]]) for k in ("images", "labels"))
    split = len(images) - HELD_OUT
    source = f"{split} CIFAR-10 images of {folder.name}/"
    return Images(images[:split], labels[:split], images[split:], labels[split:], source)


def generate(count: int = 2000, seed: int = 0) -> Images:
    """Makes gratings: ten orientations and tints, with random phase, brightness and noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    y, x = np.mgrid[:SIZE, :SIZE] / SIZE
    angle = (labels * np.pi / CLASSES)[:, None, None]
    phase = rng.uniform(0, 2 * np.pi, (count, 1, 1))
    wave = np.sin(6 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) + phase)[..., None]
    tint = rng.uniform(-1, 1, (CLASSES, 3))[labels][:, None, None]
    light = rng.normal(0, 20, (count, 1, 1, 1))
    noisy = 128 + 40 * wave + 30 * tint + light + rng.normal(0, 40, (count, SIZE, SIZE, 3))
    images = np.clip(noisy, 0, 255).astype(np.uint8)
    split = count * 3 // 4
    return Images(images[:split], labels[:split], images[split:], labels[split:], f"{count} generated images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the images."""
    parser.add_argument("--cifar", type=Path, help="folder with the binary version of CIFAR-10 (data_batch_*.bin)")
    parser.add_argument("--archives", type=Path, default=DEFAULT_ARCHIVES, help="folder with cifar10_*.npz")
    parser.add_argument("--generated", type=int, metavar="COUNT", help="so many generated images, whatever is there")


def load(arguments: argparse.Namespace) -> Images:
    """Returns the images that the options name; generated ones where nothing else is there."""
    if arguments.generated:
        return generate(arguments.generated)
    if arguments.cifar:
        return read_binary(arguments.cifar)
    return read_archives(arguments.archives) if (arguments.archives / "cifar10_test.npz").is_file() else generate()


def as_input(images: Pixels) -> npt.NDArray[np.float32]:
    """Returns the net's input: float32 (N, 3, 32, 32), roughly from -2 to 2."""
    scaled = (images.astype(np.float32) / 255 - 0.5) / 0.25
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2), np.float32)
