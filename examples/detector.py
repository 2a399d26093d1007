"""Quantizes a detector with two inputs, and measures its mAP and F1 before and after.

    python examples/detector.py

The detector is tiny and trained here in a few seconds (`detector_net.py`). What carries over to real ones:

* ``primary_inputs=["image"]``: what derives from ``scale_factor`` alone stays float. (It would be told apart without:
  say it where names and shapes do not.)
* ``protect_outputs="float"``: the head's boxes and scores stay float; a box coordinate has no 8 bits to spare.
* ``metric=``: what the accuracy passes optimize is the detector's own measure, not the average of all its numbers,
  most of which belong to cells where there is nothing.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import detector_net
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from detector_net import Truth
from onnxruntime import quantization as stock

from kenosis_ort import ArrayReader, quantize_static

Outputs = Mapping[str, npt.NDArray[np.float32]]
Rows = npt.NDArray[np.float32]  # (detections, 6): class, x0, y0, x1, y1, score

THRESHOLD = 0.3


def overlap(a: Rows, b: Rows) -> Rows:
    """Returns intersection over union of boxes of equal class, 0 for others: (len(a), len(b))."""
    low, high = np.maximum(a[:, None, 1:3], b[None, :, 1:3]), np.minimum(a[:, None, 3:5], b[None, :, 3:5])
    shared = np.clip(high - low, 0, None).prod(2)
    areas = [(r[:, 3:5] - r[:, 1:3]).prod(1) for r in (a, b)]
    return np.asarray(shared / (areas[0][:, None] + areas[1] - shared) * (a[:, None, 0] == b[None, :, 0]), np.float32)


def decode(outputs: Outputs, least: float = THRESHOLD) -> Rows:
    """Returns what is detected in one image, the best first, duplicates removed."""
    kinds, cells = np.nonzero(outputs["scores"][0] > least)
    scores = outputs["scores"][0][kinds, cells]
    rows = np.column_stack([kinds, outputs["boxes"][0][cells], scores]).astype(np.float32)[np.argsort(-scores)]
    kept: list[int] = []
    iou = overlap(rows, rows)
    for i in range(len(rows)):
        if not (iou[i, kept] > 0.5).any():
            kept.append(i)
    return rows[kept]


def hits(found: Rows, truth: Rows) -> npt.NDArray[np.bool_]:
    """Returns for each detection, the best first, whether it is the first to overlap an object by half."""
    iou, right = overlap(found, truth), np.zeros(len(found), bool)
    for i in range(len(found) if len(truth) else 0):
        j = iou[i].argmax()
        right[i] = iou[i, j] >= 0.5
        iou[:, j] = np.where(right[i], 0, iou[:, j])
    return right


def f1(found: Sequence[Rows], truths: Sequence[Rows]) -> float:
    """Returns the harmonic mean of precision and recall."""
    matched = sum(hits(a, b).sum() for a, b in zip(found, truths, strict=True))
    return float(2 * matched / max(sum(map(len, found)) + sum(map(len, truths)), 1))


def mean_average_precision(found: Sequence[Rows], truths: Sequence[Truth]) -> float:
    """Returns mAP at IoU 0.5: the area under each class's precision-recall curve, averaged."""
    areas = []
    for kind in range(detector_net.CLASSES):
        pairs = [(f[f[:, 0] == kind], t[t[:, 0] == kind]) for f, t in zip(found, truths, strict=True)]
        order = np.argsort(-np.concatenate([f[:, 5] for f, _ in pairs]))
        right = np.concatenate([hits(f, t) for f, t in pairs])[order]
        precision = right.cumsum() / np.arange(1, len(right) + 1)
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        areas.append(precision[right].sum() / max(sum(len(t) for _, t in pairs), 1))
    return float(np.mean(areas))


def agreement(outputs: Sequence[Outputs], reference: Sequence[Outputs]) -> float:
    """The metric for the accuracy passes: F1 of the detections, the float model's taken for the truth."""
    return f1([decode(o) for o in outputs], [decode(o) for o in reference])


def run(model: Path, feeds: Sequence[Outputs]) -> list[Outputs]:
    """Returns the outputs by name, one entry a feed."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return [dict(zip(names, session.run(None, feed), strict=True)) for feed in feeds]


def as_feeds(images: Rows, truths: Sequence[Truth]) -> tuple[list[Outputs], list[Truth]]:
    """Returns feeds with a scale factor each, and the objects in pixels of the original images."""
    scales = np.random.default_rng(7).choice([0.25, 0.5, 1.0], len(images)).astype(np.float32)
    feeds: list[Outputs] = [
        {"image": image[None], "scale_factor": np.full((1, 2), scale, np.float32)}
        for image, scale in zip(images, scales, strict=True)
    ]
    return feeds, [np.concatenate([t[:, :1], t[:, 1:] / s], 1) for t, s in zip(truths, scales, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, quantizes with stock and with kenosis-ort, prints mAP and F1."""
    parser = argparse.ArgumentParser(description="Quantize a detector with two inputs.")
    parser.add_argument("--images", type=int, default=1024, help="training images")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--test", type=int, default=300, help="images to measure on")
    arguments = parser.parse_args(argv)
    logging.getLogger().setLevel(logging.ERROR)  # stock's advice would stand between the lines of the result

    images, truths = detector_net.draw(arguments.images, seed=0)
    net = detector_net.train(images, truths, epochs=arguments.epochs)
    calibration, _ = as_feeds(images[:100], truths[:100])
    test, test_truths = as_feeds(*detector_net.draw(arguments.test, seed=1))
    with tempfile.TemporaryDirectory() as folder:
        models = {name: Path(folder) / f"{name}.onnx" for name in ("float32", "stock", "kenosis-ort")}
        onnx.save(detector_net.export(net), models["float32"])
        stock.quantize_static(models["float32"], models["stock"], ArrayReader(calibration))
        report = quantize_static(
            models["float32"],
            models["kenosis-ort"],
            ArrayReader(calibration),
            primary_inputs=["image"],
            protect_outputs="float",
            metric=agreement,
            promise=False,  # a net of microseconds gains no time from int8, and would be delivered as float
        )
        results = {name: run(path, test) for name, path in models.items()}
    for name, outputs in results.items():
        found = [decode(o) for o in outputs]
        ranked = [decode(o, 0.01) for o in outputs]
        print(
            f"{name:12s} mAP {mean_average_precision(ranked, test_truths):.3f}   F1 {f1(found, test_truths):.3f}   "
            f"F1 against float {agreement(outputs, results['float32']):.3f}"
        )
    print(report.verdict())
    print(report.plan.explain("scale_xyxy"))


if __name__ == "__main__":
    main()
