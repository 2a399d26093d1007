"""Half a point of top-1: a budget in accuracy against labels, on held-out data.

    python examples/labels_and_budget.py                          # the shipped digits net, or a larger one if at hand
    python examples/labels_and_budget.py --budget 0.002

Three kinds of samples, none of which is another: some to calibrate on, some with labels to decide what may be lost
(`eval_reader`), and in the end some that nobody has looked at. ``metric`` counts against the labels, which it finds by
the numbers of the samples. Where INT8 loses more than the budget allows, nodes are left float until it does not. The
report says whether the budget is kept, and whether so many samples are enough to tell.

Where a folder ``../shared/zoo`` with MLPerf Tiny's ResNet-8 and CIFAR-10 is at hand, these are taken.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kenosis_ort import ArrayReader, quantize_static
from kenosis_ort.demo import load_digits, model_path

ZOO = Path(__file__).resolve().parents[1] / "../shared/zoo"
Outputs = Mapping[str, npt.NDArray[Any]]


class Top1:
    """Share of samples whose largest score is at their label; told sample by sample, as metrics of torchmetrics are."""

    def __init__(self, labels: npt.NDArray[np.int64]) -> None:
        self.labels = labels
        self.reset()

    def update(self, outputs: Outputs, reference: Outputs, index: int) -> None:
        """Takes one sample in; ``reference``, what the float model says, does not matter where there are labels."""
        del reference
        (scores,) = outputs.values()
        self.right += int(scores.argmax() == self.labels[index])
        self.seen += 1

    def compute(self) -> float:
        """Returns the share; larger is better."""
        return self.right / self.seen

    def reset(self) -> None:
        """Forgets all samples."""
        self.right = self.seen = 0


@dataclass(frozen=True)
class Task:
    """A trained net with its data: samples are stacked along the first axis."""

    name: str
    model: Path
    calibration: npt.NDArray[np.float32]
    held_out: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    unseen: npt.NDArray[np.float32]
    unseen_labels: npt.NDArray[np.int64]


def digits(model: Path) -> Task:
    """Returns the shipped net."""
    data = load_digits()
    images, labels = data.images, data.labels
    return Task("digits", model, data.calibration, images[:300], labels[:300], images[300:], labels[300:])


def resnet8(folder: Path) -> Task:
    """Returns MLPerf Tiny's image classifier."""
    with np.load(folder / "cifar10_calib.npz") as calibration, np.load(folder / "cifar10_test.npz") as test:
        fit = np.moveaxis(calibration["images"][:100], -1, 1).astype(np.float32)
        images = np.moveaxis(test["images"][:4000], -1, 1).astype(np.float32)
        labels = test["labels"][:4000].astype(np.int64)
    model = folder / "mlperf_ic_resnet8.onnx"
    return Task("ResNet-8", model, fit, images[:2000], labels[:2000], images[2000:], labels[2000:])


def top1(model: Path, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> float:
    """Returns the accuracy of a model's file."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    scores = [session.run(None, {name: image[None]})[0].argmax() for image in images]
    return float(np.mean(scores == labels))


def main(argv: Sequence[str] | None = None) -> None:
    """Quantizes within a budget and counts again on samples that took no part."""
    parser = argparse.ArgumentParser(description="Quantize within a budget of top-1 accuracy.")
    parser.add_argument("--budget", type=float, default=0.005, help="loss of top-1 allowed (default: 0.005)")
    parser.add_argument("--zoo", type=Path, default=ZOO, help="folder with ResNet-8 and CIFAR-10, if there is one")
    arguments = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = (arguments.zoo / "mlperf_ic_resnet8.onnx").exists()
        task = resnet8(arguments.zoo) if found else digits(stack.enter_context(model_path()))
        name = ort.InferenceSession(task.model, providers=["CPUExecutionProvider"]).get_inputs()[0].name
        out = folder / "model.int8.onnx"
        report = quantize_static(
            task.model,
            out,
            ArrayReader({name: task.calibration}),
            metric=Top1(task.labels),
            eval_reader=ArrayReader({name: task.held_out}),
            accuracy_budget=arguments.budget,
            promise=False,  # the question here is the accuracy of the INT8 model
        )
        assert report.measure is not None
        print(f"{task.name}: {report.measure.sentence()}")
        print(report.measure.verdict())
        for note in report.notes:
            if "float for accuracy" in note or "budget" in note:
                print(note)
        before, after = (top1(path, task.unseen, task.unseen_labels) for path in (task.model, out))
        print(f"on {len(task.unseen)} samples that took no part: {before:.3f} in float, {after:.3f} now")


if __name__ == "__main__":
    main()
