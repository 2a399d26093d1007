"""Quantizes an image classifier with a folder of images as calibration data.

    python examples/image_folder.py                                  # the digits net, on PNGs made of its images
    python examples/image_folder.py --model net.onnx --images photos/ --size 224 \
        --mean 0.485 0.456 0.406 --std 0.229 0.224 0.225

A hundred pictures of what the model will see are plenty; labels are not needed. With labels at hand measure accuracy:
here a folder per class (``images/test/7/...png``) gives them. Needs Pillow: ``pip install 'kenosis-ort[images]'``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnxruntime as ort
from PIL import Image

from kenosis_ort import ImageFolderReader, quantize_static
from kenosis_ort.demo import load_digits, model_path


def write_digits(folder: Path) -> None:
    """Writes the shipped images as 8x8 grey PNGs: ``calibration/*.png`` and ``test/<digit>/*.png``."""
    digits = load_digits()
    names = [f"calibration/{i:03d}.png" for i in range(len(digits.calibration))]
    names += [f"test/{label}/{i:03d}.png" for i, label in enumerate(digits.labels)]
    for name, image in zip(names, np.concatenate([digits.calibration, digits.images]), strict=True):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint(image[0] * 255).astype(np.uint8)).save(path)


def classify(model: Path, reader: ImageFolderReader) -> np.ndarray:
    """Returns the class of every image, in the order of the paths."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, reader.feed(i))[0].argmax(1) for i in range(len(reader))])


def main(argv: Sequence[str] | None = None) -> None:
    """Quantizes, and compares the answers before and after."""
    parser = argparse.ArgumentParser(description="Quantize an image classifier with a folder of images.")
    parser.add_argument("--model", type=Path, help="float model; the shipped digits net if not given")
    parser.add_argument("--images", type=Path, help="folder of images; PNGs of the shipped digits if not given")
    parser.add_argument("--test", type=Path, help="folder of images to compare on, one subfolder a class")
    parser.add_argument("--out", type=Path, help="file to write; a temporary one if not given")
    parser.add_argument("--size", type=int, default=8, help="height and width that the model takes")
    parser.add_argument("--mean", type=float, nargs="+", default=[0.0])
    parser.add_argument("--std", type=float, nargs="+", default=[1.0])
    arguments = parser.parse_args(argv)
    if (arguments.model is None) != (arguments.images is None):
        parser.error("give --model and --images, or neither")

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, images, test = arguments.model, arguments.images, arguments.test
        if model is None:
            model = stack.enter_context(model_path())
            write_digits(scratch)
            images, test = scratch / "calibration", scratch / "test"
        model_input = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).get_inputs()[0]

        def reader(folder: Path, limit: int | None = None) -> ImageFolderReader:
            # Calibration has to see exactly what the model sees in use: the same size, scale, mean and channel order.
            return ImageFolderReader(
                folder,
                input_name=model_input.name,
                size=(arguments.size, arguments.size),
                mean=arguments.mean,
                std=arguments.std,
                channel_order="GRAY" if model_input.shape[1] == 1 else "RGB",
                limit=limit,
            )

        output = arguments.out or scratch / "classifier.int8.onnx"
        report = quantize_static(model, output, reader(images, limit=100))
        print(report.verdict())
        compared = reader(test or images)
        before, after = classify(model, compared), classify(output, compared)
        print(f"the same class for {(before == after).mean():.2%} of {len(before)} images")
        if test is not None:
            # Classes in the order of the subfolders' names, as torchvision.datasets.ImageFolder numbers them.
            names = sorted(path.name for path in test.iterdir() if path.is_dir())
            labels = np.concatenate([np.full(sum(1 for _ in (test / n).iterdir()), i) for i, n in enumerate(names)])
            print(f"accuracy {(before == labels).mean():.4f} -> {(after == labels).mean():.4f}")


if __name__ == "__main__":
    main()
