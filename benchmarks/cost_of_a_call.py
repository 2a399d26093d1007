"""What one call costs beside stock's: sessions opened, runs of the model, bytes handed out, seconds and peak memory.

Each call is made in a process of its own, with the default options and as many samples as asked for, on a net that the
benchmark builds or on a file. Sessions and runs are counted where the runtime is called, by the stage of the call.

    python benchmarks/cost_of_a_call.py                                   # SqueezeNet and MobileNetV2 with 40 samples
    python benchmarks/cost_of_a_call.py --nets squeezenet --samples 8 --recipe accurate
    python benchmarks/cost_of_a_call.py --model model.onnx
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from nets import NETS


def feeds_of(path: Path, count: int) -> list[dict[str, np.ndarray]]:
    """Returns smooth random pictures, or plain noise for other inputs."""
    rng = np.random.default_rng(0)
    inputs = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_inputs()
    shapes = {i.name: [d if isinstance(d, int) and d > 0 else 1 for d in i.shape] for i in inputs}
    return [{n: rng.normal(0, 1, s).astype(np.float32) for n, s in shapes.items()} for _ in range(count)]


def call(tool: str, path: Path, samples: int, options: dict[str, Any], answer: Any) -> None:
    """Makes one call, counted, and sends what it cost."""
    warnings.simplefilter("ignore")
    feeds = feeds_of(path, samples)
    plain = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    start = time.perf_counter()
    for feed in feeds:
        plain.run(None, feed)
    inference = time.perf_counter() - start
    del plain
    from onnxruntime.quantization import CalibrationDataReader

    from kenosis_ort.runtime.session import Cost, Session, counted

    ort.InferenceSession = Session  # stock's sessions count themselves too

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> Any:
            return next(self.left, None)

    with tempfile.TemporaryDirectory() as folder, counted() as counts:
        out = Path(folder) / "out.onnx"
        start = time.perf_counter()
        if tool == "stock":
            from onnxruntime.quantization import quantize_static
        else:
            from kenosis_ort import quantize_static  # type: ignore[no-redef]
        report = quantize_static(str(path), str(out), Reader(), **options)
        seconds = time.perf_counter() - start
    took = {} if report is None else report.seconds
    answer.put(
        {
            "tool": tool,
            "sessions": counts.total.sessions,
            "runs": counts.total.runs,
            "copied_mb": counts.total.copied / 2**20,
            "seconds": seconds,
            "inference": inference,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "stages": {
                name or "elsewhere": {
                    **vars(counts.by_stage.get(name, Cost())),
                    "seconds": round(took.get(name, 0.0), 2),
                }
                for name in dict.fromkeys((*took, *counts.by_stage))
            },
        }
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nets", nargs="*", default=["squeezenet", "mobilenet_v2"], choices=sorted(NETS))
    parser.add_argument("--model", type=Path, help="a file in place of the nets")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--recipe", default="fast")
    parser.add_argument("--no-promise", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ours: dict[str, Any] = {"recipe": arguments.recipe, "promise": not arguments.no_promise}
    print(
        f"{'net':<20} {'tool':<6} {'sessions':>8} {'runs':>6} {'copied MB':>9} {'seconds':>8} {'x inference':>11} "
        f"{'peak MB':>8}"
    )
    rows = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        files = {n: Path(folder) / f"{n}.onnx" for n in arguments.nets}
        if arguments.model:
            files = {arguments.model.stem: arguments.model}
        for name, path in files.items():
            if not arguments.model:
                onnx.save(NETS[name].build(), path)
            for tool, options in (("stock", {}), ("ours", ours)):
                answer = context.Queue()
                worker = context.Process(target=call, args=(tool, path, arguments.samples, options, answer))
                worker.start()
                row = {"net": name, **answer.get(timeout=3600)}
                worker.join()
                rows.append(row)
                print(
                    f"{name:<20} {tool:<6} {row['sessions']:8d} {row['runs']:6d} {row['copied_mb']:9.0f} "
                    f"{row['seconds']:8.1f} "
                    f"{row['seconds'] / row['inference']:11.1f} {row['peak_mb']:8.0f}",
                    flush=True,
                )
                for stage, cost in row["stages"].items() if tool == "ours" else ():
                    print(
                        f"    {stage:<23} {cost['sessions']:8d} {cost['runs']:6d} {cost['copied'] / 2**20:9.0f} "
                        f"{cost['seconds']:8.1f}"
                    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
