"""Time of quantization against the number of nodes: Conv+Relu chains, ours and stock's.

Calibration is left out: a first call writes the calibration cache, the timed call reads it. ``ours`` is the whole
of `quantize_static` (loading, preparation, placement, quantization, load check, fusion proof, writing), ``no proof``
the same with ``verify=False``.

    python benchmarks/linear_time.py [--nodes 500 1000 2000 4000 8000 20000] [--stock-up-to 1000]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from _zoo import OneShotReader
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_static as stock_quantize_static

import kenosis_ort


def chain(nodes: int, *, channels: int = 4, size: int = 8) -> onnx.ModelProto:
    """Conv and Relu in turn, ``nodes`` nodes in all."""
    rng = np.random.default_rng(0)
    made, weights, value = [], [], "x"
    for i in range(nodes):
        if i % 2 == 0:
            w = rng.normal(0, 0.6, (channels, channels, 1, 1)).astype(np.float32)
            b = rng.normal(0, 0.1, channels).astype(np.float32)
            weights += [numpy_helper.from_array(w, f"w{i}"), numpy_helper.from_array(b, f"b{i}")]
            made.append(helper.make_node("Conv", [value, f"w{i}", f"b{i}"], [f"y{i}"], name=f"conv{i}"))
        else:
            made.append(helper.make_node("Relu", [value], [f"y{i}"], name=f"relu{i}"))
        value = f"y{i}"
    shape = [1, channels, size, size]
    graph = helper.make_graph(
        made,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, shape)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def timed(quantize: Callable[..., Any], source: Path, folder: Path, **extras: Any) -> float:
    """Seconds of one call that finds its calibration cache ready."""
    cache = folder / "ranges.json"
    feed = {"x": np.random.default_rng(1).normal(0, 1, (1, 4, 8, 8)).astype(np.float32)}
    quantize(
        str(source), str(folder / "first.onnx"), OneShotReader([feed]), calibration_cache_path=str(cache), **extras
    )
    start = time.perf_counter()
    quantize(str(source), str(folder / "out.onnx"), OneShotReader([feed]), calibration_cache_path=str(cache), **extras)
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line per chain length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[500, 1000, 2000, 4000, 8000, 20000])
    parser.add_argument("--stock-up-to", type=int, default=1000, help="longest chain that stock has to do")
    args = parser.parse_args(argv)
    print(f"{'nodes':>7s} {'ours s':>9s} {'ms/node':>8s} {'no proof s':>11s} {'ms/node':>8s} {'stock s':>9s}")
    for nodes in args.nodes:
        with tempfile.TemporaryDirectory(prefix="kenosis-bench-") as name:
            source = Path(name) / "chain.onnx"
            onnx.save(chain(nodes), str(source))
            seconds: dict[str, float] = {}
            for label, quantize, extras in (
                ("ours", kenosis_ort.quantize_static, {}),
                ("no proof", kenosis_ort.quantize_static, {"verify": False}),
                ("stock", stock_quantize_static, {}),
            ):
                if label == "stock" and nodes > args.stock_up_to:
                    continue
                folder = Path(name) / label
                folder.mkdir()
                seconds[label] = timed(quantize, source, folder, **extras)
            stock = f"{seconds['stock']:9.2f}" if "stock" in seconds else f"{'-':>9s}"
            a, b = seconds["ours"], seconds["no proof"]
            print(f"{nodes:7d} {a:9.2f} {a / nodes * 1e3:8.3f} {b:11.2f} {b / nodes * 1e3:8.3f} {stock}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
