"""Olive's ``OnnxStaticQuantization`` as it is, and the same pass under `kenosis_ort.patch()`.

    python -m venv olive && olive/bin/pip install torch onnxscript olive-ai kenosis-ort
    olive/bin/python examples/olive_static.py

Written against olive-ai 0.13 and torch 2.13. A small residual net is built in PyTorch with random weights, its batch
normalizations settled on data, and exported; nothing is downloaded. Olive calls ``get_qdq_config`` and
``quantize_static``; `patch()` puts ours in the place of the latter.
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

import kenosis_ort

SHAPE = (3, 64, 64)
DATA = "random_images"


def images(count: int, seed: int) -> Any:
    """Returns smooth random images, (count, 3, 64, 64) float32."""
    noise = np.random.default_rng(seed).normal(0, 1, (count, *SHAPE)).astype(np.float32)
    for axis in (2, 3):
        noise = sum(np.roll(noise, shift, axis) for shift in range(4)) / 2
    return noise


def export(path: Path) -> None:
    """Writes the net: a stem, three residual blocks, a pool, a linear head; batch normalizations left unfolded."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width_in: int, width: int) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(width_in, width, 3, 2, 1), nn.Conv2d(width, width, 3, 1, 1)
            self.skip = nn.Conv2d(width_in, width, 1, 2)
            self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))

        def forward(self, x: Any) -> Any:
            y = self.norms[1](self.two(torch.relu(self.norms[0](self.one(x)))))
            return torch.relu(y + self.norms[2](self.skip(x)))

    torch.manual_seed(0)
    blocks = (Block(32, 64), Block(64, 96), Block(96, 128))
    net = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1))
    net.extend([nn.Flatten(), nn.Linear(128, 10)])
    with torch.no_grad():
        for _ in range(10):
            net(torch.from_numpy(images(16, seed=2)))
    sample = torch.zeros(1, *SHAPE)
    torch.onnx.export(net.eval(), (sample,), str(path), dynamo=False, input_names=["x"], output_names=["y"])


def quantize(model: Path, out: Path, **options: Any) -> Path:
    """Runs Olive's pass, the way a workflow does; nothing in here knows of kenosis-ort."""
    from olive.data.config import DataComponentConfig, DataConfig
    from olive.model import ONNXModelHandler
    from olive.passes.olive_pass import create_pass_from_dict
    from olive.passes.onnx.quantization import OnnxStaticQuantization

    data = DataConfig(name=DATA, load_dataset_config=DataComponentConfig(type=DATA))
    config = {"data_config": data, **options}
    made = create_pass_from_dict(OnnxStaticQuantization, config, disable_search=True)
    return Path(made.run(ONNXModelHandler(str(model)), str(out)).model_path)


def register_data(count: int) -> None:
    """Makes the calibration images known to Olive, as a user's script does."""
    import torch
    from olive.data.registry import Registry

    @Registry.register_dataset(DATA)
    def _(**_: Any) -> Any:
        return [({"x": torch.from_numpy(image)}, 0) for image in images(count, seed=0)]


def sqnr_db(model: Path, quantized: Path, feeds: Sequence[dict[str, Any]]) -> float:
    """Returns signal power over error power of the output, in dB."""
    one, other = (ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]) for p in (model, quantized))
    want, got = (np.concatenate([s.run(None, f)[0] for f in feeds]) for s in (one, other))
    return float(10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()))


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "uint8, per channel": {"activation_type": "uint8", "per_channel": True},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints each configuration's figures, stock and patched."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=32, help="calibration samples")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the timing")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    register_data(options.samples)
    print(f"{'':28}  integer Conv/Gemm/MatMul  SQNR     speed against float")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch, "net.onnx")
        export(model)
        held_out = [{"x": image[None]} for image in images(32, seed=1)]
        ways: dict[str, Callable[[], Any]] = {"stock": nullcontext, "patched": kenosis_ort.patch}
        for title, settings in CONFIGURATIONS.items():
            made = {}
            for way, around in ways.items():
                with around():
                    made[way] = quantize(model, Path(scratch, title, way), **settings)
            timed = kenosis_ort.bench({"float": model, **made}, held_out, rounds=options.rounds)
            for way, path in made.items():
                heavy = [k for k in kenosis_ort.verify_fusion(path).kernels if k.op_type in ("Conv", "Gemm", "MatMul")]
                integer = f"{sum(k.integer for k in heavy)} of {len(heavy)}"
                ratio = next(model.ratio for model in timed.models if model.name == way)
                print(f"{title + ', ' + way:28}  {integer:24}  {sqnr_db(model, path, held_out):4.1f} dB  {ratio:.2f}x")


if __name__ == "__main__":
    main()
