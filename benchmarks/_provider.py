"""Files by ONNX Runtime's OpenVINO provider; run by the Python of an environment that holds its wheel.

    PYTHON _provider.py FEEDS.npz ROUNDS SECONDS FLOAT.onnx FILE.onnx...

FEEDS.npz holds arrays named ``SAMPLE/INPUT``. Prints JSON: versions, and by file how often its runs are faster than
those of the first, the least SQNR of its outputs against it, and its nodes by provider. It imports nothing of
kenosis-ort, whose requirements that environment need not meet.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

_PROVIDER = "OpenVINOExecutionProvider"


def session(path: str, *, profile: str | None = None) -> Any:
    """Opens a file on one thread of the provider, float operators in float32."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # the provider's documents ask for it
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile
    how = {"device_type": "CPU", "num_of_threads": "1", "precision": "FP32"}
    return ort.InferenceSession(path, options, providers=[(_PROVIDER, how), "CPUExecutionProvider"])


def nodes_by_provider(path: str, feed: dict[str, Any]) -> dict[str, int]:
    """Counts what ran where: one node of the provider stands for all that it took together."""
    with tempfile.TemporaryDirectory() as folder:
        profiled = session(path, profile=str(Path(folder) / "profile"))
        profiled.run(None, feed)
        events = json.loads(Path(profiled.end_profiling()).read_text())
    return Counter(e["args"]["provider"] for e in events if e.get("cat") == "Node" and "provider" in e.get("args", {}))


def sqnr_db(reference: list[Any], found: list[Any]) -> float:
    """Returns the least signal to noise ratio over outputs, in dB."""

    def ratio(a: Any, b: Any) -> float:
        noise = float(np.sum((a.astype(np.float64) - b) ** 2))
        return 10 * np.log10(float(np.sum(a.astype(np.float64) ** 2)) / noise) if noise else np.inf

    return min(ratio(a, b) for a, b in zip(reference, found, strict=True))


def main() -> None:
    """Prints what was measured."""
    feeds_file, rounds, seconds, *files = sys.argv[1:]
    feeds: list[dict[str, Any]] = []
    with np.load(feeds_file, allow_pickle=False) as arrays:
        for key in arrays:
            sample, _, name = key.partition("/")
            while len(feeds) <= int(sample):
                feeds.append({})
            feeds[int(sample)][name] = arrays[key]
    opened = {path: session(path) for path in files}
    outputs = {
        path: [np.concatenate(several, axis=None) for several in zip(*(s.run(None, f) for f in feeds), strict=True)]
        for path, s in opened.items()
    }
    times: dict[str, list[float]] = {path: [] for path in files}
    order = np.random.default_rng(0)
    for _ in range(int(rounds)):
        for path in order.permutation(files):
            found, start = [], time.perf_counter()
            while len(found) < 3 or time.perf_counter() - start < float(seconds):
                begin = time.perf_counter()
                opened[path].run(None, feeds[0])
                found.append(time.perf_counter() - begin)
            times[path].append(statistics.quantiles(found, n=4)[0])
    rows = {
        path: {
            "speed": statistics.median(a / b for a, b in zip(times[files[0]], times[path], strict=True)),
            "sqnr_db": sqnr_db(outputs[files[0]], outputs[path]),
            "nodes": nodes_by_provider(path, feeds[0]),
            "milliseconds": 1e3 * statistics.median(times[path]),
        }
        for path in files
    }
    print(json.dumps({"onnxruntime": ort.__version__, "rows": list(rows.values())}))


if __name__ == "__main__":
    main()
