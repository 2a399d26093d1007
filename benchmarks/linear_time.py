"""Time of quantization against the number of nodes: chains, residual chains, wide Concats, transformers.

Calibration is left out: a first call writes the calibration cache, the timed call reads it. ``ours`` is the whole
of `quantize_static` (loading, preparation, placement, quantization, load check, fusion proof, writing), ``no proof``
the same with ``verify=False``.

    python benchmarks/linear_time.py [--kinds chain residual concat transformer]
        [--nodes 500 1000 2000 4000 8000 20000] [--stock-up-to 1000]

Times are CPU seconds of the calling thread, so that a busy machine changes them little.
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


def chain(nodes: int) -> onnx.ModelProto:
    """Conv and Relu in turn."""
    made, weights, value = [], _Weights(), "x"
    for i in range(0, nodes, 2):
        made.append(helper.make_node("Conv", [value, *weights.conv(i)], [f"y{i}"], name=f"conv{i}"))
        made.append(helper.make_node("Relu", [f"y{i}"], [f"y{i + 1}"], name=f"relu{i}"))
        value = f"y{i + 1}"
    return _model(made, weights, value, [1, 4, 8, 8], [1, 4, 8, 8])


def residual(nodes: int) -> onnx.ModelProto:
    """Conv, Add with what the Conv reads, Relu; branches so weak that what they sum up to stays finite."""
    made, weights, value = [], _Weights(), "x"
    for i in range(0, nodes, 3):
        made.append(helper.make_node("Conv", [value, *weights.conv(i, 1 / nodes)], [f"c{i}"], name=f"conv{i}"))
        made.append(helper.make_node("Add", [f"c{i}", value], [f"a{i}"], name=f"add{i}"))
        made.append(helper.make_node("Relu", [f"a{i}"], [f"r{i}"], name=f"relu{i}"))
        value = f"r{i}"
    return _model(made, weights, value, [1, 4, 8, 8], [1, 4, 8, 8])


def concat(nodes: int) -> onnx.ModelProto:
    """One Concat of as many branches of Conv and Relu, which all read the same input."""
    made, weights = [], _Weights()
    for i in range(nodes // 2):
        made.append(helper.make_node("Conv", ["x", *weights.conv(i)], [f"c{i}"], name=f"conv{i}"))
        made.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"], name=f"relu{i}"))
    made.append(helper.make_node("Concat", [f"r{i}" for i in range(nodes // 2)], ["y"], axis=1, name="concat"))
    return _model(made, weights, "y", [1, 4, 8, 8], [1, 4 * (nodes // 2), 8, 8])


def transformer(nodes: int) -> onnx.ModelProto:
    """Blocks of attention and a feed-forward net, 20 nodes each."""
    made, weights, value = [], _Weights(), "x"
    wide, heads = weights.of("wide", np.array([1, 8, 16])), weights.of("heads", np.array([1, 8, 2, 8]))
    for i in range(0, nodes, 20):

        def node(kind: str, inputs: list[str], number: int = i, **attributes: Any) -> str:
            name = f"{kind}{number}_{len(made)}"
            made.append(helper.make_node(kind, inputs, [name], name=f"{name}_node", **attributes))
            return name

        normal = node("LayerNormalization", [value, *weights.norm(f"{i}a")])
        split = [
            node(
                "Transpose", [node("Reshape", [node("MatMul", [normal, weights.linear(f"{part}{i}")]), heads])], perm=p
            )
            for part, p in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
        ]
        scores = node("Softmax", [node("MatMul", split[:2])], axis=-1)
        mixed = node("Transpose", [node("MatMul", [scores, split[2]])], perm=[0, 2, 1, 3])
        out = node("MatMul", [node("Reshape", [mixed, wide]), weights.linear(f"o{i}")])
        value = node("Add", [out, value])
        normal = node("LayerNormalization", [value, *weights.norm(f"{i}b")])
        grown = node("Relu", [node("MatMul", [normal, weights.linear(f"f{i}")])])
        value = node("Add", [node("MatMul", [grown, weights.linear(f"g{i}")]), value])
    return _model(made, weights, value, [1, 8, 16], [1, 8, 16])


class _Weights(list[onnx.TensorProto]):
    """Initializers of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._random = np.random.default_rng(0)

    def of(self, name: str, array: np.ndarray[Any, Any]) -> str:
        self.append(numpy_helper.from_array(array, name))
        return name

    def conv(self, number: int, strength: float = 0.3) -> list[str]:
        kernel = self.of(f"w{number}", self._random.normal(0, strength, (4, 4, 1, 1)).astype(np.float32))
        return [kernel, self.of(f"b{number}", self._random.normal(0, 0.1, 4).astype(np.float32))]

    def linear(self, name: str) -> str:
        return self.of(name, self._random.normal(0, 0.2, (16, 16)).astype(np.float32))

    def norm(self, name: str) -> list[str]:
        return [self.of(f"scale{name}", np.ones(16, np.float32)), self.of(f"shift{name}", np.zeros(16, np.float32))]


def _model(
    nodes: list[onnx.NodeProto], weights: _Weights, output: str, shape: list[int], out_shape: list[int]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, out_shape)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


KINDS: dict[str, Callable[[int], onnx.ModelProto]] = {
    made.__name__: made for made in (chain, residual, concat, transformer)
}


def timed(quantize: Callable[..., Any], source: Path, folder: Path, **extras: Any) -> float:
    """CPU seconds of one call that finds its calibration cache ready."""
    cache = folder / "ranges.json"
    shape = [dim.dim_value for dim in onnx.load(source).graph.input[0].type.tensor_type.shape.dim]
    feed = {"x": np.random.default_rng(1).normal(0, 1, shape).astype(np.float32)}
    quantize(
        str(source), str(folder / "first.onnx"), OneShotReader([feed]), calibration_cache_path=str(cache), **extras
    )
    start = time.thread_time()
    quantize(str(source), str(folder / "out.onnx"), OneShotReader([feed]), calibration_cache_path=str(cache), **extras)
    return time.thread_time() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line per net."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--nodes", type=int, nargs="*", default=[500, 1000, 2000, 4000, 8000, 20000])
    parser.add_argument("--stock-up-to", type=int, default=1000, help="most nodes that stock has to do")
    args = parser.parse_args(argv)
    head = f"{'ours s':>9s} {'ms/node':>8s} {'no proof s':>11s} {'ms/node':>8s} {'stock s':>9s}"
    print(f"{'net':>12s} {'nodes':>7s} {head}")
    for kind, nodes in ((kind, nodes) for kind in args.kinds for nodes in args.nodes):
        with tempfile.TemporaryDirectory(prefix="kenosis-bench-") as name:
            source = Path(name) / "net.onnx"
            onnx.save(KINDS[kind](nodes), str(source))
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
            each = f"{a:9.2f} {a / nodes * 1e3:8.3f} {b:11.2f} {b / nodes * 1e3:8.3f} {stock}"
            print(f"{kind:>12s} {nodes:7d} {each}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
