"""All nets of the zoo: FP32, stock's default and best configuration, and kenosis_ort's recipes, in one run.

Prints task metric, agreement, SQNR of the outputs against FP32, speed against FP32 (fresh interleaved sessions, one
thread, batch 1 where the net allows it), the Conv/Gemm/MatMul on integer kernels, the share of the
multiply-accumulates in float, and the seconds it took; in the end each recipe's thresholds. With ``--peers`` other
tools' files too, each made in an environment of its own (`_peers.py`).

    python benchmarks/zoo.py [--nets yolox_nano ultraface] [--variants ours strict] [--skip-speed] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _peers
import onnx
import onnxruntime
from _session import outputs, session
from _timing import interleaved
from _zoo import METRICS, OneShotReader, choose, load_zoo, ort_best, ort_default, quiet_folder, single_sample, sqnr_of

import kenosis_ort

RECIPES = {"ours": "fast", "accurate": "accurate", "strict": "strict"}
VARIANTS = ("ort-default", "ort-best", *RECIPES)
# Largest loss against FP32 by task metric: for the default recipe, and for the others.
LOSSES = {"int8_top1": (0.01, 0.005), "int8_map": (0.03, 0.01), "int8_psnr": (0.3, 0.1), "agree": (0.02, 0.01),
          "det_f1": (0.02, 0.01), "score_rel_err": (0.02, 0.01)}  # fmt: skip
PERFECT = {"agree": 1.0, "det_f1": 1.0, "score_rel_err": 0.0}  # measured against FP32 itself
HEAVY = ("Conv", "Gemm", "MatMul")


def ours(source: str, out: Path, feeds: Any, recipe: str) -> str:
    """``kenosis_ort.quantize_static(model, out, reader)`` without any option but the recipe."""
    report = kenosis_ort.quantize_static(source, str(out), OneShotReader(feeds), recipe=recipe)
    taken = report.speed.taken if report.speed is not None else None
    return "" if taken is None or taken.name == "int8" else f"delivered: {taken.description}"


def _with_recipe(entry: Any, recipe: str, out: Path) -> str:
    return ours(entry.path, out, entry.calib, recipe)


def kernels(path: Path) -> dict[str, Any]:
    """Conv/Gemm/MatMul on integer kernels, of all, and the share of multiply-accumulates in float, by the proof."""
    heavy = [k for k in kenosis_ort.verify_fusion(str(path)).kernels if k.op_type in HEAVY]
    work = multiply_accumulates(path)
    total = sum(work.get(k.node, 0) for k in heavy)
    floats = sum(work.get(k.node, 0) for k in heavy if not k.integer)
    share = {"float_macs": floats / total} if total else {}
    return {"integer": f"{sum(k.integer for k in heavy)}/{len(heavy)}", **share}


def multiply_accumulates(path: Path) -> dict[str, int]:
    """Multiply-accumulates a sample by node name, of Conv, Gemm and MatMul whose weights are in the file."""
    model = onnx.shape_inference.infer_shapes(onnx.load(str(path)))
    sizes = {i.name: tuple(i.dims) for i in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in sizes:
            sizes[node.output[0]] = sizes[node.input[0]]
    shapes = {v.name: [d.dim_value or 1 for d in v.type.tensor_type.shape.dim]
              for v in (*model.graph.value_info, *model.graph.output)}  # fmt: skip
    work = {}
    for node in model.graph.node:
        if node.op_type in HEAVY and node.input[1] in sizes:
            dims = shapes.get(node.output[0], [])
            positions = dims[2:] if node.op_type == "Conv" else dims[:-1]
            work[node.name] = math.prod(sizes[node.input[1]]) * math.prod(positions)
    return work


def measure(
    name: str, entry: Any, folder: Path, variants: Sequence[str], *, speed: bool, rounds: int, peers: Sequence[Any] = ()
) -> dict[str, Any]:
    """Quantizes, evaluates and times one net; returns a row per variant."""
    makers: dict[str, Callable[[Path], str]] = {
        "ort-default": lambda out: ort_default(entry.path, out, OneShotReader(entry.calib)),
        "ort-best": lambda out: ort_best(entry.path, out, entry.calib),
        **{name: partial(_with_recipe, entry, recipe) for name, recipe in RECIPES.items()},
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
            row.update(metric=float(result[key]), sqnr_db=sqnr_of(result), agree=result.get("agree"), all=result)
            row.update(kernels(out))
            files[variant] = out
        except Exception as error:  # a failing variant is a result of this benchmark, shown in the table
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        rows[variant] = row
    for column in _peers.columns(peers):
        rows[column] = row = {"key": key}
        try:
            start = time.perf_counter()
            out = _peers.make(column, peers, Path(entry.path), list(entry.calib), folder / f"{name}.{column}", name)
            row["seconds"] = time.perf_counter() - start
            result = entry.metric(reference, outputs(out, entry.evals), entry.labels)
            row.update(metric=float(result[key]), sqnr_db=sqnr_of(result), agree=result.get("agree"), all=result)
            files[column] = out
        except Exception as error:  # as above
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    if speed:
        feed = single_sample(entry.path, entry.evals[0])
        for variant, timing in interleaved(files, feed, baseline="FP32", rounds=rounds).items():
            rows[variant].update(speed=timing.speed, spread=timing.spread, ms=timing.milliseconds)
    return rows


def holds(name: str, rows: dict[str, Any], variant: str) -> str:
    """Says whether a recipe keeps the task metric, and is neither worse nor slower than stock's best."""
    mine = rows[variant]
    if "metric" not in mine:
        return "FAILS"
    key, more, tolerance = METRICS[name]
    problems = []
    target = PERFECT.get(key, rows["FP32"]["metric"])
    loss = (target - mine["metric"]) if more else (mine["metric"] - target)
    allowed = LOSSES[key][0 if variant == "ours" else 1]
    if loss > allowed + 1e-9:
        problems.append(f"loses {loss:.4f}, {allowed} allowed")
    peer = next((rows[v] for v in ("ort-best", "ort-default") if "metric" in rows.get(v, {})), None)
    if peer is not None:
        gain = mine["metric"] - peer["metric"] if more else peer["metric"] - mine["metric"]
        # A metric may be above FP32's by luck; outputs that are closer to FP32's are not worse.
        closer = (mine.get("sqnr_db") or 0.0) >= (peer.get("sqnr_db") or float("inf")) - 0.3
        if gain < -tolerance and not closer:
            problems.append(f"{-gain:.4f} behind stock's best")
        if "speed" in mine and "speed" in peer and mine["speed"] < 0.97 * peer["speed"]:
            problems.append(f"speed {mine['speed'] / peer['speed']:.2f} of stock's best")
    if mine.get("speed", 1.0) < 0.97:
        problems.append(f"speed {mine['speed']:.2f} of FP32")
    return "ok" if not problems else "WORSE: " + ", ".join(problems)


