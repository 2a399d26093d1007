"""All nets of the zoo: FP32, stock ONNX Runtime's default and best configuration, and kenosis_ort, in one run.

Prints task metric, SQNR of the outputs against FP32, speed against FP32 (fresh interleaved sessions, one thread,
batch 1 where the net allows it) and the share of Conv/Gemm/MatMul on integer kernels.

    python benchmarks/zoo.py [--nets yolox_nano ultraface] [--skip-speed] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _timing import interleaved, session
from _zoo import (
    METRICS,
    OneShotReader,
    choose,
    load_zoo,
    ort_best,
    ort_default,
    outputs,
    quiet_folder,
    single_sample,
    sqnr_of,
)

import kenosis_ort

VARIANTS = ("ort-default", "ort-best", "ours")
HEAVY = ("Conv", "Gemm", "MatMul")


def ours(source: str, out: Path, feeds: Any) -> str:
    """``kenosis_ort.quantize_static(model, out, reader)`` without any option."""
    kenosis_ort.quantize_static(source, str(out), OneShotReader(feeds))
    return ""


def integer_share(path: Path) -> str:
    """Conv/Gemm/MatMul on integer kernels, of all, by the fusion proof."""
    heavy = [k for k in kenosis_ort.verify_fusion(str(path)).kernels if k.op_type in HEAVY]
    return f"{sum(k.integer for k in heavy)}/{len(heavy)}"


def measure(
    name: str, entry: Any, folder: Path, variants: Sequence[str], *, speed: bool, rounds: int
) -> dict[str, Any]:
    """Quantizes, evaluates and times one net; returns a row per variant."""
    makers: dict[str, Callable[[Path], str]] = {
        "ort-default": lambda out: ort_default(entry.path, out, OneShotReader(entry.calib)),
        "ort-best": lambda out: ort_best(entry.path, out, entry.calib),
        "ours": lambda out: ours(entry.path, out, entry.calib),
    }
    reference = outputs(entry.path, entry.evals)
    baseline = entry.metric(reference, reference, entry.labels)
    key = METRICS[name][0]
    rows: dict[str, Any] = {"FP32": {"metric": baseline.get(key.replace("int8_", "fp32_")), "key": key}}
    files: dict[str, Path] = {"FP32": Path(entry.path)}
    for variant in variants:
        out = folder / f"{name}.{variant}.onnx"
        row: dict[str, Any] = {"key": key}
        start = time.perf_counter()
        try:
            row["note"] = makers[variant](out)
            row["seconds"] = time.perf_counter() - start
            session(out)
            result = entry.metric(reference, outputs(out, entry.evals), entry.labels)
            row.update(metric=float(result[key]), sqnr_db=sqnr_of(result), integer=integer_share(out), all=result)
            files[variant] = out
        except Exception as error:  # a failing variant is a result of this benchmark, shown in the table
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        rows[variant] = row
    if speed:
        feed = single_sample(entry.path, entry.evals[0])
        for variant, timing in interleaved(files, feed, baseline="FP32", rounds=rounds).items():
            rows[variant].update(speed=timing.speed, spread=timing.spread, ms=timing.milliseconds)
    return rows


def verdict(name: str, rows: dict[str, Any]) -> str:
    """Says whether ours holds against ort-best (ort-default where that does not load)."""
    mine = rows.get("ours", {})
    if "metric" not in mine:
        return "FAILS"
    peer = next((rows[v] for v in ("ort-best", "ort-default") if "metric" in rows.get(v, {})), None)
    if peer is None:
        return "ok (no peer measured)"
    _, more, tolerance = METRICS[name]
    gain = mine["metric"] - peer["metric"] if more else peer["metric"] - mine["metric"]
    accurate = gain >= -tolerance
    if mine.get("sqnr_db") is not None and peer.get("sqnr_db") is not None:
        accurate = accurate or mine["sqnr_db"] >= peer["sqnr_db"] - 0.3
    problems = [] if accurate else ["accuracy"]
    if "speed" in mine and mine["speed"] < 0.97 * peer["speed"]:
        problems.append(f"speed {mine['speed'] / peer['speed']:.2f} of peer")
    return "ok" if not problems else "WORSE: " + ", ".join(problems)


def cell(row: dict[str, Any]) -> str:
    """One variant as text."""
    if "error" in row:
        return f"fails: {row['error'][:110]}"
    parts = ["-" if row.get("metric") is None else f"{row['metric']:.4f}"]
    if row.get("sqnr_db") is not None:
        parts.append(f"{row['sqnr_db']:.1f} dB")
    if "speed" in row:
        parts.append(f"{row['speed']:.2f}x +-{row['spread']:.2f} ({row['ms']:.2f} ms)")
    if "integer" in row:
        parts.append(f"int {row['integer']}")
    if "seconds" in row:
        parts.append(f"made in {row['seconds']:.1f} s")
    if row.get("note"):
        parts.append(f"[{row['note']}]")
    return ", ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 where a net does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=[], help="names of nets (default: all)")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--skip-speed", action="store_true", help="accuracy only")
    parser.add_argument("--rounds", type=int, default=7, help="timing rounds")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--keep", type=Path, help="keep the quantized models in this folder")
    args = parser.parse_args(argv)
    module = load_zoo()
    if args.keep:
        args.keep = args.keep.resolve()
        args.keep.mkdir(parents=True, exist_ok=True)
    if args.json:
        args.json = args.json.resolve()
    table: dict[str, Any] = {}
    for name in choose(module, args.nets):
        with quiet_folder() as folder:
            rows = measure(name, module.ENTRIES[name](), args.keep or folder, args.variants,
                           speed=not args.skip_speed, rounds=args.rounds)  # fmt: skip
        table[name] = rows
        print(f"{name} ({METRICS[name][0]})", flush=True)
        for variant, row in rows.items():
            print(f"  {variant:12s} {cell(row)}", flush=True)
        if "ours" in rows:
            rows["verdict"] = verdict(name, rows)
            print(f"  {'verdict':12s} {rows['verdict']}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(table, indent=1, default=float) + "\n")
    bad = [n for n, rows in table.items() if str(rows.get("verdict", "ok"))[:2] != "ok"]
    print(f"{len(table) - len(bad)} of {len(table)} nets hold against stock's best")
    if bad:
        print(f"not: {', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
