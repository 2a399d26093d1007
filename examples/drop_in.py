"""A script that quantizes with stock ONNX Runtime, and the one line that changes.

The script below is what many projects have: a `CalibrationDataReader` of their own and a call of
``quantize_static``. With ``--stock`` it runs as it was written for stock ONNX Runtime; without, the function
comes from ``kenosis_ort``. Nothing else differs: neither the reader nor the call. It runs on the digits net
that ships with the package::

    python examples/drop_in.py --stock
    python examples/drop_in.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.demo import load_digits, model_path


class MyReader(CalibrationDataReader):
    """The user's own reader: one image at a time, once."""

    def __init__(self, images: npt.NDArray[np.float32]) -> None:
        self.feeds = iter([{"image": image[None]} for image in images])

    def get_next(self) -> dict[str, npt.NDArray[np.float32]] | None:
        """Returns the next feed, None at the end."""
        return next(self.feeds, None)


def main(argv: Sequence[str] | None = None) -> None:
    """Quantizes the digits net and measures it on the held-out images."""
    parser = argparse.ArgumentParser(description="Quantize the digits net with stock ONNX Runtime or kenosis-ort.")
    parser.add_argument("--stock", action="store_true", help="the script as it was before")
    if parser.parse_args(argv).stock:
        from onnxruntime.quantization import quantize_static  # before
    else:
        from kenosis_ort import quantize_static  # after: the one line that changes

    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder, model_path() as model:
        output = Path(folder) / "digits.int8.onnx"
        report = quantize_static(model, output, MyReader(digits.calibration))
        session = ort.InferenceSession(str(output), providers=["CPUExecutionProvider"])
        answers = session.run(None, {"image": digits.images})[0].argmax(1)

    print(f"accuracy on {len(answers)} held-out images: {(answers == digits.labels).mean():.4f}")
    if report is not None:  # stock returns None, kenosis_ort what it did
        print(report.verdict())


if __name__ == "__main__":
    main()
