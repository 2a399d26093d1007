"""Quantizes the shipped digits net and measures it on held-out images.

The two files ``drop_in_before.py`` (stock ONNX Runtime) and ``drop_in_after.py`` differ in one line; see with
``diff examples/drop_in_before.py examples/drop_in_after.py``, and run both.
"""
# ruff: noqa: I001 - the line that differs stays in its place

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader
from kenosis_ort import quantize_static

from kenosis_ort.demo import load_digits, model_path  # a trained net and its images


class MyReader(CalibrationDataReader):
    """The script's own reader: one image at a time, once."""

    def __init__(self, images: npt.NDArray[np.float32]) -> None:
        self.feeds = iter([{"image": image[None]} for image in images])

    def get_next(self) -> dict[str, npt.NDArray[np.float32]] | None:
        """Returns the next feed, None at the end."""
        return next(self.feeds, None)


def main() -> None:
    """Quantizes, loads the result, counts the right answers."""
    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder, model_path() as model:
        output = Path(folder) / "digits.int8.onnx"
        report = quantize_static(model, output, MyReader(digits.calibration))
        session = ort.InferenceSession(output, providers=["CPUExecutionProvider"])
        answers = session.run(None, {"image": digits.images})[0].argmax(1)
    print(f"accuracy on {len(answers)} held-out images: {(answers == digits.labels).mean():.4f}")
    print("no report" if report is None else report.verdict())


if __name__ == "__main__":
    main()