def cell(row: dict[str, Any]) -> str:
    """One variant as text."""
    if "error" in row:
        return f"fails: {row['error'][:110]}"
    parts = ["-" if row.get("metric") is None else f"{row['metric']:.4f}"]
    if row.get("agree") is not None:
        parts.append(f"agrees {row['agree']:.4f}")
    if row.get("sqnr_db") is not None:
        parts.append(f"{row['sqnr_db']:.1f} dB")
    if "speed" in row:
        parts.append(f"{row['speed']:.2f}x +-{row['spread']:.2f} ({row['ms']:.2f} ms)")
    if "integer" in row:
        parts.append(f"int {row['integer']}")
    if "float_macs" in row:
        parts.append(f"{100 * row['float_macs']:.1f} % of MACs float")
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
    _peers.add_argument(parser)
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
                           speed=not args.skip_speed, rounds=args.rounds, peers=args.peers)  # fmt: skip
        table[name] = rows
        print(f"{name} ({METRICS[name][0]})", flush=True)
        for variant, row in rows.items():
            print(f"  {variant:12s} {cell(row)}", flush=True)
        for variant in RECIPES:
            if variant in rows:
                rows[variant]["verdict"] = holds(name, rows, variant)
                print(f"  {variant:12s} {rows[variant]['verdict']}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(table, indent=1, default=float) + "\n")
    bad = False
    for variant in RECIPES:
        verdicts = {n: rows[variant]["verdict"] for n, rows in table.items() if variant in rows}
        if verdicts:
            kept = [n for n, text in verdicts.items() if text == "ok"]
            print(f"{variant}: {len(kept)} of {len(verdicts)} nets hold" + means(table, variant))
            for net in verdicts.keys() - set(kept):
                print(f"  not {net}: {verdicts[net]}")
                bad = True
    for variant in ("ort-default", "ort-best", *_peers.columns(args.peers)):
        print(f"{variant}{means(table, variant)}")
    if args.peers:
        print(f"onnxruntime {onnxruntime.__version__}, kenosis-ort {kenosis_ort.__version__}, {_peers.versions()}")
    return int(bad)


def means(table: dict[str, Any], variant: str) -> str:
    """The geometric mean of the speed over FP32, as text."""
    speeds = [rows[variant]["speed"] for rows in table.values() if "speed" in rows.get(variant, {})]
    return f", {math.exp(sum(map(math.log, speeds)) / len(speeds)):.2f}x of FP32 (geometric mean)" if speeds else ""


if __name__ == "__main__":
    sys.exit(main())
