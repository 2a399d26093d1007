"""Peak memory of one call of `quantize_static`: ours, stock's, and a plain session of the same model beside them.

Nets of MatMul and Relu with random weights, each call in a process of its own with 8 samples, everything at its default
(the promise, verification and the report's evidence included). What a call may take is the plain session's peak, four
times the model's size and 300 MB; for the largest net, whose weights lie in a file of their own, 12 GB in all.

    python benchmarks/memory_of_a_call.py                            # 64 MB in one weight, 75 x 4 MB, 5 x 64 MB
    python benchmarks/memory_of_a_call.py --nets huge --recipe plain # 2.5 GB; takes 6 GB of disk and some minutes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

NETS = {"one": (4096, 1), "many": (1024, 75), "few": (4096, 5), "huge": (4096, 40)}
"""Side of the square weights, and their number."""
SAMPLES, ROWS = 8, 8
_ALLOWED_TIMES, _ALLOWED_MB, _HUGE_MB = 4, 300, 12_000


def build(name: str, path: Path) -> None:
    """Writes a net; the huge one with external data."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    side, count = NETS[name]
    rng = np.random.default_rng(0)
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
    """Returns random samples."""
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
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=["one", "many", "few"])
    parser.add_argument("--recipe", default="fast")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, model, side, recipe = args.child
        child(kind, Path(model), int(side), recipe)
        return
    print(
        f"{'net':6s} {'model MB':>9s} {'session MB':>11s} {'ours MB':>9s} {'allowed':>9s} {'s':>6s} {'stock MB':>9s}"
        f" {'s':>6s}"
    )
    for name in args.nets:
        side, count = NETS[name]
        size = 4 * side * side * count / 2**20
        with tempfile.TemporaryDirectory(prefix="kenosis-bench-") as folder:
            model = Path(folder) / "net.onnx"
            build(name, model)
            costs = {kind: measure(kind, model, side, args.recipe) for kind in ("session", "ours", "stock")}
        session = costs["session"] or {"mb": float("nan")}
        allowed = _HUGE_MB if name == "huge" else session["mb"] + _ALLOWED_TIMES * size + _ALLOWED_MB
        ours, stock = (
            f"{c['mb']:9.0f}{more} {c['seconds']:6.1f}" if c is not None else f"{'fails':>9s}{more} {'-':>6s}"
            for c, more in ((costs["ours"], f" {allowed:9.0f}"), (costs["stock"], ""))
        )
        print(f"{name:6s} {size:9.0f} {session['mb']:11.0f} {ours} {stock}", flush=True)


if __name__ == "__main__":
    main()
