"""Peak memory and time of quantizing a large decoder, as multiples of its size and of reading plus writing it.

The decoder has random weights, which lie beside the model file: they are written one at a time. Each measurement runs
in a process of its own, with some prompts of 32 tokens. "session" runs the float model once; "int8" is
`quantize_static` with the given recipe, "weights" is `quantize_weights` to 4 bits without samples, "recipe" is
`quantize_static` with ``weight-only-4`` and the prompts.

Two peaks are printed: of the resident memory, which counts pages of files that are mapped and that the system takes
back when it needs them, and of the anonymous part, which is what the process itself holds (sampled every 20 ms). A
process that wants more anonymous memory than `--limit` fails.

    python benchmarks/large_model.py                      # 1 GB
    python benchmarks/large_model.py --gb 6 --recipe plain --kinds int8 weights
    python benchmarks/large_model.py --gb 2.5 --kinds int8 --prompts 16 --promise

Needs three times the size on the disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, VOCABULARY, TOKENS = 2048, 8192, 32
KINDS = ("session", "int8", "weights", "recipe")
_ALIGNMENT = 4096
_BLOCK = 2**24


def build(path: Path, gigabytes: float) -> int:
    """Writes a decoder of about the given size, and returns the bytes of its weights."""
    import onnx
    from onnx import TensorProto, helper

    rng = np.random.default_rng(0)
    data_path = path.with_name(f"{path.name}.data")
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    with data_path.open("wb") as data:

        def weight(name: str, *shape: int, scale: float = 0.0) -> str:
            array = rng.standard_normal(shape, np.float32) * np.float32(scale or shape[0] ** -0.5)
            data.write(b"\0" * (-data.tell() % _ALIGNMENT))
            tensor = onnx.TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", data_path.name), ("offset", data.tell()), ("length", array.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            data.write(array.tobytes())
            weights.append(tensor)
            return name

        def small(name: str, array: Any) -> str:
            weights.append(onnx.numpy_helper.from_array(np.asarray(array), name))
            return name

        def op(kind: str, inputs: list[str], out: str, **attributes: Any) -> str:
            nodes.append(helper.make_node(kind, inputs, [out], name=out, **attributes))
            return out

        def norm(x: str, name: str) -> str:
            ones, zeros = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
            return op("LayerNormalization", [x, small(f"{name}.g", ones), small(f"{name}.b", zeros)], name, axis=-1)

        small("root", np.float32(WIDTH**-0.5))
        x = op("Gather", [weight("embedding", VOCABULARY, WIDTH, scale=1.0), "ids"], "embedded")
        of_a_block = 4 * 12 * WIDTH * WIDTH
        for i in range(max(1, round((gigabytes * 1e9 - 8 * VOCABULARY * WIDTH) / of_a_block))):
            n = f"block{i}"
            h = norm(x, f"{n}.norm1")
            q, k, v = (op("MatMul", [h, weight(f"{n}.{w}.w", WIDTH, WIDTH)], f"{n}.{w}") for w in "qkv")
            scores = op("MatMul", [q, op("Transpose", [k], f"{n}.kt", perm=[0, 2, 1])], f"{n}.scores")
            shares = op("Softmax", [op("Mul", [scores, "root"], f"{n}.scaled")], f"{n}.shares", axis=-1)
            mixed = op("MatMul", [shares, v], f"{n}.mixed")
            x = op("Add", [x, op("MatMul", [mixed, weight(f"{n}.o.w", WIDTH, WIDTH)], f"{n}.o")], f"{n}.sum1")
            up = op("MatMul", [norm(x, f"{n}.norm2"), weight(f"{n}.up.w", WIDTH, 4 * WIDTH)], f"{n}.up")
            down = op("MatMul", [op("Relu", [up], f"{n}.relu"), weight(f"{n}.down.w", 4 * WIDTH, WIDTH)], f"{n}.down")
            x = op("Add", [x, down], f"{n}.sum2")
        op("MatMul", [norm(x, "norm"), weight("head.w", WIDTH, VOCABULARY)], "logits")
        size = data.tell()
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, TOKENS])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, TOKENS, VOCABULARY])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return size


def feeds(count: int = 4) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Returns random prompts."""
    return [{"ids": np.random.default_rng(i).integers(0, VOCABULARY, (1, TOKENS))} for i in range(count)]


