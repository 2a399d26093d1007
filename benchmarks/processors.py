"""Files of this package on other x86-64 processors: quantized here, run here and by emulated interpreters.

Prints, by net and processor, a hash of the outputs and their SQNR against the float model here, beside stock's file of
full 8-bit weights, quantized from the same data in the same run. An emulated interpreter is any command that runs
Python with onnxruntime on another processor, as QEMU's user mode does (``qemu-x86_64 -cpu Haswell python``).

    python benchmarks/processors.py --python Haswell=COMMAND Nehalem=COMMAND [--nets residual mobile] [--models a.onnx]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import QuantType, quantize_static as stock

sys.path.insert(0, str(Path(__file__).parents[1]))
from kenosis_ort import SyntheticReader, quantize_static
from kenosis_ort.runtime.machine import machine
from tests import models

_RUN = """
import sys, numpy as np, onnxruntime as ort
options = ort.SessionOptions(); options.intra_op_num_threads = 1
feeds = dict(np.load(sys.argv[1])); count = len(next(iter(feeds.values())))
for at, path in enumerate(sys.argv[3:]):
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    runs = [session.run(None, {k: v[i] for k, v in feeds.items()})[0] for i in range(count)]
    np.save(sys.argv[2] + str(at) + ".npy", np.stack(runs))
"""


def main() -> None:
    """Runs the benchmark; exits with 1 where a file of ours differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=[], metavar="NAME=COMMAND", help="emulated interpreters")
    parser.add_argument("--nets", nargs="*", default=["residual_block", "mobile_block", "conv_relu_chain", "mlp"])
    parser.add_argument("--models", nargs="*", default=[], type=Path, help="float models, run on made-up samples")
    parser.add_argument("--samples", type=int, default=4)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    interpreters = {"here": sys.executable, **dict(each.split("=", 1) for each in arguments.python)}
    print(f"here: {machine().cpu}, onnxruntime {ort.__version__}")
    print(f"{'net':28} {'file':6} {'processor':10} {'outputs':10} dB against float")
    differing = 0
    for name in (*arguments.nets, *arguments.models):
        with tempfile.TemporaryDirectory() as folder:
            differing += _net(name, Path(folder), interpreters, arguments.samples)
    print(f"files of ours whose outputs differ between processors: {differing}")
    sys.exit(bool(differing))


def _net(name: str | Path, folder: Path, interpreters: dict[str, str], samples: int) -> int:
    """Prints one net's table; returns 1 where the outputs of our file differ."""
    if isinstance(name, Path):
        model, count = onnx.load(name), samples
        feeds = list(SyntheticReader(name, samples=32))
    else:
        model, count = models.ALL[name](), samples
        feeds = models.feeds(model, 32)
    source = folder / "float.onnx"
    onnx.save(model, source)
    held_out = feeds[:count] if isinstance(name, Path) else models.feeds(model, count, seed=9)
    quantize_static(source, folder / "ours.onnx", models.FeedReader(feeds), promise=False, protect_outputs="int8")
    stock(str(source), str(folder / "stock.onnx"), models.FeedReader(feeds), per_channel=True,
          activation_type=QuantType.QUInt8)  # fmt: skip
    stacked = {key: np.stack([feed[key] for feed in held_out]) for key in held_out[0]}
    np.savez(folder / "feeds.npz", **stacked)
    files = [source, folder / "ours.onnx", folder / "stock.onnx"]
    hashes: dict[str, set[str]] = {"ours": set(), "stock": set()}
    reference = None
    for processor_name, command in interpreters.items():
        out = folder / processor_name
        environment = {**os.environ, "CPU": processor_name}
        call = [*shlex.split(command), "-c", _RUN, str(folder / "feeds.npz"), str(out), *map(str, files)]
        subprocess.run(call, check=True, env=environment, stderr=subprocess.DEVNULL)
        want, ours, by_stock = (np.load(f"{out}{at}.npy") for at in range(3))
        reference = want if reference is None else reference
        for kind, got in (("ours", ours), ("stock", by_stock)):
            digest = hashlib.sha256(got.tobytes()).hexdigest()[:8]
            hashes[kind].add(digest)
            noise = float(np.square(reference.astype(np.float64) - got).sum())
            db = 10 * np.log10(float(np.square(reference.astype(np.float64)).sum()) / noise) if noise else np.inf
            label = Path(name).stem if isinstance(name, Path) else name
            print(f"{label[:28]:28} {kind:6} {processor_name:10} {digest:10} {db:.1f}", flush=True)
    return int(len(hashes["ours"]) > 1)


if __name__ == "__main__":
    main()
