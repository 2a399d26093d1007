"""Optimum's ``ORTQuantizer`` as it is, and the same code under `kenosis_ort.patch()`.

    python -m venv optimum && optimum/bin/pip install "torch" "optimum-onnx[onnxruntime]" kenosis-ort
    optimum/bin/python examples/optimum_quantizer.py

Written against optimum-onnx 0.1.0, transformers 4.57 and torch 2.13. BERT and ViT are built from a configuration, with
random weights, and exported by Optimum; nothing is downloaded. Optimum calibrates and builds ``QDQQuantizer`` itself,
``quantize_static`` never runs: `patch()` puts our calibrator and our quantizer in the place of the names it imported.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.quantization import CalibrationMethod

import kenosis_ort

VOCABULARY, WIDTH, LAYERS = 1000, 256, 4
Feeds = list[dict[str, Any]]


def export(name: str, folder: Path) -> Path:
    """Exports a small net with random weights; returns the folder that Optimum reads."""
    import torch
    from optimum.exporters.onnx import onnx_export_from_model
    from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    size = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
    if name == "BERT":
        config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=128, **size)
        net, task = BertForSequenceClassification(config), "text-classification"
    else:
        net, task = ViTForImageClassification(ViTConfig(image_size=96, **size)), "image-classification"
    onnx_export_from_model(net.eval(), folder / name, task=task, opset=17, do_validation=False)
    return folder / name


def samples(name: str, count: int, seed: int) -> Feeds:
    """Returns samples as a data set hands them out: nested lists without a batch axis."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        if name == "BERT":
            length = int(rng.integers(16, 96))
            ids = rng.integers(0, VOCABULARY, length).tolist()
            found.append({"input_ids": ids, "attention_mask": [1] * length, "token_type_ids": [0] * length})
        else:
            found.append({"pixel_values": rng.normal(0, 1, (3, 96, 96)).astype(np.float32).tolist()})
    return found


def quantize(folder: Path, calibration: Feeds, out: Path) -> Path:
    """Quantizes with Optimum, the way its documentation does; nothing in here knows of kenosis-ort."""
    from optimum.onnxruntime import ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig, CalibrationConfig

    out.mkdir(parents=True)
    quantizer = ORTQuantizer.from_pretrained(folder, file_name="model.onnx")
    config = AutoQuantizationConfig.avx512_vnni(is_static=True, per_channel=False)
    method = CalibrationConfig("random", "", "train", len(calibration), CalibrationMethod.MinMax)
    ranges = quantizer.fit(
        calibration,
        method,
        onnx_augmented_model_name=str(out / "augmented.onnx"),
        operators_to_quantize=config.operators_to_quantize,
    )
    quantizer.quantize(config, out, calibration_tensors_range=ranges)
    return out / "model_quantized.onnx"


def sqnr_db(model: Path, quantized: Path, feeds: Feeds) -> float:
    """Returns signal power over error power of the logits, in dB."""
    one, other = (ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]) for p in (model, quantized))
    want, got = (np.concatenate([s.run(["logits"], f)[0] for f in feeds]) for s in (one, other))
    return float(10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints each net's figures, stock and patched."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=24, help="calibration samples")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the timing")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(f"{'':22}  integer Conv/Gemm/MatMul  SQNR     speed against float")
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("BERT", "ViT"):
            folder = export(name, Path(scratch))
            held_out = [{k: np.asarray([v]) for k, v in s.items()} for s in samples(name, 16, seed=1)]
            held_out = [{k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in f.items()} for f in held_out]
            made: dict[str, Path] = {}
            ways: dict[str, Callable[[], Any]] = {"stock": nullcontext, "patched": kenosis_ort.patch}
            for way, around in ways.items():
                with around():
                    made[way] = quantize(folder, samples(name, options.samples, seed=0), Path(scratch, name, way))
            timed = kenosis_ort.bench({"float": folder / "model.onnx", **made}, held_out, rounds=options.rounds)
            for way, path in made.items():
                heavy = [k for k in kenosis_ort.verify_fusion(path).kernels if k.op_type in ("Conv", "Gemm", "MatMul")]
                integer = f"{sum(k.integer for k in heavy)} of {len(heavy)}"
                ratio = next(model.ratio for model in timed.models if model.name == way)
                print(
                    f"{name + ', ' + way:22}  {integer:24}  "
                    f"{sqnr_db(folder / 'model.onnx', path, held_out):4.1f} dB  {ratio:.2f}x"
                )


if __name__ == "__main__":
    main()
