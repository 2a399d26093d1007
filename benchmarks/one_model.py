"""One model file: accuracy and speed of what we make of it beside what stock makes of it, from one run.

    python benchmarks/one_model.py model.onnx --data samples.npz
    python benchmarks/one_model.py model.onnx --rounds 15

Every tool calibrates on the same half of the samples; SQNR and the share of equal argmax over the last axis are of the
other half, the least over the outputs. Without ``--data`` samples are made up, which says little about accuracy. Speeds
are ratios over the model as it is: medians over rounds, in each of which every file gets a fresh session, in random
order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _session import outputs, sqnr_by_output
from _timing import interleaved
from _zoo import OneShotReader, ort_best, ort_default, quiet_folder

import kenosis_ort

FLOAT = "float"
TOOLS: dict[str, Callable[[str, Path, list[dict[str, Any]]], Any]] = {
    "default": lambda source, out, feeds: ort_default(source, out, OneShotReader(feeds)),
    "best": lambda source, out, feeds: ort_best(source, out, feeds),
    "ours": lambda source, out, feeds: kenosis_ort.quantize_static(source, str(out), OneShotReader(feeds)),
}


def samples(source: Path, data: Path | None, count: int) -> list[dict[str, Any]]:
    """The feeds to calibrate and evaluate on."""
    reader = kenosis_ort.SyntheticReader(source, samples=count) if data is None else kenosis_ort.ArrayReader(str(data))
    found: list[dict[str, Any]] = []
    while len(found) < count and (feed := reader.get_next()) is not None:
        found.append(dict(feed))
    if len(found) < 2:
        raise SystemExit("at least two samples are needed")
    return found


def agreement(reference: Sequence[Any], got: Sequence[Any]) -> float:
    """The least share of equal argmax over the last axis of the outputs, in percent; NaN where none has one."""
    shares = []
    for at in range(len(reference[0])):
        pairs = [(np.asarray(a[at]), np.asarray(b[at])) for a, b in zip(reference, got, strict=True)]
        if all(a.ndim and a.shape == b.shape and a.shape[-1] > 1 and a.dtype.kind == "f" for a, b in pairs):
            shares.append(np.mean([np.mean(a.argmax(-1) == b.argmax(-1)) for a, b in pairs]))
    return 100 * float(min(shares, default=np.nan))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, help="an .npz file with an array an input (default: made-up samples)")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    source = args.model.resolve()
    feeds = samples(source, args.data and args.data.resolve(), args.samples)
    calibration, evaluation = feeds[::2], feeds[1::2]
    with quiet_folder() as folder:
        files, took = {FLOAT: source}, {}
        for name, quantize in TOOLS.items():
            out, start = folder / f"{name}.onnx", time.perf_counter()
            try:
                quantize(str(source), out, calibration)
                outputs(out, evaluation[:1])
            except Exception as error:  # a tool that fails is a result
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            files[name], took[name] = out, time.perf_counter() - start
        timings = interleaved(files, evaluation[0], baseline=FLOAT, rounds=args.rounds)
        reference = outputs(source, evaluation)
        print(f"{'':8} {'s':>6} {'SQNR dB':>8} {'argmax %':>9} {'ms':>9} {'speed':>6}")
        for name, timing in timings.items():
            got = reference if name == FLOAT else outputs(files[name], evaluation)
            sqnr, alike = min(sqnr_by_output(reference, got), default=np.nan), agreement(reference, got)
            speed = f"{timing.speed:6.2f} ± {timing.spread:.2f}"
            print(f"{name:8} {took.get(name, 0):6.1f} {sqnr:8.1f} {alike:9.1f} {timing.milliseconds:9.3f} {speed}")


if __name__ == "__main__":
    main()
