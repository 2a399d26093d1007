"""Peak memory of one call of `quantize_static`: ours, stock's, and a plain session of the same model beside them.

Nets of MatMul and Relu with random weights, and one for pictures, of large values and small weights, each call in a
process of its own with 8 samples (16 pictures), everything at its default (the promise, verification and the report's
evidence included). What a call may take is the plain session's peak, four
times the model's size and 300 MB; for the largest net, whose weights lie in a file of their own, 12 GB in all, and for
pictures a fifth more than stock.

    python benchmarks/memory_of_a_call.py                            # 64 MB in one weight, 75 x 4, 5 x 64, pictures
    python benchmarks/memory_of_a_call.py --nets huge --recipe plain # 2.5 GB; takes 6 GB of disk and some minutes
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

NETS = {"one": (4096, 1), "many": (1024, 75), "few": (4096, 5), "pictures": (0, 0), "huge": (4096, 40)}
"""Side of the square weights, and their number; none of the net for pictures."""
SAMPLES, ROWS = 8, 8
_ALLOWED_TIMES, _ALLOWED_MB, _HUGE_MB = 4, 300, 12_000
PICTURES = """<ir_version: 9, opset_import: ["" : 17]>
    pictures (float[N,3,512,512] x) => (float[N,2,512,512] y) {
      a0 = Conv <pads = [1,1,1,1]> (x, w0)                      a = Relu (a0)
      b0 = Conv <pads = [1,1,1,1]> (a, w1)                      b = Relu (b0)
      c0 = Conv <pads = [1,1,1,1], strides = [2,2]> (b, w2)     c = Relu (c0)
      d0 = Conv <pads = [1,1,1,1]> (c, w3)                      d = Relu (d0)
      e0 = ConvTranspose <strides = [2,2]> (d, w4)              e = Relu (e0)
      f = Concat <axis = 1> (b, e)
      g0 = Conv <pads = [1,1,1,1]> (f, w5)                      g = Relu (g0)
      y = Conv (g, w6) }"""
SHAPES = ((32, 3, 3, 3), (32, 32, 3, 3), (64, 32, 3, 3), (64, 64, 3, 3), (64, 32, 2, 2), (32, 64, 3, 3), (2, 32, 1, 1))
"""Of its weights."""


def build(name: str, path: Path) -> None:
    """Writes a net; the huge one with external data."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    if name == "pictures":
        net = onnx.parser.parse_model(PICTURES)
        for i, shape in enumerate(SHAPES):
            array = rng.standard_normal(shape, np.float32) * np.float32((2.0 / np.prod(shape[1:])) ** 0.5)
            net.graph.initializer.append(numpy_helper.from_array(array, f"w{i}"))
        onnx.save_model(net, path)
        return
    side, count = NETS[name]
    nodes, weights, value = [], [], "x"
    for i in range(count):
        array = rng.standard_normal((side, side), np.float32) / np.float32(0.7 * side**0.5)
        weights.append(numpy_helper.from_array(array, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{i}"], [f"m{i}"], name=f"matmul{i}"))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [f"r{i}"], name=f"relu{i}"))
        value = f"r{i}"
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", side])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, ["N", side])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save_model(model, path, save_as_external_data=name == "huge", location=f"{path.name}.data")


def feeds(side: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Returns random samples; pictures for a side of 0."""
    if not side:
        return [
            {"x": np.random.default_rng(i).standard_normal((1, 3, 512, 512), np.float32)} for i in range(2 * SAMPLES)
        ]
    return [{"x": np.random.default_rng(i).standard_normal((ROWS, side), np.float32)} for i in range(SAMPLES)]


def child(kind: str, model: Path, side: int, recipe: str) -> None:
    """Makes one call and prints its cost as JSON."""
    warnings.simplefilter("ignore")
    out = str(model.with_name("out.onnx"))
    start = time.perf_counter()
    if kind == "session":
        import onnxruntime as ort

        ort.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, feeds(side)[0])
    elif kind == "ours":
        import kenosis_ort

        kenosis_ort.quantize_static(str(model), out, kenosis_ort.ArrayReader(feeds(side)), recipe=recipe)
    else:
        from _zoo import OneShotReader
        from onnxruntime.quantization import quantize_static

        external = model.with_name(f"{model.name}.data").exists()
        quantize_static(str(model), out, OneShotReader(feeds(side)), use_external_data_format=external)
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    print(json.dumps({"mb": peak, "seconds": seconds}))


def measure(kind: str, model: Path, side: int, recipe: str) -> dict[str, float] | None:
    """Returns the cost of one call in a process of its own; None where it fails."""
    command = [sys.executable, __file__, "--child", kind, str(model), str(side), recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1][:200], file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints one line per net."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=["one", "many", "few", "pictures"])
    parser.add_argument("--recipe", default="fast")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, model, side, recipe = args.child
        child(kind, Path(model), int(side), recipe)
        return
    print(
        f"{'net':8s} {'model MB':>9s} {'session MB':>11s} {'ours MB':>9s} {'allowed':>9s} {'s':>6s} {'stock MB':>9s}"
        f" {'s':>6s}"
    )
    for name in args.nets:
        side, count = NETS[name]
        size = 4 * (side * side * count or sum(map(math.prod, SHAPES))) / 2**20
        with tempfile.TemporaryDirectory(prefix="kenosis-bench-") as folder:
            model = Path(folder) / "net.onnx"
            build(name, model)
            costs = {kind: measure(kind, model, side, args.recipe) for kind in ("session", "ours", "stock")}
        session = costs["session"] or {"mb": float("nan")}
        allowed = _HUGE_MB if name == "huge" else session["mb"] + _ALLOWED_TIMES * size + _ALLOWED_MB
        if name == "pictures":
            allowed = 1.2 * (costs["stock"] or session)["mb"]
        ours, stock = (
            f"{c['mb']:9.0f}{more} {c['seconds']:6.1f}" if c is not None else f"{'fails':>9s}{more} {'-':>6s}"
            for c, more in ((costs["ours"], f" {allowed:9.0f}"), (costs["stock"], ""))
        )
        print(f"{name:8s} {size:9.0f} {session['mb']:11.0f} {ours} {stock}", flush=True)


if __name__ == "__main__":
    main()
