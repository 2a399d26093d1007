"""Quantizes without data, and says how far the result can be relied on.

    python examples/no_data.py                      # the shipped digits net
    python examples/no_data.py --model net.onnx     # yours

``recipe="data-free"`` makes samples up after the model's inputs (natural-looking images, tokens, sound) and relies on
what the net itself knows, such as the statistics in its BatchNormalization. Made-up data finds ranges, not accuracy:
the report says what was assumed and how far to trust it. Ten real samples are better than any number of made-up ones;
where you have a handful, `SyntheticReader(model, real=...)` takes them first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kenosis_ort import ArrayReader, SyntheticReader, quantize_static
from kenosis_ort.demo import load_digits, model_path


def logits(model: Path, images: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns the output of the digits net."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"image": images})[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Quantizes without data; for the digits net, compares with real calibration images."""
    parser = argparse.ArgumentParser(description="Quantize a model without data.")
    parser.add_argument("--model", type=Path, help="float model; the shipped digits net if not given")
    parser.add_argument("--out", type=Path, help="file to write; a temporary one if not given")
    arguments = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = arguments.model or stack.enter_context(model_path())
        print("\n".join(SyntheticReader(model).assumptions))
        made_up = arguments.out or folder / "made_up.onnx"
        report = quantize_static(
            model,
            made_up,
            recipe="data-free",  # no reader: the recipe brings its own
            promise=False,  # the question here is the quality of the INT8 model
        )
        print(report.verdict())
        if report.trust is not None:
            print(f"trust: {report.trust.verdict}. {report.trust.reason}".strip())
            if report.trust.advice:
                print(f"to do: {report.trust.advice}")
        if arguments.model is None:
            digits = load_digits()
            real = folder / "real.onnx"
            quantize_static(model, real, ArrayReader({"image": digits.calibration}), promise=False)
            reference = logits(model, digits.images)
            for name, path in (("made-up data", made_up), ("real data", real)):
                found = logits(path, digits.images)
                noise = float(np.square(found - reference).sum())
                sqnr = 10 * np.log10(np.square(reference).sum() / noise)
                accuracy = (found.argmax(1) == digits.labels).mean()
                print(f"{name:13s} accuracy {accuracy:.4f}, SQNR {sqnr:.1f} dB")


if __name__ == "__main__":
    main()