def status(key: str) -> int:
    """Returns a figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


class AnonymousPeak(threading.Thread):
    """Looks at the anonymous memory of this process, again and again, until it is told to end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._ended = 0, threading.Event()

    def run(self) -> None:
        """Looks."""
        while not self._ended.wait(0.02):
            self.most = max(self.most, status("RssAnon"))

    def end(self) -> int:
        """Returns the highest figure seen."""
        self._ended.set()
        self.join()
        return max(self.most, status("RssAnon"))


def child(kind: str, model: Path, recipe: str, limit: int, prompts: int, *, promise: bool) -> None:
    """Makes one call and prints its cost as JSON."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    out = str(model.with_name("out.onnx"))
    peak = AnonymousPeak()
    peak.start()
    start = time.perf_counter()
    if kind == "session":
        import onnxruntime as ort

        ort.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, feeds()[0])
    elif kind == "int8":
        import kenosis_ort

        reader = kenosis_ort.ArrayReader(feeds(prompts))
        report = kenosis_ort.quantize_static(model, out, reader, recipe=recipe, promise=promise)
        if report.is_float:
            raise SystemExit(report.verdict())
    elif kind == "recipe":
        import kenosis_ort

        reader = kenosis_ort.ArrayReader(feeds(prompts))
        report = kenosis_ort.quantize_static(model, out, reader, recipe="weight-only-4", promise=False)
        if report.is_float:
            raise SystemExit(report.verdict())
    else:
        import kenosis_ort

        kenosis_ort.quantize_weights(model, out, bits=4)
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "cpu": time.process_time(), "bytes": status("VmHWM"), "anonymous": peak.end()}
    print(json.dumps(found))


def seconds_to_copy(model: Path) -> float:
    """Returns the time that reading and writing the weights takes."""
    start = time.perf_counter()
    data = model.with_name(f"{model.name}.data")
    with data.open("rb") as source, data.with_name("copy").open("wb") as target:
        while block := source.read(_BLOCK):
            target.write(block)
    data.with_name("copy").unlink()
    return time.perf_counter() - start


def main() -> None:
    """Prints one line a kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="bytes of the float weights, in 1e9")
    parser.add_argument("--recipe", default="fast")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--limit", type=float, default=16.0, help="GiB of anonymous memory that a process may take")
    parser.add_argument("--folder", type=Path, help="where to write the model and results; default: temporary files")
    parser.add_argument("--prompts", type=int, default=4, help="samples; from 8 on all passes of a recipe are tried")
    parser.add_argument("--promise", action="store_true", help="int8 is timed against the float model too")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, path, recipe, limit, prompts, promise = args.child
        child(kind, Path(path), recipe, int(limit), int(prompts), promise=promise == "True")
        return
    with tempfile.TemporaryDirectory(prefix="kenosis-bench-", dir=args.folder) as folder:
        model = Path(folder) / "decoder.onnx"
        size = build(model, args.gb)
        copied = seconds_to_copy(model)
        print(f"{size / 1e9:.2f} GB of weights; read and written in {copied:.1f} s")
        heads = ("peak MB", "x size", "anon MB", "x size", "s", "x copy", "cpu s")
        print(f"{'':8s} " + " ".join(f"{head:>8s}" for head in heads), flush=True)
        for kind in args.kinds:
            limits = [str(int(args.limit * 2**30)), str(args.prompts), str(args.promise)]
            command = [sys.executable, __file__, "--child", kind, str(model), args.recipe, *limits]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{kind:8s} fails: {(done.stderr.strip().splitlines() or ['killed'])[-1][:150]}")
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{kind:8s} {found['bytes'] / 1e6:8.0f} {found['bytes'] / size:8.2f} {found['anonymous'] / 1e6:8.0f}"
                f" {found['anonymous'] / size:8.2f} {found['seconds']:8.1f} {found['seconds'] / copied:8.1f}"
                f" {found['cpu']:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
