"""Self-calibration of nets that find or read text: made-up samples with and without writing, beside real ones.

Text is set in a font that no made-up sample has, on paper and over the photographs of ``../shared/zoo`` where they are.
For each reader: mask IoU at 0.3 (detectors) or agreement of the classes (recognizers) and SQNR against float on
pictures that none was calibrated on, integer nodes, and the verdict. Recipe "plain", so that rows differ by the data.

    python benchmarks/text_nets.py detector.onnx                 # e.g. PP-OCR's, as OCR packages bring them along
    python benchmarks/text_nets.py recognizer.onnx --size 48 320 --mean 0.5 --std 0.5
"""

from __future__ import annotations

import argparse
import io
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from _session import session
from _zoo import OneShotReader, quiet_folder
from PIL import Image, ImageDraw, ImageFont

from kenosis_ort import SyntheticReader, quantize_static
from kenosis_ort.calibration.synthetic import reader as synthetic_reader

PHOTOGRAPHS = Path(__file__).parents[1] / "../shared/zoo/coco_subset.npz"
LETTERS = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_MASK = 0.3


def photographs() -> list[Image.Image]:
    """Returns real photographs to write on, none where there are none."""
    if not PHOTOGRAPHS.is_file():
        return []
    data = np.load(PHOTOGRAPHS)
    ends, stored = data["train2017_off"], data["train2017_jpg"].tobytes()
    return [Image.open(io.BytesIO(stored[a:b])).convert("RGB") for a, b in pairwise(ends)]


def picture(seed: int, height: int, width: int, grounds: Sequence[Image.Image]) -> np.ndarray[Any, Any]:
    """Returns words on paper or over a photograph, (3, height, width) from 0 to 255."""
    rng = np.random.default_rng(seed)
    if grounds and rng.random() < 0.6:
        image = grounds[int(rng.integers(len(grounds)))].resize((width, height))
    else:
        image = Image.new("RGB", (width, height), tuple(int(v) for v in rng.integers(150, 256, 3)))
    dark = np.asarray(image).mean() > 120
    ink = tuple(int(v) for v in (rng.integers(0, 90, 3) if dark else rng.integers(170, 256, 3)))
    draw, line = ImageDraw.Draw(image), width >= 2.5 * height
    top = 0 if line else int(rng.integers(4, height // 8))
    while top + 12 <= height:
        size = int(rng.integers(height // 2, height * 4 // 5) if line else rng.integers(12, max(height // 8, 13)))
        words = " ".join("".join(rng.choice(LETTERS, rng.integers(2, 10))) for _ in range(rng.integers(1, 4)))
        at = (int(rng.integers(4, max(width // (16 if line else 2), 5))), top)
        draw.text(at, words, font=ImageFont.load_default(size), fill=ink)
        top += height if line else int(size * rng.uniform(1.2, 2.2))
    return np.asarray(image).transpose(2, 0, 1)


def agreement(want: Sequence[Any], got: Sequence[Any]) -> str:
    """Returns how far answers agree, and the SQNR."""
    noise = sum(float(((a - b).astype(np.float64) ** 2).sum()) for a, b in zip(want, got, strict=True))
    power = sum(float((a.astype(np.float64) ** 2).sum()) for a in want)
    if want[0].ndim == 4:
        a, b = (np.concatenate([x.ravel() for x in answers]) > _MASK for answers in (want, got))
        said = f"mask IoU {(a & b).sum() / max((a | b).sum(), 1):.3f}"
    else:
        said = f"classes {np.mean([(x.argmax(-1) == y.argmax(-1)).mean() for x, y in zip(want, got, strict=True)]):.3f}"
    return f"{said}  {10 * np.log10(power / max(noise, 1e-30)):5.1f} dB"


def main(argv: Sequence[str] | None = None) -> None:
    """Quantizes once a reader, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="float model of one picture, channels first")
    parser.add_argument("--size", type=int, nargs=2, default=(320, 320), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--mean", type=float, nargs="+", default=[0.485, 0.456, 0.406])
    parser.add_argument("--std", type=float, nargs="+", default=[0.229, 0.224, 0.225])
    parser.add_argument("--samples", type=int, default=32)
    args = parser.parse_args(argv)
    model = str(args.model.resolve())
    name = session(model).get_inputs()[0].name
    mean, std = (np.asarray(v, np.float32).reshape(-1, 1, 1) for v in (args.mean, args.std))
    grounds = photographs()

    def feed(seed: int) -> dict[str, Any]:
        return {name: ((picture(seed, *args.size, grounds) / np.float32(255) - mean) / std)[None].astype(np.float32)}

    def made_up() -> SyntheticReader:
        shape = (1, 3, *args.size)
        return SyntheticReader(model, samples=args.samples, input_shapes={name: shape}, mean=args.mean, std=args.std)

    def without_writing() -> SyntheticReader:
        with mock.patch.object(synthetic_reader, "shows_writing", return_value=False):
            return made_up()

    noise = np.random.default_rng(0)
    readers = {
        "real": lambda: OneShotReader([feed(i) for i in range(args.samples)]),
        "Gaussian noise": lambda: OneShotReader(
            [{name: noise.standard_normal((1, 3, *args.size)).astype(np.float32)} for _ in range(args.samples)]
        ),
        "photographs alone": without_writing,
        "made up": made_up,
    }
    test = [feed(10_000 + i) for i in range(24)]
    want = [session(model).run(None, one)[0] for one in test]
    for row, make in readers.items():
        with quiet_folder() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = folder / "out.onnx"
            report = quantize_static(model, out, make(), recipe="plain", promise=False, tune="off", evidence="none")
            said = agreement(want, [session(out).run(None, one)[0] for one in test])
        verdict = "" if report.trust is None else report.trust.verdict
        print(f"{row:18s} {said}  {len(report.plan.integer_nodes()):4d} integer nodes  {verdict}", flush=True)


if __name__ == "__main__":
    main()
