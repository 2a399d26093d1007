"""Placement ablation: Q/DQ placed in different ways, everything else equal.

All variants start from the same prepared model (stock's ``quant_pre_process``), the same calibration data, uint8
activations, int8 weights per channel, and stock's scale arithmetic:

- ``naive``: Q/DQ around every operator, activations kept (stock's placement with `QDQKeepRemovableActivations`);
- ``stock placement``: stock ONNX Runtime's node-by-node placement, which folds Relu and Clip;
- ``fusion-aware``: the placement stage and nothing else;
- ``all stages``: the whole pipeline.

With ``--all-stages`` further rows switch off one other stage each. Prints task metric, SQNR, speed against FP32,
Conv/Gemm/MatMul on integer kernels, and how many compute nodes run in float.

    python benchmarks/ablation.py [--nets squeezenet11 cifar_resnet20 mobilenetv1_cifar_probe] [--all-stages]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _session import outputs
from _timing import interleaved
from _zoo import METRICS, OneShotReader, choose, load_zoo, prepared_by_stock, quiet_folder, single_sample, sqnr_of
from onnxruntime.quantization import QuantType

import kenosis_ort
from kenosis_ort.options import Stages

HEAVY = ("Conv", "Gemm", "MatMul")
DEFAULT_NETS = ("cifar_resnet20", "squeezenet11", "mobilenetv1_cifar_probe", "yolox_nano")
STOCK = Stages(placement=False)
VARIANTS: dict[str, tuple[Stages, dict[str, Any]]] = {
    "naive": (STOCK, {"QDQKeepRemovableActivations": True}),
    "stock placement": (STOCK, {}),
    "fusion-aware": (dataclasses.replace(Stages.none(), placement=True), {}),
    "all stages": (Stages(), {}),
}
SINGLE: dict[str, tuple[Stages, dict[str, Any]]] = {
    f"no {f.name}": (dataclasses.replace(Stages(), **{f.name: False}), {})
    for f in dataclasses.fields(Stages)
    if f.name != "placement"
}


def kernels(path: Path) -> tuple[str, int]:
    """Integer share of the heavy operators, and the number of compute nodes that run in float."""
    report = kenosis_ort.verify_fusion(str(path))
    heavy = [k for k in report.kernels if k.op_type in HEAVY]
    return f"{sum(k.integer for k in heavy)}/{len(heavy)}", len(report.float_nodes())


def measure(
    name: str, entry: Any, folder: Path, variants: dict[str, tuple[Stages, dict[str, Any]]], *, speed: bool
) -> dict[str, dict[str, Any]]:
    """Returns a row per variant."""
    reference = outputs(entry.path, entry.evals)
    prepared = prepared_by_stock(entry.path, folder)
    key = METRICS[name][0]
    rows: dict[str, dict[str, Any]] = {}
    files: dict[str, Path] = {"FP32": Path(entry.path)}
    for variant, (stages, extra) in variants.items():
        out = folder / f"{variant.replace(' ', '_')}.onnx"
        try:
            kenosis_ort.quantize_static(
                str(prepared), str(out), OneShotReader(entry.calib), stages=stages, extra_options=dict(extra),
                per_channel=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            )  # fmt: skip
            result = entry.metric(reference, outputs(out, entry.evals), entry.labels)
        except Exception as error:  # a variant that fails is a result of the ablation, shown in the table
            rows[variant] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        integer, floats = kernels(out)
        rows[variant] = {"metric": float(result[key]), "sqnr_db": sqnr_of(result), "integer": integer, "float": floats}
        files[variant] = out
    if speed:
        feed = single_sample(entry.path, entry.evals[0])
        for variant, timing in interleaved(files, feed, baseline="FP32").items():
            if variant != "FP32":
                rows[variant].update(speed=timing.speed, spread=timing.spread)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one table per net."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=list(DEFAULT_NETS))
    parser.add_argument("--all-stages", action="store_true", help="also switch off each other stage on its own")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args(argv)
    target = args.json.resolve() if args.json else None
    module = load_zoo()
    table = {}
    for name in choose(module, args.nets):
        with quiet_folder() as folder:
            variants = {**VARIANTS, **SINGLE} if args.all_stages else VARIANTS
            rows = measure(name, module.ENTRIES[name](), folder, variants, speed=not args.skip_speed)
        table[name] = rows
        print(f"{name} ({METRICS[name][0]})")
        for variant, row in rows.items():
            if "error" in row:
                print(f"  {variant:18s} fails: {row['error']}")
                continue
            sqnr = "" if row["sqnr_db"] is None else f"{row['sqnr_db']:6.1f} dB"
            speed = f"{row['speed']:5.2f}x +-{row['spread']:.2f}" if "speed" in row else ""
            print(f"  {variant:18s} {row['metric']:8.4f} {sqnr:9s} {speed:13s} heavy int {row['integer']:8s} "
                  f"float nodes {row['float']}", flush=True)  # fmt: skip
    if target:
        target.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
