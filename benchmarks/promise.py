"""Whether the speed promise decides alike, run after run beside other work, and whether it is kept.

Ten small nets near the border, where INT8 is about as fast as float, are quantized by the default call, each some
times, on a core that busy processes share. A flip is a run that delivers another form than most runs of the net. When
the load is over each form that was delivered is timed against the float model: by processor time, in short turns of
two sessions that are open at once, of which the quietest count, over several pairs of fresh sessions.

With ``--odd N`` as many nets of random layers and sizes take their place, one call each. A file that is slower than
float is measured again, and counts if it is slower both times.

    python benchmarks/promise.py --load 3 --runs 20
    python benchmarks/promise.py --odd 300 --load 0
    python benchmarks/promise.py --load 0 --runs 3 --nets gemms espcn
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from _session import session
from _zoo import OneShotReader, quiet_folder
from onnx import TensorProto, helper, numpy_helper

import kenosis_ort

SLOWER = 0.97
"""A delivered file below this many times the float model's speed breaks the promise."""
_PAIRS, _TURNS, _TURN_S = 15, 24, 1e-3


class Graph:
    """A float model in the making: nodes in order, weights at random.

    Args:
        shape: Of the input.
    """

    def __init__(self, *shape: int) -> None:
        self.shape, self.at, self.channels = shape, "x", shape[1]
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(0)

    def op(self, op_type: str, *inputs: str, **attributes: object) -> Graph:
        """Adds a node behind the last one; further inputs follow its output."""
        output = f"y{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, [self.at, *inputs], [output], name=output, **attributes))
        self.at = output
        return self

    def weight(self, *shape: int) -> str:
        """Adds weights and returns their name."""
        values = self._rng.normal(0, np.prod(shape[1:] or (100,)) ** -0.5, shape).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def conv(self, channels: int, kernel: int = 3, stride: int = 1, *, depthwise: bool = False) -> Graph:
        """Adds a Conv that keeps the size, but for its stride."""
        group = self.channels if depthwise else 1
        inputs = self.weight(channels, self.channels // group, kernel, kernel), self.weight(channels)
        self.channels = channels
        return self.op("Conv", *inputs, pads=[kernel // 2] * 4, strides=[stride] * 2, group=group)

    def gemm(self, wide: int) -> Graph:
        """Adds a Gemm."""
        inputs, self.channels = (self.weight(self.channels, wide), self.weight(wide)), wide
        return self.op("Gemm", *inputs)

    def model(self) -> onnx.ModelProto:
        """Returns the model."""
        ends = [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape),
            helper.make_tensor_value_info(self.at, TensorProto.FLOAT, None),
        ]
        graph = helper.make_graph(self.nodes, "net", ends[:1], ends[1:], self.weights)
        opsets = [helper.make_opsetid("", 17)]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        return onnx.shape_inference.infer_shapes(made)


def _gemms(rows: int, *widths: int) -> onnx.ModelProto:
    g = Graph(rows, widths[0])
    for width in widths[1:]:
        g.gemm(width).op("Relu")
    return g.model()


def _matmuls(wide: int, rows: int) -> onnx.ModelProto:
    g = Graph(rows, wide)
    return g.op("MatMul", g.weight(wide, wide)).op("Relu").op("MatMul", g.weight(wide, wide)).model()


def _convs(count: int, channels: int, side: int) -> onnx.ModelProto:
    g = Graph(1, channels, side, side)
    for _ in range(count):
        g.conv(channels).op("Relu")
    return g.model()


def _separable(count: int, channels: int, side: int) -> onnx.ModelProto:
    g = Graph(1, 3, side, side).conv(channels, 3, 2).op("Relu")
    for _ in range(count):
        g.conv(channels, 3, depthwise=True).op("Relu").conv(channels, 1).op("Relu")
    return g.op("GlobalAveragePool").op("Flatten").gemm(10).model()


def _unet(side: int) -> onnx.ModelProto:
    g = Graph(1, 1, side, side).conv(8).op("Relu")
    skip = g.at
    g.conv(16, 3, 2).op("Relu").conv(16).op("Relu")
    g.op("ConvTranspose", g.weight(16, 8, 2, 2), g.weight(8), strides=[2, 2]).op("Concat", skip, axis=1)
    g.channels = 16
    return g.conv(8).op("Relu").conv(1, 1).model()


def _espcn(side: int) -> onnx.ModelProto:
    g = Graph(1, 1, side, side).conv(16, 5).op("Relu").conv(16).op("Relu").conv(9)
    return g.op("DepthToSpace", blocksize=3).model()


def _residual(channels: int, side: int) -> onnx.ModelProto:
    g = Graph(1, channels, side, side)
    for _ in range(2):
        before = g.at
        g.conv(channels).op("Relu").conv(channels).op("Add", before).op("Relu")
    return g.model()


NETS: dict[str, Callable[[], onnx.ModelProto]] = {
    "gemms": lambda: _gemms(1, 64, 64, 64),
    "wide": lambda: _gemms(1, 256, 256, 256),
    "matmuls": lambda: _matmuls(16, 16),
    "matmuls64": lambda: _matmuls(64, 64),
    "convs": lambda: _convs(4, 8, 16),
    "convs16": lambda: _convs(4, 16, 16),
    "separable": lambda: _separable(3, 16, 32),
    "unet": lambda: _unet(32),
    "espcn": lambda: _espcn(17),
    "residual": lambda: _residual(16, 16),
}


def odd(seed: int) -> onnx.ModelProto:
    """Makes a net of random layers and sizes: a picture or rows, one to eight layers, branches, an end of any kind."""
    dice = np.random.default_rng(seed)
    pick = lambda *of: of[int(dice.integers(len(of)))]  # noqa: E731
    if dice.random() < 0.35:
        g = Graph(pick(1, 2, 7, 32), pick(5, 16, 33, 64, 200))
        for _ in range(dice.integers(1, 7)):
            g.gemm(pick(3, 16, 40, 64, 128, 250))
            if dice.random() < 0.8:
                g.op(pick("Relu", "Tanh", "Sigmoid", "Elu", "Softmax", "Erf"))
        return g.model()
    side = pick(5, 8, 16, 28, 40)
    g = Graph(1, pick(1, 3, 8, 16), side, side)
    for _ in range(dice.integers(1, 9)):
        kind, before, channels = pick("conv", "point", "depth", "skip", "concat", "pool"), g.at, g.channels
        if kind == "conv":
            g.conv(pick(3, 8, 12, 16, 32, 48), pick(1, 3, 3, 5), pick(1, 1, 2))
        elif kind == "point":
            g.conv(pick(4, 16, 24, 64), 1)
        elif kind == "depth":
            g.conv(channels, 3, depthwise=True)
        elif kind == "skip":
            g.conv(channels).op(pick("Relu", "HardSwish", "Identity")).op(pick("Add", "Mul"), before)
        elif kind == "concat":
            g.conv(pick(4, 16)).op("Concat", before, axis=1)
            g.channels += channels
        else:
            g.op(pick("MaxPool", "AveragePool"), kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
        if dice.random() < 0.6:
            g.op(pick("Relu", "Relu", "LeakyRelu", "HardSwish", "Sigmoid"))
    if dice.random() < 0.5:
        g.op("GlobalAveragePool").op("Flatten").gemm(pick(2, 10, 100))
    return g.model()


def _busy() -> None:
    while True:
        sum(range(10_000))


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """Keeps so many further processes busy on the cores of this one."""
    running = [multiprocessing.get_context("fork").Process(target=_busy, daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.join()


def speed(model: Path, reference: Path, feed: dict[str, np.ndarray]) -> float:
    """How often a model is faster than another: the median over pairs of fresh sessions, of the quietest turns of each.

    Turns are timed by processor time; a quarter of them counts, those with the least product of both times.
    """
    ratios = []
    for _ in range(_PAIRS):
        pair = [session(path) for path in (reference, model)]
        runs = [max(int(_TURN_S / _seconds(each, feed, 5)), 1) for each in pair]
        turns = [[_seconds(each, feed, n) for each, n in zip(pair, runs, strict=True)] for _ in range(_TURNS)]
        quiet = sorted(turns, key=math.prod)[: _TURNS // 4]
        ratios.append(statistics.median(theirs / ours for theirs, ours in quiet))
    return statistics.median(ratios)


def _seconds(opened: object, feed: dict[str, np.ndarray], runs: int) -> float:
    opened.run(None, feed)  # type: ignore[attr-defined]
    start = time.thread_time()
    for _ in range(runs):
        opened.run(None, feed)  # type: ignore[attr-defined]
    return (time.thread_time() - start) / runs


def shape_of(model: onnx.ModelProto) -> list[int]:
    """Shape of the input."""
    return [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a net, then the flips and the slowest file that was delivered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=int, default=3, help="busy processes on the same core (%(default)s)")
    parser.add_argument("--runs", type=int, default=20, help="calls for each net (%(default)s)")
    parser.add_argument("--odd", type=int, default=0, metavar="N", help="as many random nets instead, a call each")
    parser.add_argument("--first", type=int, default=0, help="seed of the first random net (%(default)s)")
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS), metavar="NET")
    args = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    warnings.simplefilter("ignore", kenosis_ort.KenosisWarning)
    if args.odd:
        args.runs = 1
        models = {f"odd{seed}": odd(seed) for seed in range(args.first, args.first + args.odd)}
    else:
        models = {name: NETS[name]() for name in args.nets}
    rng = np.random.default_rng(1)
    feeds = {
        name: [{"x": rng.normal(size=shape_of(model)).astype(np.float32)} for _ in range(8)]
        for name, model in models.items()
    }
    taken: dict[str, list[str]] = {name: [] for name in models}
    files: dict[tuple[str, str], Path] = {}
    with quiet_folder() as folder:
        with load(args.load):
            for run in range(args.runs):
                for name, model in models.items():
                    out = folder / f"{name}-{run}.onnx"
                    report = kenosis_ort.quantize_static(model, out, OneShotReader(feeds[name]))
                    form = "" if report.speed is None or report.speed.taken is None else report.speed.taken.name
                    taken[name].append(form or ("float" if report.is_float else "int8"))
                    files.setdefault((name, taken[name][-1]), out)
        flips, slowest, slow = 0, 1.0, 0
        for name, model in models.items():
            onnx.save(model, str(folder / "float.onnx"))
            counts = Counter(taken[name]).most_common()
            flips += args.runs - counts[0][1]
            said = []
            for form, times in counts:
                ratio = 1.0
                for _ in range(0 if form == "float" else 2):
                    again = speed(files[name, form], folder / "float.onnx", feeds[name][0])
                    ratio = again if ratio == 1.0 else max(ratio, again)
                    if ratio >= SLOWER:
                        break
                slowest, slow = min(slowest, ratio), slow + (ratio < SLOWER) * times
                said.append(f"{form} {times}x at {ratio:.2f}x")
            print(f"{name:10s} {args.runs - counts[0][1]:3d} flips   {', '.join(said)}", flush=True)
        calls = args.runs * len(models)
        print(f"{flips} flips in {calls} calls; {slow} files below {SLOWER:.2f}x of float, the slowest {slowest:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
