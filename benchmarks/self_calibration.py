"""Calibration without data on the nets of the zoo, against calibration on real data.

For each net: real data, Gaussian noise, `SyntheticReader` without any hint, with the net's preprocessing given, and
with eight real samples; task metric and SQNR against FP32 on the same evaluation data, and how far the report trusts
the calibration. By default with the recipe "plain": no equalization, bias correction or choice of ranges, so that the
rows differ by the data alone.

    python benchmarks/self_calibration.py [--nets squeezenet11 yolox_nano] [--recipe fast] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _session import outputs, session
from _zoo import METRICS, OneShotReader, choose, load_zoo, quiet_folder, sqnr_of

import kenosis_ort

_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}

# What a caller of each net knows: its preprocessing.
PREPROCESSING: dict[str, dict[str, Any]] = {
    "cifar_resnet20": _IMAGENET,
    "cifar_resnet20_bn": _IMAGENET,
    "mlperf_ic_resnet8": {"input_range": (0, 255)},
    "mobilenetv1_cifar_probe": {"input_range": (-1, 1)},
    "squeezenet11": {"mean": (104, 117, 123)},
    "yolox_nano": {"input_range": (0, 255)},
    "fastestdet": {"input_range": (0, 1)},
    "superres": {"input_range": (0, 1)},
    "ultraface": {"mean": 127, "std": 128},
    "silero_vad": {"input_ranges": {"input": (-1, 1)}},
}
# Most that the metric may lie below that of real data, with the preprocessing given.
TARGETS = {
    "cifar_resnet20": 0.005,
    "cifar_resnet20_bn": 0.005,
    "mlperf_ic_resnet8": 0.02,
    "mobilenetv1_cifar_probe": 0.015,
    "squeezenet11": 0.015,
    "mlperf_kws_dscnn": 0.02,
    "yolox_nano": 0.02,
    "fastestdet": 0.02,
}
MOST_BELOW_TRUSTED = 0.03
ROWS = ("real", "noise", "nothing given", "preprocessing given", "8 real samples")
_REAL = 8


def noise(feeds: Sequence[dict[str, Any]], count: int) -> Iterable[dict[str, Any]]:
    """Yields N(0, 1) for floats of the shapes of real feeds; integers as they are."""
    rng = np.random.default_rng(0)
    for index in range(count):
        feed = feeds[index % len(feeds)]
        yield {
            name: rng.standard_normal(array.shape).astype(array.dtype) if array.dtype.kind == "f" else array
            for name, array in feed.items()
        }


def single(feed: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the first sample of a feed; recurrent nets have one sample a feed."""
    return feed if name == "silero_vad" else {key: array[:1] for key, array in feed.items()}


def readers(name: str, entry: Any, samples: int, seed: int) -> dict[str, Callable[[], Any]]:
    """Returns what makes the reader of each row."""
    real = [entry.calib[i] for i in range(len(entry.calib))]
    first = [single(feed, name) for feed in real]
    if len(first) < _REAL:  # a few feeds of many samples
        first = [{key: array[i : i + 1] for key, array in real[0].items()} for i in range(_REAL)]
    hints = PREPROCESSING.get(name, {})

    def made_up(**wishes: Any) -> Callable[[], Any]:
        return lambda: kenosis_ort.SyntheticReader(entry.path, samples=samples, seed=seed, **wishes)

    rows: dict[str, Callable[[], Any]] = {
        "real": lambda: OneShotReader(real),
        "noise": lambda: OneShotReader(list(noise(first, samples))),
        "nothing given": made_up(),
        "8 real samples": made_up(real=first[:_REAL]),
    }
    if hints:
        rows["preprocessing given"] = made_up(**hints)
    return {row: rows[row] for row in ROWS if row in rows}


def trust_of(report: Any) -> str:
    """Returns the verdict on the calibration, as the report has it."""
    trust = getattr(report, "trust", None)
    return "" if trust is None else str(getattr(trust.verdict, "value", trust.verdict))


def measure(
    name: str, entry: Any, folder: Path, *, recipe: str, samples: int, seed: int, rows: Sequence[str]
) -> dict[str, Any]:
    """Quantizes and evaluates one net in all ways."""
    reference = outputs(entry.path, entry.evals)
    key = METRICS[name][0]
    baseline = entry.metric(reference, reference, entry.labels)
    found: dict[str, Any] = {"FP32": {"metric": baseline.get(key.replace("int8_", "fp32_"))}}
    for row, make in readers(name, entry, samples, seed).items():
        if row not in rows:
            continue
        out = folder / f"{name}.onnx"
        result: dict[str, Any] = {}
        start = time.perf_counter()
        try:
            report = kenosis_ort.quantize_static(entry.path, out, make(), recipe=recipe, promise=False)
            result.update(seconds=time.perf_counter() - start, trust=trust_of(report))
            session(out)
            metric = entry.metric(reference, outputs(out, entry.evals), entry.labels)
            result.update(metric=float(metric[key]), sqnr_db=sqnr_of(metric))
        except Exception as error:  # a failing row is a result of this benchmark, shown in the table
            result["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        found[row] = result
    return found


def problems(name: str, rows: dict[str, Any]) -> list[str]:
    """Says which of the targets the net misses."""
    real = rows.get("real", {}).get("metric")
    if real is None:
        return []
    sign = 1 if METRICS[name][1] else -1
    out: list[str] = []
    for row, result in rows.items():
        if row in ("FP32", "real", "noise"):
            continue
        if "metric" not in result:
            out.append(f"{row}: {result['error']}")
            continue
        loss = sign * (real - result["metric"])
        hinted = row == "preprocessing given" or (row == "nothing given" and name not in PREPROCESSING)
        if hinted and name in TARGETS and loss > TARGETS[name]:
            out.append(f"{row}: {loss:.4f} below real data, {TARGETS[name]} allowed")
        if result["trust"] == "trusted" and loss > MOST_BELOW_TRUSTED:
            out.append(f"{row}: called trusted and {loss:.4f} below real data")
    return out


def cell(result: dict[str, Any]) -> str:
    """One row as text."""
    if "error" in result:
        return f"fails: {result['error'][:110]}"
    parts = ["-" if result.get("metric") is None else f"{result['metric']:8.4f}"]
    if result.get("sqnr_db") is not None:
        parts.append(f"{result['sqnr_db']:6.2f} dB")
    if "seconds" in result:
        parts.append(f"made in {result['seconds']:5.1f} s")
    return "  ".join([*parts, result.get("trust", "")])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 where a net misses a target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=[], help="names of nets (default: all)")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS)
    parser.add_argument("--recipe", default="plain", help="recipe (default: plain)")
    parser.add_argument("--samples", type=int, default=64, help="synthetic samples (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args(argv)
    if args.json:
        args.json = args.json.resolve()
    module = load_zoo()
    table: dict[str, Any] = {}
    missed: list[str] = []
    for name in choose(module, args.nets):
        with quiet_folder() as folder:
            rows = measure(name, module.ENTRIES[name](), folder, recipe=args.recipe, samples=args.samples,
                           seed=args.seed, rows=args.rows)  # fmt: skip
        table[name] = rows
        print(f"{name} ({METRICS[name][0]})", flush=True)
        for row, result in rows.items():
            print(f"  {row:20s} {cell(result)}", flush=True)
        for problem in problems(name, rows):
            missed.append(f"{name}: {problem}")
            print(f"  MISSED: {problem}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(table, indent=1, default=float) + "\n")
    print("all targets are met" if not missed else "\n".join(["missed:", *missed]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
